"""Collect: prompts to rollouts; rewards start on each finished completion. In: new prompts and
groups in flight. Out: the same groups, each completion finished or carried over.

    groups ──▶ submit, in order ──▶ one listener per request ──▶ rollouts ──▶ scoring.offer
                                              │
                                              └──▶ partials: tokens so far, continued next step
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gyre.core.chunks import as_partial, first_tokens
from gyre.core.contracts import RolloutEngine
from gyre.core.errors import ConfigError, DeadlineError, EngineRefused
from gyre.core.events import Emit
from gyre.core.records import (
    Finish,
    Group,
    Partial,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Score,
    TokenChunk,
)
from gyre.core.seeds import derive_seed
from gyre.loop.ports import TextPort
from gyre.loop.repetition import CHECK_TOKENS, RepetitionFinder, RepetitionRule
from gyre.loop.scoring import Scoring

STOP_S = 10.0  # longest wait for an engine to stop what is wanted no more
MOST_COMPLETIONS = 4096  # of one request; completions of a larger group are requests of their own


@dataclass(slots=True, kw_only=True)
class InFlightGroup:
    """A group in progress: its finished, scored and partial completions. The loop fills it; a
    snapshot keeps it."""

    group_id: str
    prompt: Prompt
    seed: int
    rollouts: dict[int, Rollout]  # done, by sample number
    scores: dict[int, Score]  # of those
    partials: dict[int, Partial]  # opened, by sample number
    # of each when its step began, if that was broken off
    begun_tokens: dict[int, int] = field(default_factory=dict)
    refill: int = 0  # round of the step in flight that began it, if that replaces groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedRequest:
    """One request and the samples of its group that it answers."""

    group: InFlightGroup
    request: Request
    samples: tuple[int, ...]  # sample number of each of the request's completions


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    """What the requests of one step have in common."""

    sampling: Sampling  # `n` completions of each group
    cap_tokens: int = 0  # that a completion may take in this step; 0 for no bound
    repetition: RepetitionRule | None = None  # what ends a completion early; None lets it run
    tenant_salt: str = ""  # requests with the same salt share cached prefixes

    @property
    def chunk_tokens(self) -> int:
        """Return after how many tokens the loop looks at a completion; 0 for its end alone."""
        return 0 if self.repetition is None else CHECK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Upper bounds on the loop's unanswered work over all engines, so that none refuses a
    request."""

    completions: int
    tokens: int  # given ones: of prompts and beginnings


def open_groups(
    prompts: Sequence[Prompt], *, run_seed: int, step: int, first: int = 0, refill: int = 0
) -> list[InFlightGroup]:
    """Create a group for each prompt. A pure function of seed, step and position; `first` is the
    position of the first prompt."""
    return [
        InFlightGroup(
            group_id=f"{step}.{place}",
            prompt=prompt,
            seed=derive_seed(run_seed, "rollout", step, place),
            rollouts={},
            scores={},
            partials={},
            refill=refill,
        )
        for place, prompt in enumerate(prompts, first)
    ]


def requests_for(
    group: InFlightGroup, rules: RequestRules, *, most: int = MOST_COMPLETIONS
) -> list[SubmittedRequest]:
    """Build the requests for the unfinished completions of a group.

    Without a cap, a group is one request, whose completions share the prompt's prefill. The partial
    completions of an interrupted step are included, so that all draws equal those of the first
    request.

    With a cap each completion is its own request from the start, so its draws do not depend on how
    often it is carried over. The same holds for groups with more than `most` completions, and with
    `chunk_tokens`: completions that are looked at as they grow end one by one.
    """
    sampling = rules.sampling
    if not rules.cap_tokens and not rules.chunk_tokens and sampling.n <= most:
        if len(group.rollouts) == sampling.n:
            return []
        done = (_beginning(i, rollout) for i, rollout in group.rollouts.items())
        request = Request(
            request_id=group.group_id,
            tokens=group.prompt.tokens,
            sampling=sampling,
            seed=group.seed,
            chunk_tokens=0,
            tenant_salt=rules.tenant_salt,
            partials=tuple(
                sorted((*done, *group.partials.values()), key=lambda partial: partial.index)
            ),
        )
        return [SubmittedRequest(group=group, request=request, samples=tuple(range(sampling.n)))]
    open_samples = [sample for sample in range(sampling.n) if sample not in group.rollouts]
    return [_ask_one(group, sample, rules) for sample in open_samples]


def count_begun(group: InFlightGroup, size: int) -> dict[int, int]:
    """Count the tokens that each completion had when its step began. An interrupted step has
    already recorded them."""
    lengths = {sample: len(partial.tokens) for sample, partial in group.partials.items()}
    return group.begun_tokens or {sample: lengths.get(sample, 0) for sample in range(size)}


def carry_over(group: InFlightGroup) -> None:
    """Convert a group that its step left unfinished into one of the next step."""
    group.begun_tokens, group.refill = {}, 0


def _beginning(sample: int, rollout: Rollout) -> Partial:
    """Return a finished completion as a request prefix; the engine answers it at once."""
    mask = rollout.sampled
    return Partial(
        index=sample,
        tokens=rollout.tokens[mask],
        logprobs=rollout.logprobs[mask],
        raw_logprobs=rollout.raw_logprobs[mask],
        versions=rollout.versions[mask],
        support=rollout.support,
    )


def _ask_one(group: InFlightGroup, sample: int, rules: RequestRules) -> SubmittedRequest:
    longest = rules.sampling.max_tokens
    begun = group.partials.get(sample)
    taken = group.begun_tokens.get(sample, 0 if begun is None else len(begun.tokens))
    request = Request(
        request_id=f"{group.group_id}.{sample}",
        tokens=group.prompt.tokens,
        sampling=replace(
            rules.sampling, n=1, max_tokens=min(longest, taken + (rules.cap_tokens or longest))
        ),
        seed=derive_seed(group.seed, sample),
        chunk_tokens=rules.chunk_tokens,
        tenant_salt=rules.tenant_salt,
        partials=() if begun is None else (replace(begun, index=0),),
    )
    return SubmittedRequest(group=group, request=request, samples=(sample,))


def cut_to_window(
    asked: Iterable[SubmittedRequest], window: Window | None
) -> Iterator[list[SubmittedRequest]]:
    """Split requests, in order, into parts that fit the window. A request larger than the window is
    a part of its own. Each part waits for the previous one, so batching in an engine does not
    depend on timing. Pure."""
    part: list[SubmittedRequest] = []
    completions = tokens = 0
    for one in asked:
        wanted, given = one.request.sampling.n, num_given_tokens(one.request)
        full = window is not None and (
            completions + wanted > window.completions or tokens + given > window.tokens
        )
        if part and full:
            yield part
            part, completions, tokens = [], 0, 0
        part.append(one)
        completions, tokens = completions + wanted, tokens + given
    if part:
        yield part


def num_given_tokens(request: Request) -> int:
    """Count the prompt and prefix tokens of a request; its completions share the prompt."""
    return len(request.tokens) + sum(len(partial.tokens) for partial in request.partials)


class Collector:
    """Converts one step's groups into rollouts."""

    def __init__(
        self,
        engine: RolloutEngine,
        scoring: Scoring,
        text: TextPort,
        rules: RequestRules,
        *,
        deadline_s: float,
        emit: Emit,
        length_key: str = "rollout.max_tokens",
        window: Window | None = None,
    ) -> None:
        """Bind the engine and the rules of one step.

        `length_key`: the config key of the completion length, for error messages. `window`: the
        engine's capacity; None submits everything together. ConfigError for sampling that the
        trainer cannot follow.
        """
        self._window = window
        self._length_key = length_key
        if rules.sampling.shapes_logits:
            raise ConfigError(
                "rollouts with penalties, logit_bias or min_tokens: the trainer cannot compute "
                "their log-probs again",
                hint="sample rollouts with temperature, top_p, top_k and min_p only",
            )
        self._engine = engine
        self._scoring = scoring
        self._text = text
        self._emit = emit
        self._rules = rules
        self._sampling = rules.sampling
        self._deadline_s = deadline_s
        self._breaking = False  # completions that end as interrupted are kept as they are

    async def run(self, groups: Sequence[InFlightGroup]) -> None:
        """Fill the groups: wait until each completion has ended or used its share of this step.

        No task and no request outlives the call. Raises DeadlineError with the names of the
        unfinished requests. On cancellation, the groups keep the partial completions, and another
        call resumes them.
        """
        for rollout in (
            r for group in groups for i, r in group.rollouts.items() if i not in group.scores
        ):
            self._scoring.offer(rollout)  # of a step that was broken off
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._deadline_s
        for part in cut_to_window(self._ask(groups), self._window):
            await self._run_part(part, max(0.0, end_s - loop.time()))
        for group in groups:
            assert len(group.rollouts) + len(group.partials) == self._sampling.n, (
                f"{group.group_id} lost a completion"
            )

    def _ask(self, groups: Sequence[InFlightGroup]) -> Iterator[SubmittedRequest]:
        most = (
            MOST_COMPLETIONS
            if self._window is None
            else min(MOST_COMPLETIONS, self._window.completions)
        )
        for group in groups:
            yield from requests_for(group, self._rules, most=most)

    async def _run_part(self, asked: Sequence[SubmittedRequest], timeout_s: float) -> None:
        """Wait for the last answer to these requests, until the step's deadline."""
        # no await between: they enter together
        streams = [self._engine.submit(one.request) for one in asked]
        tasks = [
            asyncio.create_task(self._listen(one, s)) for one, s in zip(asked, streams, strict=True)
        ]
        try:
            _, waiting = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in tasks:
                if task.done():
                    task.result()
            if waiting:
                late = [
                    one.request.request_id
                    for one, task in zip(asked, tasks, strict=True)
                    if task in waiting
                ]
                raise DeadlineError(
                    f"{len(late)} of {len(tasks)} requests had not ended {self._deadline_s:g} s "
                    "after the step began "
                    f"({', '.join(late[:5])}{', …' if len(late) > 5 else ''}); owner: loop.collect",
                    hint="raise rollout.deadline_s, or lower rollout.max_tokens or "
                    "rollout.prompts_per_step",
                )
        except asyncio.CancelledError:
            await self._break_off(tasks)
            raise
        finally:
            await self._leave_none(tasks)

    async def _break_off(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Fetch the partial completions from the engine; the listeners store them in the groups.
        Those that do not arrive in time are reported and sampled again from the previous step's
        prefix."""
        self._breaking = True
        running = [task for task in tasks if not task.done()]
        if not running:
            return
        try:
            await self._engine.interrupt(deadline_s=STOP_S)
        except DeadlineError as error:
            self._emit("warn.engine_not_stopped", requests=len(running), error=error.message)
            return
        await asyncio.wait(running, timeout=STOP_S)

    async def _leave_none(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the listeners and the engine's remaining requests after a failure or Ctrl-C."""
        running = [task for task in tasks if not task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if running:
            try:
                await self._engine.interrupt(deadline_s=STOP_S)
            except DeadlineError as error:  # what ended the step is on its way up already
                self._emit("warn.engine_not_stopped", requests=len(running), error=error.message)

    async def _listen(self, asked: SubmittedRequest, stream: AsyncIterator[TokenChunk]) -> None:
        chunks: dict[int, list[TokenChunk]] = {}
        rule = self._rules.repetition
        finder = None if rule is None else RepetitionFinder(rule)
        if finder is not None:
            for partial in asked.request.partials:
                finder.find(partial.tokens.tolist())
        async for chunk in stream:
            chunks.setdefault(chunk.index, []).append(chunk)
            end = None if finder is None else finder.find(chunk.tokens.tolist())
            if end is not None:
                if chunk.finish is None:
                    await self._engine.abort(asked.request.request_id)
                self._end_repetition(asked, chunks.pop(chunk.index), end)
                return
            if chunk.finish is not None:
                self._finish(asked, chunk.index, chunks.pop(chunk.index))

    def _end_repetition(
        self, asked: SubmittedRequest, chunks: list[TokenChunk], num_tokens: int
    ) -> None:
        """End a completion with its first `num_tokens`, whatever the engine has chosen beyond: so
        its end does not depend on when the loop looked."""
        group, (sample,) = asked.group, asked.samples
        before = group.partials.pop(sample, None)
        partial = as_partial(sample, chunks if before is None else [before, *chunks])
        self._keep(group, sample, first_tokens(partial, num_tokens), "repetition")

    def _keep(self, group: InFlightGroup, sample: int, partial: Partial, finish: Finish) -> None:
        rollout = make_rollout(group, sample, partial, finish, self._sampling, self._text)
        group.rollouts[sample] = rollout
        self._scoring.offer(rollout)

    def _finish(self, asked: SubmittedRequest, index: int, chunks: list[TokenChunk]) -> None:
        last, group, sample = chunks[-1], asked.group, asked.samples[index]
        if sample in group.rollouts:  # it went along with its group
            return
        if last.finish == "interrupted" and self._breaking:
            begun = as_partial(
                sample, [*([group.partials[sample]] if sample in group.partials else []), *chunks]
            )
            if len(begun.tokens):
                group.partials[sample] = begun
            return
        if last.finish not in ("stop", "length"):
            raise _no_answer(asked.request.request_id, last, self._length_key)
        before = group.partials.pop(sample, None)
        partial = as_partial(index, chunks if before is None else [before, *chunks])
        allowed = asked.request.sampling.max_tokens
        if last.finish == "length" and len(partial.tokens) == allowed < self._sampling.max_tokens:
            group.partials[sample] = replace(partial, index=sample)
            return
        self._keep(group, sample, partial, last.finish)


def _no_answer(request_id: str, last: TokenChunk, length_key: str) -> EngineRefused:
    """Return the error for a completion that never finished; it is never trained on."""
    if last.finish == "refused":
        return EngineRefused(
            f"the engine refused {request_id}: {last.reason}",
            hint=f"lower {length_key} or data.max_prompt_tokens, or give the engine more pages",
        )
    return EngineRefused(
        f"the engine ended {request_id} with '{last.finish}': {last.reason or 'no reason given'}",
        hint="events.jsonl says what happened before; --resume goes on from the newest snapshot",
    )


def make_rollout(
    group: InFlightGroup,
    sample: int,
    partial: Partial,
    finish: Finish,
    sampling: Sampling,
    text: TextPort,
) -> Rollout:
    """Lay prompt and completion out as one sequence, masks as data."""
    num_prompt, num_chosen = len(group.prompt.tokens), len(partial.tokens)
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
        finish=finish,
        text=text.decode(partial.tokens, skip_special=True),
        support=partial.support,
    )


def split_whole(
    groups: Sequence[InFlightGroup], size: int
) -> tuple[list[InFlightGroup], list[InFlightGroup]]:
    """Return (complete groups, groups still in flight), in order."""
    whole = [group for group in groups if len(group.rollouts) == size]
    return whole, [group for group in groups if len(group.rollouts) < size]


def keep_scores(groups: Sequence[InFlightGroup], scores: Mapping[str, Score]) -> None:
    """Store new scores with their rollouts; those of earlier steps stay."""
    for group in groups:
        found = {
            i: scores[r.rollout_id] for i, r in group.rollouts.items() if r.rollout_id in scores
        }
        group.scores.update(found)


def as_group(group: InFlightGroup, *, scored: bool = True) -> Group:
    """Return the finished completions in order, with those scores that exist."""
    order = sorted(group.rollouts)
    return Group(
        group_id=group.group_id,
        rollouts=tuple(group.rollouts[i] for i in order),
        scores=tuple(group.scores[i] for i in order) if scored else (),
    )
