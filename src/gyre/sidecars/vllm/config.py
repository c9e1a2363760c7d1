"""vLLM settings, `[engine.vllm]` in the TOML. Pure data; imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gyre.core.config import Section

DuringTraining = Literal["keep", "sleep", "terminate"]
# arguments of vLLM's AsyncEngineArgs that may be given; the others are Gyre's to set
EXTRA_ARGUMENTS = (
    "attention_backend",
    "block_size",
    "compilation_config",
    "cpu_offload_gb",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "max_num_seqs",
    "seed",
    "tensor_parallel_size",
)


class VllmConfig(Section):
    """vLLM as the rollout engine, with `engine.kind = "vllm"`.

    KV memory is `kv_bytes` where it is set, and what `gpu_memory_utilization` leaves otherwise.
    """

    environment: str = Field(
        default="",
        description="Folder of vLLM's environment; empty: the one that `gyre sidecar install vllm` "
        "makes.",
    )
    gpu_memory_utilization: float = Field(
        default=0.8,
        gt=0.0,
        le=1.0,
        description="Fraction of the device's memory that vLLM takes, its weights included, where "
        "kv_bytes is not given.",
    )
    kv_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of KV memory; 0: by gpu_memory_utilization, and then no start begins "
        "before its phase.",
    )
    enforce_eager: bool = Field(
        default=False, description="Run without CUDA graphs and compilation: starts sooner."
    )
    during_training: DuringTraining = Field(
        default="terminate",
        description="Its device memory while the trainer trains: kept; given back by sleep level "
        "2, which a CPU build has not; given back by the end of vLLM.",
    )
    start_deadline_s: float = Field(
        default=600.0, gt=0.0, description="Seconds until vLLM must have started."
    )
    update_deadline_s: float = Field(
        default=300.0, gt=0.0, description="Seconds that loading a version may take."
    )
    data_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of private memory of each of its processes at most; 0: no limit.",
    )
    extra: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description=f"Further arguments of vLLM's engine: {', '.join(EXTRA_ARGUMENTS)}.",
    )

    @model_validator(mode="after")
    def check_extra(self) -> VllmConfig:
        unknown = sorted(set(self.extra) - set(EXTRA_ARGUMENTS))
        if unknown:
            raise ValueError(
                f"engine.vllm.extra has {', '.join(unknown)}; it takes "
                f"{', '.join(EXTRA_ARGUMENTS)}. The other arguments of vLLM follow from the config"
            )
        return self
