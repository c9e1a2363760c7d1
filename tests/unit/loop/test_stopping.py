"""A stop ends the step or breaks it off, saves what there is, and the run that goes on is the one
that never stopped."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any

import pytest

from fakes.config import FakeEngineConfig
from gyre.core.records import Rollout
from gyre.loop.config import EvalConfig
from gyre.loop.resume import from_snapshot
from gyre.loop.stopping import StepUnfinished, StopRequest
from gyre.objectives.config import GrpoConfig
from loop_cases import GROUPS_OF_4, HELD_OUT, Bench, digit_share, digits_script, run, turn

CAPPED = GROUPS_OF_4.model_copy(update={"max_tokens_per_iteration": 3})
SLOW = FakeEngineConfig(start_accuracy=0.3, token_delay_s=0.01)
EVALUATION = EvalConfig(num_problems=len(HELD_OUT), every_steps=2)
ALL = {
    "script": digits_script,
    "table": digit_share,
    "objective": GrpoConfig(),
    "steps": 4,
    "evaluation": EVALUATION,
}


def ask_at(bench: Bench, phase: str, step: int) -> None:
    """Ask for a stop as soon as a phase of a step has begun."""

    def hear(row: Any) -> None:
        if row["kind"] == "phase.started" and (row["phase"], row.get("step")) == (phase, step):
            bench.stop.ask()

    bench.events.subscribe(hear)


def go_on(folder, bench: Bench, **settings: Any) -> Bench:
    """Another attempt, from the newest snapshot."""
    again = Bench(folder, **settings)
    turn(again, kept=bench.shelf.kept[max(bench.shelf.kept)])
    return again


def tell(bench: Bench) -> tuple[Any, ...]:
    evals = [
        {name: row[name] for name in ("step", "when", "accuracy")}
        for row in bench.rows("eval.done")
    ]
    return bench.steps(), bench.sample_rows(), evals


PHASES = [
    ("evaluate", 0),
    ("rollout", 1),
    ("rollout", 3),
    ("score", 2),
    ("train", 2),
    ("train", 4),
    ("handover", 3),
    ("evaluate", 2),
    ("evaluate", 4),
    ("snapshot", 4),
]


@pytest.mark.parametrize(("phase", "step"), PHASES)
@pytest.mark.parametrize("rollout", [GROUPS_OF_4, CAPPED], ids=["whole", "partial"])
def test_a_stop_ends_the_step_and_the_run_goes_on_as_if_never_stopped(
    tmp_path, rollout, phase, step
):
    straight = Bench(tmp_path / "straight", rollout=rollout, **ALL)
    turn(straight)
    stopped = Bench(tmp_path / "stopped", rollout=rollout, **ALL)
    ask_at(stopped, phase, step)
    progress = turn(stopped)
    begun = step if phase != "evaluate" else max(step, 0)
    assert progress.step == begun == max(stopped.shelf.kept), (
        "the step in flight has ended, and no other one began"
    )
    assert progress.done == ((phase, step) in [("evaluate", 4), ("snapshot", 4)])
    assert not stopped.rows("step.broken_off")
    assert tell(go_on(tmp_path / "stopped", stopped, rollout=rollout, **ALL)) == tell(straight)


@pytest.mark.parametrize(
    ("phase", "step"), [("rollout", 1), ("rollout", 3), ("score", 2), ("evaluate", 2)]
)
@pytest.mark.parametrize("rollout", [GROUPS_OF_4, CAPPED], ids=["whole", "partial"])
def test_past_its_deadline_a_stop_keeps_what_the_step_has(tmp_path, rollout, phase, step):
    settings: dict[str, Any] = {"rollout": rollout, "engine": SLOW, **ALL}
    straight = Bench(tmp_path / "straight", rollout=rollout, **ALL)
    turn(straight)
    stopped = Bench(
        tmp_path / "stopped", stop=StopRequest(deadline_s=0.03), scorer_delay_s=0.2, **settings
    )
    ask_at(stopped, phase, step)
    progress = turn(stopped)
    before = step if phase == "evaluate" else step - 1
    assert progress.step == before and not progress.done
    assert len(stopped.rows("step.broken_off")) == (phase != "evaluate")
    assert max((row["step"] for row in stopped.rows("step.done")), default=0) == before, (
        "the last update stands"
    )
    if phase == "rollout":
        begun = [group for group in progress.in_flight if group.partials]
        assert begun and all(
            len(partial.tokens) for group in begun for partial in group.partials.values()
        )
    if phase == "score":
        assert all(len(group.rollouts) + len(group.partials) == 4 for group in progress.in_flight)
    again = Bench(tmp_path / "stopped", rollout=rollout, **ALL)
    turn(again, kept=stopped.shelf.kept[before])
    assert tell(again) == tell(straight)
    if phase == "rollout":  # what was chosen before the stop is not chosen once more
        asked = [request for where, request in again.engine.asked if where == "rollout"]
        assert sum(len(partial.tokens) for request in asked for partial in request.partials) > 0


def test_rollouts_that_were_scored_are_not_scored_again(tmp_path):
    settings: dict[str, Any] = {"rollout": GROUPS_OF_4, **ALL, "evaluation": None}
    stop, count = StopRequest(deadline_s=0.0), itertools.count(1)

    def judge(rollout: Rollout) -> float:
        if next(count) == 22:  # in the middle of step 2
            stop.ask()
        return digit_share(rollout)

    stopped = Bench(tmp_path, stop=stop, engine=SLOW, **{**settings, "table": judge})
    progress = turn(stopped)
    scored = {group.rollouts[i].rollout_id for group in progress.in_flight for i in group.scores}
    assert progress.step == 1 and scored and len(scored) < 16
    again = go_on(tmp_path, stopped, **settings)
    assert not scored & {rollout.rollout_id for rollout in again.seen}


def test_an_update_that_would_take_too_long_is_not_begun(tmp_path):
    bench = Bench(tmp_path, stop=StopRequest(deadline_s=5.0), **ALL)
    bench.ring.train_s = 60.0  # as measured: the last one took a minute

    async def slow_start() -> Any:
        await bench.engine.start(dummy=False)
        bench.stop.ask()
        progress = from_snapshot(*kept_nothing())
        async with bench.ring.collecting(progress):
            return await bench.ring.run_step(progress)

    with pytest.raises(StepUnfinished):
        try:
            run(slow_start())
        finally:
            bench.close()
    assert not bench.trainer.batches and all(
        len(group.scores) == 4 for group in bench.ring.in_flight
    )


def kept_nothing() -> tuple[Any, Any]:
    from gyre.core.codec import encode
    from gyre.loop.resume import IN_FLIGHT

    return {"stage": "main", "step": 0, "done": False, "source": None, "evals": {}}, {
        IN_FLIGHT: encode([])
    }


def test_work_that_ends_in_time_gives_its_result_and_its_error():
    async def give(value: int, error: Exception | None = None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return value

    async def go() -> None:
        stop = StopRequest(deadline_s=30.0)
        assert await stop.within(give(1)) == 1
        stop.ask()
        assert await stop.within(give(2)) == 2
        with pytest.raises(ValueError, match="three"):
            await stop.within(give(3, ValueError("three")))
        late = StopRequest(deadline_s=0.0)
        late.ask()
        with pytest.raises(StepUnfinished):
            await late.within(asyncio.sleep(30.0))

    run(go())


def test_what_may_be_broken_off_at_once_has_no_deadline():
    async def go() -> None:
        stop = StopRequest(deadline_s=30.0)
        asyncio.get_running_loop().call_later(0.01, stop.ask)
        with pytest.raises(StepUnfinished):
            await stop.within(asyncio.sleep(20.0), at_once=True)

    run(go())


def test_a_cancellation_from_outside_reaches_the_work():
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(30.0)
        finally:
            ended.append("work")

    async def go() -> None:
        task = asyncio.ensure_future(StopRequest(deadline_s=30.0).within(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    run(go())
    assert ended == ["work"]
