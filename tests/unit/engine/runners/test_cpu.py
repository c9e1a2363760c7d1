"""On a CPU nothing of CUDA is imported, with the C kernels and with torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn", "flashinfer")))  # importing one raises
import torch
from engine_cases import Bench

async def main():
    bench = Bench(shared=True, c_kernels={c_kernels})
    await bench.engine.start(dummy=False)
    print({{part.finish for (part,) in await bench.ask(3)}})
    await bench.engine.terminate()
    bench.compute.shutdown()

asyncio.run(main())
print(torch.cuda.is_initialized(), sorted(name for name in sys.modules if name.startswith("gyre.kernels.gpu.")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("c_kernels", [True, False])
def test_a_run_on_a_cpu_imports_nothing_of_cuda(c_kernels: bool) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(c_kernels=c_kernels)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["{'length'}", "False []"]
