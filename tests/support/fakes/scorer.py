"""Table scorer: scores by a function of the rollout. In: rollouts. Out: Scores. Implements Scorer.
Callers: wire (kind = "fake"), tests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

from fakes.config import FakeScorerConfig
from gyre.core.events import Emit
from gyre.core.records import Rollout, Score, ScorePart

Table = Callable[[Rollout], float] | Mapping[str, float]


def answer_table(rollout: Rollout) -> float:
    """1 for a completion whose text is the task's answer, else 0."""
    return float(rollout.text.strip() == rollout.prompt.task.get("answer"))


class TableScorer:
    """Scores from a function, or from a dictionary of completion texts (0 for a text that it
    lacks)."""

    def __init__(
        self,
        table: Table = answer_table,
        *,
        emit: Emit,
        config: FakeScorerConfig | None = None,
        delays_s: Mapping[str, float] | None = None,
    ) -> None:
        """`delays_s`: rollout id -> how long this one takes, instead of the config's delay."""
        self._table, self._emit = table, emit
        self._config = config or FakeScorerConfig()
        self._delays_s = dict(delays_s or {})
        self._closed = False

    async def score(self, rollouts: Sequence[Rollout], *, deadline_s: float) -> Sequence[Score]:
        assert not self._closed, "score after close"
        started = time.monotonic()
        return await asyncio.gather(
            *(self._score_one(rollout, started, deadline_s) for rollout in rollouts)
        )

    async def close(self) -> None:
        self._closed = True

    async def _score_one(self, rollout: Rollout, started_s: float, deadline_s: float) -> Score:
        delay_s = self._delays_s.get(rollout.rollout_id, self._config.delay_s)
        await asyncio.sleep(min(delay_s, deadline_s))
        part = (
            self._judge(rollout)
            if delay_s < deadline_s
            else _part(0.0, f"past {deadline_s:g} s", "timeout")
        )
        if part.outcome != "ok":
            self._emit(
                f"reward.{part.outcome}",
                part=part.name,
                rollout=rollout.rollout_id,
                reason=part.reason,
            )
        return Score(
            rollout_id=rollout.rollout_id,
            value=part.value * part.weight,
            parts=(part,),
            started_s=started_s,
            ended_s=time.monotonic(),
        )

    def _judge(self, rollout: Rollout) -> ScorePart:
        if isinstance(self._table, Mapping):
            known = rollout.text in self._table
            return _part(
                self._table.get(rollout.text, 0.0), "in the table" if known else "not in the table"
            )
        try:
            value = float(self._table(rollout))
        except Exception as error:  # noqa: BLE001 - a scorer never raises for what a rollout contains; score() emits it
            return _part(0.0, f"{type(error).__name__}: {error}", "error")
        if not math.isfinite(value):
            return _part(0.0, f"the table gave {value}", "invalid")
        return _part(value, f"the table gave {value:g}")


def _part(value: float, reason: str, outcome: str = "ok") -> ScorePart:
    return ScorePart(name="table", value=value, weight=1.0, reason=reason, outcome=outcome)  # type: ignore[arg-type]
