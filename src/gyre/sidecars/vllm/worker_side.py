"""Worker side: what vLLM's workers import of Gyre before they load a model. In: vLLM's load config.
Out: the worker extension, and a loader of dummy weights that waits at the gate. Imported in vLLM's
own processes alone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from vllm.model_executor import model_loader  # pyright: ignore[reportMissingImports]

from gyre.sidecars.vllm.gate import wait_until_open
from gyre.sidecars.vllm.worker_extension import WorkerExtension

__all__ = ["LateDummyLoader", "WorkerExtension"]


class LateDummyLoader(model_loader.DummyModelLoader):
    """vLLM's loader of dummy weights, which begins when the gate is open."""

    def __init__(self, load_config: Any) -> None:
        given = dict(load_config.model_loader_extra_config)
        self._gate = Path(given.pop("gate"))
        load_config.model_loader_extra_config = given
        super().__init__(load_config)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        wait_until_open(self._gate)
        return super().load_model(*args, **kwargs)


def _register() -> None:
    """Take the place of the loader named "dummy", of which vLLM knows that it reads no files."""
    noisy = logging.getLogger(model_loader.__name__)  # warns that the name is taken
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    model_loader.register_model_loader("dummy")(LateDummyLoader)
    noisy.setLevel(level)


_register()
