"""Contracts: the Protocols between rooms. In and out: records only. The loop sees these and never a
room.

Rules: what may wait is a coroutine on the event loop. Each wait ends by its deadline with
DeadlineError naming what was awaited. Three kinds of plain functions are left. PromptSource reads
and sets a cursor in memory. MemoryTenant is called on the compute thread, and may block it. The
calls `submit`, `begin`, `look` and `share` enqueue.

An engine may leave out a part of its contract. Its abilities state which; what needs one that is
missing is refused by name.

Suites: tests/contracts/, which every implementation passes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from gyre.core.offers import SOURCE_KINDS, Offer, SourceKind
from gyre.core.records import (
    CommitPolicy,
    Component,
    EngineStats,
    Evaluation,
    Health,
    Partial,
    Request,
    RoleSpec,
    Rollout,
    Score,
    StepReport,
    Tier,
    TokenChunk,
    TrainBatch,
    Usage,
    Which,
)

COMMIT_POLICIES: tuple[CommitPolicy, ...] = ("drain", "keep_prefix", "continue")
MOST_TOP = 1 << 30  # no bound of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbilities:
    """What an engine can do; the defaults are all of the contract."""

    engine: str  # its name and version, for people
    # a draw depends on seed, completion and position alone: an interrupted completion resumes with
    # the tokens that it would have had
    draws_by_position: bool = True
    # the log-prob of the plain softmax beside the processed one, whatever the sampling; without it
    # `raw_logprobs` is NaN where the two differ
    raw_logprobs: bool = True
    truncation_sets: bool = True  # returns the tokens that top-k, top-p and min-p left choosable
    most_top_logprobs: int = MOST_TOP  # best tokens returned beside a chosen one
    prompt_logprobs: bool = True
    penalties: bool = True  # repetition, presence and frequency, as docs/sampling.md has them
    logit_bias: bool = True
    min_tokens: bool = True
    stop_strings: bool = True  # where it was built with a tokenizer
    priorities: bool = True
    deadlines: bool = True
    traces: bool = True  # returns when each piece of a prompt was computed
    grammars: bool = False
    commit_policies: tuple[CommitPolicy, ...] = COMMIT_POLICIES
    # `prepare` stages a copy or a folder beside the running version, on the device; without it the
    # version stays where it was offered, and `commit` loads it
    prepares_on_device: bool = True
    # of these kinds (`core.offers`) an offer's source may be
    sources: tuple[SourceKind, ...] = SOURCE_KINDS
    sleep_levels: tuple[int, ...] = ()  # in which it can be parked instead of terminated


def join_abilities(engines: Sequence[EngineAbilities]) -> EngineAbilities:
    """Return what each of these engines can do, and so all of them together."""
    first = engines[0]

    def shared(name: str) -> Any:
        values = [getattr(one, name) for one in engines]
        if isinstance(values[0], tuple):
            return tuple(item for item in values[0] if all(item in value for value in values))
        return min(values)

    names = [one.name for one in fields(first) if one.name != "engine"]
    kinds = " and ".join(dict.fromkeys(one.engine for one in engines))
    return EngineAbilities(engine=kinds, **{name: shared(name) for name in names})


def find_unable(request: Request, abilities: EngineAbilities) -> str | None:
    """Return what the request asks for and the engine cannot do, or None."""
    sampling = request.sampling
    penalized = (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
    truncates = sampling.temperature != 0.0 and (
        sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    )
    asked = (
        ("a grammar", request.grammar is not None, abilities.grammars),
        ("truncation (top_k, top_p, min_p)", truncates, abilities.truncation_sets),
        ("prompt_logprobs", sampling.prompt_logprobs is not None, abilities.prompt_logprobs),
        ("penalties", penalized, abilities.penalties),
        ("logit_bias", bool(sampling.logit_bias), abilities.logit_bias),
        ("min_tokens", sampling.min_tokens > 0, abilities.min_tokens),
        ("stop strings", bool(sampling.stop), abilities.stop_strings),
        ("a priority", request.priority != 0, abilities.priorities),
        ("a deadline", request.deadline_s is not None, abilities.deadlines),
        ("a trace of its prefill", request.traced, abilities.traces),
    )
    missing = [what for what, is_asked, is_able in asked if is_asked and not is_able]
    if sampling.top_logprobs > abilities.most_top_logprobs:
        missing.append(
            f"top_logprobs = {sampling.top_logprobs} (at most {abilities.most_top_logprobs})"
        )
    if not missing:
        return None
    return f"{abilities.engine} cannot do what the request asks for: {', '.join(missing)}"


def find_unable_commit(policy: CommitPolicy, abilities: EngineAbilities) -> str | None:
    """Return why the engine cannot commit by this policy, or None."""
    if policy in abilities.commit_policies:
        return None
    can = ", ".join(abilities.commit_policies)
    return f"{abilities.engine} cannot commit with policy '{policy}'; it takes {can}"


class PromptSource(Protocol):
    """Yields records (Prompt for online objectives, TrainSequence for offline ones) in an order
    that is a pure function of its seed and state."""

    def take(self, n: int) -> Sequence[Any]:
        """Return the next n records; wraps over epochs with a new order. n > 0."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON-able cursor."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken. SnapshotError if it belongs to other data."""
        ...


class RolloutEngine(Protocol):
    """Tokens in, tokens out. A refusal is an answer: a chunk with finish "refused" and a reason,
    never silence."""

    def submit(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Enqueue at once (before the first await) and stream chunks; each of the n completions
        ends with a chunk that carries `finish`. Requests submitted without an await between them
        enter the queue together, in order."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request with finish "abort". Unknown ids are a no-op: it may have just finished."""
        ...

    async def interrupt(self, *, deadline_s: float) -> Mapping[str, tuple[Partial, ...]]:
        """Stop everything in flight (finish "interrupted") and return by request id what each
        had."""
        ...

    async def stats(self) -> EngineStats: ...

    async def health(self) -> Health: ...

    async def abilities(self) -> EngineAbilities:
        """Return what it can do; what a request asks for beyond that is refused."""
        ...

    async def drain(self, *, deadline_s: float) -> None:
        """Wait until nothing is waiting or running."""
        ...


class EngineLifecycle(Protocol):
    """Life of an engine and of the weights in it. A version is whole or not there."""

    async def start(self, *, dummy: bool) -> None:
        """Allocate KV; with `dummy`, weights are random until a commit and submit refuses work."""
        ...

    async def prepare(self, offer: Offer, *, reverts: bool = False) -> None:
        """Check a version, and stage or open it. Nothing served changes. What is only opened is
        read and verified by `commit`. InputError for a version or an epoch below what the engine
        has had. With `reverts` it is the version before the last commit: another engine could not
        follow."""
        ...

    async def commit(self, version: int, *, policy: CommitPolicy) -> None:
        """Swap to the prepared version, whole; after an error the last one still serves. drain:
        wait for requests first; keep_prefix: cached blocks of the old version stay but only match
        the old version; continue: running requests go on, tokens carry their version. InputError
        for a policy that is not among its abilities."""
        ...

    async def rollback(self) -> None:
        """Forget a prepared version."""
        ...

    async def terminate(self) -> None:
        """Free everything. Requests in flight end with finish "abort"."""
        ...


class MemoryTenant(Protocol):
    """Owner of components in this process. The memory manager calls it on the compute thread.
    Bytes are measured from storages, not remembered."""

    def components(self) -> Sequence[Component]: ...

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """Move whole components, in order. Contents survive device ↔ host ↔ disk; "none" forgets
        them. InputError for a tier that the component does not allow."""
        ...

    def measure(self) -> Mapping[str, Usage]: ...


class Scorer(Protocol):
    """Text to numbers with reasons, in killable processes."""

    async def score(self, rollouts: Sequence[Rollout], *, deadline_s: float) -> Sequence[Score]:
        """Return as many scores as rollouts, in their order. Never raises for what a rollout
        contains; past the deadline the parts that are missing come back with outcome "timeout"."""
        ...

    async def close(self) -> None: ...


class PolicyTrainer(Protocol):
    """Owns actor, critic, reference and reward model. Batches are global and unpacked."""

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on the batch. After it returns the version is final."""
        ...

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        """Forward only. "policy" gives the log-probs that the trainer computes for the given
        tokens."""
        ...

    async def register(self, *, epoch: int = 0) -> Offer:
        """Offer the current version. Its tensors are borrowed until the next step."""
        ...

    async def snapshot(self) -> Mapping[str, Any]:
        """Return the resumable state: "tensors" by key, and "state", JSON-able. One rank gives its
        part; the tensors of all ranks together are the whole."""
        ...

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `snapshot` returned. SnapshotError, with nothing changed, if it is of
        another model or objective."""
        ...

    async def close(self) -> None: ...


class WorkerHandle(Protocol):
    """A started worker, seen from the process that started it. Any thread may call it. Calls reach
    the worker in the order of `begin`."""

    name: str
    place: str  # node and process id, for people

    def begin(self, method: str, *args: Any) -> Future[Any]:
        """Call `method` ("step", or "engine.submit" for a part) of the object that the builder
        made; return its answer to be. It ends with the error that the method raised, or with
        WorkerLost. Callers set the deadline."""
        ...

    def look(self, what: Literal["pulse", "stacks"]) -> Future[Any]:
        """Ask the process and not the object: answered by a thread of its own while the object is
        busy or stuck. pulse: a count that grows while work is done; stacks: what every thread is
        at, as text."""
        ...


class Cluster(Protocol):
    """Starts workers on devices. A worker that dies stays dead: its starter decides what
    follows."""

    async def start(self, spec: RoleSpec) -> WorkerHandle:
        """Start a process and build its object; by `spec.deadline_s`, or it is stopped again."""
        ...

    async def stop(self, handle: WorkerHandle) -> None:
        """End the process. One that is gone already is fine."""
        ...

    async def watch(self, handle: WorkerHandle) -> str:
        """Return when the worker is gone, with the reason as far as it is known."""
        ...

    def share(self, value: Any) -> Any:
        """Return what to give to `begin` in place of a large value that several workers get: it is
        sent once."""
        ...

    async def close(self) -> None:
        """Stop every worker that is left."""
        ...
