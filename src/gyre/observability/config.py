"""Config of `observe`: what a run writes beside events.jsonl. In: the [observe] table. Out: an
ObserveConfig."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gyre.core.config import Section


class ObserveConfig(Section):
    """Options for what is recorded and where it is shown."""

    tensorboard: bool = Field(
        default=False, description="Write TensorBoard files to RUN/tensorboard (extra: track)."
    )
    wandb: Literal["off", "offline", "online"] = Field(
        default="off",
        description="Send curves to Weights & Biases, or keep them in RUN/wandb to sync later "
        "(extra: track).",
    )
    wandb_without_login: Literal["error", "offline"] = Field(
        default="error",
        description='What wandb = "online" does where nobody is logged in: refuse the run, or '
        "keep its curves offline.",
    )
    wandb_project: str = Field(default="gyre", description="Project that W&B runs appear under.")
    prometheus: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port on loopback where the run answers /metrics in Prometheus' text format, "
        "as long as it lasts; 0 for none.",
    )
    otlp_endpoint: str = Field(
        default="",
        description="Collector that gets a trace of each step by OTLP over HTTP, such as "
        '"http://127.0.0.1:4318"; empty for none (extra: trace).',
    )
    sample_groups_per_step: int = Field(
        default=4,
        ge=0,
        description="Prompt groups per step whose rollouts go to samples.jsonl; 0 keeps none.",
    )
    report: bool = Field(default=True, description="Write report.html when the run ends.")
