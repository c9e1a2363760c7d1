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
from gyre.runconfig.run_config import RunConfig
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
        refuse_transport(
            settings.weight_transport,
            on_gpus=self._on_gpus,
            colocated=self._colocated,
            engine=config.engine.kind,
        )
        self.cluster = ProcessCluster(gpus=num_gpus, on_event=self._forward)
        self.num_workers = settings.num_workers or max(1, num_gpus)
        self._tensor_ranks = config.engine.tensor_ranks
        # left out, all GPUs are ranks', and engines with GPUs of their own need a number
        self.engine_workers = config.count_pod_engines(self.num_workers)
        engine_ranks = self.engine_workers * self._tensor_ranks
        wanted = (
            max(self.num_workers, engine_ranks)
            if self._colocated
            else self.num_workers + engine_ranks
        )
        if self._on_gpus and wanted > num_gpus:
            cut = f" of {self._tensor_ranks} ranks" if self._tensor_ranks > 1 else ""
            lower = "engine.tensor_ranks" if cut else "or set cluster.colocated = true"
            raise ConfigError(
                f"{self.num_workers} trainer ranks and {self.engine_workers} engines{cut} need "
                f"{wanted} GPUs, this host has {num_gpus}",
                hint=f"lower cluster.num_workers or cluster.engine_workers, {lower}",
            )

    @property
    def share(self) -> int:
        return self.num_workers + self.engine_workers * self._tensor_ranks

    def devices_of(self, rank: int | None, engine: int, tensor_rank: int = 0) -> WorkerDevices:
        if not self._on_gpus:
            return WorkerDevices()
        first = 0 if self._colocated else self.num_workers
        device = first + engine * self._tensor_ranks + tensor_rank
        return WorkerDevices(devices=(device,) if rank is None else (rank,))

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


def refuse_transport(transport: str, *, on_gpus: bool, colocated: bool, engine: str) -> None:
    """Raise ConfigError for a way of the weights that these devices or engines have not. Pure."""
    wrong = ""
    if transport == "cuda-ipc" and not on_gpus:
        wrong, hint = "this run is on a CPU", "run.device = 'cuda'"
    elif transport == "nccl" and on_gpus and colocated:
        wrong = "NCCL takes one process of a GPU, and with cluster.colocated a rank and an engine "
        wrong, hint = wrong + "share each", "cluster.colocated = false, or 'cuda-ipc'"
    elif transport != "shm" and engine == "vllm":
        wrong, hint = "vLLM's workers read shared memory", "engine.kind = 'native'"
    if wrong:
        raise ConfigError(
            f"cluster.weight_transport = '{transport}': {wrong}",
            hint=f"set cluster.weight_transport = 'shm', or {hint}",
        )
