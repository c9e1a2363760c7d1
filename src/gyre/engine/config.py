"""Engine settings, `[engine]` in the TOML. Pure data; imports no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from gyre.core.config import Section
from gyre.core.errors import ConfigError
from gyre.core.rounding import ceil_div
from gyre.engine.scheduler.swap import SwapRates
from gyre.models.layout import local_spec
from gyre.models.spec import ModelSpec

PAGE_TOKENS = {"cpu": 16, "cuda": 64}  # on a GPU a page is a tile of the attention kernels


class EngineConfig(Section):
    """The native rollout engine.

    KV memory is the first of these that is set: `num_pages`, `kv_bytes`, `kv_fraction` of the free
    bytes. Otherwise it holds `max_running` sequences of full context, within a quarter of the free
    bytes. A training run takes `num_pages` or `kv_bytes` where they are set, refuses `kv_fraction`,
    and otherwise takes what its plan leaves.
    """

    page_tokens: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Tokens per KV page; 0: 64 on a GPU, where a page is a kernel's tile, else 16.",
    )
    num_pages: int = Field(default=0, ge=0, description="KV pages; 0 derives them from kv_bytes.")
    kv_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of device memory for KV pages; 0 derives them from kv_fraction.",
    )
    kv_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Fraction of the free device memory for KV pages; 0 sizes them by max_running.",
    )
    kv_host_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of host memory (pinned beside a GPU) for KV of preempted ones; 0: none.",
    )
    swap_bytes_per_s: float = Field(
        default=0.0,
        ge=0.0,
        description="Bytes per second between device and host that preemption reckons with; 0: "
        "5e10 on a GPU (PCIe 5 "
        "x16), 5e9 on a CPU.",
    )
    prefill_tokens_per_s: float = Field(
        default=0.0,
        ge=0.0,
        description="Prompt tokens per second that preemption reckons with; 0: from 4e14 FLOP/s "
        "on a GPU, 1e11 on a "
        "CPU, and the model's FLOPs per token.",
    )
    max_running: int = Field(
        default=256, ge=1, description="Completions that hold KV pages at the same time, at most."
    )
    max_queued: int = Field(
        default=16_384,
        ge=1,
        description="Completions that may be unanswered beyond max_running, whether any waits or "
        "not; more are refused.",
    )
    max_queued_tokens: int = Field(
        default=16_777_216,
        ge=1,
        description="Tokens of given prompts and beginnings that may be unanswered beyond what the "
        "KV cache holds; more are refused.",
    )
    token_budget: int = Field(
        default=2048,
        ge=1,
        description="Tokens of one step at most: decoding ones and prefill chunks.",
    )
    rows_at_once: int = Field(
        default=64,
        ge=1,
        description="Rows of logits looked at together for prompt log-probs, alternatives and "
        "penalties; bounds their "
        "memory, see scoring_bytes.",
    )
    prompt_logprob_bytes: int = Field(
        default=64 * 2**20,
        ge=0,
        description="Host memory for prompt log-probs of cached pages, which a prefix hit must "
        "else compute again.",
    )
    prefix_cache: bool = Field(
        default=True, description="Reuse KV pages of equal beginnings (same version and tenant)."
    )
    overlap: bool | None = Field(
        default=None,
        description="Launch a step before the tokens of the one before it are read; left out: on "
        "a GPU, not on a CPU.",
    )
    batch_invariant: bool = Field(
        default=False,
        description="Same bits for a request whatever shares its batch, however cut, cached or "
        "preempted. Refused where torch would serve, but for several tensor ranks on a CPU. Where "
        "rollouts are trained on, the trainer gives the same bits: refused on one rank of a CPU, "
        "and with another number of tensor ranks.",
    )
    burst_steps: int = Field(
        default=16,
        ge=1,
        description="Steps run between two looks at the event loop when nothing came out or in.",
    )
    c_kernels: bool = Field(
        default=True,
        description="On a CPU, run steps through C kernels where a C compiler is there; false "
        "always takes torch.",
    )
    tensor_ranks: int = Field(
        default=1,
        ge=1,
        description="Ranks over which each engine's model is cut. cluster.kind = 'pod': each a "
        "process, on a device that it shares with the trainer rank of the same number, or has for "
        "itself (cluster.colocated). 'ray': each beside a rank of the trainer, with "
        "parallel.tensor_ranks alike. `gyre serve` takes any number. All else uses one.",
    )
    sharded_sampling: bool = Field(
        default=False,
        description="On GPUs, let tensor ranks choose tokens from their parts of the logits inside "
        "the graphs; false: from gathered logits, which is as fast over NVLink. Other runners "
        "always choose from parts. Refused with batch_invariant, whose log-probs are of "
        "the whole vocabulary's blocks.",
    )
    step_deadline_s: float = Field(
        default=120.0,
        gt=0.0,
        description="Seconds that the host waits for a step on a GPU; then the engine fails.",
    )
    drain_deadline_s: float = Field(
        default=600.0,
        gt=0.0,
        description="Seconds that a commit with policy drain waits for requests in flight.",
    )
    journal: bool = Field(
        default=False,
        description="Keep every input of a run's engine under journal/ in the run folder. "
        "`gyre serve` refuses it; `gyre eval` and `gyre chat` keep none.",
    )
    disk_folder: str | None = Field(
        default=None,
        description="Folder for the disk tier of the engine's memory; without it there is none.",
    )

    @model_validator(mode="after")
    def check_budget(self) -> EngineConfig:
        if self.token_budget < self.max_running:
            raise ValueError(
                f"token_budget = {self.token_budget} is below max_running = {self.max_running}: "
                "each running completion needs one token of every step"
            )
        return self

    @model_validator(mode="after")
    def check_sampling(self) -> EngineConfig:
        if self.sharded_sampling and self.batch_invariant:
            raise ValueError(
                "sharded_sampling = true with batch_invariant = true: parts of the vocabulary are "
                "summed in other blocks than the trainer's; set one of them to false"
            )
        if self.sharded_sampling and self.tensor_ranks == 1:
            raise ValueError(
                "sharded_sampling = true with tensor_ranks = 1: one rank has all logits; set "
                "sharded_sampling = false, or tensor_ranks to 2 or more"
            )
        return self


def plan_engine(config: EngineConfig, *, device_type: str) -> EngineConfig:
    """Decide what the config leaves open: nothing is open afterwards. A CPU computes while it
    launches, so overlapping steps hide nothing there."""
    on_gpu = device_type == "cuda"
    return config.model_copy(
        update={
            "page_tokens": config.page_tokens or PAGE_TOKENS["cuda" if on_gpu else "cpu"],
            "overlap": on_gpu if config.overlap is None else config.overlap,
        }
    )


def engine_part(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Return what each rank of an engine holds of a model. ConfigError where it does not divide."""
    if (ranks := config.tensor_ranks) == 1:
        return spec
    try:
        return local_spec(spec, ranks)
    except ConfigError as error:
        raise ConfigError(
            f"engine.tensor_ranks = {ranks}: {error.message}", hint=error.hint
        ) from error


def plan_rates(
    config: EngineConfig, *, page_bytes: int, flops_per_token: int, device_type: str
) -> SwapRates:
    """Return what the choice between swapping and computing again goes by."""
    on_gpu = device_type == "cuda"
    return SwapRates(
        page_bytes=page_bytes,
        swap_bytes_per_s=config.swap_bytes_per_s or (5e10 if on_gpu else 5e9),
        prefill_tokens_per_s=config.prefill_tokens_per_s
        or (4e14 if on_gpu else 1e11) / flops_per_token,
    )


def plan_num_slots(kv_host_bytes: int, *, page_bytes: int) -> int:
    """Return the number of page slots in host memory; pure, so that the planner and the engine
    agree."""
    slots = kv_host_bytes // page_bytes
    if kv_host_bytes and not slots:
        raise ConfigError(
            f"engine.kv_host_bytes = {kv_host_bytes}: one KV page has {page_bytes} bytes",
            hint="give room for the pages of a few sequences, or 0 for no host pool",
        )
    return slots


def scoring_bytes(config: EngineConfig, *, vocab_size: int) -> int:
    """Return the most device memory that prompt log-probs, alternatives or penalties take beside a
    step's own logits: logits, float32 logits, 8-byte sort keys and what makes them, or counts, for
    `rows_at_once` rows. Pure."""
    return config.rows_at_once * vocab_size * 36


def plan_num_pages(
    config: EngineConfig, *, page_bytes: int, context_tokens: int, free_bytes: int
) -> int:
    """Return the number of KV pages; pure, so that the planner and the engine agree. At least 1."""
    if config.num_pages:
        return config.num_pages
    if config.kv_bytes:
        return max(1, config.kv_bytes // page_bytes)
    if config.kv_fraction:
        return max(1, int(free_bytes * config.kv_fraction) // page_bytes)
    pages_per_sequence = ceil_div(context_tokens, config.page_tokens)
    return max(1, min(config.max_running * pages_per_sequence, free_bytes // 4 // page_bytes))
