"""Points at which a process of a chaos run waits until a fault has struck. Python imports this file
at its start where the folder is on PYTHONPATH. In: CHAOS_POINTS, a folder. Out: files in it.

The executor arms a point with a file of its name. The first process that comes by renames it to
POINT.PID, and goes on when that file is gone. `clock` there moves this process's wall clock.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(os.environ.get("CHAOS_POINTS", ""))
WAIT_S = 30.0
BUCKET_BYTES = 16 << 10  # so that a small model has several


def wait_at(point: str) -> None:
    reached = FOLDER / f"{point}.{os.getpid()}"
    try:
        os.rename(FOLDER / point, reached)
    except OSError:  # not armed, or another process was faster
        return
    end_s = time.monotonic() + WAIT_S
    while reached.exists() and time.monotonic() < end_s:
        time.sleep(0.002)


def patch_reads(module) -> None:
    """Wait before what was registered is opened, and when its first bucket has been read."""
    cls, order = module.ReadOver, module.CopyOrder
    plain_init, plain_copy = cls.__init__, order.copy

    def __init__(self, *args, **kwargs):
        wait_at("reading")
        plain_init(self, *args, **{**kwargs, "bucket_bytes": BUCKET_BYTES})

    def copy(self, *args):
        self.num_copies = getattr(self, "num_copies", 0) + 1
        if self.num_copies == 2:
            wait_at("bucket")
        plain_copy(self, *args)

    cls.__init__, order.copy = __init__, copy


def patch_writes(module) -> None:
    """Wait when a slot has been begun."""
    cls = module.SharedMemoryStore
    plain = cls.writing

    @contextmanager
    def writing(self, **fields):
        with plain(self, **fields) as slot:
            wait_at("writing")
            yield slot

    cls.writing = writing


PATCHES = {
    "gyre.weights.registered": patch_reads,
    "gyre.weights.transports.shared_memory": patch_writes,
}


class PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches modules as they are imported."""

    def find_spec(self, fullname, path, target=None):
        patch = PATCHES.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def move_clock() -> None:
    plain = time.time

    def moved() -> float:
        try:
            return plain() + float((FOLDER / "clock").read_text())
        except (OSError, ValueError):
            return plain()

    time.time = moved


if os.environ.get("CHAOS_POINTS"):
    sys.meta_path.insert(0, PatchingFinder())
    move_clock()
