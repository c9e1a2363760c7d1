"""Rollouts run while the policy trains: bounded in age, nothing trained twice, nothing left over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from fakes.config import FakeEngineConfig, FakeTrainerConfig
from fakes.engine import Faults
from fakes.source import ListSource
from gyre.core.codec import encode
from gyre.core.errors import EngineRefused
from gyre.core.seeds import derive_seed
from gyre.loop.assemble import Passes, assemble
from gyre.loop.collect import Collector, RequestRules, as_group, keep_scores, open_groups
from gyre.loop.config import EvalConfig
from gyre.loop.resume import from_snapshot
from gyre.loop.scoring import Scoring
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import GrpoConfig
from loop_cases import (
    GROUPS_OF_4,
    HELD_OUT,
    RIGHT,
    TOKENIZER,
    TRAIN,
    Bench,
    digit_share,
    digits_script,
    turn,
)

EVALUATION = EvalConfig(num_problems=len(HELD_OUT), every_steps=3)
ALL: dict[str, Any] = {
    "script": digits_script,
    "table": digit_share,
    "objective": GrpoConfig(),
    "steps": 8,
}
SLOW_TRAINER = FakeTrainerConfig(step_delay_s=0.03)
SLOW_ENGINE = FakeEngineConfig(start_accuracy=0.3, token_delay_s=0.002)


def ahead(max_staleness: int, weight_update: str = "drain", **more: Any):
    return GROUPS_OF_4.model_copy(
        update={"max_staleness": max_staleness, "weight_update": weight_update, **more}
    )


def make(folder, max_staleness: int, weight_update: str = "drain", **more: Any) -> Bench:
    folder.mkdir(exist_ok=True, parents=True)
    rollout = ahead(max_staleness, weight_update, **more.pop("rollout", {}))
    return Bench(folder, rollout=rollout, **(ALL | more))


def batches(bench: Bench) -> list[bytes]:
    return [encode(batch) for batch in bench.trainer.batches]


def trained_groups(bench: Bench) -> list[str]:
    """Groups in the order in which they were trained on, each once per batch."""
    found = []
    for batch in bench.trainer.batches:
        found += list(dict.fromkeys(sequence.group_id for sequence in batch.sequences))
    return found


def prompts_in_order(count: int) -> list[str]:
    return [prompt.prompt_id for prompt in ListSource(TRAIN, seed=5).take(count)]


def test_staleness_0_is_a_loop_without_tasks_to_the_bit(tmp_path):
    """The same parts, called one after the other by hand."""
    bench = make(tmp_path / "ring", 0)
    turn(bench)
    plain = make(tmp_path / "plain", 0)
    rollout = GROUPS_OF_4

    async def by_hand() -> None:
        await plain.engine.start(dummy=False)
        for step in range(1, ALL["steps"] + 1):
            groups = open_groups(plain.source.take(4), run_seed=11, step=step)
            async with Scoring(plain.scorer, deadline_s=20.0) as scoring:
                await Collector(
                    plain.engine,
                    scoring,
                    TOKENIZER,
                    RequestRules(sampling=rollout.sampling()),
                    deadline_s=20.0,
                    emit=plain.events.emit,
                ).run(groups)
                keep_scores(groups, await scoring.finish())
            made = assemble(
                ALL["objective"], [as_group(g) for g in groups], Passes(), step=step, accuracy=RIGHT
            )
            await plain.trainer.step(made.batch)
            offer = await plain.trainer.register(epoch=1)
            await plain.engine.prepare(offer)
            await plain.engine.commit(offer.version, policy="drain")

    try:
        asyncio.run(by_hand())
    finally:
        plain.close()
    assert batches(bench) == batches(plain) and len(batches(plain)) == 8
    assert [encode(r) for _, r in bench.engine.asked] == [encode(r) for _, r in plain.engine.asked]
    kinds = {
        row["kind"] for kind in ("step.roles", "rollouts.staleness") for row in bench.rows(kind)
    }
    assert not kinds, "no event of the overlap"


def test_one_step_off_trains_each_batch_one_version_late_and_repeats_to_the_bit(tmp_path):
    first = make(tmp_path / "first", 1)
    again = make(tmp_path / "again", 1, trainer=SLOW_TRAINER)  # another pace, the same numbers
    turn(first)
    turn(again)
    assert batches(first) == batches(again) and first.steps() == again.steps()
    for rollout in first.seen:
        step = int(rollout.group_id.partition(".")[0])
        assert set(rollout.versions[rollout.sampled].tolist()) == {max(0, step - 2)}
    assert [row["staleness_max"] for row in first.steps()] == [0.0] + [1.0] * 7
    assert trained_groups(first) == [f"{step}.{i}" for step in range(1, 9) for i in range(4)]
    assert {what for _, what in first.engine.calls if what.startswith("commit")} == {
        f"commit {version} drain" for version in range(9)
    }


def test_the_next_rollouts_run_while_the_policy_trains(tmp_path):
    bench = make(tmp_path, 1, trainer=SLOW_TRAINER)
    turn(bench)
    order = [
        (row["kind"], row.get("phase"), row["step"])
        for kind in ("phase.started", "phase.ended")
        for row in bench.rows(kind)
    ]
    times = {
        (row["kind"], row["phase"], row["step"]): row["seq"]
        for kind in ("phase.started", "phase.ended")
        for row in bench.rows(kind)
    }
    assert len(order) == len(times)
    for step in range(2, 8):
        assert times["phase.started", "rollout", step + 1] < times["phase.ended", "train", step], (
            "it began before the update was done"
        )
    entered = {phase for phase, _ in bench.gate.seen}
    assert entered == {"handover", "score", "train"}, "engines keep what rollouts need"


def train_behind(bench: Bench, lead: int) -> None:
    """Let each update end when the collector is as far ahead as it may be."""
    step, ended = bench.trainer.step, [0]

    def hear(row: Any) -> None:
        if (row["kind"], row.get("phase")) == ("phase.ended", "rollout"):
            ended[0] = row["step"]

    async def step_behind(batch: Any) -> Any:
        while ended[0] < min(ALL["steps"], batch.step + lead):
            await asyncio.sleep(0.001)
        return await step(batch)

    bench.events.subscribe(hear)
    bench.trainer.step = step_behind  # type: ignore[method-assign]


@pytest.mark.parametrize("weight_update", ["drain", "continue"])
@pytest.mark.parametrize("bound", [1, 2, 3])
def test_no_token_is_older_than_the_bound(tmp_path, bound, weight_update):
    bench = make(tmp_path, bound, weight_update)
    train_behind(bench, bound)
    turn(bench)
    found = [
        {int(age): n for age, n in row["tokens"].items()}
        for row in bench.rows("rollouts.staleness")
    ]
    assert len(found) == 8 and max(age for tokens in found for age in tokens) == bound
    for row, tokens in zip(bench.steps(), found, strict=True):
        count = sum(tokens.values())
        assert row["staleness_min"] == min(tokens) and row["staleness_max"] == max(tokens)
        mean = sum(age * n for age, n in tokens.items()) / count
        assert row["staleness_mean"] == pytest.approx(mean)
        assert row["stale_tokens_share"] == pytest.approx(1 - tokens.get(0, 0) / count)
    assert trained_groups(bench) == [f"{step}.{i}" for step in range(1, 9) for i in range(4)]
    assert not bench.rows("drop.stale")


def test_continue_changes_weights_under_running_completions(tmp_path):
    """Each update ends while completions of the next step have some of their tokens."""
    slow = FakeEngineConfig(token_delay_s=0.01)
    bench = make(tmp_path, 1, "continue", engine=slow, steps=4)
    step = bench.trainer.step

    async def step_under_way(batch: Any) -> Any:
        while batch.step < 4 and not bench.engine.is_reciting():
            await asyncio.sleep(0.001)
        return await step(batch)

    bench.trainer.step = step_under_way  # type: ignore[method-assign]
    turn(bench)
    mixed = 0
    for rollout in bench.seen:
        versions = rollout.versions[rollout.sampled]
        assert np.all(np.diff(versions) >= 0)
        mixed += len(set(versions.tolist())) > 1
    assert mixed, "some completion has tokens of two versions"
    assert {what.split()[-1] for _, what in bench.engine.calls if "commit" in what} == {"continue"}


def test_an_evaluation_has_the_engine_for_itself(tmp_path):
    bench = make(tmp_path, 2, "continue", engine=SLOW_ENGINE, evaluation=EVALUATION)
    turn(bench)
    rows = [*bench.rows("phase.started"), *bench.rows("phase.ended")]
    under_way: set[str] = set()
    for row in sorted(rows, key=lambda row: row["seq"]):
        (under_way.add if row["kind"] == "phase.started" else under_way.discard)(row["phase"])
        assert not {"rollout", "evaluate"} <= under_way
    assert [row["step"] for row in bench.rows("eval.done")] == [0, 3, 6, 8]


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_a_run_one_step_off_resumes_to_the_bit(tmp_path, stop_at):
    settings: dict[str, Any] = {"evaluation": EVALUATION, "snapshot_every": 1}
    straight = make(tmp_path / "straight", 1, **settings)
    turn(straight)
    first = make(tmp_path / "stopped", 1, **settings)
    turn(first)  # the log goes on past the snapshot, as after a kill
    kept = first.shelf.kept[stop_at]
    waiting = from_snapshot(json.loads(kept[0]), kept[1])
    assert len(waiting.in_flight) == 4 and all(len(g.rollouts) == 4 for g in waiting.in_flight), (
        "the next batch is complete, and waits"
    )
    second = make(tmp_path / "stopped", 1, **settings)
    resumed = turn(second, kept=kept)
    assert second.steps() == straight.steps()
    assert second.sample_rows() == straight.sample_rows()
    assert batches(second) == batches(straight)[stop_at:]
    assert resumed.done and resumed.step == 8


def ask_at(bench: Bench, phase: str, step: int) -> None:
    def hear(row: Any) -> None:
        if row["kind"] == "phase.started" and (row["phase"], row.get("step")) == (phase, step):
            bench.stop.ask()

    bench.events.subscribe(hear)


@pytest.mark.parametrize("deadline_s", [0.0, 30.0], ids=["broken off", "in time"])
@pytest.mark.parametrize(
    ("bound", "weight_update"), [(1, "drain"), (2, "drain"), (2, "continue"), (3, "continue")]
)
@pytest.mark.parametrize(("phase", "step"), [("rollout", 4), ("train", 3), ("score", 2)])
def test_a_stopped_run_repeats_and_skips_no_prompt(
    tmp_path, bound, weight_update, phase, step, deadline_s
):
    settings: dict[str, Any] = {"engine": SLOW_ENGINE, "trainer": SLOW_TRAINER}
    stopped = make(
        tmp_path, bound, weight_update, stop=StopRequest(deadline_s=deadline_s), **settings
    )
    ask_at(stopped, phase, step)
    progress = turn(stopped)
    assert not progress.done and progress.num_unfinished_groups
    kept = stopped.shelf.kept[max(stopped.shelf.kept)]
    again = make(tmp_path, bound, weight_update, **settings)
    assert turn(again, kept=kept).done
    assert trained_groups(stopped) + trained_groups(again) == [
        f"{number}.{i}" for number in range(1, 9) for i in range(4)
    ], "each group is trained on once, in order"
    prompts = {r.group_id: r.prompt.prompt_id for r in [*stopped.seen, *again.seen]}
    order = trained_groups(stopped) + trained_groups(again)
    wanted = dict(zip(order, prompts_in_order(32), strict=True))
    assert prompts == wanted, "every prompt of the source, once"
    ages = [int(age) for row in again.rows("rollouts.staleness") for age in row["tokens"]]
    assert max(ages) <= bound
    begun = {group.group_id: group for group in progress.in_flight}
    for _, request in again.engine.asked[: len(begun)]:
        for partial in request.partials:
            assert len(partial.tokens)


def test_completions_set_aside_go_on_across_versions_within_the_bound(tmp_path):
    """12 tokens by 6: a completion is set aside once at most."""
    settings = {"rollout": {"max_tokens_per_iteration": 6, "max_tokens": 12}}
    bench = make(tmp_path, 2, **settings)
    turn(bench)
    assert bench.rows("rollouts.carried") and not bench.rows("drop.stale")
    spans = {len(set(r.versions[r.sampled].tolist())) for r in bench.seen}
    assert spans == {1, 2}
    ages = [int(age) for row in bench.rows("rollouts.staleness") for age in row["tokens"]]
    assert max(ages) == 2
    groups = trained_groups(bench)
    assert len(groups) == len(set(groups))


def test_groups_past_the_bound_are_dropped_counted_and_replaced(tmp_path):
    """12 tokens by 3: up to three times set aside, and one version is all that is allowed."""
    bench = make(tmp_path, 1, rollout={"max_tokens_per_iteration": 3, "max_tokens": 12})
    turn(bench)
    dropped = sum(row["count"] for row in bench.rows("drop.stale"))
    assert dropped and all(row["tokens"] > 0 for row in bench.rows("drop.stale"))
    ages = [int(age) for row in bench.rows("rollouts.staleness") for age in row["tokens"]]
    assert max(ages, default=0) <= 1
    begun = {request.request_id.rpartition(".")[0] for _, request in bench.engine.asked}
    trained = trained_groups(bench)
    carried = {group.group_id for group in bench.ring.in_flight}
    assert len(trained) == len(set(trained)) and not carried & set(trained)
    assert len(begun) == len(trained) + dropped + len(carried), "trained, dropped or carried"


@pytest.mark.parametrize("bound", [1, 3])
def test_an_error_of_the_collector_ends_the_run_and_leaves_nothing(tmp_path, bound):
    faults = Faults(refuse=lambda request: "as told" if request.request_id == "4.2" else "")
    bench = make(tmp_path, bound, faults=faults, engine=SLOW_ENGINE)
    with pytest.raises(EngineRefused, match="as told"):
        turn(bench)
    assert not bench.engine.live and len(bench.trainer.batches) <= 3


def test_an_error_of_the_learner_ends_the_run_and_leaves_nothing(tmp_path):
    bench = make(tmp_path, 2, engine=SLOW_ENGINE)

    async def fail(batch: Any) -> Any:
        await asyncio.sleep(0.01)
        raise RuntimeError("no memory")

    bench.trainer.step = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        turn(bench)
    assert not bench.engine.live


def test_the_report_of_roles_adds_up(tmp_path):
    bench = make(tmp_path, 1, trainer=SLOW_TRAINER)
    turn(bench)
    rows = bench.rows("step.roles")
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        idle = row["collector_idle_s"] + row["learner_idle_s"]
        assert row["synchronous_s"] == pytest.approx(2 * row["seconds"] - idle, abs=1e-3)
        assert 0 <= row["collector_idle_s"] <= row["seconds"] + 1e-3
    seeds = {request.seed for _, request in bench.engine.asked}
    assert derive_seed(11, "rollout", 5, 0) in seeds, "seeds are those of the synchronous order"


@pytest.mark.parametrize("stop_at", [1, 4])
@pytest.mark.parametrize("weight_update", ["drain", "continue"])
def test_a_killed_run_repeats_and_skips_no_prompt(tmp_path, weight_update, stop_at):
    """A snapshot between two steps, with rollouts under way; the log goes on behind it."""
    settings: dict[str, Any] = {"engine": SLOW_ENGINE, "snapshot_every": 1}
    killed = make(tmp_path, 2, weight_update, **settings)
    turn(killed)
    kept = killed.shelf.kept[stop_at]
    progress = from_snapshot(json.loads(kept[0]), kept[1])
    assert progress.num_unfinished_groups >= 4
    again = make(tmp_path, 2, weight_update, **settings)
    turn(again, kept=kept)
    before = trained_groups(killed)[: 4 * stop_at]
    order = before + trained_groups(again)
    assert order == [f"{number}.{i}" for number in range(1, 9) for i in range(4)]
    prompts = {r.group_id: r.prompt.prompt_id for r in [*killed.seen, *again.seen]}
    assert prompts == dict(zip(order, prompts_in_order(32), strict=True))
    assert [row["step"] for row in again.rows("step.done")] == list(range(1, 9))
    seen = [rollout.rollout_id for rollout in again.seen]
    assert len(seen) == len(set(seen)), "nothing is scored twice"


@pytest.mark.parametrize("weight_update", ["drain", "continue"])
def test_a_stop_does_not_wait_for_rollouts_that_run_ahead(tmp_path, weight_update):
    """One completion of the next step never ends; the step that trains is done and saved."""
    bench = make(
        tmp_path,
        1,
        weight_update,
        stop=StopRequest(deadline_s=25.0),  # the test's own limit is near
        faults=Faults(stalled=frozenset({"4.1"})),
    )
    ask_at(bench, "train", 3)
    progress = turn(bench)
    assert progress.step == 3 == max(bench.shelf.kept)
    assert len(progress.in_flight) == 4 and not progress.collected
    (row,) = bench.rows("step.broken_off")
    assert (row["step"], row["groups"]) == (4, 4)
    again = make(tmp_path, 1, weight_update)
    assert turn(again, kept=bench.shelf.kept[3]).done
    assert trained_groups(again) == [f"{number}.{i}" for number in range(4, 9) for i in range(4)]


@pytest.mark.parametrize("weight_update", ["drain", "continue"])
def test_a_handover_that_fails_ends_the_run_and_leaves_nothing(tmp_path, weight_update):
    bench = make(tmp_path, 2, weight_update, engine=SLOW_ENGINE)

    def hear(row: Any) -> None:
        if (row["kind"], row.get("phase"), row.get("step")) == ("phase.started", "train", 3):
            bench.engine.fail_commit = True

    bench.events.subscribe(hear)
    with pytest.raises(RuntimeError, match="told to fail"):
        turn(bench)
    assert not bench.engine.live
    (row,) = bench.rows("weights.publish_failed")
    assert row["version"] == 3 and bench.engine.calls[-1][1] == "rollback"


@pytest.mark.parametrize(
    ("objective", "warned"),
    [
        (GrpoConfig(correction="none"), True),
        (GrpoConfig(correction="icepop"), False),
        (GrpoConfig(), False),
        (GrpoConfig(correction="none", ratio_base="engine"), False),
    ],
)
def test_staleness_without_a_correction_is_said(tmp_path, objective, warned):
    bench = make(tmp_path, 1, objective=objective, steps=2)
    turn(bench)
    assert len(bench.rows("warn.staleness_uncorrected")) == warned


def test_an_error_that_nobody_waits_for_is_an_event(tmp_path):
    """Collector and learner fail at once: the learner's error is raised, the other one is told."""
    faults = Faults(refuse=lambda request: "as told" if request.request_id == "3.2" else "")
    bench = make(tmp_path, 1, faults=faults)

    async def fail(batch: Any) -> Any:
        while not bench.rows("engine.refused"):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        raise RuntimeError("no memory")

    step = bench.trainer.step
    bench.trainer.step = lambda batch: fail(batch) if batch.step == 2 else step(batch)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        turn(bench)
    (row,) = bench.rows("warn.collector_failed")
    assert "EngineRefused" in row["error"] and "as told" in row["error"]
