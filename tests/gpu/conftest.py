"""What the files of GPU tests share: no test's result hangs on those before it, and the files can
be dealt into parts.

--part I/N runs the I-th of N parts, dealt by the seconds in seconds.json; --record-seconds measures
them again; --order SEED shuffles files, and the tests of each.
"""

from __future__ import annotations

import gc
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

SECONDS = Path(__file__).with_name("seconds.json")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="I/N: the I-th of N parts of the GPU tests, counted from 1")
    parser.addoption(
        "--order", type=int, help="a seed: run the files in another order, and the tests of each"
    )
    parser.addoption(
        "--record-seconds", action="store_true", help="write what each file takes into seconds.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-seconds", default=False):
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, seed = config.getoption("--part", default=None), config.getoption("--order", default=None)
    if part is not None:
        number, parts = read_part(part)
        mine = deal(
            Counter(item.path.name for item in items), json.loads(SECONDS.read_text()), parts
        )[number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item.path.name not in mine])
        items[:] = [item for item in items if item.path.name in mine]
    if seed is not None:
        items[:] = shuffle(items, seed)


def read_part(text: str) -> tuple[int, int]:
    number, slash, parts = text.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"--part {text}: need I/N with I from 1 to N, as in --part 2/3")
    return int(number), int(parts)


def deal(tests: Counter[str], seconds: dict[str, float], parts: int) -> list[set[str]]:
    """Deal files, the longest first, each to the part that has least. A file not measured yet
    counts a second a test."""
    dealt: list[set[str]] = [set() for _ in range(parts)]
    taken_s = [0.0] * parts
    cost_s = {name: seconds.get(name, float(count)) for name, count in tests.items()}
    for name in sorted(cost_s, key=lambda name: (-cost_s[name], name)):
        least = taken_s.index(min(taken_s))
        dealt[least].add(name)
        taken_s[least] += cost_s[name]
    return dealt


def shuffle(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files stay together: ranks that a file starts for its tests are then started once."""
    draw = random.Random(seed)
    place = {item: draw.random() for item in items}
    place_of_file = {name: draw.random() for name in sorted({item.path.name for item in items})}
    return sorted(items, key=lambda item: (place_of_file[item.path.name], place[item]))


class Recorder:
    """Sums what the tests of each file take, and writes it beside what is known of the others."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[Path(report.location[0]).name] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = json.loads(SECONDS.read_text()) | {
            name: round(s, 1) for name, s in self._seconds.items()
        }
        SECONDS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


@pytest.fixture(autouse=True, scope="module")
def nothing_cached() -> Iterator[None]:
    """A file finds no device memory that the garbage or the cache of another one holds."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def fresh_draws(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def allocated() -> Callable[[], int]:
    """Device bytes of tensors that are still referred to: the garbage of this test and earlier ones
    is collected."""

    def count() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    return count


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Products of float32 without TF32. Restored by assignment: torch keeps no entry that pytest
    could delete."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that Triton compiles or loads from now on."""
    import triton

    names: list[str] = []

    def note(*, fn, **more) -> None:
        names.append(str(getattr(fn, "name", fn)))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    yield names
