"""Collect: prompts to rollouts, with rewards already running on what is done. In: prompts and what was left in flight.
Out: whole groups, and what stays in flight. Caller: loop.controller.

    prompts ──▶ submit (all at once, in order) ──▶ one listener per request ──▶ done queue ──▶ score_task
                                                            │
                                                            └──▶ Open: tokens so far, continued next step
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre.core.contracts import RolloutEngine
from gyre.core.errors import DeadlineError, EngineRefused
from gyre.core.records import Group, Partial, Prompt, Request, Rollout, Sampling, Score, Support, TokenChunk
from gyre.core.seeds import derive_seed
from gyre.loop.ports import TextPort
from gyre.loop.scoring import Scoring


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A group on its way: which completions are done, scored, begun. The loop fills it; a snapshot keeps it."""

    group_id: str
    prompt: Prompt
    seed: int
    rollouts: dict[int, Rollout]  # done, by sample number
    scores: dict[int, Score]  # of those
    partials: dict[int, Partial]  # begun, by sample number


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request and which samples of its group it answers."""

    group: InFlight
    request: Request
    samples: tuple[int, ...]  # sample number of each of the request's completions


def open_groups(prompts: Sequence[Prompt], *, run_seed: int, step: int) -> list[InFlight]:
    """Begin a group for each prompt. A pure function of seed, step and place."""
    return [
        InFlight(
            group_id=f"{step}.{place}",
            prompt=prompt,
            seed=derive_seed(run_seed, "rollout", step, place),
            rollouts={},
            scores={},
            partials={},
        )
        for place, prompt in enumerate(prompts)
    ]


def requests_for(group: InFlight, sampling: Sampling, *, cap: int) -> list[Asked]:
    """What to ask for: a fresh group in one request, the unfinished completions of an old one each in its own.

    `cap` bounds the tokens that a completion may take in this step (0 does not).
    """
    if not group.partials:
        tokens = min(sampling.max_tokens, cap) if cap else sampling.max_tokens
        request = Request(
            request_id=group.group_id,
            tokens=group.prompt.tokens,
            sampling=replace(sampling, max_tokens=tokens),
            seed=group.seed,
            chunk_tokens=0,
        )
        return [Asked(group=group, request=request, samples=tuple(range(sampling.n)))]
    asked = []
    for sample, partial in sorted(group.partials.items()):
        tokens = min(sampling.max_tokens, len(partial.tokens) + cap) if cap else sampling.max_tokens
        request = Request(
            request_id=f"{group.group_id}.{sample}",
            tokens=group.prompt.tokens,
            sampling=replace(sampling, max_tokens=tokens, n=1),
            seed=derive_seed(group.seed, sample),
            chunk_tokens=0,
            partials=(replace(partial, index=0),),
        )
        asked.append(Asked(group=group, request=request, samples=(sample,)))
    return asked


class Collector:
    """Turns one step's prompts into scored groups."""

    def __init__(
        self,
        engine: RolloutEngine,
        scoring: Scoring,
        text: TextPort,
        *,
        sampling: Sampling,
        cap: int,
        deadline_s: float,
    ) -> None:
        """`cap`: tokens that a completion may take in this step, 0 for all it wants."""
        self._engine, self._scoring, self._text = engine, scoring, text
        self._sampling, self._cap, self._deadline_s = sampling, cap, deadline_s

    async def run(self, groups: Sequence[InFlight]) -> list[InFlight]:
        """Wait until each completion has ended or used up its share of this step; DeadlineError names the rest."""
        asked = [one for group in groups for one in requests_for(group, self._sampling, cap=self._cap)]
        streams = [(one, self._engine.submit(one.request)) for one in asked]  # no await between: they enter together
        tasks = [asyncio.create_task(self._listen(one, stream)) for one, stream in streams]
        done, waiting = await asyncio.wait(tasks, timeout=self._deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in done if task.exception() is not None]
        if waiting or failed:
            await _cancel(waiting)
            if failed:
                raise failed[0].exception()  # type: ignore[misc]
            raise DeadlineError(
                f"{len(waiting)} of {len(tasks)} requests had not ended {self._deadline_s:.0f} s after the step "
                "began; owner: loop.collect",
                hint="raise rollout.deadline_s, or lower rollout.max_tokens",
            )
        return list(groups)

    async def _listen(self, asked: Asked, stream: AsyncIterator[TokenChunk]) -> None:
        chunks: dict[int, list[TokenChunk]] = {}
        async for chunk in stream:
            chunks.setdefault(chunk.index, []).append(chunk)
            if chunk.finish is not None:
                self._finish(asked, chunk.index, chunks.pop(chunk.index))

    def _finish(self, asked: Asked, index: int, chunks: list[TokenChunk]) -> None:
        last, group, sample = chunks[-1], asked.group, asked.samples[index]
        if last.finish == "refused":
            raise EngineRefused(
                f"the engine refused {asked.request.request_id}: {last.reason}",
                hint="lower rollout.max_tokens or data.max_prompt_tokens, or give the engine more pages",
            )
        partial = join_chunks(chunks)
        before = group.partials.pop(sample, None)
        if before is not None:
            partial = join_partials(before, partial)
        if last.finish == "length" and len(partial.tokens) < self._sampling.max_tokens:
            group.partials[sample] = replace(partial, index=sample)
            return
        rollout = make_rollout(group, sample, partial, last, self._sampling, self._text)
        group.rollouts[sample] = rollout
        self._scoring.offer(rollout)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def join_chunks(chunks: Sequence[TokenChunk]) -> Partial:
    """All tokens of one completion as they came."""
    return Partial(
        index=chunks[0].index,
        tokens=np.concatenate([c.tokens for c in chunks]).astype(np.int32),
        logprobs=np.concatenate([c.logprobs for c in chunks]).astype(np.float32),
        raw_logprobs=np.concatenate([c.raw_logprobs for c in chunks]).astype(np.float32),
        versions=np.concatenate([c.versions for c in chunks]).astype(np.int32),
        support=join_supports([c.support for c in chunks if c.support is not None]),
    )


def join_partials(first: Partial, second: Partial) -> Partial:
    """A beginning and what came after it."""
    supports = [s for s in (first.support, second.support) if s is not None]
    return Partial(
        index=first.index,
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        raw_logprobs=np.concatenate([first.raw_logprobs, second.raw_logprobs]),
        versions=np.concatenate([first.versions, second.versions]),
        support=join_supports(supports),
    )


def join_supports(supports: Sequence[Support]) -> Support | None:
    if not supports:
        return None
    counts = np.concatenate([np.diff(s.offsets) for s in supports])
    return Support(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ids=np.concatenate([s.ids for s in supports]).astype(np.int32),
    )


def make_rollout(
    group: InFlight, sample: int, partial: Partial, last: TokenChunk, sampling: Sampling, text: TextPort
) -> Rollout:
    """Lay prompt and completion out as one sequence, masks as data."""
    num_prompt, num_chosen = len(group.prompt.tokens), len(partial.tokens)
    assert last.finish is not None
    pad = np.zeros(num_prompt, dtype=np.float32)
    return Rollout(
        rollout_id=f"{group.group_id}.{sample}",
        group_id=group.group_id,
        prompt=group.prompt,
        tokens=np.concatenate([group.prompt.tokens, partial.tokens]).astype(np.int32),
        sampled=np.arange(num_prompt + num_chosen) >= num_prompt,
        logprobs=np.concatenate([pad, partial.logprobs]),
        raw_logprobs=np.concatenate([pad, partial.raw_logprobs]),
        versions=np.concatenate([np.full(num_prompt, -1, dtype=np.int32), partial.versions]),
        sampling=sampling,
        finish=last.finish,
        text=text.decode(partial.tokens, skip_special=True),
        support=partial.support,
    )


def split_whole(groups: Sequence[InFlight], size: int) -> tuple[list[InFlight], list[InFlight]]:
    """(groups with all their completions, groups still in flight), in order."""
    whole = [group for group in groups if len(group.rollouts) == size]
    return whole, [group for group in groups if len(group.rollouts) < size]


def as_group(group: InFlight) -> Group:
    order = sorted(group.rollouts)
    return Group(
        group_id=group.group_id,
        rollouts=tuple(group.rollouts[i] for i in order),
        scores=tuple(group.scores[i] for i in order),
    )
