"""oneDNN is kept from AMX tiles that the processor announces and does not describe."""

import os
import subprocess
import sys

import pytest

from gyre.kernels.cpu import build, process

PRODUCT = (
    "import torch; from gyre.kernels.cpu.process import avoid_hidden_tiles; avoid_hidden_tiles(); "
    "a = torch.eye(256, dtype=torch.bfloat16); print(float((a @ a).sum()))"
)


def test_a_process_multiplies_in_bfloat16_whatever_the_processor_announces() -> None:
    clean = {name: value for name, value in os.environ.items() if name != process.LIMIT}
    ran = subprocess.run(
        [sys.executable, "-c", PRODUCT], env=clean, capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "256.0"), ran.stderr[-2000:]


@pytest.mark.parametrize("hidden", [True, False])
def test_only_hidden_tiles_limit_onednn(monkeypatch: pytest.MonkeyPatch, hidden: bool) -> None:
    monkeypatch.setenv(process.LIMIT, "")  # so that it is restored
    monkeypatch.delenv(process.LIMIT)
    monkeypatch.setattr(process, "tiles_are_hidden", lambda: hidden)
    process.avoid_hidden_tiles()
    assert os.environ.get(process.LIMIT) == (process.BEST_WITHOUT_TILES if hidden else None)


def test_a_limit_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process.LIMIT, "AVX2")
    monkeypatch.setattr(process, "tiles_are_hidden", lambda: True)
    process.avoid_hidden_tiles()
    assert os.environ[process.LIMIT] == "AVX2"


def test_a_processor_without_amx_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor_properties", lambda: "flags : avx2 fma")
    assert not process.tiles_are_hidden()
