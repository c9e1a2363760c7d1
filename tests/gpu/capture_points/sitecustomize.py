"""A point of a tensor rank's process: the moment before a graph with collectives is captured. Python
imports this file at its start where the folder is on PYTHONPATH. In: CAPTURE_POINT, a file with "die"
or "hang". Out: rank 1 takes the file, once, and does so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from pathlib import Path

PLACE = Path(os.environ.get("CAPTURE_POINT", ""))
MODULE, AT = "gyre.distributed.process_group", 3  # graphs that are captured before


def patch(module) -> None:
    cls = module.RankGroup
    plain = cls.capturing

    def capturing(self):
        self.num_captures = getattr(self, "num_captures", 0) + 1
        if self.rank == 1 and self.num_captures == AT:
            taken = PLACE.with_suffix(".taken")
            try:
                os.rename(PLACE, taken)
            except OSError:  # by an earlier process
                return plain(self)
            if taken.read_text() == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return plain(self)

    cls.capturing = capturing


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches the module as it is imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("CAPTURE_POINT"):
    sys.meta_path.insert(0, PatchingFinder())
