"""`import gyre` costs nothing: what it offers is imported when it is first named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import gyre

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "pydantic", "starlette")


def loaded(code: str) -> list[str]:
    """Run code in a new process; return which heavy modules it left."""
    code += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded("import gyre; dir(gyre); gyre.__version__") == []
    assert "torch" in loaded("from gyre import Engine")


def test_every_public_name_is_there_and_no_other() -> None:
    for name in gyre.__all__:
        assert getattr(gyre, name).__name__ == name
        assert name in dir(gyre)
    with pytest.raises(AttributeError, match="'gyre' has no attribute 'Engin'"):
        getattr(gyre, "Engin")  # noqa: B009
