python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>&1 | tail -1
echo '' > /tmp/site/pycosat.py; 
export PYTHONPATH=/tmp/site:$PWD/src:/tmp/fa4site:/tmp/fa4site/nvidia_cutlass_dsl/dsl_packages
python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu/test_invariant_gpu.py tests/gpu/test_engine_gpu.py tests/gpu/test_inference_kernels_gpu.py -k "fifty or mode_off or fused_runner or flash4" 2>&1 | tail -50
