"""Seeds are pinned: a change of them would change every run that was ever recorded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import (
    ConfigError,
    DeadlineError,
    EngineRefused,
    GyreError,
    InputError,
    MemoryBudgetError,
)
from gyre.core.errors import SnapshotError as Snapshot
from gyre.core.seeds import derive_seed

PINNED = {
    (): 6510301506637419378,
    (0,): 1887154467326967967,
    (-1,): 1488950461037304600,
    (1, "rollout", 2, 3): 1465013451968127791,
    ("1", "rollout", 2, 3): 9172000074102007138,
    (7, "data", "main"): 1127951792484953275,
    (1180591620717411303424, "é"): 5899890197039917112,
}
PARTS = st.lists(st.integers() | st.text(st.characters(exclude_categories=["Cs"])), max_size=4)


@pytest.mark.parametrize("path", PINNED, ids=str)
def test_pinned_values(path):
    assert derive_seed(*path) == PINNED[path]


@given(PARTS)
def test_a_seed_has_63_bits_and_no_state(path):
    seed = derive_seed(*path)
    assert 0 <= seed < 2**63 and seed == derive_seed(*path)


@given(PARTS, PARTS)
def test_different_paths_have_different_seeds(left, right):
    assert (derive_seed(*left) == derive_seed(*right)) == (left == right)


def test_parts_do_not_run_into_each_other():
    paths = [(1, "a"), ("1a",), ("1", "a"), (1, "a", ""), ("", 1, "a"), (11,), (1, 1), ("int:1",)]
    assert len({derive_seed(*path) for path in paths}) == len(paths)


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_the_process_and_its_hash_seed_do_not_matter(hash_seed):
    code = (
        "from gyre.core.seeds import derive_seed; print(*[derive_seed(*p) for p in "
        f"{list(PINNED)!r}])"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert [int(word) for word in done.stdout.split()] == list(PINNED.values())


@pytest.mark.parametrize("bit", range(63))
def test_every_bit_is_used(bit):
    ones = sum(derive_seed("bits", number) >> bit & 1 for number in range(400))
    assert 120 < ones < 280  # eight standard deviations around 200


def test_errors_say_kind_message_and_hint():
    kinds = {}
    for error in (
        ConfigError,
        InputError,
        MemoryBudgetError,
        Snapshot,
        DeadlineError,
        EngineRefused,
    ):
        raised = error("what we got", hint="what to do")
        assert isinstance(raised, GyreError) and str(raised) == "what we got"
        assert raised.as_dict() == {
            "kind": error.kind,
            "message": "what we got",
            "hint": "what to do",
        }
        kinds[error.kind] = error
    assert len(kinds) == 6
