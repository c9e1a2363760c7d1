"""Interpreters: Python of another environment, which sees gyre and none of the packages beside it.
In: a folder. Out: the variables that a process of that Python is started with.

The environment has its own torch, numpy and msgspec; ours would take their place if the whole of
our site-packages was on its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# of our interpreter, and wrong for another one
OURS = ("PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def show_gyre_alone(folder: Path) -> None:
    """Put a link to the package into an empty folder."""
    (folder / "gyre").symlink_to(Path(__file__).parents[1])


def variables_for(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process of another Python, from those of this one. Pure."""
    found = {name: value for name, value in given.items() if name not in OURS}
    return {**found, "PYTHONPATH": str(folder), "PYTHONNOUSERSITE": "1"}
