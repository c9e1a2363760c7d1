"""Pod workers: the sidecars of a pod on this host. In: the config's `[cluster]`. Out: a Fleet, for
WorkerPlacement.

Trainer ranks and engines are processes of their own, over the same devices or over devices of their
own. Weights go from one to the other by registered shards in shared memory. Nothing crosses by
pickle.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from gyre.cluster.process_cluster import ProcessCluster
from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.launch.factories import Facts
from gyre.launch.placement.pod_members import PodMembers
from gyre.launch.placement.pod_metadata import PodMetadata
from gyre.launch.placement.worker_placement import LOOPBACK, WorkerDevices, name_run
from gyre.planner.plan import Dtype
from gyre.runconfig import RunConfig
from gyre.weights.transports.addresses import SHARED_MEMORY
from gyre.weights.transports.shared_memory import remove_leftovers


class PodWorkers:
    """Processes of this host, and how many of what kind a run has."""

    ranks_have_engines = False
    host = LOOPBACK

    def __init__(self, config: RunConfig) -> None:
        """ConfigError when this host has too few GPUs."""
        settings = config.cluster
        if settings.rendezvous.kind == "etcd" and importlib.util.find_spec("httpx2") is None:
            raise ConfigError(
                "cluster.rendezvous.kind = 'etcd': the HTTP client for etcd is not installed",
                hint="pip install 'gyre-rl[pod]'",
            )
        self._config = config
        num_gpus = torch.cuda.device_count() if config.run.device != "cpu" else 0
        self._on_gpus = num_gpus > 0
        self._colocated = settings.colocated
        self._emit: Emit = lambda kind, **fields: None
        self.cluster = ProcessCluster(gpus=num_gpus, on_event=self._forward)
        self.num_workers = settings.num_workers or max(1, num_gpus)
        self.engine_workers = settings.engine_workers or self.num_workers
        wanted = (
            max(self.num_workers, self.engine_workers)
            if self._colocated
            else self.num_workers + self.engine_workers
        )
        if self._on_gpus and wanted > num_gpus:
            raise ConfigError(
                f"{self.num_workers} trainer ranks and {self.engine_workers} engines need "
                f"{wanted} GPUs, this host has {num_gpus}",
                hint="lower cluster.num_workers or cluster.engine_workers, or set "
                "cluster.colocated = true",
            )

    @property
    def share(self) -> int:
        return self.num_workers + self.engine_workers

    def devices_of(self, rank: int | None, engine: int) -> WorkerDevices:
        if not self._on_gpus:
            return WorkerDevices()
        first = 0 if self._colocated else self.num_workers
        return WorkerDevices(devices=(first + engine,) if rank is None else (rank,))

    def forward_to(self, emit: Emit) -> None:
        self._emit = emit

    def open_members(
        self, folder: Path, facts: Facts, dtype: Dtype, metadata: PodMetadata | None
    ) -> PodMembers | None:
        if not self._config.cluster.members_address:
            return None
        return PodMembers(
            self._config,
            folder,
            facts,
            dtype,
            cluster=self.cluster,
            run_id=name_run(folder),
            emit=self._emit,
            metadata=metadata,
        )

    async def stop_workers(self) -> None:
        """End the sidecars, and remove what they have left in shared memory."""
        await self.cluster.close()
        remove_leftovers(SHARED_MEMORY, keep_run="", emit=self._emit)

    async def close(self) -> None:
        await self.cluster.close()

    def _forward(self, worker: str, kind: str, **fields: Any) -> None:
        self._emit(kind, worker=worker, **fields)
