python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; export PYTHONPATH=/tmp/site:$PWD/src
python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu/test_invariant_gpu.py tests/gpu/test_engine_gpu.py 2>&1 | tail -60
cd bench
timeout 100 python3 attention_gpu.py 2>&1 | tail -8
timeout 100 python3 engine.py --shape 0.6b --json --runs 2 2>&1 | tail -1 | cut -c1-300
