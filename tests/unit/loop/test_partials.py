"""Partial rollouts and snapshots: what was set aside goes on as if nothing had happened; so does a
run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.chunks import as_partial, join_supports
from gyre.core.codec import encode
from gyre.core.errors import SnapshotError
from gyre.core.records import Partial, Support
from gyre.loop.collect import RequestRules, open_groups, requests_for, split_whole
from gyre.loop.config import EvalConfig
from gyre.loop.resume import IN_FLIGHT, StageProgress, from_snapshot, is_due, to_snapshot
from gyre.objectives.config import GrpoConfig
from loop_cases import (
    GROUPS_OF_4,
    HELD_OUT,
    TOKENIZER,
    TRAIN,
    Bench,
    digit_share,
    digits_script,
    turn,
)

CAPPED = GROUPS_OF_4.model_copy(update={"max_tokens_per_iteration": 3})
# a cap that no completion reaches
UNCAPPED = GROUPS_OF_4.model_copy(update={"max_tokens_per_iteration": 16})
ALL_STEPS = {"script": digits_script, "table": digit_share, "objective": GrpoConfig()}


def test_a_completion_that_was_set_aside_is_the_one_that_never_was(tmp_path):
    straight = Bench(tmp_path / "straight", rollout=UNCAPPED, steps=1, **ALL_STEPS)
    capped = Bench(tmp_path / "capped", rollout=CAPPED, steps=12, **ALL_STEPS)
    turn(straight)
    turn(capped)
    whole = {rollout.rollout_id: rollout for rollout in straight.seen}
    parted = {rollout.rollout_id: rollout for rollout in capped.seen if rollout.rollout_id in whole}
    assert set(parted) == set(whole) and len(whole) == 16
    assert max(int(rollout.sampled.sum()) for rollout in whole.values()) > 3 * 3, (
        "too short to be carried thrice"
    )
    for rollout_id, rollout in whole.items():
        other = parted[rollout_id]
        assert other.tokens.tolist() == rollout.tokens.tolist()
        assert (other.text, other.finish, other.prompt) == (
            rollout.text,
            rollout.finish,
            rollout.prompt,
        )
        np.testing.assert_array_equal(other.logprobs, rollout.logprobs)
        np.testing.assert_array_equal(other.raw_logprobs, rollout.raw_logprobs)


def test_tokens_of_a_carried_completion_carry_the_version_of_their_step(tmp_path):
    bench = Bench(tmp_path, rollout=CAPPED, steps=10, **ALL_STEPS)
    turn(bench)
    version_after = {0: 0} | {row["step"]: row["version"] for row in bench.steps()}
    carried = 0
    for rollout in bench.seen:
        begun = int(rollout.group_id.partition(".")[0])
        chosen = rollout.versions[rollout.sampled].tolist()
        assert chosen == [version_after[begun - 1 + place // 3] for place in range(len(chosen))]
        carried += len(chosen) > 3
    assert carried


def test_each_completion_is_trained_on_once_with_its_own_score(tmp_path):
    bench = Bench(tmp_path, rollout=CAPPED, steps=10, **ALL_STEPS)
    turn(bench)
    ids = [rollout.rollout_id for rollout in bench.seen]
    assert len(ids) == len(set(ids))
    groups = [sequence.group_id for batch in bench.trainer.batches for sequence in batch.sequences]
    assert all(groups.count(group) == 4 for group in groups)
    for row in bench.sample_rows():
        digits = [int(char) for char in row["completion"]]
        assert row["score"] == pytest.approx(
            sum(digit > 4 for digit in digits) / max(1, len(digits))
        )
    assert {row["step"] for row in bench.rows("rollouts.carried")} == set(range(1, 11))


def test_a_step_in_which_no_group_gets_whole_trains_nothing_and_goes_on(tmp_path):
    def long(request, index, version):
        return [*TOKENIZER.encode("12345").tolist(), TOKENIZER.end_id]

    bench = Bench(
        tmp_path, rollout=CAPPED, steps=4, script=long, table=digit_share, objective=GrpoConfig()
    )
    turn(bench)
    assert [len(batch.sequences) for batch in bench.trainer.batches] == [0, 16, 0, 16]
    assert [row["version"] for row in bench.steps()] == [0, 1, 1, 2]
    asked = [request.request_id for phase, request in bench.engine.asked if phase == "rollout"]
    want = [
        f"{step}.{place}.{sample}"
        for step in (1, 1, 3, 3)
        for place in range(4)
        for sample in range(4)
    ]
    assert asked == want


@pytest.mark.parametrize("rollout", [GROUPS_OF_4, CAPPED], ids=["whole", "partial"])
@pytest.mark.parametrize("stop_at", [2, 4])
def test_a_run_resumed_from_a_snapshot_is_the_run_that_never_stopped(tmp_path, rollout, stop_at):
    evaluation = EvalConfig(num_problems=len(HELD_OUT), every_steps=3)
    settings = {
        "rollout": rollout,
        "steps": 6,
        "snapshot_every": 2,
        "evaluation": evaluation,
        **ALL_STEPS,
    }
    straight = Bench(tmp_path / "straight", **settings)
    whole = turn(straight)
    first = Bench(tmp_path / "stopped", **settings)
    # the log goes on past the snapshot, as after a kill: those rows must be dead to readers
    turn(first)
    second = Bench(tmp_path / "stopped", **settings)
    resumed = turn(second, kept=first.shelf.kept[stop_at])
    assert second.steps() == straight.steps()
    assert second.sample_rows() == straight.sample_rows()
    assert resumed.evals == whole.evals and resumed.step == whole.step == 6 and resumed.done
    assert [row["when"] for row in second.rows("eval.done")] == [
        row["when"] for row in straight.rows("eval.done")
    ]
    assert sorted(first.shelf.kept) == [2, 4, 6]
    assert without_times(second.shelf.kept[6]) == without_times(straight.shelf.kept[6])


def without_times(kept) -> tuple[StageProgress, list[bytes]]:
    """What a snapshot holds, and its groups in flight to the last bit; scores say when they were
    made, which may differ."""
    progress = from_snapshot(json.loads(kept[0]), kept[1])
    groups = []
    for group in progress.in_flight:
        scores = {
            i: replace(score, started_s=0.0, ended_s=0.0) for i, score in group.scores.items()
        }
        groups.append(encode(replace(group, scores=scores)))
    return replace(progress, in_flight=()), groups


def test_a_snapshot_keeps_what_is_in_flight_with_its_scores(tmp_path):
    bench = Bench(tmp_path, rollout=CAPPED, steps=3, snapshot_every=1, **ALL_STEPS)
    turn(bench)
    kept_scores = 0
    for step, (_, blobs, _) in bench.shelf.kept.items():
        progress = from_snapshot(
            {"stage": "main", "step": step, "done": False, "source": None, "evals": {}}, blobs
        )
        assert progress.in_flight
        for group in progress.in_flight:
            assert set(group.rollouts) == set(group.scores)
            assert set(group.rollouts) | set(group.partials) == set(range(4))
            assert not set(group.rollouts) & set(group.partials) and group.partials
            kept_scores += len(group.scores)
            for sample, partial in group.partials.items():
                assert partial.index == sample and 0 < len(partial.tokens) < GROUPS_OF_4.max_tokens
    assert kept_scores


def test_a_snapshot_without_its_blob_is_refused():
    state, blobs = to_snapshot(StageProgress(stage="main", step=3), events={"attempt": 1, "seq": 7})
    assert from_snapshot(state, blobs) == StageProgress(stage="main", step=3, in_flight=[])
    with pytest.raises(SnapshotError, match=IN_FLIGHT):
        from_snapshot(state, {})


@given(st.integers(1, 40), st.integers(0, 7))
def test_what_is_due_follows_from_the_step(step, every):
    assert is_due(step, every) == (every > 0 and step in range(0, 41, every or 1))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_requests_of_a_fresh_group_cover_each_sample_once(num_prompts, size, cap):
    sampling = GROUPS_OF_4.model_copy(update={"completions_per_prompt": size}).sampling()
    groups = open_groups(TRAIN[:num_prompts], run_seed=3, step=9)
    rules = RequestRules(sampling=sampling, cap_tokens=cap)
    asked = [one for group in groups for one in requests_for(group, rules)]
    covered = [(one.group.group_id, sample) for one in asked for sample in one.samples]
    assert covered == [(group.group_id, sample) for group in groups for sample in range(size)]
    assert (
        len({one.request.request_id for one in asked})
        == len(asked)
        == len({one.request.seed for one in asked})
    )
    assert all(one.request.sampling.n == len(one.samples) for one in asked)
    assert all(one.request.sampling.max_tokens == (min(cap, 16) if cap else 16) for one in asked)


def test_group_ids_never_meet_across_steps():
    ids = [
        group.group_id
        for step in range(30)
        for group in open_groups(TRAIN[:12], run_seed=0, step=step)
    ]
    seeds = [
        group.seed for step in range(30) for group in open_groups(TRAIN[:12], run_seed=0, step=step)
    ]
    assert len(set(ids)) == len(ids) and len(set(seeds)) == len(seeds)


def test_split_whole_keeps_the_order():
    groups = open_groups(TRAIN[:4], run_seed=0, step=1)
    for group in groups[::2]:
        group.rollouts.update(dict.fromkeys(range(2)))  # type: ignore[arg-type]
    whole, rest = split_whole(groups, 2)
    assert [g.group_id for g in whole] == ["1.0", "1.2"] and [g.group_id for g in rest] == [
        "1.1",
        "1.3",
    ]


@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=4), max_size=4))
def test_joined_supports_hold_each_token_s_ids_in_order(parts):
    supports = [
        Support(
            offsets=np.cumsum([0, *map(len, part)]).astype(np.int64),
            ids=np.array([i for ids in part for i in ids], dtype=np.int32),
        )
        for part in parts
    ]
    joined = join_supports(supports)
    tokens = [ids for part in parts for ids in part]
    if joined is None:
        assert not parts
        return
    assert [
        joined.ids[a:b].tolist() for a, b in zip(joined.offsets, joined.offsets[1:], strict=False)
    ] == tokens
    assert joined.offsets.dtype == np.int64 and joined.ids.dtype == np.int32


@given(st.integers(0, 5), st.integers(0, 5))
def test_joined_partials_are_one_after_the_other(first, second):
    def partial(start: int, size: int) -> Partial:
        numbers = np.arange(start, start + size)
        floats = numbers.astype(np.float32)
        return Partial(
            index=2, tokens=numbers.astype(np.int32), logprobs=-floats, raw_logprobs=-2 * floats,
            versions=numbers.astype(np.int32),
        )  # fmt: skip

    joined = as_partial(2, [partial(0, first), partial(first, second)])
    want = partial(0, first + second)
    for name in ("tokens", "logprobs", "raw_logprobs", "versions"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(want, name))
        assert getattr(joined, name).dtype == getattr(want, name).dtype
    assert joined.index == 2 and joined.support is None
