cat .fa4b/cu13.part2 > /dev/null && cp .fa4b/* /tmp/fa4/
cd /tmp/fa4 && cat cu13.part1 cu13.part2 > nvidia_cutlass_dsl_libs_cu13-4.8.1-cp312-cp312-manylinux_2_28_x86_64.whl && rm cu13.part*
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/fa4site /tmp/fa4/*.whl 2>&1 | tail -2
cd - > /dev/null; ls /tmp/fa4site | head -30
export PYTHONPATH=/tmp/site:$PWD/src:/tmp/fa4site:/tmp/fa4site/nvidia_cutlass_dsl/dsl_packages
python3 -m pytest -p no:cacheprovider -o addopts="" -o timeout=0 -q tests/gpu/test_invariant_gpu.py tests/gpu/test_engine_gpu.py -k "fifty or mode_off or fused_runner" 2>&1 | tail -30
cd bench
timeout 200 python3 attention_gpu.py --json 2>&1 | tail -8
