"""What goes wrong ends the run with the right error, and leaves no task, no request and no lost
scorer behind. `loop_cases.run` fails each test here that leaves a task pending."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from fakes.config import FakeEngineConfig, FakeTrainerConfig
from fakes.engine import Faults
from fakes.scorer import TableScorer
from gyre.core.errors import DeadlineError, EngineRefused, MemoryBudgetError, RankError
from gyre.core.records import Score
from gyre.loop.config import EvalConfig
from gyre.loop.resume import StageProgress
from gyre.loop.scoring import Scoring
from loop_cases import GROUPS_OF_4, HELD_OUT, Bench, digits_script, interrupt_when, run, turn

HURRIED = GROUPS_OF_4.model_copy(update={"deadline_s": 0.2, "reward_deadline_s": 0.2})
SLOW = FakeEngineConfig(start_accuracy=0.3, token_delay_s=0.02)


class NeverScorer:
    """Ignores its deadline."""

    def __init__(self) -> None:
        self.asked = self.given_up = 0

    async def score(self, rollouts, *, deadline_s: float) -> list[Score]:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up += 1
        return []

    async def close(self) -> None: ...


def test_a_refusal_ends_the_run_with_the_engine_s_reason(tmp_path):
    refuse = Faults(refuse=lambda request: "not this one" if request.request_id == "2.3" else "")
    bench = Bench(tmp_path, faults=refuse, steps=3)
    with pytest.raises(EngineRefused, match=r"refused 2\.3: not this one") as caught:
        turn(bench)
    assert caught.value.hint
    assert [row["step"] for row in bench.rows("step.done")] == [1]
    assert len(bench.trainer.batches) == 1, "nothing of the refused step was trained on"


def test_an_engine_that_breaks_ends_the_run_and_its_stumps_are_not_trained_on(tmp_path):
    bench = Bench(tmp_path, faults=Faults(crash_after_tokens=20), steps=3)
    with pytest.raises(EngineRefused, match=r"ended 1\.\d with 'abort'.*told to fail"):
        turn(bench)
    assert not bench.trainer.batches


def test_an_engine_that_is_late_ends_the_run_by_its_deadline_and_is_stopped(tmp_path):
    bench = Bench(
        tmp_path, rollout=HURRIED, faults=Faults(stalled=frozenset({"1.1", "1.2"})), steps=1
    )

    async def go() -> None:
        with pytest.raises(
            DeadlineError, match=r"2 of 4 requests .* \(1\.1, 1\.2\); owner: loop\.collect"
        ):
            await bench.go()
        stats = await bench.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    run(go())
    assert not bench.trainer.batches


def test_an_engine_that_cannot_be_stopped_is_said_and_the_first_error_counts(tmp_path):
    bench = Bench(tmp_path, rollout=HURRIED, faults=Faults(stalled=frozenset({"1.0"})), steps=1)
    stop = bench.engine.interrupt

    async def late(*, deadline_s: float) -> None:
        raise DeadlineError("the engine is busy")

    async def go() -> None:
        bench.engine.interrupt = late  # type: ignore[method-assign]
        with pytest.raises(DeadlineError, match=r"1\.0"):
            await bench.go()
        assert not [task for task in asyncio.all_tasks() if "_listen" in repr(task.get_coro())]
        await stop(deadline_s=1.0)

    run(go())
    assert [row["requests"] for row in bench.rows("warn.engine_not_stopped")] == [1]


def test_a_scorer_past_its_deadline_costs_labeled_scores(tmp_path):
    delays = {f"1.0.{sample}": 5.0 for sample in range(4)}
    bench = Bench(tmp_path, rollout=HURRIED, delays_s=delays, steps=1)
    turn(bench)
    assert {row["what"]: row["count"] for row in bench.rows("warn.reward_failed")} == {
        "table timeout": 4
    }


def test_a_scorer_that_ignores_its_deadline_ends_the_run(tmp_path):
    scorer = NeverScorer()
    bench = Bench(tmp_path, rollout=HURRIED, scorer=scorer, steps=1)
    with pytest.raises(DeadlineError, match=r"questions to the rewards .*owner: loop\.scoring"):
        turn(bench)
    assert scorer.asked == scorer.given_up > 0
    assert not bench.trainer.batches


def test_a_scorer_that_breaks_ends_the_run_with_its_own_error(tmp_path):
    class Broken(NeverScorer):
        async def score(self, rollouts, *, deadline_s: float) -> list[Score]:
            raise RuntimeError("no workers")

    with pytest.raises(RuntimeError, match="no workers"):
        turn(Bench(tmp_path, scorer=Broken(), steps=1))


def test_ctrl_c_while_rollouts_are_in_flight(tmp_path):
    bench = Bench(tmp_path, engine=SLOW, script=digits_script, scorer_delay_s=0.5, steps=1)

    async def go() -> None:
        ring = asyncio.create_task(bench.go())
        await interrupt_when(
            ring, lambda: bench.gate.phase == "rollout" and bench.engine.is_reciting()
        )
        assert ring.cancelled()
        stats = await bench.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        await check_alive(bench)

    run(go())


@pytest.mark.parametrize("phase", ["rollout", "score", "train", "handover", "evaluate"])
def test_ctrl_c_in_any_phase(tmp_path, phase):
    bench = Bench(
        tmp_path,
        engine=SLOW,
        scorer_delay_s=0.05,
        trainer=FakeTrainerConfig(step_delay_s=0.05),
        evaluation=EvalConfig(num_problems=len(HELD_OUT)),
        steps=2,
    )

    async def go() -> None:
        ring = asyncio.create_task(bench.go())
        await interrupt_when(ring, lambda: (phase, 2) in bench.gate.seen)
        assert ring.cancelled()
        await check_alive(bench)

    run(go())


def test_ctrl_c_while_rewards_run_takes_the_questions_back(tmp_path):
    scorer = NeverScorer()
    bench = Bench(tmp_path, scorer=scorer, steps=1)

    async def go() -> None:
        ring = asyncio.create_task(bench.go())
        await interrupt_when(ring, lambda: bench.gate.phase == "score" and scorer.asked > 0)
        assert scorer.given_up == scorer.asked

    run(go())


async def check_alive(bench: Bench) -> None:
    """Engine and scorer, which belong to wire, can still be used and ended."""
    assert (await bench.engine.health()).ok
    assert isinstance(bench.scorer, TableScorer)
    if bench.seen:
        (score,) = await bench.scorer.score(bench.seen[:1], deadline_s=5.0)
        assert score.parts[0].outcome == "ok"
    await bench.scorer.close()
    await bench.engine.terminate()


def test_a_move_that_is_refused_ends_the_run_and_the_questions(tmp_path):
    scorer = NeverScorer()
    bench = Bench(tmp_path, scorer=scorer, steps=1)
    enter = bench.gate.enter

    async def refuse(phase, *, step: int) -> None:
        await enter(phase, step=step)
        if phase == "score":
            raise MemoryBudgetError("reference does not fit")

    bench.gate.enter = refuse  # type: ignore[method-assign]
    with pytest.raises(MemoryBudgetError):
        turn(bench)
    assert scorer.asked == scorer.given_up > 0


@pytest.mark.parametrize("where", ["prepare", "commit"])
def test_a_handover_that_fails_is_rolled_back_and_the_engine_keeps_its_version(tmp_path, where):
    bench = Bench(tmp_path, steps=2)

    async def go() -> None:
        await bench.engine.start(dummy=False)
        done = bench.ring.run_step
        progress = StageProgress(stage="main")
        await bench.ring.publish(0)
        async with bench.ring.collecting(progress):
            progress = await done(progress)
            before = (await bench.engine.stats()).version
            bench.engine.fail_commit = where == "commit"
            bench.engine.faults = Faults(fail_prepare=where == "prepare")
            with pytest.raises(RuntimeError, match="told"):
                await done(progress)
        assert (await bench.engine.stats()).version == before
        assert bench.engine.calls[-1][1] == "rollback"

    run(go())
    (row,) = bench.rows("weights.publish_failed")
    assert row["step"] == 2 and "told" in row["error"]
    assert [row["step"] for row in bench.rows("step.done")] == [1]


def test_a_way_back_that_fails_too_does_not_hide_why_the_handover_failed(tmp_path, monkeypatch):
    bench = Bench(tmp_path, steps=1)

    async def rollback() -> None:
        raise RankError("engine-0 is lost")

    async def go() -> None:
        await bench.engine.start(dummy=False)
        bench.engine.fail_commit = True
        monkeypatch.setattr(bench.engine, "rollback", rollback)
        with pytest.raises(RuntimeError, match="told to fail"):
            await bench.ring.publish(0)

    run(go())
    (row,) = bench.rows("warn.rollback_failed")
    assert "engine-0 is lost" in row["error"]


def test_scoring_asks_those_that_finish_together_in_one_question(tmp_path):
    bench = Bench(tmp_path, steps=1)
    turn(bench)
    rollouts = bench.seen

    class Counting(NeverScorer):
        async def score(self, given, *, deadline_s: float) -> list[Score]:
            self.asked += 1
            return [Score(rollout_id=r.rollout_id, value=1.0, parts=()) for r in given]

    async def go() -> None:
        scorer = Counting()
        async with Scoring(scorer, deadline_s=5.0) as scoring:
            for rollout in rollouts[:5]:
                scoring.offer(rollout)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert scorer.asked == 1
            scoring.offer(rollouts[5])
            scores = await scoring.finish()
        assert scorer.asked == 2
        assert list(scores) == [rollout.rollout_id for rollout in rollouts[:6]]
        with suppress(AssertionError):
            async with Scoring(scorer, deadline_s=5.0) as scoring:
                scoring.offer(rollouts[0])
                raise AssertionError("before it was asked")
        await asyncio.sleep(0.01)
        assert scorer.asked == 2

    run(go())
