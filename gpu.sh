python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; export PYTHONPATH=/tmp/site:$PWD/src
python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu/test_inference_kernels_gpu.py tests/gpu/test_engine_gpu.py -k "decode or engine" 2>&1 | tail -40
cd bench; timeout 100 python3 engine.py --shape 0.6b --json --profile --runs 2 2>&1 | tail -1 
timeout 200 python3 engine.py --shape 8b --json --runs 1 2>&1 | tail -1 | cut -c1-500
