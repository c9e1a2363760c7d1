"""What is believed of an engine's cache, against plain forms of it: by property."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.engine_pool import affinity
from gyre.cluster.engine_pool.affinity import PrefixBelief, PrefixHasher, PrefixSum, SessionTable
from gyre.engine.kv_cache import prefix_cache
from gyre.engine.kv_cache.page_allocator import Pages
from gyre.engine.kv_cache.prefix_cache import extend_keys, root_key

TOKENS = st.lists(st.integers(0, 3), max_size=40)
PAGES = st.integers(1, 5)


def keys_of(tokens: list[int], page: int, salt: str = "", seed: int = 0) -> list[int]:
    hasher = PrefixHasher(seed)
    return hasher.extend(hasher.begin(salt), np.array(tokens, np.int32), page)[0]


@given(TOKENS, TOKENS, PAGES)
def test_keys_are_equal_as_far_as_the_prefixes_are(one, other, page) -> None:
    ours, theirs = keys_of(one, page), keys_of(other, page)
    assert (len(ours), len(theirs)) == (len(one) // page, len(other) // page)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        stop = (number + 1) * page
        assert (a == b) == (one[:stop] == other[:stop])
    assert len({*ours}) == len(ours)


@given(TOKENS, st.integers(0, 40), PAGES)
def test_a_hash_goes_on_where_it_ended(tokens, cut, page) -> None:
    hasher, array = PrefixHasher(7), np.array(tokens, np.int32)
    whole, end = hasher.extend(PrefixSum(), array, page)
    first, middle = hasher.extend(PrefixSum(), array[:cut], page)
    rest, last = hasher.extend(middle, array[cut:], page)
    assert [*first, *rest] == whole and last == end


@given(st.lists(st.integers(0, 3), min_size=4, max_size=20))
def test_tenants_and_seeds_share_no_key(tokens) -> None:
    found = [keys_of(tokens, 4, "a"), keys_of(tokens, 4, "b"), keys_of(tokens, 4)]
    found += [keys_of(tokens, 4, seed=1)]
    assert len({key for keys in found for key in keys}) == sum(map(len, found))


@given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=30), st.integers(0, 12))
def test_a_belief_is_bounded_and_has_no_page_without_those_before_it(steps, capacity) -> None:
    belief = PrefixBelief(capacity)
    for tokens, forgets in steps:
        keys = keys_of(tokens, 2)
        if forgets:
            belief.forget()
            assert len(belief) == 0
        belief.remember(keys, num_found=belief.count_pages(keys))
        assert len(belief) <= capacity
        assert belief.count_pages(keys) == min(len(keys), capacity)
        for other, _ in steps:
            held = [belief.count_pages([key]) for key in keys_of(other, 2)]
            assert held == sorted(held, reverse=True)
            assert belief.count_pages(keys_of(other, 2)) == sum(held)


@given(st.lists(TOKENS, max_size=25), st.integers(3, 30))
def test_of_requests_one_after_another_it_is_what_the_engine_has(prompts, capacity) -> None:
    """Against the pages and the prefix cache of the engine itself. Of prompts whose last page is
    not full: a full one is computed again, in a page that the belief does not count."""
    assert affinity.MOST_REUSED == prefix_cache.MOST_REUSED
    page, belief, pages = 2, PrefixBelief(capacity), Pages(capacity)
    for drawn in prompts:
        cut = drawn[: 2 * capacity - 1]
        tokens = cut + [0] * (1 - len(cut) % 2)
        array, keys = np.array(tokens, np.int32), []
        extend_keys(keys, root_key(0, ""), array, page, len(tokens) // page)
        shared = max(0, len(tokens) - 1) // page
        hits = pages.find(keys[:shared])
        assert belief.count_pages(keys_of(tokens, page)[:shared]) == len(hits)
        pages.share(hits, found=True)
        owned = np.concatenate([hits, pages.take(len(keys) - len(hits))])
        pages.remember(keys[len(hits) :], owned[len(hits) :], 0)
        pages.give(owned)
        belief.remember(keys_of(tokens, page), num_found=len(hits))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.text(max_size=2), st.integers(0, 4)), max_size=60),
    st.integers(1, 5),
)
def test_the_latest_sessions_are_kept_and_no_more(notes, capacity) -> None:
    table, last = SessionTable(capacity), {}
    for salt, session, life in notes:
        table.note(salt, session, life)
        last.pop((salt, session), None)
        last[salt, session] = life
        assert len(table) <= capacity
        kept = dict(list(last.items())[-capacity:])
        assert all(table.find(*key) == kept.get(key) for key in last)


def test_a_session_id_may_be_any_text() -> None:
    table = SessionTable()
    table.note("a", "b\ud800", 1)
    assert table.find("a", "b\ud800") == 1 and table.find("ab", "\ud800") is None
