"""Broadcast group: a publisher and its readers, over gloo on CPUs and over NCCL on GPUs. In: a
seat. Out: broadcasts from the publisher, which is rank 0; an error by name within a deadline.

The group is not torch's default one, which the trainer's ranks have. It lasts until its members
change, or until it fails. NCCL takes one rank of a device.
"""

# N bytes of a bucket

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from gyre.core.errors import DeadlineError, SnapshotError

LOOPBACK = "127.0.0.1"
SLICE = timedelta(seconds=0.05)  # between two looks whether a member is lost
POLL_S = 5e-5  # between two looks at the device
MEETING_S = 2e-3  # between two looks for members that join
# NCCL's watchdog ends the process, so that the deadline must come well before
WATCHDOG_FACTOR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeat:
    """A member's place in a group."""

    name: str  # of the publisher's part
    generation: int  # differs whenever the members change
    rank: int
    size: int
    store_port: int  # of the publisher's store, on this host


class BroadcastGroup:
    """Collectives of the members, each in the same order. One thread uses it."""

    def __init__(
        self,
        seat: GroupSeat,
        device: torch.device,
        store: dist.Store,
        *,
        look: Callable[[], None],
        deadline_s: float,
    ) -> None:
        """Join; returns when all members have. `look` raises when one is lost. SnapshotError or
        DeadlineError."""
        self.seat = seat
        self._device = device
        with self._named():
            meeting = PrefixStore(f"gyre/weights/{seat.name}/{seat.generation}", store)
            # all are here before the backend connects them, which cannot be ended early
            meeting.set(f"here/{seat.rank}", "")
            wanted = [f"here/{rank}" for rank in range(seat.size)]
            ends_at = time.monotonic() + deadline_s
            while not meeting.check(wanted):
                look()
                if time.monotonic() > ends_at:
                    raise self._late("did not form", deadline_s)
                time.sleep(MEETING_S)
            self._backend = _open(meeting, seat, device, deadline_s)

    def begin(self, bytes_N: Tensor) -> Any:
        """Start to broadcast the publisher's bytes into the others'. Returns what `wait` takes."""
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        with self._named(), self._on_device():
            return self._backend.broadcast([bytes_N], options)

    def wait(self, work: Any, *, look: Callable[[], None], deadline_s: float) -> None:
        """Wait until a broadcast has ended here. `look` raises when a member is lost."""
        ends_at = time.monotonic() + deadline_s
        while not work.is_completed():
            look()
            if time.monotonic() > ends_at:
                raise self._late("has not passed on a bucket", deadline_s)
            if self._device.type == "cuda":
                time.sleep(POLL_S)
                continue
            # over, or what broke it, which the last wait raises
            with contextlib.suppress(RuntimeError):
                work.wait(SLICE)
        with self._named():
            work.wait(SLICE)

    def abort(self) -> None:
        """End every broadcast; others see that this member is gone."""
        with contextlib.suppress(RuntimeError):  # it may be broken already
            self._backend.abort()

    def _late(self, what: str, deadline_s: float) -> DeadlineError:
        return DeadlineError(
            f"the group of {self.seat.name} with {self.seat.size} members {what} within "
            f"{deadline_s:g} s",
            hint="a member stands still; the next version makes a new group",
        )

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise SnapshotError(
                f"the group of {self.seat.name} with {self.seat.size} members is broken: "
                f"{str(error).splitlines()[0]}",
                hint="a member was lost; the next version makes a new group",
            ) from error

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        if self._device.type == "cuda":
            return torch.cuda.device(self._device)
        return contextlib.nullcontext()


def _open(store: dist.Store, seat: GroupSeat, device: torch.device, deadline_s: float) -> Any:
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # by default it would resolve the host's name
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=deadline_s)
        return dist.ProcessGroupGloo(store, seat.rank, seat.size, options)
    given = dist.ProcessGroupNCCL.Options()
    given._timeout = timedelta(seconds=WATCHDOG_FACTOR * deadline_s)
    with torch.cuda.device(device):
        return dist.ProcessGroupNCCL(store, seat.rank, seat.size, given)
