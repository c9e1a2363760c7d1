"""Records: the data that rooms exchange. Frozen, keyword-only, a unit or a length on each field.

In: nothing. Out: plain data (numpy arrays for what grows with tokens). Token ids are the truth and
text is a view of them. Masks are data and never guessed from padding.

Letters: P prompt tokens, C tokens that the policy chose, T = tokens of a whole sequence. Column
convention: entry t of a per-token array belongs to token t as the *target*: logprobs[t] is log
p(tokens[t] | tokens[:t]). Token 0 is never a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

CommitPolicy = Literal["drain", "keep_prefix", "continue"]
# the loop says "repetition"; an engine says the others
Finish = Literal["stop", "length", "abort", "deadline", "refused", "interrupted", "repetition"]
Tier = Literal["device", "host", "disk", "none"]
# processed: after temperature and truncation; raw: of the plain softmax
LogprobKind = Literal["processed", "raw"]
Phase = Literal["idle", "rollout", "score", "train", "handover", "evaluate"]
Which = Literal["policy", "reference", "critic", "reward"]
# what the processes of a pod do in a step, in the order of its timeline, and three more:
# "score" of a trainer, "wake" and "park" of an engine that keeps its process
Activity = Literal[
    "dummy_start",
    "train",
    "offload",
    "convert",
    "register",
    "update",
    "start",
    "rollout",
    "wait_rollout",
    "terminate",
    "onload",
    "score",
    "wake",
    "park",
]
# what a training pass keeps of each layer: least with "full"
Checkpointing = Literal["none", "selective", "full"]
Projection = Literal["qkv", "out", "gate_up", "down"]  # the matrices of a decoder layer
# what the optimizer keeps of its two moments: floats, or a code and a scale
Moments = Literal["float32", "8_bit"]
# what a layer's matrix products multiply: the compute dtype, or 8-bit floats
Matmul = Literal["same", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, ready for the engine."""

    prompt_id: str  # stable hash of source and text; decides the held-out split
    tokens: np.ndarray  # int32 [P], with the generation prefix of the template
    text: str  # the rendered prompt, for people and rewards
    task: Mapping[str, Any]  # what rewards need (answer, tests, …); JSON-able
    source: str  # name of the data source


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; part of the rollout, since the trainer must reproduce it."""

    temperature: float = 1.0  # 0.0 means greedy
    top_p: float = 1.0  # keeps the smallest set with at least this mass
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0  # keeps tokens with at least min_p × the best probability
    max_tokens: int = 128  # tokens chosen per completion at most
    stop: tuple[str, ...] = ()  # strings; the completion ends with the token that completes one
    stop_ids: tuple[int, ...] = ()  # token ids, beside the tokenizer's end-of-text
    ignore_eos: bool = False
    n: int = 1  # completions per request
    # What follows bends the logits before temperature. The trainer does not know of it: serving
    # may, rollouts may not.
    # of tokens in prompt or completion: positive logits ÷ it, negative × it
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # taken off the logit of each token chosen before
    frequency_penalty: float = 0.0  # taken off once for each time it was chosen
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    # no stop id is chosen, and no stop string looked for, before this many tokens
    min_tokens: int = 0
    # What is returned besides the tokens; always of the plain softmax ("raw"), whatever the rules
    # above.
    top_logprobs: int = 0  # best tokens returned beside each chosen one
    # None: nothing, 0: the prompt tokens' own, k: also the best k at each place
    prompt_logprobs: int | None = None

    @property
    def shapes_logits(self) -> bool:
        """True if recomputing the processed log-probs needs more than temperature and
        truncation."""
        plain = (
            self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
        )
        return not (plain and not self.logit_bias and self.min_tokens == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probs of a prompt's own tokens under the plain softmax. Entry 0 is never a target: 0.0,
    version -1, ids 0."""

    logprobs: np.ndarray  # float32 [P]
    versions: np.ndarray  # int32 [P], policy version that gave each
    top_ids: np.ndarray  # int32 [P, K], best first; K = sampling.prompt_logprobs
    top_logprobs: np.ndarray  # float32 [P, K]


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """The tokens that truncation (top-k, top-p, min-p) left choosable, per chosen token. Ragged."""

    offsets: np.ndarray  # int64 [C + 1]
    ids: np.ndarray  # int32 [offsets[-1]]; ids[offsets[c]:offsets[c + 1]] for token c, ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """An interrupted completion, with everything needed to resume it token for token."""

    index: int  # which of the request's n completions
    tokens: np.ndarray  # int32 [C]
    logprobs: np.ndarray  # float32 [C], after temperature and truncation
    raw_logprobs: np.ndarray  # float32 [C], of the plain softmax
    versions: np.ndarray  # int32 [C], policy version that chose each token
    support: Support | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation request. `partials` may hold prefixes of some of its n completions."""

    request_id: str
    tokens: np.ndarray  # int32 [P]
    sampling: Sampling
    seed: int = 0  # with a completion's index and position, decides every draw
    priority: int = 0  # larger runs earlier and is preempted later
    deadline_s: float | None = None  # seconds from submit until the engine answers "deadline"
    tenant_salt: str = ""  # part of the prefix-cache key
    session_id: str = ""  # a router prefers the engine that served the session last
    grammar: str | None = None  # refused by engines that have no grammar support
    chunk_tokens: int = 1  # tokens per TokenChunk; 0 means one chunk at the end
    partials: tuple[Partial, ...] = ()
    traced: bool = False  # its chunks tell when each piece of its known tokens was computed
    resumed: bool = False  # a lost engine had admitted it: a full queue refuses it no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When a completion began, by CLOCK_MONOTONIC of the engine's host. Processes of that host may
    compare it with their own."""

    started_s: float  # a step first computed it: it waited before
    first_token_s: float  # its first token was on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiming:
    """When one step computed a piece of a completion's known tokens, by the clock of Timing."""

    start: int  # position of its first token
    num_tokens: int
    launched_s: float  # its step was handed to the device
    ended_s: float  # the step's results were on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of a completion. Its last chunk carries `finish`."""

    request_id: str
    index: int  # which of the request's n completions
    tokens: np.ndarray  # int32 [c], new since the last chunk
    # float32 [c], processed: after penalties, bias, temperature and truncation
    logprobs: np.ndarray
    # float32 [c], of the plain softmax; NaN where the engine cannot tell (`EngineAbilities`)
    raw_logprobs: np.ndarray
    versions: np.ndarray  # int32 [c]
    support: Support | None = None
    finish: Finish | None = None
    reason: str = ""  # why refused, aborted or past the deadline
    # int32 [c, K], best first, equals by id; K = sampling.top_logprobs; None when 0
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None  # float32 [c, K], raw
    # when asked for, in a completion's first chunk with a token
    prompt_logprobs: PromptLogprobs | None = None
    timing: Timing | None = None  # in a completion's first chunk with a token
    # prompt tokens whose KV was found in the cache; in a completion's first chunk with a token,
    # of completions that share their prompt's computation in that of one
    cached_tokens: int = 0
    # of a traced request: what was computed since its last chunk, again after a preemption
    prefills: tuple[PrefillTiming, ...] = ()

    @staticmethod
    def end(request_id: str, index: int, finish: Finish, reason: str) -> TokenChunk:
        """Return a final chunk without tokens."""
        return TokenChunk(
            request_id=request_id,
            index=index,
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            raw_logprobs=np.empty(0, np.float32),
            versions=np.empty(0, np.int32),
            finish=finish,
            reason=reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One complete answer of an engine."""

    request_id: str
    index: int
    tokens: np.ndarray  # int32 [C], the stop token included
    logprobs: np.ndarray  # float32 [C], processed
    raw_logprobs: np.ndarray  # float32 [C], of the plain softmax
    versions: np.ndarray  # int32 [C]
    finish: Finish
    support: Support | None = None
    reason: str = ""
    top_ids: np.ndarray | None = None  # int32 [C, K]
    top_logprobs: np.ndarray | None = None  # float32 [C, K], raw
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt with one completion: the unit of scoring and training."""

    rollout_id: str
    group_id: str  # shared by the siblings of one prompt
    prompt: Prompt
    tokens: np.ndarray  # int32 [T], prompt then completion
    sampled: np.ndarray  # bool [T], True where the policy chose the token
    logprobs: np.ndarray  # float32 [T], the sampler's; 0.0 where not sampled
    raw_logprobs: np.ndarray  # float32 [T]
    versions: np.ndarray  # int32 [T], -1 where not sampled
    sampling: Sampling
    finish: Finish
    text: str  # the completion, decoded; a view
    support: Support | None = None  # over the sampled tokens, in order
    # of `logprobs`, with which the trainer compares its own
    logprob_kind: LogprobKind = "processed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePart:
    """The result of one reward."""

    name: str
    value: float
    weight: float
    # why this value, in words a person can check; of a failure, what is before ": " names its kind
    reason: str
    outcome: Literal["ok", "timeout", "error", "invalid"] = "ok"
    seconds: float = field(default=0.0, compare=False)  # of wall time, as far as known


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The weighted sum of the parts; never absent: a failure is a labeled score."""

    rollout_id: str
    value: float
    parts: tuple[ScorePart, ...]
    started_s: float = 0.0  # monotonic clock, for the overlap account
    ended_s: float = 0.0

    @property
    def is_scored(self) -> bool:
        """True if some part that counts was scored; parts of weight 0 count only if all are. A
        sample without is excluded from its group and the loss."""
        counting = [part for part in self.parts if part.weight] or self.parts
        return not counting or any(part.outcome == "ok" for part in counting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The siblings of one prompt with their scores, in the same order."""

    group_id: str
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One sequence to train on or to evaluate, unpacked.

    `columns` are per-token arrays of length T by the column convention. Examples: loss_mask (bool),
    advantages, values, returns; logprobs (behavior), policy_logprobs (the trainer's, before the
    step), reference_logprobs. `scalars` are per sequence.
    """

    tokens: np.ndarray  # int32 [T]
    columns: Mapping[str, np.ndarray]
    scalars: Mapping[str, float] = field(default_factory=dict)
    pair_id: int = -1  # siblings of a preference pair share it; scalars["chosen"] is 1.0 or 0.0
    group_id: str = ""
    temperature: float = 1.0  # the trainer divides logits by it before the log-softmax
    support: Support | None = None  # over tokens where loss_mask is True


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """All sequences of one loop step: global and unpacked. The trainer deals and packs them."""

    sequences: tuple[TrainSequence, ...]
    step: int  # loop step that made it


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of a forward pass, one entry per sequence of the batch, in its order."""

    which: Which
    # float32 [T] each: log-probs (policy, reference) or values (critic)
    per_token: tuple[np.ndarray, ...] = ()
    per_sequence: np.ndarray | None = None  # float32 [sequences]: scores (reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one call of `step` did."""

    step: int  # loop step
    version: int  # policy version after it
    metrics: Mapping[str, float]
    num_tokens: int  # tokens trained on, padding not counted
    num_updates: int  # optimizer steps taken
    # metrics that the machine decides
    measured: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of one tensor, or of some of its columns, and the rank that has it."""

    start: int  # numbers of the columns, row by row: [start, stop)
    stop: int
    columns: tuple[int, int] | None = None  # [first, last); None for all of them
    owner: int = 0  # rank in the publisher's group; the lowest of those that have the run
    # 16 hex digits of the multilinear sum of `kernels.checksum`; None where the receiver reads the
    # same storage, or where ranks gather the run from each other
    checksum: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a version. Its segments tile it, each number once."""

    name: str  # our parameter name
    dtype: str  # torch name, "bfloat16"
    shape: tuple[int, ...]
    size_bytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a receiver needs to verify a complete version."""

    version: int
    entries: tuple[TensorEntry, ...]
    shared: bool  # True when the engine reads the trainer's own storage: no byte moves
    epoch: int = 0  # of the publisher; a receiver refuses one that is lower than it has seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A named piece of device memory that can move as a whole."""

    name: str  # "engine.kv", "actor.optimizer", …
    size_bytes: int  # when on the device
    tier: Tier  # where it is now
    tiers: tuple[Tier, ...]  # where it may live; "none" means destroyed and built again on demand


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHoldings:
    """What one process says that it has on its device."""

    component_bytes: int = 0  # of its components, as measured
    process_bytes: int = 0  # all that its allocators hold, the components among it


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Measured bytes of one component, read from its storages."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start, and current gauges."""

    running: int
    waiting: int
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    preemptions: int
    refused: int
    steps: int
    pages_used: int
    pages_total: int
    version: int
    swaps_out: int = 0  # preemptions that kept the KV in host memory
    swaps_in: int = 0  # of these, resumed
    recomputed_tokens: int = 0  # computed a second time after a preemption
    host_pages_used: int = 0
    host_pages_total: int = 0
    page_tokens: int = 0  # tokens of a KV page; 0 where that is not known
    prefix_page_tokens: int = 0  # the same of a page in the prefix cache; 0 where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """What a router has given to one engine since its start, and what it would give."""

    requests: int = 0
    believed_hit_tokens: int = 0  # of prompts, likely in its prefix cache; siblings' included
    sessions_kept: int = 0  # requests that went to the engine of their session's last one
    sessions_moved: int = 0  # requests of a session that another engine had served last
    ejections: int = 0
    share: float = 1.0  # of new requests that it may have; 0 while it is ejected
    load: int = 0  # of its requests, by estimate, in tokens of a prompt
    believed_pages: int = 0  # in its prefix cache
    sessions: int = 0  # that the router knows, of all engines


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One engine behind a server, as far as it is known by a deadline."""

    name: str
    state: Literal["ready", "starting", "unwell", "lost"]
    reason: str = ""  # why it is not ready
    stats: EngineStats | None = None  # None: it has not answered
    outstanding_tokens: int = 0  # of its requests, still to be computed at most
    routing: RoutingStats = field(default_factory=RoutingStats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What a worker's process and each of its children may take, whatever they run."""

    data_bytes: int = 0  # of private writable memory, as RLIMIT_DATA counts it; 0: no limit
    cores: tuple[int, ...] = ()  # that they run on; () means those of the starter


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of the host that a worker is to have at a place of its own file system."""

    host_path: str
    place: str
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A worker to be started: one process with its devices."""

    name: str  # unique among the workers of a cluster
    # "module:function"; called there as function(context, **arguments), gives the object that is
    # asked
    builder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # plain values
    environment: Mapping[str, str] = field(default_factory=dict)  # set before the process starts
    gpus: float = 0.0  # of its own
    devices: tuple[int, ...] = ()  # GPUs of its host by number, that other workers may name too
    cpus: float = 1.0
    deadline_s: float = 120.0  # from the start until the builder has returned
    # Python of another environment, which the process runs in; "" means this one. Of our packages
    # it sees gyre alone
    interpreter: str = ""
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    mounts: tuple[Mount, ...] = ()  # for clusters of containers; the others refuse them
