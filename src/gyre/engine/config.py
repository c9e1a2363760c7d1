"""Engine settings, `[engine]` in the TOML. Pure data; imports no torch. Callers: runconfig, planner, memory, native."""

from __future__ import annotations

from pydantic import Field, model_validator

from gyre.core.config import Section


class EngineConfig(Section):
    """The native rollout engine. KV memory is `num_pages`, else `kv_bytes`, else `kv_fraction` of what is free, else
    enough for `max_running` sequences of full context within a quarter of what is free."""

    page_tokens: int = Field(default=16, ge=1, le=1024, description="Tokens per KV page.")
    num_pages: int = Field(default=0, ge=0, description="KV pages; 0 derives them from kv_bytes.")
    kv_bytes: int = Field(
        default=0, ge=0, description="Bytes of device memory for KV pages; 0 derives them from kv_fraction."
    )
    kv_fraction: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Fraction of the free device memory for KV pages; 0 sizes them by max_running.",
    )
    max_running: int = Field(default=256, ge=1, description="Completions that hold KV pages at the same time, at most.")
    max_queued: int = Field(default=16_384, ge=1, description="Completions that wait, at most; more are refused.")
    token_budget: int = Field(
        default=2048, ge=1, description="Tokens of one step at most: decoding ones and prefill chunks."
    )
    prefix_cache: bool = Field(
        default=True, description="Reuse KV pages of equal beginnings (same version and tenant)."
    )
    burst_steps: int = Field(
        default=16, ge=1, description="Steps run between two looks at the event loop when nothing came out or in."
    )
    c_kernels: bool = Field(
        default=True,
        description="On a CPU, run steps through C kernels where a C compiler is there; false always takes torch.",
    )
    drain_deadline_s: float = Field(
        default=600.0, gt=0.0, description="Seconds that a commit with policy drain waits for requests in flight."
    )
    disk_folder: str | None = Field(
        default=None, description="Folder for the disk tier of the engine's memory; without it there is none."
    )

    @model_validator(mode="after")
    def check_budget(self) -> EngineConfig:
        if self.token_budget < self.max_running:
            raise ValueError(
                f"token_budget = {self.token_budget} is below max_running = {self.max_running}: "
                "each running completion needs one token of every step"
            )
        return self


def plan_num_pages(config: EngineConfig, *, page_bytes: int, context_tokens: int, free_bytes: int) -> int:
    """Return the number of KV pages; pure, so that the planner and the engine agree. At least 1."""
    if config.num_pages:
        return config.num_pages
    if config.kv_bytes:
        return max(1, config.kv_bytes // page_bytes)
    if config.kv_fraction:
        return max(1, int(free_bytes * config.kv_fraction) // page_bytes)
    pages_per_sequence = -(-context_tokens // config.page_tokens)
    return max(1, min(config.max_running * pages_per_sequence, free_bytes // 4 // page_bytes))
