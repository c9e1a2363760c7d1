"""Scoring: rule rewards run in their own processes while rollouts are still being generated. In:
finished rollouts, one by one. Out: their scores, and how much of the reward time each window hid.

    offer(rollout) ──▶ waiting, until the event loop turns ──▶ one request to the scorer
                                                               ──▶ scores by rollout id
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from gyre.core.contracts import Scorer
from gyre.core.errors import DeadlineError
from gyre.core.records import Rollout, Score
from gyre.observability.overlap import Interval, overlap_account

# rollouts per question to the scorer: enough to be cheap, few enough that all its workers have some
MAX_BATCH = 128
# the scorer itself answers at its deadline, with timeouts; the run ends only if not even that comes
TIMEOUT_FACTOR = 1.25


class Scoring:
    """The rewards of one loop step. Leaving the block cancels every unanswered request."""

    def __init__(self, scorer: Scorer, *, deadline_s: float) -> None:
        self._scorer = scorer
        self._deadline_s = deadline_s
        self._waiting: list[Rollout] = []  # bounded by the rollouts of a step
        self._asked: list[asyncio.Task[None]] = []
        self._scores: dict[str, Score] = {}
        self._wake: asyncio.Handle | None = None

    async def __aenter__(self) -> Scoring:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the unfinished requests to the scorer and wait for their tasks."""
        self._stop_waking()
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def offer(self, rollout: Rollout) -> None:
        """Enqueue a finished rollout. Rollouts of the same event-loop turn are scored in one
        request."""
        self._waiting.append(rollout)
        if self._wake is None:
            self._wake = asyncio.get_running_loop().call_soon(self._ask)

    async def finish(self) -> dict[str, Score]:
        """Wait for all scores; the deadline counts from now. Raises DeadlineError."""
        self._ask()
        if self._asked:
            _, late = await asyncio.wait(self._asked, timeout=self._deadline_s * TIMEOUT_FACTOR)
            if late:
                raise DeadlineError(
                    f"{len(late)} of {len(self._asked)} questions to the rewards had no answer "
                    f"{self._deadline_s * TIMEOUT_FACTOR:g} s after the last rollout; owner: "
                    "loop.scoring",
                    hint="raise rollout.reward_deadline_s, or lower the limits of the slow reward",
                )
            for task in self._asked:
                task.result()
        return self._scores

    def so_far(self) -> dict[str, Score]:
        """Return the scores received so far, for an interrupted step."""
        return dict(self._scores)

    def account(self, *, rollout: Sequence[Interval], reference: Interval) -> dict[str, float]:
        """Return the fields of a `reward.window` event, in seconds."""
        rules = [(score.started_s, score.ended_s) for score in self._scores.values()]
        return overlap_account(rules, rollout=rollout, reference=[reference])

    def _stop_waking(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _ask(self) -> None:
        self._stop_waking()
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            self._asked.append(asyncio.create_task(self._score(batch)))

    async def _score(self, batch: list[Rollout]) -> None:
        scores = await self._scorer.score(batch, deadline_s=self._deadline_s)
        assert len(scores) == len(batch), f"{len(scores)} scores for {len(batch)} rollouts"
        for rollout, score in zip(batch, scores, strict=True):
            assert score.rollout_id == rollout.rollout_id, (score.rollout_id, rollout.rollout_id)
            self._scores[rollout.rollout_id] = score
