"""keep_freed_memory: a fresh process that frees and takes the same memory no longer faults its
pages in again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from gyre.kernels.cpu.process import keep_freed_memory
assert keep_freed_memory() is True
def work():
    return [torch.ones(3_000_000) for _ in range(12)]
work(); work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the switch is glibc's")
def test_freed_memory_is_used_again_without_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    pages_touched = 5 * 12 * 12_000_000 // 4096
    assert int(done.stdout) < pages_touched // 20
