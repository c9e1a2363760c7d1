"""Cluster config: on which devices a run works, and what happens when one fails. In: the TOML table
`[cluster]`. Out: a frozen section. No torch, no ray here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gyre.core.config import Section
from gyre.distributed.config import RendezvousConfig


class ClusterConfig(Section):
    """Where the trainer ranks and the engines of a training run live. Evaluation, chat and plans
    use one device."""

    kind: Literal["inline", "ray", "pod"] = "inline"
    """inline: all in this process, on one device. ray: one worker process per device, each with a
    trainer rank and an engine; needs the extra `cluster`. pod: trainer ranks and engines are
    processes of their own on this host; weights go through shared memory."""
    num_workers: int = Field(default=0, ge=0)
    """Trainer ranks, each in a worker; with kind = "ray" an engine is beside each. 0 takes one per
    GPU of the cluster, or one on a CPU."""
    engine_workers: int = Field(default=0, ge=0)
    """Workers with an engine alone. ray: further ones, on devices of their own; their weights go
    through host memory. pod: all engines; 0 takes as many as trainer ranks, or with
    engine.tensor_ranks as their devices take."""
    colocated: bool = True
    """pod: trainer ranks and engines share devices, one after the other, each rank of an engine the
    device of one trainer rank. false: each has a device of its own."""
    weight_transport: Literal["shm", "cuda-ipc", "nccl"] = "shm"
    """pod: how weights get from the ranks to the engines. shm: through shared memory. The others go
    from device to device. cuda-ipc: each engine reads staging buckets of each rank's GPU, which are
    filled from shared memory once the rank's weights have left; for shared devices and for others
    of the host that are peers. nccl: each rank broadcasts to all engines (over gloo on a CPU); on
    GPUs it needs colocated = false. Every version is in shared memory too, for an engine that comes
    late, and for one that loses its way to a device."""
    weight_dtype: Literal["same", "fp8"] = "same"
    """pod: the number format in which a version goes to the engines. same: theirs. fp8: quantized
    as it is registered; not there yet, and refused."""
    members_address: str = ""
    """pod: "host:port" at which engines of other hosts join the run (gyre sidecar join); they read
    weights at the next port. Port 0 takes free ones. Empty: none may join. Neither is encrypted:
    listen on a private network. Members run the native engine, also beside vLLM."""
    address: str = ""
    """Of a running Ray cluster, "host:port" or "auto"; without it Ray is started here, on loopback
    alone."""
    cpus_per_worker: float = Field(default=1.0, gt=0.0)
    """Cores that each worker asks Ray for."""
    object_store_bytes: int = Field(default=512 << 20, ge=100 << 20)
    """Shared memory for batches on their way, of a Ray that is started here."""
    max_restarts: int = Field(default=2, ge=0)
    """How often a run restarts by itself from its newest snapshot after a rank died, hung or
    raised; and how often each engine worker is started again."""
    start_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest wait for a worker to start: its process and the group of all ranks."""
    call_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest wait for a worker's answer about weights, memory or requests, which come without
    signs of progress."""
    hang_s: float = Field(default=45.0, gt=0.0)
    """Seconds without progress after which a rank or an engine with work counts as hung. So does
    one whose process does not answer in a call. Five things are progress. They are a layer's
    forward pass, a piece of offloaded state updated or waited for (trainer.offload_deadline_s),
    and a part of a trace written. The others are a look whether a snapshot is copied
    (snapshot.deadline_s), and a block of a snapshot written between two steps. Long steps are
    fine; each of these, and an update of state on the device, must be shorter."""
    stall_s: float = Field(default=10.0, gt=0.0)
    """Seconds without progress after which a served engine with work is not ready, and gets no new
    requests; at cluster.hang_s it is lost."""
    routing: Literal["prefix", "least_tokens", "round_robin"] = "prefix"
    """How a served request finds its engine. prefix: the one with the least to compute, where what
    it likely has in its prefix cache counts off. least_tokens: by the tokens still to be computed
    at most. round_robin: each in turn. A training run always takes least_tokens, so that runs
    repeat to the bit."""
    return_s: float = Field(default=30.0, ge=0.0)
    """Seconds in which a served engine that stood still for cluster.stall_s, or was lost, gets back
    its whole share of new requests; each time soon after another doubles them, up to 8 times."""
    progress_tokens: int = Field(default=64, ge=0)
    """Tokens between an engine's reports of a rollout, from which another engine resumes it if the
    first is lost; 0 reports at its end only."""
    rendezvous: RendezvousConfig = Field(default_factory=RendezvousConfig)
    """pod: where its processes meet."""
    multicast: bool = False
    """Let NCCL use NVLink multicast. It can put the GPUs of a shared host out of service."""

    @model_validator(mode="after")
    def refuse_workers_inline(self) -> ClusterConfig:
        if self.kind == "inline" and (self.num_workers > 1 or self.engine_workers or self.address):
            raise ValueError(
                "kind = 'inline' works on one device in this process: give kind = 'ray' for "
                "num_workers, "
                "engine_workers or address"
            )
        if self.kind == "pod" and self.address:
            raise ValueError("kind = 'pod' works on this host: leave address out")
        changed = not self.colocated or self.rendezvous != RendezvousConfig()
        if changed and self.kind != "pod":
            key = "rendezvous" if self.colocated else "colocated"
            raise ValueError(f"kind = '{self.kind}' does not use {key}: give kind = 'pod'")
        if self.weight_transport != "shm" and self.kind != "pod":
            raise ValueError(
                f"kind = '{self.kind}' does not use weight_transport: give kind = 'pod'"
            )
        if self.weight_dtype == "fp8":
            raise ValueError(
                "weight_dtype = 'fp8': weights are not quantized on the way to engines yet, which "
                "take weight_dtype = 'same': leave it out"
            )
        if self.members_address and self.kind != "pod":
            raise ValueError(
                f"kind = '{self.kind}' has no members of other hosts: give kind = 'pod' for "
                "members_address"
            )
        return self
