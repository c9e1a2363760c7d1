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
HOOK = "from file_scheduler import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(HOOK)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."]
    return subprocess.run(
        [*command, *options, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{SUPPORT}"},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )


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
    ran = run(tmp_path, "-n", f"{workers}", "--dist", "loadfile", "--no-loadscope-reorder")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"1 failed, 13 passed", ran.stdout), ran.stdout
    assert re.search(rf"worker 'gw\d+' crashed while running '{crashing}.py::test_1'", ran.stdout)


def test_a_worker_that_collects_other_tests_than_the_crashed_one_ends_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_a.py").write_text(
        "import os\n"
        "def test_0(): open('crashed', 'x'); os.kill(os.getpid(), 9)\n"
        "if not os.path.exists('crashed'):\n"
        "    def test_1(): pass\n"
    )
    ran = run(tmp_path, "-n", "1", "--dist", "loadfile")
    assert ran.returncode == 3, ran.stdout + ran.stderr
    assert "has collected other tests" in ran.stdout


def test_a_run_without_xdist_needs_no_scheduler(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_0(): pass")
    ran = run(tmp_path, "-p", "no:xdist")
    assert ran.returncode == 0, ran.stdout + ran.stderr
