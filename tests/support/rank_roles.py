"""Ranks of a served engine that something is wrong with, for tests in real processes. In: what
`build_served_rank` gets. Out: its object. Workers import it by name: "rank_roles:FUNCTION"."""

from __future__ import annotations

import asyncio
from typing import Any

from gyre.cluster.worker.server import Context
from gyre.distributed import init
from gyre.distributed.devices import DeviceRecord
from gyre.launch.serving import served_rank
from gyre.launch.serving.served_rank import ServedRank, build_served_rank


async def build_mixed(context: Context, *, memories: list[int], **fields: Any) -> ServedRank:
    """Ranks on GPUs of one name with so many GiB each."""
    size_bytes = memories[fields["tensor_rank"]] << 30
    record = DeviceRecord(host="here", name="H", capability="9.0", memory_bytes=size_bytes)
    init.read_device = lambda device: record
    return await build_served_rank(context, **fields)


async def build_torn(context: Context, **fields: Any) -> ServedRank:
    """Ranks that see other files in the folder."""
    rank = fields["tensor_rank"]
    served_rank.find_signature = lambda folder: (("config.json", rank, 1, 1),)
    return await build_served_rank(context, **fields)


class Late:
    async def meet(self, port: int) -> None:
        await asyncio.Event().wait()


async def build_late(context: Context, **fields: Any) -> ServedRank | Late:
    """Rank 1 does not come to the meeting."""
    return Late() if fields["tensor_rank"] == 1 else await build_served_rank(context, **fields)
