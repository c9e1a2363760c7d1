"""Trainer group: many ranks as one PolicyTrainer. In: global batches. Out: the first rank's answer, once all have
answered. Implements PolicyTrainer and MemoryTenant. Caller: loop, through wire.

Every rank gets every call with the same arguments (SPMD); a batch is sent once. The first rank that fails ends the call
with one error that names it. A watchdog looks at all ranks while a call runs: when none of those that are still at it
makes progress for `hang_s`, the call ends with all their stacks. After either the group is of no use any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any

from gyre.cluster.pulse import Pulse
from gyre.cluster.seats import add_usage
from gyre.cluster.waiting import LOSSES, arrive, arrive_now
from gyre.core.contracts import Cluster, WorkerHandle
from gyre.core.errors import RankError, WorkerLate, WorkerLost
from gyre.core.records import Component, Evaluation, Manifest, StepReport, Tier, TrainBatch, Usage, Which

LOOK_S = 1.0  # between two looks at the ranks
STACKS_S = 5.0  # longest wait for a rank's stacks
GRACE_S = 8.0  # how long the other ranks have to say what they saw, once one has failed
BLOCK_BYTES = 256 << 20  # of tensors fetched at a time
HINT = "cluster.max_restarts lets the run restart from its newest snapshot; events.jsonl has what came before"


class VersionTensors(Mapping[str, Any]):
    """A version's tensors, fetched from the first rank when they are looked at. `homes` are the workers whose own
    trainer rank has them, so that nothing need be fetched there."""

    def __init__(self, manifest: Manifest, homes: frozenset[str], fetch: Callable[[Sequence[str]], list[Any]]) -> None:
        self.manifest, self.homes, self._fetch = manifest, homes, fetch

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        return self._fetch([name])[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self.manifest.entries)

    def fetch_all(self) -> dict[str, Any]:
        """All tensors, a block at a time. Blocks."""
        found: dict[str, Any] = {}
        block: list[str] = []
        size_bytes = 0
        for entry in self.manifest.entries:
            if block and size_bytes + entry.size_bytes > BLOCK_BYTES:
                found |= zip(block, self._fetch(block), strict=True)
                block, size_bytes = [], 0
            block.append(entry.name)
            size_bytes += entry.size_bytes
        return found | dict(zip(block, self._fetch(block), strict=True))

    def _names(self) -> list[str]:
        return [entry.name for entry in self.manifest.entries]


class TrainerGroup:
    """`handles` by rank; each worker's object has a TrainerSeat as `trainer`."""

    def __init__(
        self,
        cluster: Cluster,
        handles: Sequence[WorkerHandle],
        *,
        emit: Callable[..., None],
        call_deadline_s: float,
        hang_s: float,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
        look_s: float = LOOK_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._cluster, self._handles, self._emit, self._clock = cluster, tuple(handles), emit, clock
        self._deadline_s, self._hang_s = call_deadline_s, hang_s
        self._look_s, self._grace_s = look_s, grace_s
        self._failed: RankError | None = None
        self.version = version

    # PolicyTrainer ---------------------------------------------------------------------------------------------------

    async def step(self, batch: TrainBatch) -> StepReport:
        reports = await self.run(f"step {batch.step}", "trainer.step", self._cluster.share(batch))
        first = reports[0]
        for rank, report in enumerate(reports):
            mine, other = (first.version, first.num_updates), (report.version, report.num_updates)
            assert mine == other, f"rank {rank} is at (version, updates) {other}, the first at {mine}"
        self.version = first.version
        return first

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        share = self._cluster.share(batch)
        return (await self.run(f"evaluation of '{which}'", "trainer.evaluate", share, which))[0]

    def register(self) -> tuple[Manifest, VersionTensors]:
        """Blocks; not for the event loop's thread unless the workers are other processes. The tensors are fetched when
        they are looked at."""
        manifests = self._now("trainer.register")
        assert len({manifest.version for manifest in manifests}) == 1, "the ranks are at different versions"
        homes = frozenset(handle.name for handle in self._handles)
        return manifests[0], VersionTensors(manifests[0], homes, self._fetcher(manifests[0].version))

    def snapshot(self) -> Mapping[str, Any]:
        """Blocks. The ranks' parts go through this process; `wire` has the ranks write them themselves."""
        taken = self._now("trainer.snapshot")
        tensors = {key: part for own in taken for key, part in own["tensors"].items()}
        return {"tensors": tensors, "state": taken[0]["state"]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Blocks, as `snapshot`."""
        self._now("trainer.restore", self._cluster.share(state))
        self.version = int(state["state"]["version"])

    async def close(self) -> None:
        if self._failed is None:
            await self.run("close", "trainer.close", patience_s=self._deadline_s)

    # MemoryTenant: sums over the ranks -------------------------------------------------------------------------------

    def components(self) -> Sequence[Component]:
        first, *others = self._now("trainer.components")
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

    def move(self, names: Sequence[str], tier: Tier) -> None:
        self._now("trainer.move", tuple(names), tier)

    def measure(self) -> Mapping[str, Usage]:
        return add_usage(self._now("trainer.measure"))

    # SPMD calls ------------------------------------------------------------------------------------------------------

    async def run(self, what: str, method: str, *args: Any, patience_s: float | None = None) -> list[Any]:
        """Call `method` on every rank and return the answers by rank. RankError names the rank that failed or hangs;
        an error that a user can act on comes as it is. `patience_s` is for calls that run no model, and so show no
        progress: how long one may take."""
        if self._failed is not None:
            raise self._failed
        tasks = [asyncio.wrap_future(handle.begin(method, *args)) for handle in self._handles]
        guard = asyncio.create_task(self._guard(what, tasks, patience_s or self._hang_s))
        try:
            while True:
                open_ = [task for task in tasks if not task.done()]
                if any(task.exception() is not None for task in tasks if task.done()):
                    if open_:
                        await asyncio.wait(open_, timeout=self._grace_s)
                    self._raise_verdict(what, tasks)
                if not open_:
                    return [task.result() for task in tasks]
                await asyncio.wait([*open_, guard], return_when=asyncio.FIRST_COMPLETED)
                if guard.done():
                    guard.result()
        except RankError as error:
            self._failed = error
            raise
        finally:
            guard.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(guard, *tasks, return_exceptions=True)

    def _raise_verdict(self, what: str, tasks: Sequence[asyncio.Future[Any]]) -> None:
        errors = {
            rank: error
            for rank, task in enumerate(tasks)
            if task.done() and not task.cancelled() and (error := task.exception()) is not None
        }
        rank, error = find_cause(errors)
        handle = self._handles[rank]
        self._emit("rank.failed", rank=rank, worker=handle.name, place=handle.place, what=what, error=str(error)[:4000])
        if not isinstance(error, (*LOSSES, RankError)):
            raise error
        raise RankError(f"{what}: rank {rank} ({handle.name}, {handle.place}) failed: {error}", hint=HINT) from error

    async def _guard(self, what: str, tasks: Sequence[asyncio.Future[Any]], patience_s: float) -> None:
        """Raise when no rank that is still at it makes progress. Waits for: looks, each with a deadline."""
        names = tuple(handle.name for handle in self._handles)
        pulse = Pulse(names, self._clock())
        while True:
            await asyncio.sleep(self._look_s)
            pulse.observe(await self._look(tasks), self._clock())
            busy = {handle.name for handle, task in zip(self._handles, tasks, strict=True) if not task.done()}
            still = {name: s for name, s in pulse.still_s(self._clock()).items() if name in busy}
            if still and min(still.values()) >= patience_s:
                await self._raise_hang(what, still)

    async def _look(self, tasks: Sequence[asyncio.Future[Any]]) -> dict[str, int]:
        async def one(handle: WorkerHandle) -> int | None:
            try:
                return await arrive(handle.look("pulse"), handle, "pulse", LOOK_S)
            except LOSSES:
                return None

        busy = [handle for handle, task in zip(self._handles, tasks, strict=True) if not task.done()]
        counts = await asyncio.gather(*(one(handle) for handle in busy))
        return {handle.name: count for handle, count in zip(busy, counts, strict=True) if count is not None}

    async def _raise_hang(self, what: str, still: Mapping[str, float]) -> None:
        async def one(handle: WorkerHandle) -> str:
            try:
                return await arrive(handle.look("stacks"), handle, "stacks", STACKS_S)
            except LOSSES as error:
                return f"no stacks: {error}"

        stacks = dict(
            zip(
                (handle.name for handle in self._handles),
                await asyncio.gather(*(one(handle) for handle in self._handles)),
                strict=True,
            )
        )
        rank = next(rank for rank, handle in enumerate(self._handles) if handle.name in still)
        silent = [name for name, text in stacks.items() if text.startswith("no stacks")]
        about = f"{', '.join(silent)} answers nothing" if silent else "all ranks that are at it stand still"
        self._emit("rank.hung", what=what, still_s=dict(still), stacks=stacks)
        waits = ", ".join(f"{name} for {seconds:.0f} s" for name, seconds in still.items())
        told = "\n\n".join(f"== {name}\n{text}" for name, text in stacks.items())
        first = self._handles[rank]
        raise RankError(
            f"{what} hangs: no progress on {waits}; {about} (rank {rank} is {first.name}, {first.place})\n\n{told}",
            hint=f"cluster.hang_s = {self._hang_s:g} is how long a rank may stand still. {HINT}",
        )

    def _now(self, method: str, *args: Any) -> list[Any]:
        """Call every rank at once and block until all have answered."""
        if self._failed is not None:
            raise self._failed
        futures = [handle.begin(method, *args) for handle in self._handles]
        done, late = wait(futures, self._deadline_s, return_when=FIRST_EXCEPTION)
        if late and any(future.exception() is not None for future in done):
            wait(late, self._grace_s)  # a rank that failed holds up those that wait for it
        results, errors = [], {}
        for rank, (handle, future) in enumerate(zip(self._handles, futures, strict=True)):
            try:
                results.append(arrive_now(future, handle, method, 0.0))
            except Exception as error:  # noqa: BLE001  the first one is raised
                errors[rank] = error
        if not errors:
            return results
        rank, error = find_cause(errors)
        if not isinstance(error, (*LOSSES, RankError)):
            raise error
        handle = self._handles[rank]
        self._failed = RankError(f"{method}: rank {rank} ({handle.name}, {handle.place}) failed: {error}", hint=HINT)
        raise self._failed from error

    def _fetcher(self, version: int) -> Callable[[Sequence[str]], list[Any]]:
        first = self._handles[0]

        def fetch(names: Sequence[str]) -> list[Any]:
            future = first.begin("trainer.tensors", version, tuple(names))
            try:
                return arrive_now(future, first, "trainer.tensors", self._deadline_s)
            except LOSSES as error:  # of the rank, not of whoever wants the tensors
                what = f"tensors of version {version}"
                raise RankError(f"{what}: rank 0 ({first.name}, {first.place}) failed: {error}", hint=HINT) from error

        return fetch


def find_cause(errors: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """Of the ranks' errors the one that began it: a rank that is gone, then one with an error of its own, then one that
    only saw another rank fail, then one that has not answered; the lowest rank among equals."""

    def order(item: tuple[int, BaseException]) -> tuple[int, int]:
        rank, error = item
        if isinstance(error, WorkerLost):
            return 0, rank
        if isinstance(error, WorkerLate):
            return 3, rank
        return (2 if isinstance(error, RankError) else 1), rank

    return min(errors.items(), key=order)
