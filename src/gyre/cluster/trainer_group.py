"""Trainer group: many ranks as one PolicyTrainer. In: global batches. Out: the first rank's answer,
once all have answered. Implements PolicyTrainer.

Every rank gets every call with the same arguments (SPMD); a batch is sent once. The first rank that
fails ends the call with one error that names it. A watchdog looks at all ranks while a call runs,
and ends one that hangs with all their stacks. After either the group is of no use any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gyre.cluster.watchdog import GRACE_S, HINT, Watchdog, find_cause
from gyre.cluster.worker.endpoints import add_usage
from gyre.cluster.worker.rpc import CALLS, LOOK_S, LOSSES
from gyre.core.contracts import Cluster, WorkerHandle
from gyre.core.errors import InputError, RankError
from gyre.core.events import Emit
from gyre.core.liveness import StallLimit
from gyre.core.offers import Offer, RemoteTensors
from gyre.core.records import (
    Component,
    Evaluation,
    Manifest,
    StepReport,
    TensorEntry,
    Tier,
    TrainBatch,
    Usage,
    Which,
)
from gyre.weights.receive import join_offers
from gyre.weights.transports.publish import join_parts

BLOCK_BYTES = 256 << 20  # of tensors fetched at a time


class TrainerGroup:
    """`handles` by rank; each worker's object has a TrainerEndpoint as `trainer`."""

    def __init__(
        self,
        cluster: Cluster,
        handles: Sequence[WorkerHandle],
        *,
        emit: Emit,
        call_deadline_s: float,
        hang_s: float,
        registers_shards: bool = False,
        look_s: float = LOOK_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """Make a group of started ranks. With `registers_shards` they copy each version to where
        other processes read it; else engines beside the ranks read it in place."""
        self._registers_shards = registers_shards
        self._cluster = cluster
        self._handles = tuple(handles)
        self._emit = emit
        self._grace_s = grace_s
        self._calls = StallLimit(key=CALLS, seconds=call_deadline_s)
        self._watchdog = Watchdog(handles, emit=emit, hang_s=hang_s, look_s=look_s)
        self._failed: RankError | None = None
        self.version = 0  # the starter of the ranks sets what they resume from

    # PolicyTrainer
    # ----------------------------------------------------------------------------------------------

    async def step(self, batch: TrainBatch) -> StepReport:
        reports = await self.run(f"step {batch.step}", "trainer.step", self._cluster.share(batch))
        first = reports[0]
        for rank, report in enumerate(reports):
            mine, other = (first.version, first.num_updates), (report.version, report.num_updates)
            assert mine == other, (
                f"rank {rank} is at (version, updates) {other}, the first at {mine}"
            )
        self.version = first.version
        return first

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        share = self._cluster.share(batch)
        return (await self.run(f"evaluation of '{which}'", "trainer.evaluate", share, which))[0]

    async def register(self, *, epoch: int = 0) -> Offer:
        """Let every rank keep its offer for the engine beside it, or register its shards. No tensor
        comes here until it is fetched."""
        if self._registers_shards:
            parts = await self.run(
                "trainer.register_shards",
                "trainer.register_shards",
                epoch,
                stall_limit=self._calls,
            )
            return join_parts(self.version, epoch, parts)
        manifests = await self.run(
            "trainer.register", "trainer.register", epoch, stall_limit=self._calls
        )
        first = manifests[0]
        assert all(manifest.version == first.version for manifest in manifests), (
            "the ranks are at different versions"
        )
        return Offer(
            manifest=first,
            source=RemoteTensors(fetch=partial(self._fetch, first)),
            homes=frozenset(handle.name for handle in self._handles),
        )

    async def _fetch(self, manifest: Manifest) -> Offer:
        """Whole tensors of the version from the first rank, a block at a time."""
        version, found = manifest.version, []
        for names in _blocks(manifest.entries):
            [part] = await self.run(
                f"tensors of version {version}",
                "trainer.tensors",
                version,
                names,
                stall_limit=self._calls,
                num_ranks=1,
            )
            found.append(part)
        return join_offers(manifest, found)

    async def snapshot(self) -> Mapping[str, Any]:
        """Return the parts of all ranks, which go through this process; in a run the ranks write
        them themselves."""
        taken = await self.run("snapshot", "trainer.snapshot", stall_limit=self._calls)
        tensors = {key: part for own in taken for key, part in own["tensors"].items()}
        return {"tensors": tensors, "state": taken[0]["state"]}

    async def restore(self, state: Mapping[str, Any]) -> None:
        share = self._cluster.share(state)
        await self.run("restore", "trainer.restore", share, stall_limit=self._calls)
        self.version = int(state["state"]["version"])

    async def close(self) -> None:
        if self._failed is None:
            await self.run("close", "trainer.close", stall_limit=self._calls)

    # The ranks' components: as a MemoryTenant's, summed over the ranks
    # ----------------------------------------------------------------------------------------------

    async def components(self) -> Sequence[Component]:
        first, *others = await self.run("components", "trainer.components", stall_limit=self._calls)
        sizes = [{part.name: part.size_bytes for part in parts} for parts in others]
        return tuple(
            Component(
                name=part.name,
                size_bytes=part.size_bytes + sum(rank[part.name] for rank in sizes),
                tier=part.tier,
                tiers=part.tiers,
            )
            for part in first
        )

    async def move(self, names: Sequence[str], tier: Tier) -> None:
        await self.run("move", "trainer.move", tuple(names), tier, stall_limit=self._calls)

    async def measure(self) -> Mapping[str, Usage]:
        return add_usage(await self.run("measure", "trainer.measure", stall_limit=self._calls))

    # SPMD calls
    # ----------------------------------------------------------------------------------------------

    async def run(
        self,
        what: str,
        method: str,
        *args: Any,
        stall_limit: StallLimit | None = None,
        num_ranks: int | None = None,
    ) -> list[Any]:
        """Call `method` on every rank, or the first `num_ranks`, and return the answers by rank.
        RankError names the rank that failed or hangs; an error that a user can act on comes as it
        is. `stall_limit` is how long a call that runs no model may take without progress."""
        if self._failed is not None:
            raise self._failed
        handles = self._handles[:num_ranks]
        tasks = [asyncio.wrap_future(handle.begin(method, *args)) for handle in handles]
        calls = {handle.name: task for handle, task in zip(handles, tasks, strict=True)}
        try:
            await self._watchdog.settle(
                what, calls, stall_limit or self._watchdog.hang, grace_s=self._grace_s
            )
            ended = {rank: task for rank, task in enumerate(tasks) if not task.cancelled()}
            errors = {
                rank: error
                for rank, task in ended.items()
                if (error := task.exception()) is not None
            }
            if errors:
                self._raise_verdict(what, errors)
            return [task.result() for task in tasks]
        except RankError as error:
            # what one rank alone did not do in time may hold up its caller, and no other
            if num_ranks is None:
                self._failed = error
            raise

    def _raise_verdict(self, what: str, errors: Mapping[int, BaseException]) -> None:
        rank, error = find_cause(errors)
        handle = self._handles[rank]
        place = handle.place
        # which a rank that is well may say, of a version that is over
        if not isinstance(error, InputError):
            self._emit(
                "rank.failed",
                rank=rank,
                worker=handle.name,
                place=place,
                what=what,
                error=str(error)[:4000],
            )
        if not isinstance(error, (*LOSSES, RankError)):
            raise error
        raise RankError(
            f"{what}: rank {rank} ({handle.name}, {place}) failed: {error}", hint=HINT
        ) from error


def _blocks(entries: Sequence[TensorEntry]) -> Iterator[tuple[str, ...]]:
    """Names of tensors that are fetched together."""
    block: list[str] = []
    size_bytes = 0
    for entry in entries:
        if block and size_bytes + entry.size_bytes > BLOCK_BYTES:
            yield tuple(block)
            block, size_bytes = [], 0
        block.append(entry.name)
        size_bytes += entry.size_bytes
    if block:
        yield tuple(block)
