"""A run whose worker crashes ends: one test has failed, and every other was run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
RUN_S = 60.0


@pytest.mark.parametrize(("workers", "crashing"), [(1, "test_d"), (2, "test_a"), (2, "test_f")])
def test_a_crash_ends_one_test_and_no_other(tmp_path: Path, workers: int, crashing: str) -> None:
    for name in "abcdef":
        tests = 1 if name in "ce" else 3
        (tmp_path / f"test_{name}.py").write_text(
            "\n".join(f"def test_{number}(): pass" for number in range(tests))
        )
    (tmp_path / f"{crashing}.py").write_text(
        "import os\ndef test_0(): pass\ndef test_1(): os.kill(os.getpid(), 9)\ndef test_2(): pass\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from file_scheduler import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    ran = subprocess.run(
        [*command, "-n", f"{workers}", "--dist", "loadfile", "--no-loadscope-reorder", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"1 failed, 13 passed", ran.stdout), ran.stdout
    assert re.search(rf"worker 'gw\d+' crashed while running '{crashing}.py::test_1'", ran.stdout)
