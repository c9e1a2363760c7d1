"""Event schema: every kind of event, its fields with type, unit and meaning. Past 500 lines: it is
one table. In: a kind and fields. Out: an assertion where they do not fit.

A field name means the same in every event that has it; `own` holds the few that differ.
docs/events.md is made from this table (`make docs`) and adds the modules that emit each kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Emit(Protocol):
    """Where events go: an event log, a worker's context, or a collector in a test."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Field:
    type: str  # of the JSON value: int, float, str, bool, list, map; "|" separates alternatives
    unit: str  # "" where it has none
    meaning: str


@dataclass(frozen=True, slots=True)
class EventKind:
    """One kind. `names` lists its fields; those that end with "?" may be missing."""

    meaning: str
    names: str = ""
    counted: bool = False  # a fallback, drop, retry or warning that the report must count
    own: Mapping[str, Field] = field(default_factory=dict)
    required: frozenset[str] = field(init=False)
    allowed: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = self.names.split()
        required = frozenset(name for name in names if not name.endswith("?"))
        object.__setattr__(self, "required", required)
        allowed = frozenset(name.removesuffix("?") for name in names)
        object.__setattr__(self, "allowed", allowed | ANYWHERE)

    def fields(self) -> dict[str, tuple[Field, bool]]:
        """Return each field's meaning and whether it is required, in the order of `names`."""
        plain = [name.removesuffix("?") for name in self.names.split()]
        return {name: (self.own.get(name) or FIELDS[name], name in self.required) for name in plain}


ANYWHERE = frozenset({"worker", "counted", "trace_id"})  # fields that any event may have

FIELDS = {
    "after": Field("float", "", "value after the change"),
    "asked": Field("int", "", "how many the config asks for"),
    "batch_invariant": Field("bool", "", "whether results do not depend on the batch"),
    "before": Field("float", "", "value before the change"),
    "changed": Field("map", "", "config keys changed by this resume: [before, after]"),
    "checks": Field("int", "checks", "checks of this reward part, failed or not"),
    "computed_tokens": Field("int", "tokens", "tokens of the sequence whose KV was computed"),
    "count": Field("int", "", "how many occurrences the row stands for"),
    "counted": Field("bool", "", "replaces the kind's own rule on whether the report counts it"),
    "depth": Field("int", "", "number of phases around this one"),
    "device": Field("str", "", "PyTorch's name of the device"),
    "dtype": Field("str", "", "number format of the weights"),
    "dummy": Field("bool", "", "whether the weights are placeholders until the next commit"),
    "endpoint": Field("str", "", "client URL of the rendezvous"),
    "engine": Field("str", "", "name of the engine's worker"),
    "epoch": Field("int", "", "attempt of the run whose offers count"),
    "error": Field("str", "", "what was raised"),
    "evals": Field("map", "", "by measure: values before and after, with intervals"),
    "folder": Field("str", "", "folder that it is about"),
    "groups": Field("int", "groups", "groups of rollouts that are not finished"),
    "held_out": Field("int", "records", "records kept for evaluation"),
    "index": Field("int", "", "which completion of the request"),
    "instructions": Field("str", "", "instruction set that the C kernels use"),
    "isolation": Field("str", "", "what separates programs from the machine"),
    "kernel": Field("str", "", "kernel that was chosen"),
    "kv_pages": Field("int", "pages", "KV pages of the engine"),
    "learner": Field("str", "", "trained model that it is about"),
    "left_wide": Field("map", "", "matrices kept in the wide format, with the reason"),
    "mode": Field("str", "", "sandbox mode: strong, bubblewrap or weak"),
    "n": Field("int", "", "trials behind the value"),
    "member": Field("str", "", "process of the pod"),
    "name": Field("str", "", "measure that it is about"),
    "num_tokens": Field("int", "tokens", "tokens trained on"),
    "num_updates": Field("int", "updates", "optimizer updates"),
    "number": Field("int", "", "which restart, from 1"),
    "peer": Field("str", "", "address of the other side of a connection"),
    "pages": Field("int", "pages", "KV pages"),
    "part": Field("str", "", "reward part"),
    "path": Field("str", "", "file or folder"),
    "phase": Field("str", "", 'path of the phase, such as "score/reference"'),
    "place": Field("str", "", "node and process of the worker"),
    "rank": Field("int", "", "rank of the trainer"),
    "reason": Field("str", "", "why it happened"),
    "request_id": Field("str", "", "request"),
    "requests": Field("int", "requests", "requests that were not answered"),
    "rollout": Field("str", "", "id of the rollout"),
    "rounds": Field("int", "rounds", "rounds of replacement"),
    "seconds": Field("float", "s", "how long it took"),
    "size_bytes": Field("int", "bytes", "size"),
    "source": Field("str", "", "data source"),
    "stage": Field("str", "", "stage of the run: cold_start or main"),
    "stages": Field("list", "", "stages of the run: name and steps of each"),
    "step": Field("int", "", "training step of the stage; 0 is before the first"),
    "steps": Field("int", "steps", "training steps of the stage"),
    "trace_id": Field("str", "", "trace of the request that it is about, where one is open"),
    "train": Field("int", "records", "records to train on"),
    "version": Field("int", "", "version of the policy's weights"),
    "what": Field("str", "", "call or phase that was under way"),
    "worker": Field("str", "", "worker that it is about, or that emitted it"),
}

EVENTS = {
    # The run and its stages
    "attempt.started": EventKind(
        "A later attempt began; rows past the point it resumes from are void.",
        "resumed_from step? stage?",
        own={"resumed_from": Field("map | null", "", "attempt and seq of the last valid row")},
    ),
    "run.started": EventKind(
        "A run or an attempt began.",
        "name stages objective model seed gyre hardware device dtype threads stage_index",
        own={
            "name": Field("str", "", "name of the run folder"),
            "objective": Field("str", "", "objective.kind of the config"),
            "model": Field("map", "", "path, family and number of parameters"),
            "seed": Field("int", "", "seed of the run"),
            "gyre": Field("str", "", "version of Gyre"),
            "hardware": Field("map", "", "processor, memory and devices"),
            "threads": Field("int", "threads", "threads of PyTorch's arithmetic"),
            "stage_index": Field("int", "", "stage that this attempt begins with, from 0"),
        },
    ),
    "run.resumed": EventKind(
        "A run resumed from a snapshot, or from its beginning where there is none.",
        "stage step lost_steps changed",
        own={"lost_steps": Field("int", "steps", "steps that must be done again")},
    ),
    "run.stopped": EventKind(
        "A signal stopped the run after its state was saved.",
        "stage step in_flight_groups",
        own={"in_flight_groups": Field("int", "groups", "unfinished groups in the snapshot")},
    ),
    "run.done": EventKind("The run reached its last step.", "step version evals stage"),
    "retry.run_restarted": EventKind(
        "The run restarted from its newest snapshot after a failure.", "number error", counted=True
    ),
    "stage.started": EventKind("A stage began.", "stage steps step"),
    "stage.done": EventKind("A stage ended.", "stage step version"),
    "plan.made": EventKind(
        "The sizes of a stage were planned.",
        "stage residency kv_pages notes",
        own={
            "residency": Field("str", "", "whether components stay on the device or take turns"),
            "notes": Field("list", "", "remarks of the planner"),
        },
    ),
    "phase.started": EventKind("A timed phase began.", "phase depth step?"),
    "phase.ended": EventKind(
        "A timed phase ended.",
        "phase depth seconds step? error?",
        own={"error": Field("str", "", "class of the exception that ended it")},
    ),
    "export.verified": EventKind("The exported model was read back and is right.", "folder"),
    # The loop
    "step.done": EventKind(
        "A training step ended.",
        "stage step version metrics num_tokens num_updates num_prompts? reward_standard_error?"
        " seconds",
        own={
            "metrics": Field("map", "", "numbers of the step by name; see Metrics"),
            "num_prompts": Field("int", "prompts", "prompts sampled, whether trained on or not"),
            "reward_standard_error": Field("float | null", "", "standard error of the reward"),
        },
    ),
    "step.broken_off": EventKind(
        "A stop ended a step early; the resumed run continues from its tokens.",
        "step groups partial_tokens",
        own={"partial_tokens": Field("int", "tokens", "tokens kept of unfinished completions")},
    ),
    "eval.done": EventKind(
        "An evaluation ended. The value is also given under the measure's own name.",
        "stage name accuracy? reward? loss? pair_accuracy? preference_accuracy? n meaning"
        " standard_error interval step when detail",
        own={
            "accuracy": Field("float", "fraction", "share of problems solved"),
            "reward": Field("float", "", "mean reward of a completion"),
            "loss": Field("float", "nats", "mean negative log-prob of a target token"),
            "pair_accuracy": Field("float", "fraction", "pairs that the reward model orders right"),
            "preference_accuracy": Field("float", "fraction", "pairs that the policy orders right"),
            "meaning": Field("str", "", "what the value measures"),
            "standard_error": Field("float | null", "", "standard error of the value"),
            "interval": Field("list | null", "", "95 % interval: low, high"),
            "when": Field("str", "", "before for the first evaluation of a stage, else after"),
            "detail": Field("map", "", "further means, by name"),
        },
    ),
    "rollouts.refilled": EventKind(
        "Groups that teach nothing were replaced.",
        "step rounds prompts",
        own={"prompts": Field("int", "prompts", "prompts drawn as replacements")},
    ),
    "rollouts.refills_exhausted": EventKind(
        "Groups that teach nothing remained after the last round of replacement.",
        "step rounds missing",
        counted=True,
        own={"missing": Field("int", "groups", "groups that the step lacks")},
    ),
    "rollouts.carried": EventKind("Unfinished groups continue in the next step.", "step groups"),
    "rollouts.repetition_stopped": EventKind(
        "Completions that repeated themselves were ended early.", "step count"
    ),
    "drop.stale": EventKind(
        "Unfinished groups would be older than rollout.max_staleness when they are trained on.",
        "step count tokens",
        counted=True,
        own={"tokens": Field("int", "tokens", "tokens that were generated for them")},
    ),
    "rollouts.staleness": EventKind(
        "Ages of a batch's tokens, where rollouts run while the policy trains.",
        "step tokens",
        own={"tokens": Field("map", "tokens", "tokens by age, in versions published since")},
    ),
    "step.roles": EventKind(
        "Who waited how long since the step before, where rollouts run while the policy trains.",
        "step seconds collector_idle_s learner_idle_s synchronous_s",
        own={
            "collector_idle_s": Field("float", "s", "the collector waited for a credit"),
            "learner_idle_s": Field("float", "s", "the learner waited for rollouts"),
            "synchronous_s": Field("float", "s", "what the same work takes one after the other"),
        },
    ),
    "drop.equal_groups": EventKind(
        "Groups with equal scores were left out of training.", "step count", counted=True
    ),
    "drop.groups_without_pair": EventKind(
        "Groups without a preference pair were left out of training.", "step count", counted=True
    ),
    "drop.unscored": EventKind("Completions that no reward could score.", "step count", True),
    "drop.truncated": EventKind(
        "Completions cut off at max_tokens were left out of training.", "step count", counted=True
    ),
    "fallback.filter_by_score": EventKind(
        "Groups are filtered by score, since the config has no accuracy.", "stage reason", True
    ),
    "warn.collector_failed": EventKind(
        "Rollouts failed while the run was ending for another reason.", "error", counted=True
    ),
    "warn.staleness_uncorrected": EventKind(
        "Rollouts are older than the weights that they train, and no correction is set.",
        "stage reason",
        counted=True,
    ),
    "handover.engine_started": EventKind("The engine started again for weights.", "dummy step"),
    "handover.engine_terminated": EventKind("The engine made room for training.", "step"),
    # Data
    "data.loaded": EventKind(
        "A data source was read.",
        "source train held_out dropped split_turns",
        own={
            "dropped": Field("map", "records", "records left out, by reason"),
            "split_turns": Field("int", "records", "conversations split into prompt and answer"),
        },
    ),
    "data.exhausted": EventKind(
        "A procedural task has fewer different problems than were asked for.",
        "task asked found draws",
        counted=True,
        own={
            "task": Field("str", "", "name of the task"),
            "found": Field("int", "problems", "different problems found"),
            "draws": Field("int", "draws", "problems drawn, duplicates included"),
        },
    ),
    "drop.rows": EventKind(
        "Records of a data source were left out, by reason.",
        "source count duplicate? in_held_out? overlong? untraced? no_difference?",
        counted=True,
        own={
            "duplicate": Field("int", "records", "records that another one repeats"),
            "in_held_out": Field("int", "records", "records that are held out, too"),
            "overlong": Field("int", "records", "records longer than the model's context"),
            "untraced": Field("int", "records", "records without a worked solution"),
            "no_difference": Field("int", "records", "pairs whose members are equal"),
        },
    ),
    # Engine
    "engine.installing": EventKind(
        "The environment of an engine's sidecar is being made.",
        "doing",
        own={"doing": Field("str", "", "what is done now, for people")},
    ),
    "engine.loaded": EventKind(
        "A served engine's worker has the model on its device.",
        "load_format imports_s seconds",
        own={
            "load_format": Field("str", "", "auto: from files; dummy: drawn; vllm: no weights yet"),
            "imports_s": Field("float", "s", "from the process's start until the call to load"),
        },
    ),
    "engine.started": EventKind(
        "The engine took its memory.",
        "dummy version pages scoring_bytes seconds",
        own={"scoring_bytes": Field("int", "bytes", "most that scoring a prompt takes")},
    ),
    "engine.terminated": EventKind("The engine gave its memory back.", "version"),
    "engine.committed": EventKind(
        "The engine answers with new weights.",
        "version policy shared",
        own={
            "policy": Field(
                "str", "", "how requests in flight are treated: drain, keep_prefix, continue"
            ),
            "shared": Field("bool", "", "whether the weights are the trainer's own storage"),
        },
    ),
    "engine.failed": EventKind(
        "The engine failed and answered all requests; only a restart helps.",
        "error unanswered",
        counted=True,
        own={"unanswered": Field("int", "requests", "requests ended by the failure")},
    ),
    "engine.refused": EventKind(
        "Requests were refused for one kind of reason; the first is named.",
        "request_id reason count",
        counted=True,
    ),
    "engine.completion_failed": EventKind(
        "A sidecar's engine broke on a completion, which was aborted.",
        "request_id error",
        counted=True,
    ),
    "engine.deadline": EventKind("A request passed its deadline.", "request_id", counted=True),
    "engine.nonfinite": EventKind(
        "The model gave non-finite logits; the completion was aborted.",
        "request_id index version",
        counted=True,
    ),
    "engine.preempted": EventKind(
        "A sequence gave its KV pages back to others.",
        "request_id index way why reason computed_tokens size_bytes swap_s recompute_s",
        counted=True,
        own={
            "way": Field("str", "", "swap (to the host) or recompute"),
            "why": Field("str", "", "why that way"),
            "size_bytes": Field("int", "bytes", "size of its KV"),
            "swap_s": Field("float", "s", "expected time of a swap, out and in"),
            "recompute_s": Field("float", "s", "expected time of computing it again"),
        },
    ),
    "engine.resumed": EventKind(
        "A swapped sequence continues.",
        "request_id index computed_tokens pages shared_pages",
        own={"shared_pages": Field("int", "pages", "of them, pages that were still there")},
    ),
    "engine.swap_voided": EventKind(
        "Swapped KV became useless; the sequence computes it again.",
        "request_id index computed_tokens reason",
        counted=True,
    ),
    "engine.hits_recomputed": EventKind(
        "Cached pages are computed again for their prompt log-probs.",
        "request_id index pages reason",
        counted=True,
    ),
    "engine.prefix_cleared": EventKind("Cached pages were dropped.", "pages reason"),
    "engine.c_kernels": EventKind("The engine uses the C kernels.", "instructions"),
    "engine.torch_kernels": EventKind("The engine uses PyTorch's kernels.", "reason", True),
    "engine.stranger": EventKind(
        "A connection to an engine's first rank was refused: it does not know the token.",
        "peer",
        True,
    ),
    "engine.nccl_sums": EventKind(
        "GPUs cannot write each other's memory; NCCL sums few rows as well.", "reason", True
    ),
    "engine.wide_truncation": EventKind(
        "Tensor ranks truncated by sums of digits: their best candidates might not have sufficed. "
        "Told at each doubling.",
        "rows count",
        counted=True,
        own={"rows": Field("int", "rows", "rows that truncated in the last such step")},
    ),
    "engine.prefill_kernel": EventKind(
        "The attention kernel for prompts was chosen.",
        "kernel reason seconds triton_s? flash4_s?",
        own={
            "triton_s": Field("float", "s", "measured time of Gyre's kernel"),
            "flash4_s": Field("float", "s", "measured time of FlashAttention-4"),
        },
    ),
    "engine.graphs_captured": EventKind(
        "CUDA graphs were captured at start.",
        "graphs batch_invariant seconds first_s",
        own={
            "graphs": Field("int", "graphs", "graphs captured"),
            "first_s": Field("float", "s", "of them for the first, which compiles the kernels"),
        },
    ),
    "engine.graphs_recaptured": EventKind(
        "CUDA graphs were captured again.",
        "graphs reason",
        counted=True,
        own={"graphs": Field("int", "graphs", "graphs captured")},
    ),
    # Weights
    "weights.staged": EventKind(
        "A version was copied into staging memory and verified.",
        "version size_bytes buckets",
        own={"buckets": Field("int", "buckets", "pieces that it was copied in")},
    ),
    "weights.commit_failed": EventKind(
        "A commit failed and was undone; the last version goes on serving.",
        "version serving",
        counted=True,
        own={"serving": Field("int", "", "version that the engine serves")},
    ),
    "weights.read": EventKind(
        "A registered version was read over the engine's weights and verified.",
        "version size_bytes buckets undo_from transport",
        own={
            "transport": Field(
                "str", "", "how its parts were opened: `shm`, `tcp`, `cuda-ipc`, `nccl`, `gloo`"
            ),
            "buckets": Field("int", "buckets", "pieces that it was read in"),
            "undo_from": Field(
                "str", "", "what keeps the last version meanwhile: `device`, `publisher` or `host`"
            ),
        },
    ),
    "weights.reader_refused": EventKind(
        "A server of registered weights refused a reader.", "peer reason", True
    ),
    "weights.reader_lost": EventKind(
        "A reader of registered weights hung up, or was too slow.", "peer error", True
    ),
    "weights.slot_failed": EventKind(
        "A version was not written to its slot, and is on its publisher's device alone.",
        "version error",
        counted=True,
    ),
    "weights.slot_used": EventKind(
        "A reader read a part from its slot, and not by way of its publisher's device.",
        "version address reason",
        counted=True,
        own={"address": Field("str", "", "address on the device")},
    ),
    "weights.readers_apart": EventKind(
        "Two readers of a version did not keep pace, and stopped waiting for each other: what both "
        "want is filled twice from there.",
        "version",
        counted=True,
    ),
    "weights.leftovers_removed": EventKind(
        "Parts of versions in shared memory whose owners had died were removed.",
        "count size_bytes folder",
    ),
    "weights.gathered": EventKind("Shards were gathered into whole weights.", "version size_bytes"),
    "weights.published": EventKind(
        "The engine has the trainer's version.",
        "step version epoch tensors copied_bytes",
        own={
            "epoch": Field("int", "", "attempt of the run that publishes it"),
            "tensors": Field("int", "tensors", "tensors of the version"),
            "copied_bytes": Field("int", "bytes", "bytes copied; 0 where storage is shared"),
        },
    ),
    "weights.publish_failed": EventKind("A publication failed.", "step version error", True),
    "retry.version_registered": EventKind(
        "A version was registered again, since engines could not read it where it was.",
        "step version error",
        counted=True,
    ),
    "weights.populate_unsupported": EventKind(
        "The kernel is older than 5.14: CUDA maps the pages of slots one by one, which is slower.",
        "kernel",
        own={"kernel": Field("str", "", "release of the system's kernel")},
        counted=True,
    ),
    "weights.slot_replaced": EventKind(
        "A slot in shared memory had been cut or removed; its owner made it anew.",
        "name",
        counted=True,
    ),
    # Memory
    "memory": EventKind(
        "Memory was measured at a phase change. Peaks are those of the phase that was left.",
        "phase left step owners read_from? device_free_bytes? device_peak_bytes host_rss_bytes"
        " host_peak_rss_bytes unowned_bytes fragment_bytes outside_bytes neighbor_bytes"
        " planned_working_bytes?"
        " planned_peak_device_bytes? planned_peak_host_bytes? budget_device_bytes?"
        " budget_host_bytes? waited_s seconds",
        own={
            "phase": Field("str", "", "phase that is entered"),
            "left": Field("str | null", "", "phase that was left"),
            "owners": Field("map", "bytes", "by component: bytes on device, host and disk"),
            "read_from": Field(
                "str",
                "",
                "of vLLM's processes: `driver`, `allocators` (and what their start took beyond), "
                "`host` (a CPU: nothing is on a device), `none` (no process)",
            ),
            "device_free_bytes": Field("int", "bytes", "free on the device"),
            "device_peak_bytes": Field("int", "bytes", "most that was taken on the device"),
            "host_rss_bytes": Field("int", "bytes", "resident memory of the process"),
            "host_peak_rss_bytes": Field("int", "bytes", "most of it since the process began"),
            "unowned_bytes": Field("int", "bytes", "allocated by no component"),
            "fragment_bytes": Field("int", "bytes", "reserved by PyTorch and not in use"),
            "outside_bytes": Field("int", "bytes", "taken on the device outside PyTorch"),
            "neighbor_bytes": Field(
                "int", "bytes", "that other workers on the device say they have; not outside"
            ),
            "planned_working_bytes": Field("int", "bytes", "planned for work of the phase"),
            "planned_peak_device_bytes": Field("int", "bytes", "planned peak on the device"),
            "planned_peak_host_bytes": Field("int", "bytes", "planned peak on the host"),
            "budget_device_bytes": Field("int", "bytes", "budget of the device"),
            "budget_host_bytes": Field("int", "bytes", "budget of the host"),
            "waited_s": Field("float", "s", "time until the device showed the freed memory"),
            "seconds": Field("float", "s", "how long the change took, moves and proof together"),
        },
    ),
    "fallback.device_reading": EventKind(
        "A reading of vLLM's device memory is missing, and its ledger does without.",
        "what reason",
        counted=True,
        own={
            "what": Field(
                "str",
                "",
                "driver: its figure for a process, whose allocators are counted instead; device: "
                "releases are proved by the ranks' ledgers alone",
            )
        },
    ),
    "memory.tolerance_raised": EventKind(
        "A trainer's rank shares its device with an engine over ranks, whose communication buffers "
        "no process reports: more may be outside than memory.outside_tolerance_bytes.",
        "size_bytes",
        own={"size_bytes": Field("int", "bytes", "what may be outside now")},
        counted=True,
    ),
    "memory.move": EventKind(
        "A component moved between tiers.",
        "component source target size_bytes seconds reason step",
        own={
            "component": Field("str", "", "what moved"),
            "source": Field("str", "", "tier it left: device, host, disk or none"),
            "target": Field("str", "", "tier it went to"),
        },
    ),
    "device.made": EventKind(
        "A device's part of a stage was built.",
        "seconds",
        own={"seconds": Field("map", "s", "how long each part took")},
    ),
    "policy.left": EventKind(
        "A stage left its policy to the next one.",
        "in_shards",
        own={"in_shards": Field("bool", "", "whether each rank keeps its own shards")},
    ),
    # Cluster
    "cluster.starting": EventKind(
        "Workers are being started.",
        "workers engine_workers",
        own={
            "workers": Field("list", "", "names of the trainer's workers"),
            "engine_workers": Field("int", "workers", "workers with an engine alone"),
        },
    ),
    "cluster.started": EventKind(
        "Workers started.",
        "workers",
        own={"workers": Field("map", "", "node and process, by worker")},
    ),
    "cluster.memory": EventKind(
        "All workers entered a phase.",
        "phase step device_bytes",
        own={
            "phase": Field("str", "", "phase that was entered"),
            "device_bytes": Field("map", "bytes", "bytes held on the device, by worker"),
        },
    ),
    "pod.activity": EventKind(
        "A process of a pod has done one of the activities of the pod's timeline.",
        "activity seconds size_bytes?",
        own={
            "activity": Field("str", "", "activity of the timeline in docs/pod.md"),
            "size_bytes": Field("int", "bytes", "moved, taken or freed; missing: it moves none"),
        },
    ),
    "pod.clock_set_back": EventKind(
        "The wall clock was set back while a process started; its start is told without that time.",
        "seconds",
        counted=True,
        own={"seconds": Field("float", "s", "by which the clock is behind the process's start")},
    ),
    "member.listening": EventKind(
        "Engines of other hosts may join the run.",
        "address token_file",
        own={
            "address": Field("str", "", "host and port to join at"),
            "token_file": Field("str", "", "file with the token that a member needs"),
        },
    ),
    "member.refused": EventKind(
        "Connections to the members' address were refused. Told once a second at most.",
        "peer reason count",
        counted=True,
        own={"count": Field("int", "", "connections refused since the last such event")},
    ),
    "member.joined": EventKind("An engine of another host joined the run.", "member place"),
    "member.left": EventKind(
        "An engine of another host left the run, or was lost.",
        "member place reason requests",
        own={"requests": Field("int", "requests", "requests that it was given in this stage")},
    ),
    "engine.lost": EventKind(
        "An engine's worker ended.",
        "engine place cause requests",
        counted=True,
        own={"cause": Field("str", "", "how it ended")},
    ),
    "engine.restarted": EventKind("A lost engine's worker started again.", "engine number place"),
    "engine.restart_failed": EventKind(
        "A lost engine's worker could not start.", "engine number error", counted=True
    ),
    "engine.restarts_exhausted": EventKind(
        "A lost engine stays away; its restarts are used up.",
        "engine restarts",
        counted=True,
        own={"restarts": Field("int", "restarts", "restarts tried")},
    ),
    "engine.waits_for_weights": EventKind(
        "A restarted engine waits for the next version.", "engine version reason"
    ),
    "engine.rejoined": EventKind(
        "An engine that was restarted, or joined, takes requests.", "engine version"
    ),
    "engine.answered": EventKind(
        "Completions that an engine ended whole since the last version, where engines of other "
        "hosts have joined.",
        "engine version completions",
        own={"completions": Field("int", "completions", "completions that it ended")},
    ),
    "engine.reverted": EventKind(
        "An engine serves its last version again, since another could not take the next one.",
        "engine version",
        counted=True,
    ),
    "engine.ejected": EventKind(
        "An engine stands still, and gets no new requests.",
        "engine still_s requests",
        counted=True,
        own={"still_s": Field("float", "s", "time without progress of its requests")},
    ),
    "engine.returning": EventKind(
        "An engine that was ejected or lost gets new requests again, slowly.",
        "engine return_s",
        own={"return_s": Field("float", "s", "time until it has its whole share")},
    ),
    "engine.ejections_ignored": EventKind(
        "Every engine is ejected, so requests go to them all the same.",
        "engines",
        counted=True,
        own={"engines": Field("list", "", "their names")},
    ),
    "retry.request_requeued": EventKind(
        "A lost engine's request goes to another engine.",
        "request_id engine kept_tokens",
        counted=True,
        own={"kept_tokens": Field("int", "tokens", "tokens that are not sampled again")},
    ),
    "rank.failed": EventKind(
        "A trainer rank raised.", "rank worker place what error", counted=True
    ),
    "rank.hung": EventKind(
        "Trainer ranks made no progress in time.",
        "what still_s stacks",
        counted=True,
        own={
            "still_s": Field("map", "s", "time without progress, by worker"),
            "stacks": Field("map", "", "stack traces, by worker"),
        },
    ),
    "drop.spans": EventKind(
        "Spans of traces did not reach the collector.",
        "reason count error",
        counted=True,
        own={
            "reason": Field(
                "str",
                "",
                "queue_full: the collector is too slow; not_taken: it did not take a batch; "
                "shutdown: it had not taken them in time",
            ),
            "error": Field("str", "", "why the newest batch was not taken"),
        },
    ),
    "drop.worker_events": EventKind("A worker's oldest events were dropped.", "count", True),
    # Rewards and sandboxes
    "reward.window": EventKind(
        "How much of the rule rewards' time was hidden.",
        "step rule_s rollout_s reference_s hidden_s",
        own={
            "rule_s": Field("float", "s", "time that at least one rule ran"),
            "rollout_s": Field("float", "s", "of it, while rollouts were generated"),
            "reference_s": Field("float", "s", "of the rest, while learned rewards ran"),
            "hidden_s": Field("float", "s", "both together"),
        },
    ),
    "reward.timeout": EventKind("A reward part took too long.", "part rollout reason"),
    "reward.error": EventKind("A reward part raised.", "part rollout reason"),
    "reward.invalid": EventKind("A reward part gave no number.", "part rollout reason"),
    "warn.reward_failed": EventKind(
        "Checks of a reward part failed in one way; the first is quoted.",
        "step? where? what failure reason count checks",
        counted=True,
        own={
            "where": Field("str", "", "where it happened, if not in a step"),
            "what": Field("str", "", "the part and its outcome"),
            "failure": Field("str", "", "what all of these failures share"),
        },
    ),
    "reward.retried": EventKind(
        "A check is retried, since its worker was killed from outside.",
        "part worker reason",
        counted=True,
    ),
    "reward.worker_replaced": EventKind(
        "A reward worker was replaced.", "worker reason", counted=True
    ),
    "reward.fork_server_replaced": EventKind(
        "The fork server of the reward workers was replaced.",
        "exit_code",
        counted=True,
        own={"exit_code": Field("int | null", "", "exit code of the old one")},
    ),
    "reward.fork_server_killed": EventKind(
        "The fork server did not end and was killed.", counted=True
    ),
    "reward.output_dropped": EventKind(
        "Output of rewards beyond the log's limit is dropped.",
        "log kept_bytes",
        counted=True,
        own={
            "log": Field("str", "", "the log"),
            "kept_bytes": Field("int", "bytes", "size of the log"),
        },
    ),
    "sandbox.started": EventKind(
        "Programs run in a sandbox.",
        "mode isolation note refused",
        own={
            "note": Field("str", "", "remark of the sandbox"),
            "refused": Field("map", "", "stronger modes that the machine refuses, with the reason"),
        },
    ),
    "sandbox.weak": EventKind(
        "Programs run without network and file system isolation.", "mode isolation reason", True
    ),
    "sandbox.call_refused": EventKind(
        "A program made system calls that the sandbox refuses.",
        "part rollout calls",
        counted=True,
        own={"calls": Field("map", "calls", "how often, by name of the call")},
    ),
    "warn.tests_decided_inside": EventKind(
        "Tests whose result a program could forge.",
        "part count rollouts",
        counted=True,
        own={"rollouts": Field("int", "rollouts", "rollouts with such tests")},
    ),
    # Snapshots
    "snapshot.begun": EventKind(
        "A background snapshot began; training continues.",
        "step seconds buffer_bytes",
        own={
            "seconds": Field("float", "s", "time that training stood still"),
            "buffer_bytes": Field("int", "bytes", "staging memory of all ranks"),
        },
    ),
    "snapshot.copied": EventKind("A snapshot's state is in staging memory.", "step seconds"),
    "snapshot.held": EventKind("An update waited for a snapshot's copy.", "step rank seconds"),
    "snapshot.waiting": EventKind(
        "A snapshot waits for the one before it.",
        "step writing",
        own={"writing": Field("int", "", "step of the one that is being written")},
    ),
    "snapshot.waited": EventKind("The wait for an earlier snapshot ended.", "step seconds"),
    "snapshot.saved": EventKind(
        "A snapshot is complete on disk.",
        "step path size_bytes ranks",
        own={"ranks": Field("int", "ranks", "ranks that wrote it")},
    ),
    "snapshot.skipped": EventKind(
        "A damaged snapshot was passed over.",
        "path file tensor reason",
        counted=True,
        own={
            "file": Field("str", "", "first damaged file"),
            "tensor": Field("str", "", "first damaged tensor of that file"),
        },
    ),
    "snapshot.replaced": EventKind("A damaged snapshot was overwritten.", "path", counted=True),
    "snapshot.leftover_removed": EventKind("An unfinished snapshot was removed.", "path", True),
    "snapshot.prune_failed": EventKind(
        "An old snapshot could not be removed.", "path reason", counted=True
    ),
    # Trainer
    "trainer.c_kernels": EventKind("The trainer uses the C kernels.", "instructions"),
    "trainer.torch_kernels": EventKind("The trainer uses PyTorch's kernels.", "reason", True),
    "trainer.attention_kernel": EventKind("The attention kernel was chosen.", "kernel reason"),
    "trainer.float8": EventKind(
        "Matrices multiplied in 8 bits.",
        "learner layers gathered left_wide",
        own={
            "layers": Field("list", "", "matrices multiplied in 8 bits"),
            "gathered": Field("list", "", "of them, those whose shards travel in 8 bits"),
        },
    ),
    "trainer.moments": EventKind(
        "Optimizer moments kept in 8 bits.",
        "learner coded_numbers numbers left_wide",
        own={
            "coded_numbers": Field("int", "numbers", "numbers kept in 8 bits"),
            "numbers": Field("int", "numbers", "all numbers"),
        },
    ),
    "trainer.offload": EventKind(
        "Optimizer state lives outside the device.",
        "learner optimizer gradients size_bytes staging_bytes path",
        own={
            "optimizer": Field("str", "", "where optimizer state lives: device, host or disk"),
            "gradients": Field("str", "", "where gradient sums live"),
            "staging_bytes": Field("int", "bytes", "staging buffer on the device"),
            "path": Field("str", "", "file of the state; empty where it is in host memory"),
        },
    ),
    "trainer.offload_parameters": EventKind(
        "A model's weights live in host memory.",
        "model size_bytes layer_buffer_bytes",
        own={
            "model": Field("str", "", "model whose weights they are"),
            "layer_buffer_bytes": Field("int", "bytes", "layer buffers on the device"),
        },
    ),
    "trainer.offload_leftover_removed": EventKind(
        "State files of an ended run were removed.", "path size_bytes", counted=True
    ),
    "trainer.nothing_to_train": EventKind(
        "No sequence of the batch carries a loss.",
        "step sequences",
        counted=True,
        own={"sequences": Field("int", "sequences", "sequences of the batch")},
    ),
    "trainer.oversized_chunks": EventKind(
        "Micro-batches exceed the limit, since one sequence alone does.",
        "step chunks tokens_per_chunk",
        counted=True,
        own={
            "chunks": Field("int", "micro-batches", "how many do"),
            "tokens_per_chunk": Field("int", "tokens", "the limit"),
        },
    ),
    "trainer.idle_ranks": EventKind(
        "An update has fewer items than there are ranks.",
        "step items ranks",
        counted=True,
        own={
            "items": Field("int", "items", "items of the smallest update"),
            "ranks": Field("int", "ranks", "trainer ranks"),
        },
    ),
    "trainer.update_skipped": EventKind(
        "An update was skipped, since its gradient is not finite.", "step reason", counted=True
    ),
    "trainer.loss_scale": EventKind(
        "The FP16 loss scale changed.",
        "step factor was",
        own={
            "factor": Field("float", "", "the new scale"),
            "was": Field("float", "", "the old scale"),
        },
    ),
    "trainer.reference_refreshed": EventKind("The reference model was updated.", "step version"),
    "trace.written": EventKind(
        "A profiler trace was written.",
        "step file size_bytes seconds compute_s communication_s exposed_s idle_s top",
        own={
            "file": Field("str", "", "file, relative to the run folder"),
            "seconds": Field("float", "s", "wall time of the step"),
            "compute_s": Field("float", "s", "time with computation"),
            "communication_s": Field("float", "s", "time with communication"),
            "exposed_s": Field("float", "s", "communication without computation"),
            "idle_s": Field("float", "s", "time with neither"),
            "top": Field("list", "", "longest kernels: name, calls and seconds"),
        },
    ),
    "trace.failed": EventKind("A step could not be traced.", "step folder error", counted=True),
    # Warnings
    "fallback.wandb_offline": EventKind("W&B keeps its data on disk.", "reason folder", True),
    "warn.engine_not_stopped": EventKind(
        "The engine did not end its requests in time.", "requests error", counted=True
    ),
    "warn.fewer_held_out": EventKind(
        "Fewer held-out records than asked for.",
        "stage source asked got",
        counted=True,
        own={"got": Field("int", "records", "records that there are")},
    ),
    "warn.figures_contradict": EventKind(
        "Training and held-out figures cannot both be right.",
        "stage step name rule training held_out reason",
        counted=True,
        own={
            "rule": Field("str", "", "opposed (directions) or gap (values)"),
            "training": Field("list", "", "training figures: value, low and high of each"),
            "held_out": Field("list", "", "held-out figures, likewise"),
        },
    ),
    "warn.learning_rate_high": EventKind("A learning rate is unusual.", "stage reason", True),
    "warn.learning_rate_moved": EventKind(
        "A changed config moves the learning rate of the next step.",
        "step before after",
        counted=True,
    ),
    "warn.listener_failed": EventKind(
        "A display or tracker raised and gets no more events.",
        "listener error",
        counted=True,
        own={"listener": Field("str", "", "its name")},
    ),
    "warn.model_keys_ignored": EventKind(
        "A model's config has keys that change nothing.",
        "folder keys",
        counted=True,
        own={"keys": Field("list", "", "the keys")},
    ),
    "warn.reference_rounded": EventKind(
        "A float32 reference average was rounded to the model's format.", "dtype", counted=True
    ),
    "warn.report_not_written": EventKind("The report was not written.", "error", counted=True),
    "warn.rollback_failed": EventKind(
        "The engine could not return to its last version.", "step error", counted=True
    ),
    "warn.run_not_locked": EventKind("The run folder is not locked.", "reason", counted=True),
    "warn.samples_gone": EventKind("Samples of earlier attempts are missing.", "reason", True),
    "warn.stage_not_closed": EventKind(
        "A stage that had failed did not close cleanly.", "error", counted=True
    ),
    "warn.steps_lost": EventKind(
        "Steps after the snapshot must be done again.",
        "count stage resumed_step",
        counted=True,
        own={"resumed_step": Field("int", "", "step of the snapshot")},
    ),
    "warn.tokenizer_misread": EventKind(
        "The tokenizer may not fit the model.",
        "family reason",
        counted=True,
        own={"family": Field("str", "", "model family")},
    ),
    # Serving
    "serve.ready": EventKind(
        "The server takes requests.",
        "url imports_s workers_s engines_s seconds",
        own={
            "url": Field("str", "", "where it listens"),
            "imports_s": Field("float", "s", "from the process's start until it starts workers"),
            "workers_s": Field("float", "s", "until every worker has its model"),
            "engines_s": Field("float", "s", "until every engine can take requests"),
            "seconds": Field("float", "s", "from the process's start to readiness"),
        },
    ),
    "serve.access": EventKind(
        "A request of a client ended. Told with --access-log only.",
        "method path status seconds request_id tokens",
        own={
            "method": Field("str", "", "HTTP method"),
            "path": Field("str", "", "path of the URL"),
            "status": Field("int", "", "HTTP status; 499: the client hung up before it was sent"),
            "seconds": Field("float", "s", "from its head to the end of its answer"),
            "request_id": Field("str | null", "", "id of the answer, of a completion"),
            "tokens": Field("int | null", "", "tokens chosen, of a completion"),
        },
    ),
    "serve.weights_updated": EventKind(
        "The server answers with the weights of another folder.",
        "folder version policy",
        own={"policy": Field("str", "", "what became of the requests under way")},
    ),
    "serve.weights_refused": EventKind(
        "A folder's weights were not taken; the last version goes on serving.",
        "folder serving reason",
        counted=True,
        own={"serving": Field("int", "", "version that the engines serve")},
    ),
    "serve.follow_ended": EventKind(
        "A fault ended the look for new weights; the server goes on with those that it has.",
        "error",
        counted=True,
    ),
    "rendezvous.failover": EventKind(
        "An endpoint of the rendezvous did not answer; the next one is asked.",
        "reason endpoint",
        counted=True,
    ),
    "rendezvous.lost": EventKind(
        "No endpoint of the rendezvous answers; calls retry until their deadlines.",
        "reason",
        counted=True,
    ),
    "rendezvous.back": EventKind("The rendezvous answers again.", "endpoint seconds"),
    "rendezvous.not_told": EventKind(
        "The rendezvous did not take a record by its deadline; the run goes on without it.",
        "what reason",
        counted=True,
    ),
    "drop.rendezvous_notes": EventKind(
        "More records waited for the rendezvous than are kept; the newest was dropped.",
        "count",
        counted=True,
    ),
    "rendezvous.opened": EventKind(
        "The rendezvous of a run was opened.",
        "store place",
        own={"store": Field("str", "", "store (of the driver) or etcd")},
    ),
    "rendezvous.lease_lost": EventKind(
        "A member's lease had ended; it took a new one.",
        "member seconds",
        counted=True,
        own={"seconds": Field("float", "s", "since its last sign of life")},
    ),
    "rendezvous.replaced": EventKind(
        "Another process of the same name has taken the member's records.",
        "member keys",
        counted=True,
        own={"keys": Field("list", "", "records that it has now")},
    ),
    "rendezvous.superseded": EventKind(
        "A newer attempt publishes; this process's offers are refused from now on.",
        "epoch publisher",
        counted=True,
        own={"publisher": Field("str", "", "member that publishes")},
    ),
    "rendezvous.stale_offer": EventKind(
        "The rendezvous had only an offer that is older than one seen before; it was not taken.",
        "epoch version",
        counted=True,
    ),
    "rendezvous.rewritten": EventKind(
        "Records that the rendezvous had lost were written again.", "count reason", counted=True
    ),
    "rendezvous.watch_reopened": EventKind(
        "The connection of a watch ended; it goes on from where it was.", "reason", counted=True
    ),
    "rendezvous.rewound": EventKind(
        "The rendezvous went back to older data; whoever owns a record writes it again.",
        "revision expected",
        counted=True,
        own={
            "revision": Field("int", "", "where it is now"),
            "expected": Field("int", "", "where it was before"),
        },
    ),
    "serve.request_failed": EventKind(
        "A fault of the server broke a request, which was answered with status 500.",
        "path error request_id",
        counted=True,
        own={
            "path": Field("str", "", "path of the URL"),
            "request_id": Field("str | null", "", "id of the answer, of a completion"),
        },
    ),
    "serve.keys_loaded": EventKind(
        "The key file had changed, and was read again.",
        "path keys usable",
        own={
            "keys": Field("int", "keys", "keys in the file"),
            "usable": Field("int", "keys", "keys that are neither revoked nor expired"),
        },
    ),
    "serve.keys_unreadable": EventKind(
        "The changed key file is not whole; the server goes on with the keys from before.",
        "path error",
        counted=True,
    ),
    "serve.usage_incomplete": EventKind(
        "The engine had not said in time what an aborted request had cost; its key pays for less.",
        "request_id",
        counted=True,
    ),
    "serve.prompt_late": EventKind(
        "A prompt was not read in time; its request was refused.",
        "path seconds",
        counted=True,
        own={
            "path": Field("str", "", "the request's route"),
            "seconds": Field("float", "s", "that it had"),
        },
    ),
    "serve.library_warning": EventKind(
        "A library of the server logged a warning or an error.",
        "logger level message error",
        counted=True,
        own={
            "logger": Field("str", "", "name of the library's logger"),
            "level": Field("str", "", "WARNING, ERROR or CRITICAL"),
            "message": Field("str", "", "at most 500 characters of it"),
            "error": Field("str", "", "type of the exception that came with it"),
        },
    ),
    "warn.worker_not_gone": EventKind(
        "A worker did not end when it was stopped.",
        "place waited_s",
        counted=True,
        own={"waited_s": Field("float", "s", "time waited")},
    ),
}


def check_event(kind: str, fields: Iterable[str]) -> None:
    """Assert that the schema knows a kind and its fields. A failure is a fault of Gyre."""
    known = EVENTS.get(kind)
    assert known is not None, f"event {kind} is not in core/events.py"
    names = set(fields)
    assert known.required <= names <= known.allowed, (
        f"event {kind}: core/events.py requires {sorted(known.required - names)} beside what is "
        f"given, and does not know {sorted(names - known.allowed)}"
    )
