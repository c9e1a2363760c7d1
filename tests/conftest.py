"""The order of test files: the longest first, so that workers that run files side by side end
together, also when one crashes. And the engines' accounts, looked at after every test."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator

import pytest

from gyre.kernels.cpu.process import avoid_hidden_tiles

if importlib.util.find_spec("xdist"):  # GPU machines may lack it
    from file_scheduler import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

LONGEST = (
    "test_objectives_learn.py",
    "test_cluster_runs.py",
    "test_kill_resume.py",
    "server/test_fuzz.py",
    "test_serve_tensor.py",
    "adamw/test_moments.py",
    "test_pod_runs.py",
    "test_serve_lasting.py",
    "trainer/test_tensor_ranks.py",
    "test_serve_weights.py",
    "test_engine.py",
    "trainer/test_trainer.py",
    "trainer/test_ranks.py",
    "test_pod_tensor.py",
)


def pytest_configure() -> None:
    """Tests multiply in bfloat16 without the package as well."""
    avoid_hidden_tiles()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next(
            (number for number, name in enumerate(LONGEST) if item.path.match(name)), len(LONGEST)
        )

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The thousands of tests and modules that are there now stay: no collection looks at them.
    tests/mutants/serve.py does, after it has collected tests only."""
    if session.config.option.collectonly:
        return
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine that has answered everyone holds no page, slot or row; one that failed is to be
    restarted."""
    native = sys.modules.get("gyre.engine.engine")
    if native is None:
        yield
        return
    made, make = [], native.NativeEngine.__init__

    def note(self, *args, **fields) -> None:
        make(self, *args, **fields)
        made.append(self)

    monkeypatch.setattr(native.NativeEngine, "__init__", note)
    yield
    for engine in made:
        if engine.core is not None and not engine.failure and engine.frontend.load.completions == 0:
            state = engine.core.state
            state.check()
            assert state.pages.num_used == 0 and state.rows.num_active == 0 and not state.requests
            assert state.slots.num_free == state.slots.num_slots
