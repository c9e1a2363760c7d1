"""Init: joins a process to the group of ranks and leaves it. In: rank, world size, the address of a
store, a backend, a device, a timeout. Out: the RankGroup of all ranks.

A driver calls `hold_store()` and passes `store.port` to the ranks, with `child_environment()` of
`distributed.environment` in their environment. Each rank calls `join`. A restarted group needs a
new store or a new `round_id`: stale addresses of dead ranks would make the new ranks hang.
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
    """Rank of this process, the world size and the rendezvous."""

    rank: int
    world_size: int
    store_host: str
    store_port: int
    round_id: str  # differs whenever the ranks are started again
    backend: Literal["gloo", "nccl"]
    device: torch.device
    timeout_s: float  # of each collective


def hold_store(host: str = "127.0.0.1", *, timeout_s: float = 60.0) -> TCPStore:
    """Create a store on a free port of the address `host`, in the process that starts the ranks; it
    must outlive them.

    The store has no authentication, so it must not be reachable from elsewhere. By default it would
    listen on every address.
    """
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
    """Join the ranks; returns when all have. Raises RankError on a timeout, and ConfigError when
    the kinds of devices differ."""
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
        board = FailureDetector(
            SharedKVStore(PrefixStore(f"gyre/{seat.round_id}/faults", _connect(seat))),
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


def join_neighbors(seat: RankSpec, size: int, *, name: str) -> RankGroup:
    """Join `size` neighboring ranks, with a failure detector of their own: it counts operations
    that the other ranks have no part in. All ranks call it, after `join`. RankError on a
    timeout."""
    first = seat.rank - seat.rank % size
    prefix = f"gyre/{seat.round_id}/{name}-{first}"
    try:
        groups = [
            dist.new_group([*range(start, start + size)])
            for start in range(0, seat.world_size, size)
        ]
        process_group = groups[first // size]
        assert isinstance(process_group, dist.ProcessGroup)
        neighbors = RankGroup(
            name=name,
            rank=seat.rank - first,
            size=size,
            device=seat.device,
            process_group=process_group,
            board=FailureDetector(
                SharedKVStore(PrefixStore(f"{prefix}/faults", _connect(seat))),
                rank=seat.rank - first,
                size=size,
                grace_s=GRACE_S,
                abort=lambda: _abort(seat.device),
            ),
            notes=SharedKVStore(PrefixStore(f"{prefix}/notes", _connect(seat))),
            timeout_s=seat.timeout_s,
        )
        if seat.device.type == "cuda":  # before memory is measured
            neighbors.warm_up()
    except RuntimeError as error:
        raise RankError(
            f"rank {seat.rank} could not join ranks {first} to {first + size - 1} ({name}): "
            f"{str(error).splitlines()[0]}",
            hint="one of them has died, or hangs; its log says why",
        ) from error
    return neighbors


def leave(group: RankGroup) -> None:
    """Leave the ranks. Needs no other rank to be alive."""
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
    """Abort every collective of this process on a GPU. Over gloo the waiting thread aborts itself
    (distributed.process_group)."""
    if device.type == "cpu":
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        group._get_backend(device).abort()
