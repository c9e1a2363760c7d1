python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; export PYTHONPATH=/tmp/site:$PWD/src:$PWD/bench
nvidia-smi --query-gpu=serial,uuid,clocks.sm,clocks.max.sm,power.draw,temperature.gpu --format=csv
for m in base novmm lt; do timeout 80 python3 exp.py $m 2>&1 | tail -1 | cut -c1-2600; nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader; done
