"""checkpoint-engine 0.4.2 (MoonshotAI) between the trainer ranks and the engines of a pod. In: each
rank's named tensors. Out: its registered memory; its broadcast, in the engine's process too.
Callers: bench/pod_handover.py, bench/pod_engine.py.

Its broadcast is what it names its fastest and its default (`update` without ranks): each rank
copies its buckets to its GPU, NCCL sends them to all ranks, and each rank's engine copies them out
of a buffer that it opened by CUDA IPC. It may use the trainer's process group (`auto_pg=False`),
which is faster than to make one for each update, and it registers again in the pinned memory that
it has (`use_shared_memory_pool`). It needs pyzmq, loguru, pydantic, fastapi, httpx and uvicorn.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gyre.distributed.process_group import RankGroup

CHECKPOINT = "bench"
BUCKETS_GIB = (8.0, 4.0, 2.0)  # its default, and two that overlap more
UPDATE_S = 60.0


def find_peer(site: str, device: torch.device) -> tuple[str, str]:
    """Return its version and why it cannot run here, "" if it can."""
    if device.type != "cuda":
        return "", "it needs CUDA"
    try:
        _import(site, "ps")
        return importlib.metadata.version("checkpoint-engine"), ""
    except ImportError as error:
        return "", f"{error}: give --peer-site"


class PeerServer:
    """A rank's ParameterServer."""

    def __init__(self, group: RankGroup) -> None:
        module: Any = importlib.import_module("checkpoint_engine.ps")
        # a label of the host, for which it asks the network; this host may have none
        module.get_ip = lambda: "127.0.0.1"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = group.share(listener.getsockname()[1])[0]
        os.environ |= {"RANK": str(group.rank), "WORLD_SIZE": str(group.size)}
        self._rank = group.rank
        self._server: Any = module.ParameterServer(
            rank=group.rank,
            world_size=group.size,
            gpu_count=group.size,
            auto_pg=False,
            master_addr="127.0.0.1",
            master_port=port,
        )

    def register(self, tensors: dict[str, Tensor]) -> None:
        self._server.unregister_checkpoint(CHECKPOINT)  # its pinned memory stays
        self._server.register_checkpoint(
            CHECKPOINT, named_tensors=tensors, use_shared_memory_pool=True
        )

    def gather_metas(self) -> None:
        self._server.gather_metas(CHECKPOINT)

    def update(self, ask_engine: Callable[[str], Any]) -> None:
        """`ask_engine` gets the address at which this rank's engine finds the server."""
        self._server.update(
            CHECKPOINT,
            lambda paths: ask_engine(paths[self._rank][1]),
            timeout=timedelta(seconds=UPDATE_S),
        )

    @property
    def host_bytes(self) -> int:
        pool = self._server._get_memory_pool(CHECKPOINT)
        return sum(one.buffer.nbytes for one in pool)


@contextlib.contextmanager
def bucket_size(gib: float) -> Iterator[None]:
    """Set the largest bucket; a tensor that is larger has one of its own size."""
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = str(gib)
    yield
    del os.environ["PS_MAX_BUCKET_SIZE_GB"]


def receive_from_peer(
    path: str, own: dict[str, Tensor], device: torch.device, *, site: str
) -> None:
    """In the engine's process: copy every bucket over the engine's tensors."""

    @torch.no_grad()
    def copy_over(weights: list[tuple[str, Tensor]]) -> None:
        torch._foreach_copy_([own[name] for name, _ in weights], [value for _, value in weights])

    _import(site, "worker").update_weights_from_ipc(
        _context(), path, device_id=device.index or 0, run=copy_over
    )


@cache
def _context() -> Any:
    return importlib.import_module("zmq").Context()


def _import(site: str, name: str) -> Any:
    if site and site not in sys.path:
        sys.path.append(site)  # behind our own packages
    module = importlib.import_module(f"checkpoint_engine.{name}")
    importlib.import_module("loguru").logger.disable("checkpoint_engine")
    return module
