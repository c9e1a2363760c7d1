"""Scorer: rollouts to numbers with reasons, by rules. In: rollouts, the parts of the config. Out:
one Score each.

A score is the weighted sum of its parts. Each part of each rollout is a check in a worker process
(rewards.pool.pool); the event loop stays free. A check that hangs, dies or raises costs
that one part of that one rollout. It is labeled and counts as the least that the part can give, so
it is never worth more than a wrong answer. For a reward function, whose least value is not known,
that is `failed`, or the least that it gave in the same call (core.scores). Parts of kind "model"
are not scored here: the trainer evaluates the reward model, and the loop adds its ScorePart.
Events: reward.timeout, reward.error and reward.invalid, one per labeled part, with the rollout and
the reason. warn.tests_decided_inside, per call and part: `count` tests of code that the tested
programs could forge. sandbox.call_refused, one per part whose programs made such system calls, by
name and with counts. Those of rewards.pool.pool and of rewards.sandbox.executors.choose_mode come
as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from gyre.core.events import Emit
from gyre.core.records import Rollout, Score, ScorePart
from gyre.core.scores import lower_failed_parts
from gyre.rewards.config import RewardsConfig
from gyre.rewards.messages import CheckResult, Item, Setup, encode_item
from gyre.rewards.pool.pool import Pool, Ticket
from gyre.rewards.sandbox.executors import choose_mode

_MOST_WORKERS = 16  # chosen by itself; a config may say more


class RuleScorer:
    """Implements core.contracts.Scorer. `clock` is CLOCK_MONOTONIC in seconds, as workers have it.

    Starts its processes when made, so that their imports overlap with what else starts. ConfigError
    when the config asks for isolation that this machine refuses. `log` takes what rewards print;
    None is stderr.
    """

    def __init__(
        self,
        config: RewardsConfig,
        *,
        emit: Emit,
        clock: Callable[[], float],
        log: Path | None = None,
    ) -> None:
        self._parts = [part for part in config.parts if part.kind != "model"]
        self._end_markers = config.end_markers
        self._emit = emit
        self._clock = clock
        runs_code = any(part.kind == "code" for part in self._parts)
        self.isolation = choose_mode(config.sandbox, emit=emit) if runs_code else ""
        setup = Setup(
            parts=[part.for_check() for part in self._parts],
            sandbox=self.isolation,
            memory_bytes=config.worker_memory_mib << 20,
        )
        workers = config.workers or min(os.cpu_count() or 1, _MOST_WORKERS)
        limits_s = [part.total_limit_s for part in self._parts]
        self.pool = (
            Pool(setup, limits_s, num_workers=workers, emit=emit, log=log) if self._parts else None
        )

    async def score(self, rollouts: Sequence[Rollout], *, deadline_s: float) -> Sequence[Score]:
        called_s = self._clock()
        results: dict[tuple[int, int], CheckResult] = {}
        tickets: list[Ticket] = []
        for index, rollout in enumerate(rollouts):
            try:
                item = encode_item(self._item(rollout))
            except (TypeError, ValueError, RecursionError) as error:
                bad = CheckResult(
                    index=0, reason=f"the task is not plain data: {error}", outcome="error"
                )
                results.update({(index, part): bad for part in range(len(self._parts))})
                continue
            tickets += [
                Ticket(rollout=index, part=part, item=item) for part in range(len(self._parts))
            ]
        if tickets and self.pool is not None:
            await self.pool.run(tickets, deadline_s=deadline_s)
        for ticket in tickets:
            assert ticket.result is not None
            results[ticket.rollout, ticket.part] = ticket.result
        self._emit_decided_inside(results)
        scores = [
            self._sum(rollout, [results[index, part] for part in range(len(self._parts))], called_s)
            for index, rollout in enumerate(rollouts)
        ]
        return lower_failed_parts(scores)

    def _emit_decided_inside(self, results: Mapping[tuple[int, int], CheckResult]) -> None:
        """Emit one event per part and call with its tests that a program could forge."""
        for place, part in enumerate(self._parts):
            counts = [
                each.decided_inside
                for (_, at), each in results.items()
                if at == place and each.decided_inside
            ]
            if counts:
                self._emit(
                    "warn.tests_decided_inside",
                    part=part.name,
                    count=sum(counts),
                    rollouts=len(counts),
                )

    def _item(self, rollout: Rollout) -> Item:
        text = without_end(rollout.text, self._end_markers)
        return Item(
            text=text.encode("utf-8", "replace").decode(),
            task=rollout.prompt.task,
            prompt=rollout.prompt.text.encode("utf-8", "replace").decode(),
            finish=rollout.finish,
            num_tokens=int(rollout.sampled.sum()),
        )

    def _sum(self, rollout: Rollout, results: Sequence[CheckResult], called_s: float) -> Score:
        parts = tuple(
            ScorePart(
                name=part.name,
                value=result.value if result.outcome == "ok" else part.failed_value,
                weight=part.weight,
                reason=result.reason,
                seconds=max(0.0, result.ended_s - result.started_s),
                outcome=cast(Literal["ok", "timeout", "error", "invalid"], result.outcome),
            )
            for part, result in zip(self._parts, results, strict=True)
        )
        for part in parts:
            if part.outcome != "ok":
                self._emit(
                    f"reward.{part.outcome}",
                    part=part.name,
                    rollout=rollout.rollout_id,
                    reason=part.reason,
                )
        for part, result in zip(parts, results, strict=True):
            if result.refused_calls:
                calls = result.refused_calls
                self._emit(
                    "sandbox.call_refused", part=part.name, rollout=rollout.rollout_id, calls=calls
                )
        begun = [result.started_s for result in results if result.ended_s]
        ended = [result.ended_s for result in results if result.ended_s]
        whole = len(ended) == len(results) and ended
        return Score(
            rollout_id=rollout.rollout_id,
            value=float(sum(part.weight * part.value for part in parts)),
            parts=parts,
            started_s=min(begun) if begun else called_s,
            ended_s=max(ended) if whole else self._clock(),
        )

    async def close(self) -> None:
        """End every process. Idempotent."""
        if self.pool is not None:
            await self.pool.close()


def without_end(text: str, markers: Sequence[str]) -> str:
    """Return the completion without the end-of-text tokens that a tokenizer may leave in its
    text."""
    end = len(text.rstrip())
    while marker := next(
        (marker for marker in markers if marker and text.endswith(marker, 0, end)), None
    ):
        end -= len(marker)
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]
