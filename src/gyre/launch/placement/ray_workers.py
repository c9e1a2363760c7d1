"""Ray workers: Ray, and how many workers of what kind a run has there. In: the config's
`[cluster]`. Out: a Fleet, for WorkerPlacement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cluster.ray_cluster import RayCluster
from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.launch.factories import Facts
from gyre.launch.placement.pod_metadata import PodMetadata
from gyre.launch.placement.worker_placement import LOOPBACK, WorkerDevices
from gyre.planner.plan import Dtype
from gyre.runconfig.run_config import RunConfig


class RayWorkers:
    """Ray, and how many workers of what kind a run has there."""

    ranks_have_engines = True

    def __init__(self, config: RunConfig) -> None:
        """Start or join Ray. ConfigError when it cannot hold the workers."""
        _refuse_unsupported(config)
        self.config = config.cluster
        self._emit: Emit = lambda kind, **fields: None
        self.cluster = RayCluster(config.cluster, on_event=self._forward)
        self.num_workers = config.cluster.num_workers or max(1, self.cluster.num_gpus)
        self.on_gpus = config.run.device == "cuda" or (
            config.run.device == "auto" and self.cluster.num_gpus > 0
        )
        self._check_room()

    @property
    def host(self) -> str:
        """Return the address at which workers reach this process."""
        return self.cluster.address if self.config.address else LOOPBACK

    @property
    def engine_workers(self) -> int:
        return self.config.engine_workers

    @property
    def share(self) -> int:
        """Workers on one machine."""
        return math.ceil((self.num_workers + self.config.engine_workers) / self.cluster.num_nodes)

    def devices_of(self, rank: int | None, engine: int, tensor_rank: int = 0) -> WorkerDevices:
        return WorkerDevices(gpus=1.0 if self.on_gpus else 0.0)

    def open_members(
        self, folder: Path, facts: Facts, dtype: Dtype, metadata: PodMetadata | None
    ) -> None:
        return None

    async def stop_workers(self) -> None:
        await self.cluster.stop_all()

    def forward_to(self, emit: Emit) -> None:
        """Send the workers' events to another log from now on."""
        self._emit = emit

    async def close(self) -> None:
        await self.cluster.close()

    def _forward(self, worker: str, kind: str, **fields: Any) -> None:
        self._emit(kind, worker=worker, **fields)

    def _check_room(self) -> None:
        wanted = self.num_workers + self.config.engine_workers
        cores, gpus = wanted * self.config.cpus_per_worker, wanted if self.on_gpus else 0
        if cores > self.cluster.num_cpus or gpus > self.cluster.num_gpus:
            offered = f"{self.cluster.num_cpus:g} cores and {self.cluster.num_gpus} GPUs"
            self.cluster.leave()
            raise ConfigError(
                f"{wanted} workers need {cores:g} cores and {gpus} GPUs, the cluster offers "
                f"{offered}",
                hint="lower cluster.num_workers, cluster.engine_workers or cluster.cpus_per_worker",
            )
        if self.on_gpus and (
            mixture := find_mixed_types(self.cluster.gpus_by_type, self.num_workers)
        ):
            self.cluster.leave()
            raise ConfigError(
                f"{self.num_workers} trainer ranks need GPUs of one type, the cluster has "
                f"{mixture}",
                hint="set cluster.num_workers to what one type has, or join a cluster of one type",
            )


def find_mixed_types(gpus_by_type: Mapping[str, int], num_ranks: int) -> str:
    """Return what the cluster has of each GPU type, when no type has enough for all ranks; "" when
    one has. Pure. Ray may still place ranks on two types where one has enough: then they refuse it
    themselves when they join."""
    if len(gpus_by_type) < 2 or max(gpus_by_type.values()) >= num_ranks:
        return ""
    return ", ".join(f"{count} × {kind}" for kind, count in sorted(gpus_by_type.items()))


def _refuse_unsupported(config: RunConfig) -> None:
    zero, _ = config.parallel.of("actor")
    if config.cluster.engine_workers and zero >= 2:
        raise ConfigError(
            f"cluster.engine_workers = {config.cluster.engine_workers} with parallel.zero = "
            f"{zero}: "
            "shards reach only engines beside a trainer rank",
            hint="set parallel.zero = 1, or cluster.engine_workers = 0",
        )
