python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; export PYTHONPATH=/tmp/site:$PWD/src
timeout 300 python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu -k "not test_inference_kernels_gpu" 2>&1 | tail -70
