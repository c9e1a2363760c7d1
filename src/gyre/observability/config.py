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
    sample_groups_per_step: int = Field(
        default=4,
        ge=0,
        description="Prompt groups per step whose rollouts go to samples.jsonl; 0 keeps none.",
    )
    report: bool = Field(default=True, description="Write report.html when the run ends.")
