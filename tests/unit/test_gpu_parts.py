"""How GPU tests are dealt into parts: every file in one of them, none much longer than it has to
be."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SPEC = importlib.util.spec_from_file_location(
    "gpu_conftest", Path(__file__).parents[1] / "gpu" / "conftest.py"
)
assert SPEC is not None and SPEC.loader is not None
parts_of = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(parts_of)

FILES = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(1, 300), max_size=25)


@given(
    FILES,
    st.dictionaries(st.text("abc", min_size=1, max_size=4), st.floats(0.1, 500)),
    st.integers(1, 6),
)
def test_every_file_is_in_one_part_and_parts_are_alike(
    tests: dict, seconds: dict, parts: int
) -> None:
    dealt = parts_of.deal(Counter(tests), seconds, parts)
    assert len(dealt) == parts and sorted(name for part in dealt for name in part) == sorted(tests)
    cost = {name: seconds.get(name, float(count)) for name, count in tests.items()}
    taken = [sum(cost[name] for name in part) for part in dealt]
    assert max(taken) - min(taken) <= max(cost.values(), default=0.0) + 1e-6


@pytest.mark.parametrize("text", ["", "1", "0/3", "4/3", "1/0", "a/b", "-1/3", "1/3/5"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="need I/N"):
        parts_of.read_part(text)
