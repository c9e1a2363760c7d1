"""A version is on all engines or on none: two engines in processes of their own read it out of shared
memory, and one of them finds it damaged after the other has committed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster_roles import HERE
from engine_cases import ask, make_decoder, tensors_of, tokens_of, versions_of
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.process_cluster import ProcessCluster
from gyre.core.chunks import complete
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import SnapshotError
from gyre.core.offers import Offer
from gyre.core.records import RoleSpec, TokenChunk
from gyre.weights.transports.slot_header import HEADER_BYTES
from vllm_sidecar import register, registered

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="shared memory is a folder on Linux"
)
NAMES = ("engine-0", "engine-1")
DEADLINE_S = 30.0
Events = list[tuple[str, str, Mapping[str, Any]]]


async def start(cluster: ProcessCluster, gate: Path) -> list[WorkerHandle]:
    """The second engine begins its commit of version 2 once `gate` is there."""
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    specs = [
        RoleSpec(
            name=name,
            builder="gated_role:gated_engine",
            arguments={"gate": str(gate), "version": 2} if name == NAMES[1] else {},
            environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for name in NAMES
    ]
    return list(await asyncio.gather(*(cluster.start(spec) for spec in specs)))


def flip(offer: Offer) -> None:
    """Change bytes in the middle of a registered version."""
    (address,) = offer.source.parts[0].addresses  # type: ignore[union-attr]
    slot = Path("/dev/shm") / address.rpartition("/")[2]
    with slot.open("r+b") as file:
        file.seek(HEADER_BYTES + (slot.stat().st_size - HEADER_BYTES) // 2)
        file.write(b"\x5a" * 64)


async def answers(pool: EnginePool) -> dict[str, tuple[list[list[int]], set[int]]]:
    """The tokens and versions that each engine answers the same requests with, asked by itself."""
    found = {}
    for name in NAMES:
        member, requests = pool.members[name], ask(2)
        await member.ask("engine.submit", tuple(requests))
        chunks: list[TokenChunk] = []
        while sum(chunk.finish is not None for chunk in chunks) < len(requests):
            news = await member.ask("engine.poll")
            chunks += news.chunks
        results = [
            (complete([chunk for chunk in chunks if chunk.request_id == request.request_id]),)
            for request in requests
        ]
        found[name] = tokens_of(results), versions_of(results)
    return found


def test_both_serve_the_last_version_after_one_cannot_commit(tmp_path: Path) -> None:
    events: Events = []

    def note(worker: str, kind: str, **fields: Any) -> None:
        events.append((worker, kind, fields))

    def committed(version: int) -> list[str]:
        return [
            worker
            for worker, kind, fields in events
            if kind == "engine.committed" and fields["version"] == version
        ]

    async def main() -> None:
        cluster = ProcessCluster(gpus=0, on_event=note)
        pool = EnginePool(
            cluster,
            await start(cluster, tmp_path / "gate"),
            settings=PoolSettings(call_deadline_s=DEADLINE_S, hang_s=DEADLINE_S, progress_tokens=4),
            emit=lambda kind, **fields: note("pool", kind, **fields),
        )
        try:
            with registered() as store:
                await pool.start(dummy=True)
                await pool.prepare(register(store, tensors_of(make_decoder(1)), 1))
                await pool.commit(1, policy="drain")
                before = await answers(pool)
                offer = register(store, tensors_of(make_decoder(2)), 2)
                await pool.prepare(offer)
                committing = asyncio.create_task(pool.commit(2, policy="drain"))
                while committed(2) != [NAMES[0]]:
                    await asyncio.sleep(0.01)
                flip(offer)
                (tmp_path / "gate").touch()
                with pytest.raises(SnapshotError, match="checksum"):
                    await committing
                assert await answers(pool) == before
                assert pool.version == 1
                await pool.prepare(register(store, tensors_of(make_decoder(3)), 3))
                await pool.commit(3, policy="drain")
                after = await answers(pool)
        finally:
            await pool.close()
            await cluster.close()
        assert [before[name][1] for name in NAMES] == [{1}, {1}]
        assert [after[name][1] for name in NAMES] == [{3}, {3}]
        assert before[NAMES[0]] == before[NAMES[1]] and after[NAMES[0]] == after[NAMES[1]]

    asyncio.run(asyncio.wait_for(main(), 90))
    reverted = [fields for _, kind, fields in events if kind == "engine.reverted"]
    assert reverted == [{"engine": NAMES[0], "version": 1}]
    assert not [kind for _, kind, _ in events if kind == "engine.lost"]
