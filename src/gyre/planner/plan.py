"""Plan: everything a run needs to know, decided once. Records only, with a JSON round trip
(`plan.json`).

In: PlanInputs (numbers from the configs; None where the user says "auto") and Hardware. Out: Plan,
in which nothing is open any more.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gyre.core.errors import SnapshotError
from gyre.core.records import Checkpointing, Matmul, Moments, Phase, Tier
from gyre.distributed.config import SumGradients, Zero
from gyre.memory.config import Leave, Residency

DeviceKind = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
Saving = Literal["triton", "torch_cuda", "torch_cpu", "c_cpu"]
"""Whose kernels run a layer, which decides what it keeps for the backward pass: on a GPU Triton's
or torch's around flash attention, on a CPU torch's or the C ones."""


def best_dtype(device: DeviceKind, *, bf16: bool) -> Dtype:
    """Return what run.dtype = "auto" means: bfloat16 where the device multiplies it. Otherwise a
    GPU takes float16 with loss scaling, since its float32 is many times slower. A CPU takes
    float32, since its float16 is emulated."""
    if bf16:
        return "bfloat16"
    return "float16" if device == "cuda" else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What this machine offers, at this moment."""

    device: DeviceKind  # the best there is
    device_name: str
    device_total_bytes: int
    device_free_bytes: int
    host_total_bytes: int
    host_available_bytes: int
    disk_free_bytes: int  # under the folder of the disk tier; 0 without one
    cores: int  # that this process may use
    bf16: bool  # matrix products in bfloat16 are native
    saving: Saving  # of the best device


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNumbers:
    """A decoder by its sizes."""

    num_parameters: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    context_tokens: int  # longest sequence that it takes
    tied: bool  # the head is the embedding
    qkv_bias: bool
    qk_norm: bool
    row_ranks: int = 1  # that split the rows of the residual stream of this part of a model

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one decoder layer: the model's, without embedding, head and
        final norm, divided evenly."""
        outside = self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size
        return (self.num_parameters - outside) // self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How one model is spread over the trainer's ranks."""

    zero: Zero = 0
    ranks: int = 1  # that share one copy of what is sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the user wrote, as numbers. None means: decide."""

    model: ModelNumbers
    objective: str  # its kind, for the words only
    online: bool  # completions are generated; otherwise sequences come from data
    prompts_per_step: int  # for offline objectives: data rows per step
    # for offline objectives: sequences per row (2 for preference pairs)
    completions_per_prompt: int
    max_prompt_tokens: int
    max_completion_tokens: int
    sequences_per_update: int | None = None
    tokens_per_chunk: int | None = None
    checkpointing: Checkpointing = "none"
    matmul: Matmul = "same"
    moments: Moments = "float32"
    offload_optimizer: Literal["none", "host", "disk"] = "none"
    offload_gradients: bool = False
    offload_parameters: tuple[str, ...] = ()  # models whose weights live in host memory
    offload_cut_bytes: int = 128 << 20
    epochs_per_batch: int = 1
    critic: bool = False
    reference: bool = False
    reward_model: ModelNumbers | None = None
    # what a rank trains of the model, where tensor ranks share layers; None: all of it
    trained_part: ModelNumbers | None = None
    shared_weights: bool = True  # the engine reads the trainer's own parameters
    engines_alone: bool = False  # on workers without a rank, which take whole weights only
    # models with a `zero` of their own, which does not follow the actor's
    lie_apart: tuple[str, ...] = ()
    device: DeviceKind | None = None
    dtype: Dtype | None = None
    threads: int | None = None
    page_tokens: int | None = None
    kv_pages: int | None = None
    kv_bytes: int | None = None  # of the device for KV pages; counts where `kv_pages` is None
    kv_host_bytes: int = 0  # of host memory for KV of preempted completions
    max_running: int | None = None  # completions that hold pages at the same time
    max_queued: int | None = None  # completions that an engine lets wait; None: no bound
    max_queued_tokens: int | None = None  # given tokens that it lets wait; None: no bound
    engines: int = 1  # that share a step's completions
    # what each rank of an engine holds of the model; None: all of it
    engine_part: ModelNumbers | None = None
    max_refills: int = 0  # rounds of further prompts per step, in place of those that teach nothing
    # what was not set: name in the plan -> its source
    not_given: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # what the loop does that no number says, for the plan's notes
    engine_tokens_per_step: int = 2048
    batch_invariant: bool = False
    residency: Residency | None = None
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None
    disk_tier: bool = False
    leave: Mapping[str, Leave] = field(default_factory=dict)
    ranks: int = 1  # that train together, on different data
    # of "actor", "critic", "reference", "reward"
    shards: Mapping[str, Shards] = field(default_factory=dict)
    sum_gradients: SumGradients = "chunk"  # when those of models in shards are summed over ranks
    snapshot_background: bool = False  # it is staged in host memory, which stays taken
    reference_average: bool = False  # a moving average in float32 beside the reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The four named sizes. Everything else about batches follows from them."""

    prompts_per_step: int  # prompts
    completions_per_prompt: int  # completions
    sequences_per_update: int  # sequences
    tokens_per_chunk: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedSizes:
    sequences_per_step: int
    updates_per_step: int  # optimizer updates, epochs included
    sequences_in_last_update: int  # of each epoch
    longest_sequence_tokens: int
    expected_tokens_per_step: int  # when completions are half as long as they may be
    most_tokens_per_step: int
    chunks_per_update: int  # of full length, at most
    longest_queue: int = 0  # completions that wait while as many as fit run, at most
    submissions: int = 1  # parts in which a step's requests reach the engines
    # completions, with every group that teaches nothing replaced as often as allowed
    most_sampled_per_step: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    name: str
    size_bytes: int
    tiers: tuple[Tier, ...]
    phases: tuple[Phase, ...]
    leave: tuple[Tier, ...]
    formula: str  # where the bytes come from


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePlan:
    """One phase of a steady iteration."""

    phase: Phase
    device: Mapping[str, int]  # bytes by component
    host: Mapping[str, int]
    disk: Mapping[str, int]
    working_bytes: int  # activations, logits, sampling
    peak_device_bytes: int
    peak_host_bytes: int
    moved_bytes: int  # copied on entering it


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Nothing in here is "auto"."""

    objective: str
    device: DeviceKind
    dtype: Dtype
    threads: int
    page_tokens: int
    kv_pages: int  # 0 when nothing is generated
    max_running: int
    residency: Residency
    device_budget_bytes: int
    host_budget_bytes: int
    disk_budget_bytes: int
    sizes: Sizes
    derived: DerivedSizes
    components: tuple[ComponentPlan, ...]
    working: Mapping[Phase, int]  # bytes beside the components, by phase
    start: PhasePlan  # how a stage begins: its peak, and where things are before the first phase
    phases: tuple[PhasePlan, ...]
    reasons: Mapping[str, str]  # by name of a number: what forced it
    notes: tuple[str, ...]
    hardware: Hardware

    @property
    def parked_at_start(self) -> dict[str, Tier]:
        """Components of the trainer that leave the device as soon as they are made, and where
        to."""
        found: dict[str, Tier] = {}
        for name in sorted({c.name for c in self.components} - set(self.start.device)):
            if not name.startswith("engine."):
                found[name] = (
                    "host"
                    if name in self.start.host
                    else "disk"
                    if name in self.start.disk
                    else "none"
                )
        return found

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            return _build(Plan, json.loads(text))
        except (ValueError, TypeError, KeyError) as error:
            raise SnapshotError(
                f"this is not a plan of this version: {error}",
                hint="make it again with `gyre plan`",
            ) from error


def _build(kind: Any, value: Any) -> Any:
    """Rebuild records from JSON values by their annotations."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is a table, got {type(value).__name__}")
        hints = typing.get_type_hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise KeyError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        return tuple(_build(args[0], item) for item in value)
    return value
