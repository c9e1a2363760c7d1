"""Pages and their prefix cache against a plain account of who holds what, over random histories."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.engine.kv_cache.page_allocator import Pages
from gyre.engine.kv_cache.prefix_cache import PrefixCache, extend_keys, root_key
from gyre.engine.kv_cache.prompt_logprobs import BlockScores

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["take", "give", "share", "find", "remember", "drop", "disown"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


@given(st.integers(1, 7), ACTS)
def test_accounts_follow_a_plain_model(num_pages: int, acts: list[tuple[str, int]]) -> None:
    """Each holder has some pages; a cached page without a holder is idle, and evicted last of all:
    first those that nobody found again, oldest first."""
    pages = Pages(num_pages)
    holders: list[list[int]] = []
    cached: dict[int, bytes] = {}
    idle: list[int] = []  # in the order of eviction
    found: set[int] = set()
    stamps = dict.fromkeys(range(1, num_pages + 1), 0)
    names = iter(range(1000))
    for act, number in acts:
        held = {page for holder in holders for page in holder}
        free = set(range(1, num_pages + 1)) - held - set(idle)
        if act == "take" and number <= len(free) + len(idle):
            evicted = idle[: max(number - len(free), 0)]
            got = pages.take(number).tolist()
            assert (
                len(set(got)) == number
                and set(got) <= free | set(evicted)
                and set(evicted) <= set(got)
            )
            idle = idle[len(evicted) :]
            found -= set(evicted)
            for page in evicted:
                del cached[page]
            for page in got:
                stamps[page] += 1
            holders.append(got)
        elif act == "take":
            with pytest.raises(AssertionError):
                pages.take(number)
        elif act == "give" and holders:
            gone = holders.pop(number % len(holders))
            pages.give(np.asarray(gone, np.int32))
            left = {page for holder in holders for page in holder}
            for page in [page for page in reversed(gone) if page not in left and page in cached]:
                once = [other for other in idle if other not in found]
                again = [other for other in idle if other in found]
                (again if page in found else once).append(page)
                while len(again) > 4 * (len(once) + 1):
                    found.remove(again[0])
                    once.append(again.pop(0))
                idle = once + again
        elif act in ("share", "find") and cached:
            wanted = sorted(cached)[: number + 1]
            assert pages.num_idle_among(np.asarray(wanted, np.int32)) == len(
                set(wanted) & set(idle)
            )
            pages.share(np.asarray(wanted, np.int32), found=act == "find")
            found |= set(wanted) if act == "find" else set()
            idle = [page for page in idle if page not in wanted]
            holders.append(wanted)
        elif act == "remember" and holders:
            mine = holders[number % len(holders)]
            keys = [b"%d" % next(names) for _ in mine]
            pages.remember(keys, np.asarray(mine, np.int32), version=number % 2)
            for key, page in zip(keys, mine, strict=True):
                cached.setdefault(page, key)
        elif act == "drop":
            assert pages.drop_cached() == len(cached)
            cached, idle, found = {}, [], set()
        elif act == "disown" and holders:
            mine = holders[number % len(holders)]
            pages.disown(np.asarray(mine, np.int32))
            cached = {page: key for page, key in cached.items() if page not in mine}
            found -= set(mine)
        held = {page for holder in holders for page in holder}
        assert pages.num_used == len(held) and pages.num_available == num_pages - len(held)
        assert list(pages.prefix.idle_pages) == idle and len(pages.prefix) == len(cached)
        everyone = np.arange(1, num_pages + 1)
        assert pages.stamps(everyone).tolist() == list(stamps.values())
        now = pages.still_hold(everyone, pages.stamps(everyone)).tolist()
        assert now == [page in held or page in cached for page in everyone.tolist()]
        assert not pages.still_hold(everyone, pages.stamps(everyone) - 1).any()
        users = [sum(page in holder for holder in holders) for page in everyone.tolist()]
        assert pages.only_used_once(everyone).tolist() == [
            p for p, n in zip(everyone.tolist(), users, strict=True) if n == 1
        ]
        for page, key in cached.items():
            assert pages.find([key, b"unknown", key]).tolist() == [page]
        pages.check([np.asarray(holder, np.int32) for holder in holders])


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 3)), max_size=40),
    st.integers(12, 20),
)
def test_no_page_is_cached_without_those_before_it(asked, num_pages) -> None:
    """Requests of binary words run beside each other, at most two at a time."""
    pages, running = Pages(num_pages), list[np.ndarray]()
    for word, ends in asked:
        keys = [bytes(word[: length + 1]) for length in range(len(word))]
        hits = pages.find(keys)
        pages.share(hits, found=True)
        owned = np.concatenate([hits, pages.take(len(keys) - len(hits))])
        pages.remember(keys[len(hits) :], owned[len(hits) :], 0)
        running.append(owned)
        while len(running) > (1 if ends else 2) - 1:
            pages.give(running.pop(ends % len(running)))
        pages.check(running)
        for other, _ in asked:
            known = [pages.prefix.knows(bytes(other[: end + 1])) for end in range(len(other))]
            assert known == sorted(known, reverse=True)


def test_a_shared_prefix_outlives_many_ends_that_nobody_asks_for_again() -> None:
    pages, prefix = Pages(10), [b"p0", b"p1", b"p2"]
    for number in range(50):
        hits = pages.find(prefix)
        assert len(hits) == (3 if number else 0)
        pages.share(hits, found=True)
        owned = np.concatenate([hits, pages.take(7 - len(hits))])
        keys = [*prefix, *(b"%d.%d" % (number, end) for end in range(4))]
        pages.remember(keys[len(hits) :], owned[len(hits) :], 0)
        pages.give(owned)
        for turn in range(2 if number else 0):  # then LRU alone would have pushed it out
            other = pages.take(5)
            pages.remember([b"x%d.%d.%d" % (number, turn, end) for end in range(5)], other, 0)
            pages.give(other)


def test_low_pages_leave_first_and_in_order() -> None:
    pages = Pages(6)
    first, second = pages.take(2), pages.take(3)
    assert first.tolist() == [1, 2] and second.tolist() == [3, 4, 5]
    pages.give(first)
    assert pages.take(4 - 1).tolist() == [1, 2, 6]


def test_of_two_versions_one_is_kept() -> None:
    pages = Pages(4)
    held = pages.take(4)
    pages.remember([b"a", b"b"], held[:2], version=3)
    pages.remember([b"c"], held[2:3], version=4)
    pages.remember([b"a"], held[3:], version=4)  # known already: the first page keeps the key
    pages.give(held[:1])
    assert pages.find([b"a"]).tolist() == [1]
    assert pages.drop_cached(keep_version=4) == 2
    assert pages.find([b"a"]).tolist() == [] and pages.find([b"c"]).tolist() == [3]
    assert pages.num_available == 1 and pages.still_hold(
        np.arange(1, 5), pages.stamps(np.arange(1, 5))
    ).tolist() == [
        False,
        True,
        True,
        True,
    ]
    pages.check([held[1:]])


@pytest.mark.parametrize("wrong", ["twice in one", "null page", "too few users", "too many users"])
def test_the_accounts_find_what_is_wrong(wrong: str) -> None:
    pages = Pages(3)
    held = pages.take(2)
    lists = {
        "twice in one": [np.concatenate([held, held[:1]])],
        "null page": [held, np.zeros(1, np.int32)],
        "too few users": [held[:1]],
        "too many users": [held, held],
    }[wrong]
    with pytest.raises(AssertionError):
        pages.check(lists)


def test_the_accounts_find_another_page_cached_than_the_cache_knows() -> None:
    pages = Pages(3)
    held = pages.take(2)
    pages.remember([b"a"], held[:1], version=0)
    pages.check([held])
    pages.is_cached_P[held] = [False, True]
    with pytest.raises(AssertionError):
        pages.check([held])


def keys_of(tokens: list[int], *counts: int) -> list[bytes]:
    """Keys of blocks of two tokens, made in as many calls as there are counts."""
    made: list[bytes] = []
    for count in counts:
        extend_keys(made, root_key(1, "tenant"), np.asarray(tokens, np.int32), 2, count)
    return made


def test_a_key_is_of_its_own_block_and_all_before_it_and_of_nothing_behind_it() -> None:
    tokens = list(range(8))
    base = keys_of(tokens, 4)
    for place in range(8):
        changed = [*tokens[:place], 99, *tokens[place + 1 :]]
        same = [key == other for key, other in zip(keys_of(changed, 4), base, strict=True)]
        assert same == [block < place // 2 for block in range(4)]


def test_keys_do_not_depend_on_how_they_were_extended() -> None:
    tokens = list(range(9))
    assert (
        keys_of(tokens, 1, 3, 3, 4)
        == keys_of(tokens, 4)
        == [*keys_of(tokens, 2), *keys_of(tokens, 4)[2:]]
    )


def test_keys_have_128_bits() -> None:
    assert {len(key) for key in [root_key(1, ""), *keys_of([1, 2, 3, 4], 2)]} == {16}


def test_prompt_logprobs_are_kept_only_where_room_was_given() -> None:
    """An entry of one token takes four bytes."""
    one = BlockScores(
        logprobs=np.zeros(1, np.float32),
        top_ids=np.zeros((1, 0), np.int32),
        top_logprobs=np.zeros((1, 0), np.float32),
    )
    for cache, room in (
        (PrefixCache(), 0),
        (Pages(1).prefix, 0),
        (Pages(1, score_bytes=4).prefix, 4),
    ):
        assert cache.scores.max_bytes == room
        cache.scores.put(b"a", one)
        assert len(cache.scores) == room // 4


def test_only_a_known_page_rests_and_once() -> None:
    cache = PrefixCache()
    with pytest.raises(AssertionError):
        cache.rest(1)
    cache.remember(b"a", 1, 0)
    cache.rest(1)
    with pytest.raises(AssertionError):
        cache.rest(1)
