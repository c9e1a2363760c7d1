"""File scheduler: what `--dist loadfile` does, and goes on when a worker crashes. In: the test files
that a run collected. Out: whole files, handed to workers; the test that a crash ended is not run
again.

xdist 3.8 hands finished files out once more after a crash; a worker that gets only such ones waits
for good. Its issues 1323, 1327 and 1378 tell of it; what mends the first two is not released.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduler(LoadFileScheduling):
    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        unfinished = [test for tests in files.values() for test, done in tests.items() if not done]
        if not unfinished:
            return None
        crashed = unfinished[0]
        for name, tests in files.items():
            left = {test: False for test, done in tests.items() if not done and test != crashed}
            if left:
                self.workqueue[name] = left
        for other in self.nodes:
            self._reschedule(other)
        return crashed

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            raise RuntimeError("the worker in a crashed one's place has collected other tests")

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down or node not in self.registered_collections:
            return  # one in a crashed one's place collects first
        # A worker begins a test when it knows of a second, or that there is none. It asks for work
        # when one has ended.
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            with suppress(OSError):  # it has just ended, which `remove_node` hears of next
                self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


@pytest.hookimpl(optionalhook=True)  # of xdist, which a run may leave out
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduler | None:
    return FileScheduler(config, log) if config.getvalue("dist") == "loadfile" else None
