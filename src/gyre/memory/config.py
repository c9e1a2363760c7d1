"""Config of `[memory]`: budgets, tiers and how a component leaves a phase. In: TOML. Out:
MemoryConfig. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from gyre.core.config import Section

Leave = Literal["park", "disk", "destroy"]
Residency = Literal["resident", "spill", "phase"]


class MemoryConfig(Section):
    """Memory budgets, and where components go between the phases that need them."""

    device_budget_bytes: PositiveInt | Literal["auto"] = "auto"
    """Bytes on the device for all components and a phase's working memory; "auto" is decided from
    what is free."""

    host_budget_bytes: NonNegativeInt | Literal["auto"] = "auto"
    """Bytes of host memory (pinned on a GPU) for parked components; on a CPU this comes on top of
    the device budget."""

    disk_budget_bytes: NonNegativeInt | Literal["auto"] = "auto"
    """Bytes under disk_folder for components saved there."""

    disk_folder: str = ""
    """Folder of the disk tier; relative paths lie in the run folder; "" means that there is no disk
    tier."""

    residency: Residency | Literal["auto"] = "auto"
    """resident: nothing ever leaves the device; spill: only what must make room leaves, the least
    needed first; phase: each component leaves when its phase ends; auto: resident if everything
    fits at once, otherwise spill, or phase in a pod whose processes share devices."""

    leave: dict[str, Leave] = Field(default_factory=dict)
    """How a component leaves the device, by name or by owner ("engine", "actor.optimizer"): park
    keeps it in host memory, disk saves it to a file, destroy frees it and has its owner build it
    again. Default: park."""

    component_tolerance_bytes: NonNegativeInt = 0
    """Bytes by which a component's measured storages may differ from the ledger."""

    unowned_tolerance_bytes: NonNegativeInt = 128 << 20
    """GPU: bytes that torch may hold at a phase boundary beyond the components and what was there
    at the start: each thread that multiplies matrices has a workspace, 32 MiB on Hopper."""

    outside_tolerance_bytes: NonNegativeInt = 1 << 30
    """GPU: bytes by which device memory outside torch (context, kernels, NCCL, other processes) and
    fragments inside it may grow since the start."""

    release_deadline_s: PositiveFloat = 20.0
    """GPU: seconds that device memory may take to come back after a phase change."""
