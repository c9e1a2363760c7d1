"""Gyre: rollout, score, train, hand the weights back. Importing this package loads no torch: what
it offers is imported when it is first named."""

import importlib
from typing import TYPE_CHECKING, Any

from gyre.core import VERSION

if TYPE_CHECKING:
    from gyre.launch.python.engine import Engine
    from gyre.launch.python.results import CompletionOutput, RequestOutput

__version__ = VERSION
__all__ = ["CompletionOutput", "Engine", "RequestOutput"]

_PLACES = {
    "CompletionOutput": "gyre.launch.python.results",
    "Engine": "gyre.launch.python.engine",
    "RequestOutput": "gyre.launch.python.results",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
