python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; export PYTHONPATH=/tmp/site:$PWD/src
cd bench
timeout 100 python3 engine.py --shape 8b --record --commit 7200d914e9e9f4c278213c6cf5ff20145f156eb3 --runs 2 --streams 1 8 32 128 2>&1 | tail -12
timeout 60 python3 engine.py --shape 0.6b --record --commit 7200d914e9e9f4c278213c6cf5ff20145f156eb3 --runs 2 --profile 2>&1 | tail -3 | cut -c1-300
timeout 60 python3 engine.py --shape 0.6b --record --commit 7200d914e9e9f4c278213c6cf5ff20145f156eb3 --runs 1 --batch-invariant 2>&1 | tail -9 | head -5 | cut -c1-300
timeout 90 python3 engine.py --shape 8b --record --commit 7200d914e9e9f4c278213c6cf5ff20145f156eb3 --runs 1 --batch-invariant 2>&1 | tail -9 | head -5| cut -c1-300
timeout 60 python3 engine.py --shape 8b --record --commit 7200d914e9e9f4c278213c6cf5ff20145f156eb3 --runs 1 --prefix-hits 2>&1 | tail -9 | head -3| cut -c1-300
timeout 60 python3 attention_gpu.py --record --commit 7200d914e9e9f4c278213c6cf5ff20145f156eb3 2>&1 | tail -6
mkdir -p $OUT; cp records/engine_*.json records/attention_gpu.json $OUT/
cd ..; timeout 60 python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu/test_vram_virtual_gpu.py -k survive 2>&1 | tail -3
