"""The failure detector's decision, by property."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre.core.liveness import LastProgress, decide

TIMES = st.floats(0, 100)
SOURCES = st.dictionaries(st.sampled_from("abcd"), TIMES, max_size=4)
LIMITS = st.floats(0.1, 60)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=20))
def test_progress_is_the_time_when_the_mark_last_changed(beats) -> None:
    now, counts, changed = 0.0, {"a": 0, "b": 0}, {"a": 0.0, "b": 0.0}
    progress = LastProgress(("a", "b"), now)
    progress.observe(counts, now)
    for wait, *moves in beats:
        now += wait
        for name, moves_ in zip(("a", "b"), moves, strict=True):
            if moves_:
                counts[name] += 1
                changed[name] = now
        progress.observe(counts, now)
    assert progress.changed_s == changed
    # a limit of zero judges all: each stands still since its mark changed, the longest first
    still_s = decide(now, progress.changed_s, 0.0).still_s
    assert dict(still_s) == {name: now - changed[name] for name in changed}
    assert list(still_s.values()) == sorted(still_s.values(), reverse=True)


def test_a_source_that_reports_nothing_makes_no_progress() -> None:
    progress = LastProgress(("a", "b"), 0.0)
    for now in range(10):
        progress.observe({"a": now}, float(now))
    verdict = decide(9.0, progress.changed_s, 5.0)
    assert verdict.has_failed and tuple(verdict.still_s) == ("b",)
    assert verdict.reason == "no progress on b for 9 s"


def test_the_first_mark_is_progress_whatever_it_is() -> None:
    """A neighbor that has not written anything yet has the whole limit from the first look on."""
    progress = LastProgress(("a",), 0.0)
    progress.observe({"a": None}, 20.0)
    assert decide(20.0, progress.changed_s, 15.0).state == "healthy"
    progress.observe({"a": None}, 35.0)
    assert decide(35.0, progress.changed_s, 15.0).state == "failed"


@given(SOURCES, TIMES, LIMITS, st.booleans())
def test_a_verdict_names_exactly_those_past_the_limit(sources, now, limit, together) -> None:
    verdict = decide(now, sources, limit, together=together)
    over = {name for name, last in sources.items() if now - last >= limit}
    assert set(verdict.still_s) == over
    everyone = over == set(sources)
    expected = "healthy" if not over else "failed" if everyone or not together else "suspect"
    assert verdict.state == expected
    assert bool(verdict.reason) == (verdict.state != "healthy")


@given(SOURCES, TIMES, st.floats(0, 50), LIMITS, st.booleans())
def test_time_without_progress_never_heals(sources, now, wait, limit, together) -> None:
    order = ("healthy", "suspect", "failed")
    before = decide(now, sources, limit, together=together).state
    later = decide(now + wait, sources, limit, together=together).state
    assert order.index(later) >= order.index(before)


@given(SOURCES.filter(bool), TIMES, LIMITS)
def test_progress_of_one_frees_all_that_may_wait_for_it(sources, now, limit) -> None:
    name = min(sources)
    assert decide(now, sources | {name: now}, limit, together=True).state != "failed"
    alone = decide(now, sources | {name: now}, limit)
    assert name not in alone.still_s
