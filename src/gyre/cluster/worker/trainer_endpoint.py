"""Trainer endpoint: a trainer rank, as a worker offers it to calls from outside. In: calls by plain
values and records. Out: records. It lives in the worker; a process without tensors needs none of
its imports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeVar

from gyre.core.offers import Offer
from gyre.core.records import (
    Component,
    Evaluation,
    Manifest,
    StepReport,
    Tier,
    TrainBatch,
    Usage,
    Which,
)
from gyre.observability.spans import ActivityClock
from gyre.weights.protocol import (
    FetchBegan,
    FetchEnded,
    PublisherMessage,
    PublisherState,
    Registered,
    Withdrawn,
)
from gyre.weights.receive import copy_out
from gyre.weights.transports.publish import PublishedPart

Result = TypeVar("Result")


class TrainerEndpoint:
    """One rank of the trainer. Every rank gets every call; the first one's answers stand for
    all."""

    def __init__(
        self,
        trainer: Any,
        *,
        rank: int,
        compute: Executor,
        publish: Callable[[Offer], PublishedPart] | None = None,
        withdraw: Callable[[], None] = lambda: None,
        activities: ActivityClock | None = None,
    ) -> None:
        """`trainer` is a PolicyTrainer and a MemoryTenant. `publish` copies this rank's part of an
        offer to where other processes read it, on the compute thread. `withdraw` ends what reads
        the tensors themselves, before they change or leave the device."""
        self.trainer = trainer
        self._rank = rank
        self._compute = compute
        self._activities = activities or ActivityClock()
        self._publish = publish
        self._end_reads = withdraw
        # calls that are its own
        self.snapshot = trainer.snapshot
        self.close = trainer.close
        self._state = PublisherState()
        self._offer: Offer | None = None
        self._may_write = asyncio.Event()

    async def step(self, batch: TrainBatch) -> StepReport:
        await self._withdraw()
        with self._activities.timing("train"):
            return await self.trainer.step(batch)

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation | None:
        with self._activities.timing("score"):
            found = await self.trainer.evaluate(batch, which)
        return found if self._rank == 0 else None

    async def register(self, epoch: int = 0) -> Manifest:
        """Keep the offer until the next step. The first rank returns what the version consists of,
        any other only which one it has."""
        self._offer = offer = await self.trainer.register(epoch=epoch)
        manifest = offer.manifest
        self._move_publisher(Registered(epoch=epoch, version=offer.version))
        return manifest if self._rank == 0 else replace(manifest, entries=())

    async def register_shards(self, epoch: int = 0) -> PublishedPart:
        """Copy this rank's part of the current version to where other processes read it. It stays
        there until the next but one is registered, whatever becomes of this process."""
        assert self._publish is not None, "this worker publishes no shards"
        publish = self._publish
        with self._activities.timing("convert"):
            offer = await self.trainer.register(epoch=epoch)
        return await self._on_compute(lambda: publish(offer))

    def offer(self, version: int) -> Offer:
        """Return the offer that was registered. InputError when the trainer is past that
        version."""
        self._state.refuse_fetch(version)
        assert self._offer is not None
        return self._offer

    async def tensors(self, version: int, names: Sequence[str]) -> Offer:
        """Return copies on the host of some of a version's tensors, with checksums. InputError when
        the trainer is past that version."""
        offer = self.offer(version)
        self._move_publisher(FetchBegan(version=version))
        copying = asyncio.ensure_future(self._on_compute(lambda: copy_out(offer, names)))
        # a caller that is cancelled does not end the copy
        copying.add_done_callback(lambda _: self._move_publisher(FetchEnded()))
        return await asyncio.shield(copying)

    async def _withdraw(self) -> None:
        """Refuse new fetches. Waits for copies that run on the compute thread, which the caller
        needs next."""
        self._offer = None
        self._move_publisher(Withdrawn())
        await self._on_compute(self._end_reads)
        await self._may_write.wait()

    def _move_publisher(self, message: PublisherMessage) -> None:
        self._state = self._state.after(message)
        if self._state.may_write:
            self._may_write.set()
        else:
            self._may_write.clear()

    async def restore(self, state: Mapping[str, Any]) -> None:
        await self._withdraw()
        await self.trainer.restore(state)

    async def components(self) -> tuple[Component, ...]:
        return await self._on_compute(lambda: tuple(self.trainer.components()))

    async def move(self, names: Sequence[str], tier: Tier) -> None:
        await self._on_compute(self._end_reads)
        await self._on_compute(lambda: self.trainer.move(names, tier))

    async def measure(self) -> Mapping[str, Usage]:
        return await self._on_compute(lambda: dict(self.trainer.measure()))

    async def _on_compute(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)
