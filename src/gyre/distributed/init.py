"""Start: how a process becomes a rank, and how it ceases to be one. In: rank, world size, the
address of a store, a back end, a device, a deadline. Out: the Group of all ranks.

A driver calls `hold_store()` and hands `store.port` to the ranks, with `child_environment()` in
their environment; each rank calls `join`. Groups that are started again need a new store or a new
`round_id`: addresses of dead ranks in an old one make the new ranks hang.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from gyre.core.errors import ConfigError, RankError
from gyre.distributed.devices import read_device, refuse_mixture
from gyre.distributed.failure_detector import FailureDetector
from gyre.distributed.kv_store import SharedKVStore
from gyre.distributed.process_group import RankGroup

GRACE_S = 5.0  # how long lost ranks look for one that has a cause to tell


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Which rank this process is, and of what."""

    rank: int
    world_size: int
    store_host: str
    store_port: int
    round_id: str  # differs whenever the ranks are started again
    backend: Literal["gloo", "nccl"]
    device: torch.device
    timeout_s: float  # of each collective


def child_environment(*, multicast: bool = False) -> dict[str, str]:
    """What must stand in the environment of a rank's process before it starts. NVLink multicast can
    put the GPUs of a shared host out of service, so it stays off unless the user asks for it by
    name."""
    if multicast:
        return {}
    return {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


def hold_store(host: str = "127.0.0.1", *, timeout_s: float = 60.0) -> TCPStore:
    """A store on a free port of the address `host`, in the process that starts the ranks; it must
    outlive them. It asks nobody who they are, so it must not be reached from elsewhere: left to
    itself it would listen on every address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            port, descriptor = listener.getsockname()[1], listener.detach()
    except OSError as error:
        raise ConfigError(
            f"the store that ranks meet at cannot listen on {host}: {error.strerror or error}",
            hint="this process must be on a machine that has the address by which the cluster "
            "knows it: see "
            "`ray start --node-ip-address`",
        ) from error
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        use_libuv=True,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=descriptor,  # the store closes it
    )


def join(seat: RankSpec) -> RankGroup:
    """Become a rank; returns when all ranks have. RankError when they have not by the deadline,
    ConfigError when they have different kinds of devices."""
    timeout = timedelta(seconds=seat.timeout_s)
    if seat.device.type == "cuda":
        torch.cuda.set_device(seat.device)
    try:
        dist.init_process_group(
            seat.backend,
            store=PrefixStore(f"gyre/{seat.round_id}/ranks", _connect(seat)),
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=timeout,
            device_id=seat.device if seat.backend == "nccl" else None,
        )
        group = dist.group.WORLD
        assert group is not None
        board_store = PrefixStore(f"gyre/{seat.round_id}/faults", _connect(seat))
        board = FailureDetector(
            board_store,
            rank=seat.rank,
            size=seat.world_size,
            grace_s=GRACE_S,
            abort=lambda: _abort(seat.device),
        )
        world = RankGroup(
            name="world",
            rank=seat.rank,
            size=seat.world_size,
            device=seat.device,
            process_group=group,
            board=board,
            notes=SharedKVStore(PrefixStore(f"gyre/{seat.round_id}/notes", _connect(seat))),
            timeout_s=seat.timeout_s,
        )
        world.barrier()
        refuse_mixture(world, read_device(seat.device))
    except ConfigError:
        leave(world)
        raise
    except RuntimeError as error:
        raise RankError(
            f"rank {seat.rank} of {seat.world_size} could not join round '{seat.round_id}' at "
            f"{seat.store_host}:{seat.store_port} within {seat.timeout_s:g} s: "
            f"{str(error).splitlines()[0]}",
            hint="check that all ranks were started with one address, world size and round, and "
            "that none died early",
        ) from error
    return world


def leave(group: RankGroup) -> None:
    """Cease to be a rank. Needs no other rank to be alive."""
    group.close()
    if dist.is_initialized():
        if group.is_broken:
            _abort(group.device)
        dist.destroy_process_group()


def _connect(seat: RankSpec) -> TCPStore:
    return TCPStore(
        seat.store_host,
        seat.store_port,
        is_master=False,
        timeout=timedelta(seconds=seat.timeout_s),
        use_libuv=True,
    )


def _abort(device: torch.device) -> None:
    """End every collective of this process that waits on a GPU; over gloo whoever waits sees to it
    (distributed.process_group)."""
    if device.type == "cpu":
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        group._get_backend(device).abort()
