"""Ages are counted in published versions; a group that would be too old is left out."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.records import Partial
from gyre.loop.asynchronous.staleness import (
    MOST_PUBLISHED,
    ages,
    note_published,
    oldest_age,
    split_stale,
)
from gyre.loop.collect import open_groups
from loop_cases import TRAIN

versions = st.lists(st.integers(0, 50), max_size=40)


@given(versions, st.integers(0, 60))
def test_an_age_counts_the_versions_published_since(numbers, asked):
    published: tuple[int, ...] = ()
    for number in sorted(numbers):
        published = note_published(published, number)
    assert published == tuple(sorted(set(numbers)))
    assert ages(np.array([asked]), published).tolist() == [sum(v > asked for v in published)]


def test_a_step_without_an_update_ages_nothing_and_the_memory_is_bounded():
    assert note_published((0, 3), 3) == (0, 3)
    many = tuple(range(MOST_PUBLISHED))
    assert note_published(many, MOST_PUBLISHED) == tuple(range(1, MOST_PUBLISHED + 1))


def begun(*versions_of_tokens: int):
    (group,) = open_groups(TRAIN[:1], run_seed=0, step=1)
    if versions_of_tokens:
        count = len(versions_of_tokens)
        zeros = np.zeros(count, dtype=np.float32)
        group.partials[0] = Partial(
            index=0,
            tokens=np.ones(count, dtype=np.int32),
            logprobs=zeros,
            raw_logprobs=zeros,
            versions=np.array(versions_of_tokens, dtype=np.int32),
        )
    return group


def test_the_oldest_token_decides_over_a_group():
    published = (0, 2, 4, 6)
    assert oldest_age(begun(), published) == 0
    assert oldest_age(begun(6), published) == 0
    assert oldest_age(begun(2, 6), published) == 2


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_a_group_is_dropped_exactly_where_it_would_pass_the_bound(groups, bound, ahead):
    published = tuple(range(10))
    made = [begun(*tokens) for tokens in groups]
    kept, stale = split_stale(made, published, max_staleness=bound, versions_ahead=ahead)
    kept_ids, stale_ids = [id(group) for group in kept], [id(group) for group in stale]
    assert [id(group) for group in made if id(group) in kept_ids] == kept_ids
    assert len(kept) + len(stale) == len(made)
    for group, tokens in zip(made, groups, strict=True):
        age = 9 - min(tokens, default=9)
        is_old = bool(bound) and age > 0 and age + ahead > bound
        assert (id(group) in stale_ids) == is_old


def test_the_synchronous_order_drops_none():
    kept, stale = split_stale([begun(0)], tuple(range(9)), max_staleness=0, versions_ahead=0)
    assert len(kept) == 1 and not stale
