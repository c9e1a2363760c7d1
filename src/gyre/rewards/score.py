"""Scorer: rollouts to numbers with reasons, by rules. In: rollouts, the parts of the config. Out:
one Score each.

A score is the weighted sum of its parts. Each part of each rollout is a check in a worker process
(rewards.pool.pool) while the loop goes on; a check that hangs, dies or raises costs that one part
of that one rollout: it is labelled and counts as the least that the part can give, so that it is
never worth more than a wrong answer. For a reward function, whose least value nobody knows, that is
`failed`, or the least that it gave in the same call (core.scores). Parts of kind "model" are not
scored here: the trainer evaluates the reward model, and the loop adds its ScorePart. Events:
reward.timeout, reward.error, reward.invalid (one per labelled part, with the rollout and the
reason); warn.tests_decided_inside (per call and part: `count` tests of code that the tested
programs could forge); sandbox.call_refused (one per part whose programs made such system calls, by
name and with counts); those of rewards.pool.pool and of rewards.sandbox.executors.choose_mode.
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
from gyre.rewards.messages import Item, Setup, Verdict, encode_item
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
        verdicts: dict[tuple[int, int], Verdict] = {}
        tickets: list[Ticket] = []
        for index, rollout in enumerate(rollouts):
            try:
                item = encode_item(self._item(rollout))
            except (TypeError, ValueError, RecursionError) as error:
                bad = Verdict(
                    index=0, reason=f"the task is no plain data: {error}", outcome="error"
                )
                verdicts.update({(index, part): bad for part in range(len(self._parts))})
                continue
            tickets += [
                Ticket(rollout=index, part=part, item=item) for part in range(len(self._parts))
            ]
        if tickets and self.pool is not None:
            await self.pool.run(tickets, deadline_s=deadline_s)
        for ticket in tickets:
            assert ticket.verdict is not None
            verdicts[ticket.rollout, ticket.part] = ticket.verdict
        self._tell_decided_inside(verdicts)
        scores = [
            self._sum(
                rollout, [verdicts[index, part] for part in range(len(self._parts))], called_s
            )
            for index, rollout in enumerate(rollouts)
        ]
        return lower_failed_parts(scores)

    def _tell_decided_inside(self, verdicts: Mapping[tuple[int, int], Verdict]) -> None:
        """One event per part and call: its tests that a program could forge."""
        for place, part in enumerate(self._parts):
            counts = [
                each.decided_inside
                for (_, at), each in verdicts.items()
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
        text = _without_end(rollout.text, self._end_markers)
        return Item(
            text=text.encode("utf-8", "replace").decode(),
            task=rollout.prompt.task,
            prompt=rollout.prompt.text.encode("utf-8", "replace").decode(),
            finish=rollout.finish,
            num_tokens=int(rollout.sampled.sum()),
        )

    def _sum(self, rollout: Rollout, verdicts: Sequence[Verdict], called_s: float) -> Score:
        parts = tuple(
            ScorePart(
                name=part.name,
                value=verdict.value if verdict.outcome == "ok" else part.failed_value,
                weight=part.weight,
                reason=verdict.reason,
                seconds=max(0.0, verdict.ended_s - verdict.started_s),
                outcome=cast(Literal["ok", "timeout", "error", "invalid"], verdict.outcome),
            )
            for part, verdict in zip(self._parts, verdicts, strict=True)
        )
        for part in parts:
            if part.outcome != "ok":
                self._emit(
                    f"reward.{part.outcome}",
                    part=part.name,
                    rollout=rollout.rollout_id,
                    reason=part.reason,
                )
        for part, verdict in zip(parts, verdicts, strict=True):
            if verdict.refused_calls:
                calls = verdict.refused_calls
                self._emit(
                    "sandbox.call_refused", part=part.name, rollout=rollout.rollout_id, calls=calls
                )
        begun = [verdict.started_s for verdict in verdicts if verdict.ended_s]
        ended = [verdict.ended_s for verdict in verdicts if verdict.ended_s]
        whole = len(ended) == len(verdicts) and ended
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


def _without_end(text: str, markers: Sequence[str]) -> str:
    """The completion without the end-of-text tokens that a tokenizer may leave in its text."""
    end = len(text.rstrip())
    while marker := next(
        (marker for marker in markers if marker and text.endswith(marker, 0, end)), None
    ):
        end -= len(marker)
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]
