"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from gyre.kernels.cpu.build import INSTRUCTION_SETS, InstructionSet, Unavailable
from gyre.kernels.cpu.chunks import load_chunks
from gyre.kernels.cpu.library import load_decoder
from rank_pool import RankPool
from zero_cases import LAYOUTS, TENSOR_LAYOUTS

# a busy machine says nothing of an example
hypothesis.settings.register_profile("gyre", deadline=None)
hypothesis.settings.load_profile("gyre")


# weights in shards
QUICK_LAYOUTS = ("zero3", "zero3_tensor2")
# and whole ones, of tests that compare with one process
QUICK_WHOLE = "zero1", ("test_gradients_equal_one_process", "test_training_equals_one_process")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test of several layouts of ranks, make test runs one or two that differ most, and make
    test-all every one."""
    whole, compared = QUICK_WHOLE
    for item in items:
        layout = item.callspec.params.get("layout") if hasattr(item, "callspec") else None
        known = isinstance(layout, str) and layout in (LAYOUTS | TENSOR_LAYOUTS)
        is_compared = layout == whole and getattr(item, "originalname", "") in compared
        if known and layout not in QUICK_LAYOUTS and not is_compared:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["c", pytest.param("avx2", marks=pytest.mark.slow), "torch"])
def both_kernels(request, monkeypatch) -> str:
    """Run the test on the C kernels, and again without them; where there is time, also on those for
    AVX2."""
    library = load_decoder(torch.float32)
    if request.param == "avx2":
        narrow = load_decoder(torch.float32, INSTRUCTION_SETS[-1])
        best = None if isinstance(library, Unavailable) else library.instructions
        if isinstance(narrow, Unavailable) or narrow.instructions is best:
            pytest.skip("there are no AVX2 kernels here beside the best ones")
        monkeypatch.setattr(
            "gyre.engine.runners.cpu_step.load_decoder",
            lambda dtype: load_decoder(dtype, INSTRUCTION_SETS[-1]),
        )
    elif request.param == "torch":
        monkeypatch.setattr(
            "gyre.engine.runners.cpu_step.load_decoder",
            lambda dtype: Unavailable(reason="not for this test"),
        )
    elif isinstance(library, Unavailable):
        pytest.skip(library.reason)
    return request.param


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, ids=lambda one: one.name)
def instructions(request) -> Iterator[InstructionSet]:
    """Run the test on the C kernels of each instruction set that this machine has."""
    found = load_decoder(torch.float32, request.param)
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gyre.engine.runners.cpu_step.load_decoder",
            lambda dtype: load_decoder(dtype, request.param),
        )
        for module in ("cpu.chunks", "dispatch"):
            patch.setattr(
                f"gyre.kernels.{module}.load_chunks",
                lambda dtype: load_chunks(dtype, request.param),
            )
        yield request.param


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.slow), 3],
    ids=["1 thread", "3 threads"],
)
def team(request) -> Iterator[int]:
    """Run the test with so many threads, whatever the machine has: a team of one hides races."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ranks():
    """Four ranks over gloo."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pair():
    """Two ranks over gloo."""
    pool = RankPool(2)
    yield pool
    pool.close()
