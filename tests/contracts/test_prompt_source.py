"""Contract of PromptSource, for every kind of records that the data room deals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.config import FakeSourceConfig
from fakes.script import byte_tokenizer, sum_prompts
from fakes.source import ListSource
from gyre.core.contracts import PromptSource
from gyre.core.errors import InputError, SnapshotError
from gyre.core.records import Prompt, TrainSequence
from gyre.data.config import DataConfig
from gyre.data.examples import tokenizer_texts
from gyre.data.sources import PairSource, ShuffledSource, load_prompts
from gyre.text.tokenizer import train_tokenizer

LENGTH = 7


def sequence(i: int, chosen: float = -1.0) -> TrainSequence:
    columns = {"loss_mask": np.array([False, True, True])}
    return TrainSequence(
        tokens=np.array([9, 8, i], dtype=np.int32), columns=columns, scalars={"chosen": chosen}
    )


def prompts(seed: int = 0, length: int = LENGTH) -> PromptSource:
    records = [
        Prompt(
            prompt_id=str(i), tokens=np.array([i], dtype=np.int32), text=str(i), task={}, source="s"
        )
        for i in range(length)
    ]
    return ShuffledSource(records, seed, "prompts")


def sequences(seed: int = 0, length: int = LENGTH) -> PromptSource:
    return ShuffledSource([sequence(i) for i in range(length)], seed, "sequences")


def pairs(seed: int = 0, length: int = LENGTH) -> PromptSource:
    return PairSource(
        [(sequence(i, 1.0), sequence(100 + i, 0.0)) for i in range(length)], seed, "pairs"
    )


def procedural(seed: int = 0, length: int = LENGTH) -> PromptSource:
    settings = DataConfig(num_problems=length, held_out_fraction=0)
    emit: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    tokenizer = train_tokenizer(tokenizer_texts(settings, num_texts=5, emit=emit), vocab_size=300)
    return ShuffledSource(load_prompts(settings, tokenizer, emit=emit).train, seed, "procedural")


def fake(seed: int = 0, length: int = LENGTH) -> PromptSource:
    config = FakeSourceConfig(num_prompts=length, held_out_fraction=0.0)
    return ListSource(sum_prompts(config, byte_tokenizer())[0], seed=seed)


MAKERS = [prompts, sequences, pairs, procedural, fake]
make_any = pytest.mark.parametrize("make", MAKERS)
Maker = Callable[..., PromptSource]


def taken(source: PromptSource, *counts: int) -> list[Any]:
    """Comparable contents of what is taken."""
    records = [record for n in counts for record in source.take(n)]
    return [
        (r.tokens.tolist(), getattr(r, "pair_id", None), getattr(r, "scalars", None))
        for r in records
    ]


def per_item(make: Maker) -> int:
    return 2 if make is pairs else 1


@make_any
def test_take_gives_n_and_each_epoch_gives_all_once(make: Maker) -> None:
    source = make()
    for _ in range(3):
        epoch = taken(source, LENGTH)
        assert len(epoch) == LENGTH * per_item(make)
        assert max(Counter(str(tokens) for tokens, _, _ in epoch).values()) == 1


@make_any
def test_epochs_have_different_orders(make: Maker) -> None:
    source = make(length=20)
    orders = [[tokens for tokens, _, _ in taken(source, 20)] for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])


@make_any
def test_order_is_a_function_of_the_seed(make: Maker) -> None:
    assert taken(make(seed=3, length=20), 33) == taken(make(seed=3, length=20), 33)
    assert taken(make(seed=3, length=20), 33) != taken(make(seed=4, length=20), 33)


@given(
    st.sampled_from([prompts, pairs]),
    st.lists(st.integers(1, 12), max_size=5),
    st.lists(st.integers(1, 12), min_size=1),
)
def test_state_continues_exactly_and_step_sizes_do_not_matter(
    make: Maker, before: list[int], after: list[int]
) -> None:
    source = make()
    taken(source, *before)
    state = json.loads(json.dumps(source.state()))
    rest = taken(source, *after)
    fresh = make()
    fresh.restore(state)
    assert taken(fresh, sum(after)) == rest
    straight = make()
    assert taken(straight, sum(before) + sum(after))[sum(before) * per_item(make) :] == rest
    source.restore(state)  # also backwards, in the source that has gone on
    assert taken(source, *after) == rest


@make_any
def test_state_is_json_and_taking_it_changes_nothing(make: Maker) -> None:
    source, other = make(), make()
    for _ in range(4):
        assert json.loads(json.dumps(source.state())) == dict(source.state())
        assert taken(source, 5) == taken(other, 5)


@make_any
def test_state_of_other_data_is_refused(make: Maker) -> None:
    state = make().state()
    for other in (make(seed=1), make(length=LENGTH + 1), *(m() for m in MAKERS if m is not make)):
        with pytest.raises(SnapshotError) as caught:
            other.restore(state)
        assert caught.value.hint
    with pytest.raises(SnapshotError):
        make().restore({**state, "position": "three"})
    with pytest.raises(SnapshotError):
        make().restore({})


def test_masks_are_part_of_what_is_recognized() -> None:
    other = sequence(0)
    changed = TrainSequence(
        tokens=other.tokens, columns={"loss_mask": np.array([True, True, True])}
    )
    state = ShuffledSource([other], 0, "x").state()
    with pytest.raises(SnapshotError, match="fingerprint"):
        ShuffledSource([changed], 0, "x").restore(state)


def test_no_records_is_an_error_of_the_user() -> None:
    with pytest.raises(InputError, match="holds no records"):
        ShuffledSource([], 0, "empty")


def test_orders_are_pinned() -> None:
    """A resumed run of an older release must see the same order."""
    order = [tokens[0] for tokens, _, _ in taken(prompts(seed=0), 2 * LENGTH)]
    assert order == [0, 4, 2, 1, 6, 3, 5, 0, 4, 1, 2, 5, 3, 6]
