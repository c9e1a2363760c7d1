"""The states of a publisher and of a receiver: whatever the order of offers, swaps, failures and
way backs, an engine answers with a version that it has whole, and never with an older publisher's.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fakes.trainer import CountingTrainer
from gyre.cluster.worker.trainer_endpoint import TrainerEndpoint
from gyre.core.errors import InputError
from gyre.core.records import TrainBatch
from gyre.engine.weights import EngineWeights
from gyre.models.decoder import Decoder
from gyre.weights.protocol import FetchBegan, FetchEnded, PublisherState, Registered, Withdrawn
from offers import FailAt, Fault, offer_of
from trainer_cases import SPEC


class Receiving(RuleBasedStateMachine):
    """A real engine's weights beside a plain account of what it was offered and took."""

    def __init__(self) -> None:
        super().__init__()
        decoder = Decoder(SPEC, device=torch.device("cpu"), dtype=torch.float32)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.fill_(0.0)
        self.weights = EngineWeights(
            decoder,
            shared=False,
            version=0,
            device=torch.device("cpu"),
            emit=lambda kind, **fields: None,
        )
        self.shapes = {name: tensor.shape for name, tensor in self.weights.tensors.items()}
        self.numbers = 0.0  # that fill the version which serves
        self.served, self.epoch, self.dummy = 0, 0, False
        self.waiting: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None  # served before
        self.fills = 0.0

    @rule(version=st.integers(0, 4), epoch=st.integers(0, 3))
    def prepare(self, version: int, epoch: int) -> None:
        self.fills += 1.0
        tensors = {name: torch.full(shape, self.fills) for name, shape in self.shapes.items()}
        is_stale = epoch < self.epoch or (epoch == self.epoch and version < self.served)
        before = self.weights.state
        if is_stale:
            with pytest.raises(InputError, match="epoch"):
                self.weights.prepare(offer_of(version, tensors, epoch=epoch))
            assert self.weights.state == before
            return
        is_again = before.prepared is not None and (
            (before.prepared.epoch, before.prepared.version) == (epoch, version)
        )
        self.weights.prepare(offer_of(version, tensors, epoch=epoch))
        self.epoch = epoch
        if not is_again:
            self.waiting = version, self.fills

    @rule()
    def prepare_what_does_not_fit(self) -> None:
        with pytest.raises(InputError):
            self.weights.prepare(offer_of(9, {"other": torch.zeros(2)}, epoch=9))
        self.waiting = None  # given up before the new one is staged

    @precondition(lambda self: self.waiting)
    @rule()
    def commit(self) -> None:
        version, fill = self.waiting
        self.weights.commit(version)
        self._serve(version, fill)

    def _serve(self, version: int, fill: float) -> None:
        self.last = None if self.dummy else (self.served, self.numbers)
        self.served, self.numbers, self.dummy, self.waiting = version, fill, False, None

    @rule()
    def serve_the_last_version_again(self) -> None:
        """Under any epoch, but only the version before this one."""
        if self.last is None:
            with pytest.raises(InputError, match="no version served before"):
                self.weights.prepare(offer_of(9, {}), reverts=True)
            return
        version, fill = self.last
        tensors = {name: torch.full(shape, fill) for name, shape in self.shapes.items()}
        with pytest.raises(InputError, match=f"version {version} served before"):
            self.weights.prepare(offer_of(version + 1, tensors), reverts=True)
        self.weights.prepare(offer_of(version, tensors), reverts=True)
        self.weights.commit(version)
        self._serve(version, fill)

    @precondition(lambda self: self.waiting)
    @rule(number=st.integers(1, 60), torn=st.booleans())
    def commit_that_may_fail(self, number: int, torn: bool) -> None:
        version, fill = self.waiting
        try:
            with FailAt(number, torn=torn):
                self.weights.commit(version)
        except Fault:
            return
        self._serve(version, fill)

    @precondition(lambda self: self.waiting)
    @rule()
    def commit_whose_rest_fails(self) -> None:
        with pytest.raises(Fault), self.weights.swapping(self.waiting[0]):
            raise Fault

    @rule()
    def roll_back(self) -> None:
        self.weights.rollback()
        self.waiting = None

    @rule()
    def lose_the_numbers(self) -> None:
        self.weights.forget()
        self.dummy = True

    @invariant()
    def has_one_version_whole(self) -> None:
        state = self.weights.state
        assert (state.version, state.epoch) == (self.served, self.epoch)
        assert self.weights.is_dummy == self.dummy
        assert (state.prepared is not None) == (self.waiting is not None)
        for tensor in self.weights.tensors.values():
            assert torch.equal(tensor, torch.full_like(tensor, self.numbers))


TestReceiving = Receiving.TestCase
TestReceiving.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class Publishing(RuleBasedStateMachine):
    """What may be fetched is what was registered last and not withdrawn."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.version, self.offered = PublisherState(), 0, False
        self.reading = 0  # fetches that have begun and not ended

    @rule(epoch=st.integers(0, 3))
    def register(self, epoch: int) -> None:
        self.state = self.state.after(Registered(epoch=epoch, version=self.version))
        self.offered = True

    @rule()
    def withdraw(self) -> None:
        self.state = self.state.after(Withdrawn())
        self.offered = False

    @precondition(lambda self: self.state.may_write)
    @rule(updates=st.integers(0, 2))
    def step(self, updates: int) -> None:
        assert not self.reading and not self.offered
        self.version += updates

    @rule(version=st.integers(0, 6))
    def fetch(self, version: int) -> None:
        if self.offered and version == self.version:
            self.state = self.state.after(FetchBegan(version=version))
            self.reading += 1
            return
        with pytest.raises(InputError, match="past it" if not self.offered else "is at"):
            self.state.after(FetchBegan(version=version))

    @precondition(lambda self: self.reading)
    @rule()
    def end_fetch(self) -> None:
        self.state = self.state.after(FetchEnded())
        self.reading -= 1

    @invariant()
    def is_written_only_when_nobody_reads(self) -> None:
        assert self.state.may_write == (not self.offered and not self.reading)


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=60, deadline=None)


def test_a_step_waits_for_copies_that_have_begun_and_takes_no_more() -> None:
    async def main() -> None:
        gate, compute = threading.Event(), ThreadPoolExecutor(1)
        trainer = CountingTrainer(emit=lambda kind, **fields: None, version=4)
        seat = TrainerEndpoint(trainer, rank=0, compute=compute)
        manifest = await seat.register(7)
        assert (manifest.epoch, manifest.version) == (7, 4)
        compute.submit(gate.wait, 20)
        copy = asyncio.create_task(seat.tensors(4, ["version"]))
        await asyncio.sleep(0)
        step = asyncio.create_task(seat.step(TrainBatch(sequences=(), step=1)))
        await asyncio.sleep(0.02)
        assert not step.done()
        with pytest.raises(InputError, match="the trainer is past it"):
            await seat.tensors(4, ["version"])
        gate.set()
        found = await copy
        assert (found.manifest.epoch, found.version) == (7, 4)
        await step
        compute.shutdown()

    asyncio.run(main())
