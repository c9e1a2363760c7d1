"""Peer memory: what the tensor ranks of an engine write to each other on GPUs of one host. In: a
group, the decoder's sizes. Out: buffers for `kernels.gpu.peer_sums`; or none, with an event that
says why, and the sums are NCCL's then.

The memory is the driver's own, opened by CUDA IPC, and stays until the process ends: captured
graphs have its addresses.
"""

# S ranks, R rows

from __future__ import annotations

import torch

from gyre.core.errors import InputError, MemoryBudgetError
from gyre.core.events import Emit
from gyre.distributed.process_group import RankGroup
from gyre.engine.runners.gpu_work import PEER_ROWS
from gyre.kernels.gpu.peer_sums import PeerBuffers
from gyre.kernels.gpu.work_list import peer_bytes
from gyre.weights.transports.device.cuda_ipc import CudaStaging


def meet_peers(
    group: RankGroup, *, width: int, dtype: torch.dtype, emit: Emit
) -> PeerBuffers | None:
    """Allocate this rank's memory and open the others'. All ranks call it; either all have it or
    none has."""
    sizes = {"ranks": group.size, "rows": PEER_ROWS, "width": width}
    size_bytes, device = peer_bytes(**sizes, item_bytes=dtype.itemsize), group.device
    own: CudaStaging | None = None
    opened: dict[int, CudaStaging] = {}
    handle, reason = "", ""
    try:
        own = CudaStaging(device, size_bytes)
        own.bytes_N.zero_()
        torch.cuda.synchronize(device)
        handle = own.handle.hex()
    except (InputError, MemoryBudgetError) as error:
        reason = f"rank {group.rank}: {error.message}"
    told = group.share([handle, reason])
    reasons = [found for _, found in told if found]
    if not reasons:
        try:
            for rank, (handle, _) in enumerate(told):
                if rank != group.rank:
                    opened[rank] = CudaStaging(device, size_bytes, bytes.fromhex(handle))
        except (InputError, MemoryBudgetError) as error:
            reason = f"rank {group.rank}: {error.message}"
        reasons = [found for found in group.share(reason) if found]
    if reasons:
        for one in opened.values():
            one.close()
        group.barrier()
        if own is not None:
            own.close()
        emit("engine.nccl_sums", reason=reasons[0])
        return None
    assert own is not None
    places = [
        (own if rank == group.rank else opened[rank]).bytes_N.data_ptr()
        for rank in range(group.size)
    ]
    return PeerBuffers(
        rank=group.rank,
        places_S=torch.tensor(places, dtype=torch.int64, device=device),
        calls_R=torch.zeros(PEER_ROWS, dtype=torch.int32, device=device),
        dtype=dtype,
        **sizes,
    )
