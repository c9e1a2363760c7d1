cat /tmp/vl/part0 /tmp/vl/part1 /tmp/vl/part2 /tmp/vl/part3 > /tmp/vl/vllm-0.25.1-cp38-abi3-manylinux_2_28_x86_64.whl
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/vsite /tmp/vl/*.whl .vllm4/*.whl 2>&1 | tail -2
export PYTHONPATH=/tmp/vsite VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_NO_USAGE_STATS=1
mkdir -p $OUT; cd bench
timeout 350 python3 peers/vllm_gpu.py $OUT 2>&1 | grep -v "^$" | tail -25 | cut -c1-400
