"""Beside a trainer: an engine's rank behind the first, in a process whose one compute thread works
for a trainer's rank as well. In: what rank 0 sends. Out: the same steps, and a MemoryTenant whose
components move as those of rank 0 do.

It plays what comes as soon as the thread is free. Messages about phases wait for this rank's own
phase: a move, until this rank's memory manager wants it, too, and rank 0's word that it is in the
phase. So each ledger decides about its own device, and all decide alike or the engine ends by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import NoReturn

from gyre.core.errors import RankError
from gyre.core.records import Component, Phase, Tier, Usage
from gyre.distributed.process_group import RankGroup
from gyre.engine.core_worker import CoreWorker
from gyre.engine.scheduler.journal import MoveComponent, Start
from gyre.engine.tensor_group import (
    WHAT,
    EndCore,
    EnteredPhase,
    EntryStream,
    Message,
    OwnOffer,
    cause_of,
    play_message,
)

# for the next message, before the thread is given back; between two looks whether rank 0 is there
LINGER_S, LOOK_S = 2e-3, 0.1
PhaseMessage = MoveComponent | EnteredPhase


class RankBesideTrainer:
    """MemoryTenant. `listen`, `close` and what is private to them run on the event loop, all else
    on the compute thread."""

    def __init__(
        self,
        stream: EntryStream,
        worker: CoreWorker,
        group: RankGroup,
        *,
        compute: Executor,
        own_offer: OwnOffer,
    ) -> None:
        """`own_offer` returns a version of the trainer in this process."""
        self._stream = stream
        self._worker = worker
        self._group = group
        self._compute = compute
        self._own_offer = own_offer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: PhaseMessage | None = None
        self._life = ExitStack()  # of a core, which the failure detector watches
        self._error: RankError | None = None  # why nothing is played any more
        self._closed = False

    # -- on the event loop

    def listen(self) -> None:
        """Play what comes from now on."""
        self._loop = asyncio.get_running_loop()
        self._arm()

    async def close(self) -> None:
        """Follow rank 0 to the end of its core, and close the stream."""
        if self._loop is not None:
            self._closed = True
            self._loop.remove_reader(self._stream.fileno())
        await asyncio.get_running_loop().run_in_executor(self._compute, self._finish)

    def _arm(self) -> None:
        if self._loop is None or self._closed or self._error is not None or self._held is not None:
            return
        self._loop.add_reader(self._stream.fileno(), self._hear)

    def _hear(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._stream.fileno())
        self._compute.submit(self._play_waiting)

    # -- on the compute thread

    def start(self) -> None:
        """Play until the core is there. RankError names what rank 0 did instead."""
        self._until("its core's start", lambda message: isinstance(message, Start))

    def entered(self, phase: Phase, step: int) -> None:
        """Play all that rank 0 did until it was in the phase as well. RankError where it moves what
        this rank did not."""
        there = EnteredPhase(phase=phase, step=step)
        self._until(_words(there), lambda message: message == there)

    def components(self) -> Sequence[Component]:
        return self._worker.memory.components()

    def measure(self) -> Mapping[str, Usage]:
        return self._worker.memory.measure()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        """Move components as rank 0 does, at the same point of its journal. RankError where it does
        something else."""
        for name in names:
            if self._worker.memory.tier(name) != tier:
                wanted = MoveComponent(component=name, tier=tier)
                self._until(_words(wanted), _is_move(name, tier))

    def _play_waiting(self) -> None:
        """Play what is there, and what comes in a moment."""
        if self._error is None and not self._closed:
            try:
                while self._held is None and (message := self._next(LINGER_S)) is not None:
                    if isinstance(message, PhaseMessage):
                        self._held = message
                    else:
                        self._play(message)
            except RankError:
                return  # the next call of this rank raises it
        self._rearm()

    def _until(self, wanted: str, is_wanted: Callable[[Message], bool]) -> None:
        """Play all messages up to one, and that. RankError where rank 0 comes to another of those
        that wait, or to none within the group's timeout."""
        if self._error is not None:
            raise self._error
        ends_at = time.monotonic() + self._group.timeout_s
        while True:
            message, self._held = self._held or self._next(LOOK_S), None
            if message is None:
                if time.monotonic() > ends_at:
                    limit_s = self._group.timeout_s
                    self._fail(RankError(f"rank 0 did not come to {wanted} in {limit_s:g} s"))
            elif is_wanted(message):
                self._play(message)
                break
            elif isinstance(message, PhaseMessage):
                self._fail(RankError(f"it comes to {wanted}, and rank 0 to {_words(message)}"))
            else:
                self._play(message)
        self._rearm()

    def _next(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none comes within the time."""
        try:
            self._group.check(WHAT)
            return self._stream.receive(timeout_s)
        except EOFError as ended:
            self._fail(RankError(f"{ended}"))
        except Exception as error:  # noqa: BLE001  the failure detector names the rank at fault
            self._fail(error)

    def _play(self, message: Message) -> None:
        try:
            if isinstance(message, Start):
                self._life.close()  # of the core before it
                self._life.enter_context(self._group.guard(WHAT))
            play_message(message, self._worker, self._group, self._own_offer)
            if isinstance(message, EndCore):
                self._life.close()
        except Exception as error:  # noqa: BLE001  by its type the guard recognizes a lost rank
            self._fail(cause_of(error))

    def _fail(self, error: BaseException) -> NoReturn:
        """End the steps on all ranks, and raise why. The core cannot go on by itself."""
        life, self._life = self._life, ExitStack()
        try:
            life.__exit__(type(error), error, error.__traceback__)
        except RankError as named:
            error = named
        self._error = RankError(
            f"rank {self._group.rank} of the engine plays no more: {error}",
            hint=getattr(error, "hint", "") or "the logs of the engine's ranks say why",
        )
        raise self._error from error

    def _finish(self) -> None:
        """Play to the end of the core, and close."""
        try:
            if self._error is None and self._worker.core is not None:
                self._until("the end of its core", lambda message: isinstance(message, EndCore))
        finally:
            self._life.close()
            self._stream.close()

    def _rearm(self) -> None:
        if self._loop is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._arm)


def _is_move(name: str, tier: Tier) -> Callable[[Message], bool]:
    return lambda message: (
        isinstance(message, MoveComponent) and (message.component, message.tier) == (name, tier)
    )


def _words(message: PhaseMessage) -> str:
    if isinstance(message, MoveComponent):
        return f"the move of {message.component} to tier '{message.tier}'"
    return f"phase {message.phase} of step {message.step}"
