"""RankGroup: collectives over ranks. In: flat tensors. Out: sums, slices and concatenations over
the ranks, or a RankError that names collective, group and rank.

A group of one, `alone()`, does nothing and needs no torch.distributed. Every collective has the
group's timeout. `distributed.failure_detector` defines how a failing rank affects the others. Gloo
cannot be aborted, so on a CPU the waiting thread polls the failure detector. Inside `capturing`
collectives take the bare path of a graph capture: no look-up, no timing, no count on the way.
"""

# B bytes, N numbers of a flat tensor, S ranks of the group, T rows, E numbers of a row

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gyre.core.errors import RankError
from gyre.distributed.comm_stats import Captured, Kind, Traffic
from gyre.distributed.failure_detector import FailureDetector
from gyre.distributed.kv_store import KVStore, LocalKVStore
from gyre.distributed.point_to_point import PointToPoint

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# of `share`: what fits into a frame is shared by one collective; text's length first
FRAME_BYTES, HEAD_BYTES = 2048, 4
SLICE = timedelta(seconds=0.1)  # between two looks at the fault board
LOOK_S = 0.05  # between two looks for what ranks leave each other outside collectives
SOLO_SHARE = 0.8  # the rest is for ranks that came to the wait earlier
Found = TypeVar("Found")
LOST = ("gloo", "NCCL", "nccl", "ProcessGroup", "onnection", "imed out", "imeout", "abort")


class RankGroup:
    """`rank` of `size`. Every rank calls the same methods in the same order, with tensors of the
    same size."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
        board: FailureDetector | None = None,
        notes: KVStore | None = None,
        traffic: Traffic | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """Bind the ranks. `timeout_s`: longest wait for the others in one collective."""
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self.notes: KVStore = notes or LocalKVStore()
        self._group = process_group
        self._board = board
        self.traffic = traffic or Traffic()  # of all groups of this rank
        self._captured: Captured | None = None  # while a graph is captured

    @property
    def process_group(self) -> dist.ProcessGroup:
        assert self._group is not None, "one process alone has no process group"
        return self._group

    def part(self, name: str, process_group: dist.ProcessGroup) -> RankGroup:
        """Return some of these ranks as a subgroup with the same failure detector and key-value
        store."""
        return RankGroup(
            name=name,
            rank=process_group.rank(),
            size=process_group.size(),
            device=self.device,
            process_group=process_group,
            board=self._board,
            notes=self.notes,
            traffic=self.traffic,
            timeout_s=self.timeout_s,
        )

    @property
    def longest_solo_s(self) -> float:
        """Longest that one rank may wait by itself while others are in a collective, so that its
        own error precedes theirs."""
        return SOLO_SHARE * self.timeout_s

    def all_reduce(self, x_N: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Sum (or largest) over the ranks, in place."""
        if self.size > 1:
            self._run(
                "all_reduce",
                x_N,
                lambda: dist.all_reduce(x_N, OPS[op], group=self._group, async_op=True),
            )

    def count_sum(self, x_N: Tensor) -> None:
        """Count a sum over the ranks that a kernel makes in their memory, as `all_reduce` counts
        its own."""
        size_bytes = x_N.numel() * x_N.element_size()
        if self._captured is not None:
            self._captured.count("all_reduce", size_bytes, self.size)
            return
        self.check("all_reduce")
        self.traffic.count("all_reduce", size_bytes, self.size)

    def reduce_scatter(self, x_SN: Tensor) -> Tensor:
        """Sum all ranks' versions of this rank's slice of `x_SN` in place and return it; the rest
        becomes scratch."""
        return self.begin_reduce_scatter(x_SN)()

    def begin_reduce_scatter(self, x_SN: Tensor) -> Callable[[], Tensor]:
        """Start a `reduce_scatter`; the function that is returned waits for the slice. `x_SN` must
        not be read or written before."""
        step = len(x_SN) // self.size
        own_N = x_SN[self.rank * step : (self.rank + 1) * step]

        def start() -> dist.Work | None:
            # what gloo's own does, too, but a wait for that cannot be cut in slices
            if x_SN.device.type == "cpu":
                return dist.all_reduce(x_SN, group=self._group, async_op=True)
            return dist.reduce_scatter_tensor(own_N, x_SN, group=self._group, async_op=True)

        if self.size == 1:
            return lambda: own_N
        whole_bytes = x_SN.numel() * x_SN.element_size()
        wait = self._begin("reduce_scatter", whole_bytes, x_SN.device, start)

        def slice_when_summed() -> Tensor:
            wait()
            return own_N

        return slice_when_summed

    def exchange(self, x_SN: Tensor) -> Tensor:
        """Send one slice to each rank; return the slices that all ranks sent to this one, in rank
        order."""
        if self.size == 1:
            return x_SN
        out_SN = torch.empty_like(x_SN)
        start = functools.partial(
            dist.all_to_all_single, out_SN, x_SN, group=self._group, async_op=True
        )
        # whose half it is: gradients of layers (trainer.parallelize.fsdp)
        self._run("reduce_scatter", x_SN, start)
        return out_SN

    def all_to_all(self, x_TE: Tensor, sent_S: Sequence[int], received_S: Sequence[int]) -> Tensor:
        """Send the first `sent_S[0]` rows to rank 0, the next to rank 1 and so on. Return the rows
        that the ranks sent to this one, in rank order; `received_S` is how many, of
        `exchange_counts` where the rank doesn't know."""
        assert len(sent_S) == len(received_S) == self.size and sum(sent_S) == len(x_TE)
        if self.size == 1:
            return x_TE
        out_TE = x_TE.new_empty(sum(received_S), *x_TE.shape[1:])
        others = len(x_TE) - sent_S[self.rank]
        self._begin(
            "all_to_all",
            others * math.prod(x_TE.shape[1:]) * x_TE.element_size(),
            x_TE.device,
            lambda: dist.all_to_all_single(
                out_TE,
                x_TE.contiguous(),
                list(received_S),
                list(sent_S),
                group=self._group,
                async_op=True,
            ),
        )()
        return out_TE

    def exchange_counts(self, sent_S: Sequence[int]) -> list[int]:
        """Tell each rank how many rows it will get; return how many this one will. The host waits
        for them."""
        ones_S = [1] * self.size
        return self.all_to_all(torch.tensor(sent_S, device=self.device), ones_S, ones_S).tolist()

    def begin_point_to_point(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Start to send a tensor to each rank of `sends` and to fill one from each of `receives`.
        All start at once, so two ranks may send to each other; no other rank takes part. Return the
        wait function, to be called before the tensors are read or overwritten."""
        assert self.rank not in sends and self.rank not in receives
        if not sends and not receives:
            return lambda: None
        device = next(iter((*sends.values(), *receives.values()))).device

        def start() -> PointToPoint:
            ops = [
                dist.P2POp(dist.isend, x_N, group=self._group, group_peer=rank)
                for rank, x_N in sends.items()
            ]
            ops += [
                dist.P2POp(dist.irecv, x_N, group=self._group, group_peer=rank)
                for rank, x_N in receives.items()
            ]
            return PointToPoint(dist.batch_isend_irecv(ops), device)

        sent = sum(x_N.numel() * x_N.element_size() for x_N in sends.values())
        return self._begin("send", sent, device, start)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Captured]:
        """Let the block's collectives be captured in a graph. Yields what each replay sends, for
        `Traffic.replayed`. The step that replays the graph needs a deadline of its own. All ranks
        capture at the same point."""
        assert self._captured is None, f"group '{self.name}' is being captured"
        self.check("capture")
        self._captured = Captured()
        try:
            yield self._captured
        finally:
            self._captured = None

    def all_gather(self, x_SN: Tensor, own_N: Tensor) -> None:
        """Concatenate every rank's numbers; `own_N` may be this rank's slice of `x_SN`."""
        self.begin_all_gather(x_SN, own_N)()

    def begin_all_gather(self, x_SN: Tensor, own_N: Tensor) -> Callable[[], None]:
        """Start an asynchronous `all_gather` and return its wait function. Every rank must call
        that once before reading `x_SN` or overwriting `own_N`."""
        if self.size == 1:
            x_SN.copy_(own_N)
            return lambda: None
        return self._begin(
            "all_gather",
            x_SN.numel() * x_SN.element_size(),
            x_SN.device,
            lambda: dist.all_gather_into_tensor(x_SN, own_N, group=self._group, async_op=True),
        )

    def broadcast(self, x_N: Tensor, source: int) -> None:
        """Copy rank `source`'s numbers to all, in place."""
        if self.size > 1:
            self._run(
                "broadcast",
                x_N,
                lambda: dist.broadcast(x_N, group=self._group, group_src=source, async_op=True),
            )

    def barrier(self) -> None:
        """Block until every rank has arrived."""
        if self.size > 1:
            self.all_reduce(here := torch.zeros(1, device=self.device))
            here.cpu()  # on a GPU the collective itself is only queued

    def warm_up(self, *, largest: int = 4 << 20) -> None:
        """Run each collective once, small and large. NCCL allocates its buffers, some hundred
        megabytes, at the first one of a kind, so memory measurements should come later. All ranks
        call it."""
        for size in (1, largest):  # numbers per rank
            x_SN = torch.zeros(size * self.size, dtype=torch.float32, device=self.device)
            own_N = x_SN[self.rank * size : (self.rank + 1) * size]
            self.all_reduce(x_SN)
            self.all_gather(x_SN, own_N)
            self.reduce_scatter(x_SN)
            self.exchange(x_SN)
        self.barrier()

    def share(self, value: Any) -> list[Any]:
        """Gather every rank's JSON-able value, by rank. For small values."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        head = len(text).to_bytes(HEAD_BYTES, "big")
        frames = self._gather_bytes(head + text[: FRAME_BYTES - HEAD_BYTES], FRAME_BYTES)
        lengths = [int.from_bytes(frame[:HEAD_BYTES], "big") for frame in frames]
        texts = [frame[HEAD_BYTES:] for frame in frames]
        if max(lengths) > FRAME_BYTES - HEAD_BYTES:
            texts = self._gather_bytes(text, max(lengths))
        return [json.loads(found[:length]) for found, length in zip(texts, lengths, strict=True)]

    def _gather_bytes(self, own: bytes, size: int) -> list[bytes]:
        """Gather every rank's bytes, padded to `size`."""
        own_B = torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8).to(
            self.device
        )
        joined_B = torch.empty(size * self.size, dtype=torch.uint8, device=self.device)
        self.all_gather(joined_B, own_B)
        return [bytes(row_B.numpy()) for row_B in joined_B.cpu().view(self.size, size)]

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Guard an operation of all ranks: a failure ends it on all, with an error that names the
        rank."""
        if self._board is None:
            yield
            return
        self._board.enter()
        try:
            self.check(what)
            yield
            self.check(what)
        except BaseException as error:
            raise self._verdict(what, error) from error
        finally:
            self._board.leave()

    @property
    def is_broken(self) -> bool:
        return bool(self.fault)

    @property
    def fault(self) -> str:
        """Return why no collective may run any more, or an empty string."""
        return "" if self._board is None else self._board.broken

    def close(self) -> None:
        """Stop the failure detector."""
        if self._board is not None:
            self._board.close()

    def check(self, what: str) -> None:
        """Raise if a rank was lost. Later results are invalid."""
        if self._board is not None and self._board.broken:
            raise _Lost(f"{what}: {self._board.broken}")

    def look_for(
        self,
        what: str,
        look: Callable[[], Found | None],
        within_s: float,
        progress: Callable[[], None] = lambda: None,
    ) -> Found | None:
        """Poll `look` outside of collectives and return its result; None after `within_s`. Ends
        early when the group fails. Callable from any thread."""
        until = time.monotonic() + within_s
        while (found := look()) is None and time.monotonic() <= until:
            self.check(what)
            progress()
            time.sleep(LOOK_S)
        return found

    def _finish(self, work: dist.Work | PointToPoint | None) -> None:
        """Wait for a collective: on a GPU the stream waits; on a CPU this thread, until the group
        fails."""
        if work is None:
            return
        if self.device.type != "cpu":
            work.wait()
            return
        while not work.is_completed():
            self.check("collective")
            # over, or what broke it, which the next wait raises
            with contextlib.suppress(RuntimeError):
                work.wait(SLICE)
        work.wait()

    def _run(self, what: Kind, whole: Tensor, start: Callable[[], dist.Work | None]) -> None:
        """Run a collective. `whole`: the tensor that all ranks produce together."""
        self._begin(what, whole.numel() * whole.element_size(), whole.device, start)()

    def _begin(
        self,
        what: Kind,
        whole_bytes: int,
        device: torch.device,
        start: Callable[[], dist.Work | PointToPoint | None],
    ) -> Callable[[], None]:
        """Start a collective and return its wait function; on a GPU the compute stream waits."""
        if self._captured is not None:
            self._captured.count(what, whole_bytes, self.size)
            bare = start()

            def end() -> None:
                if bare is not None:
                    bare.wait()

            return end
        self.check(what)
        self.traffic.count(what, whole_bytes, self.size)
        with self._named(what):
            work = start()

        def wait() -> None:
            with self._named(what), self.traffic.waiting(device):
                self._finish(work)

        return wait

    @contextlib.contextmanager
    def _named(self, what: Kind) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise _Lost(
                f"{what} in group '{self.name}' ({self.size} ranks): {str(error).splitlines()[0]}"
            ) from error

    def _verdict(self, what: str, error: BaseException) -> BaseException:
        """Return the error to raise here: this rank's own, or one that names the rank at fault."""
        assert self._board is not None
        own = not _is_lost(error)
        text = f"{type(error).__name__}: {error}" if own else str(error)
        with contextlib.suppress(RankError):  # the store may be what was lost
            self._board.report(text[:2000], own=own)
        if own:
            return error
        culprit = self._board.blame()
        self._board.break_off(culprit)
        return RankError(
            f"{what} ended on rank {self.rank}: {culprit}",
            hint=f"start the ranks again from the last snapshot; this rank saw: {text[:300]}",
        )


class _Lost(RuntimeError):
    """A collective that did not complete."""


def _is_lost(error: BaseException) -> bool:
    """Return whether a collective failed, ours or one inside torch, so that the cause is
    elsewhere."""
    if isinstance(error, _Lost | dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in LOST)


def alone(device: torch.device | None = None) -> RankGroup:
    """Return the group of a single process."""
    return RankGroup(name="alone", rank=0, size=1, device=device or torch.device("cpu"))
