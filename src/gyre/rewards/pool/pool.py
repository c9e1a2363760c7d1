"""Pool: worker processes that are killed on time. In: tickets (one check each). Out: every ticket
with its result.

A worker is lost when it is silent over the limit, or dead. The first check without a result is to
blame; the worker is replaced. A worker may be killed from outside (SIGKILL, as by the out-of-memory
killer, or SIGTERM). The first time that costs no result: the check that it was at is retried. What
comes from a worker and is no result on the check that it is at is blamed on that check. A worker in
which rewards leave too much memory or too many processes is replaced. Waits and their owners: a
check by its part's limit, a call by its deadline, the workers' start by the call's deadline. Only
the loop's thread touches a pool. Events: reward.worker_replaced, reward.retried,
reward.fork_server_replaced, reward.fork_server_killed, reward.output_dropped.

    run ──▶ batches waiting ──▶ idle worker ──▶ results one by one ──▶ the call is done
                   ▲                 │ lost
                   └── what is left ─┘
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gyre.core.errors import DeadlineError
from gyre.core.events import Emit
from gyre.core.rounding import ceil_div
from gyre.rewards.checks import QUICK
from gyre.rewards.fork_server.connection import Ended
from gyre.rewards.messages import OUTCOMES, READY, CheckResult, Job, Setup, decode_result, frame
from gyre.rewards.pool.channel import Channel, WorkerForkServer

_MOST_CHECKS = 128  # per batch, so that no worker sits on work that another could do
_MOST_TRIES = 3  # of a check while the fork server dies
_MOST_FALSE_STARTS = 6
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)  # ends that a check seldom brings about itself
_TOKEN_BYTES = 16
LOG_BYTES_PER_WORKER = 1 << 20  # of what rewards print


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One part of one rollout, to be judged."""

    rollout: int  # index in the call
    part: int  # index in the setup's parts
    item: bytes  # encoded Item
    result: CheckResult | None = None
    tries: int = 0
    retried: bool = False  # its worker was killed from outside once


@dataclass(slots=True, kw_only=True, eq=False)
class PoolCall:
    """The tickets of one `run`; `done` is set when each has a result."""

    tickets: list[Ticket]
    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """What one worker gets at a time."""

    call: PoolCall
    tickets: list[Ticket]
    next: int = 0  # the first ticket without a result

    @property
    def current(self) -> Ticket:
        return self.tickets[self.next]


class Worker:
    """One worker process as the pool sees it."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.channel: Channel | None = None
        self.ready = False
        self.batch: Batch | None = None
        self.token = b""  # of the job that it has
        self.heard_s = 0.0  # loop time of the last result
        self.timer: asyncio.TimerHandle | None = None


class Pool:
    """Workers of one scorer. Processes start when it is made; `close` leaves none."""

    def __init__(
        self,
        setup: Setup,
        limits_s: Sequence[float],
        *,
        num_workers: int,
        emit: Emit,
        log: Path | None = None,
    ) -> None:
        """`log` takes what rewards print, up to LOG_BYTES_PER_WORKER for each worker; None is
        stderr."""
        self._setup = frame(setup)
        self._kinds = [part["kind"] for part in setup.parts]
        self._names_of_parts = [part.get("name") or part["kind"] for part in setup.parts]
        self._libraries = libraries(setup)
        self._limits_s = limits_s
        self._num_workers = num_workers
        self._emit = emit
        self._calls: list[PoolCall] = []
        self._waiting: deque[Batch] = deque()
        self._workers: dict[int, Worker] = {}
        self._names = 0
        self._false_starts = 0  # processes that ended before they were ready, one after the other
        self._closed = False
        self._fault: DeadlineError | None = None  # why there will be no results any more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log = log
        kept_bytes = log.stat().st_size if log is not None and log.is_file() else 0
        self._log_bytes = kept_bytes + num_workers * LOG_BYTES_PER_WORKER
        self.server = self._start_server()

    def _start_server(self) -> WorkerForkServer:
        return WorkerForkServer(
            self._libraries, log=str(self._log or ""), log_bytes=self._log_bytes
        )

    # ---- calls

    async def run(self, tickets: list[Ticket], *, deadline_s: float) -> None:
        """Return when every ticket has a result; after the deadline the missing ones have
        "timeout"."""
        self._attach()
        if self._fault is not None:
            raise self._fault
        call = PoolCall(tickets=tickets, left=len(tickets))
        self._calls.append(call)
        self._waiting.extend(self._cut(call))
        self._dispatch()
        try:
            await asyncio.wait_for(call.done.wait(), deadline_s)
        except TimeoutError:
            self._drop(call, f"not done {deadline_s:g} s after the call")
        except asyncio.CancelledError:
            self._drop(call, "the call was cancelled")
            raise
        finally:
            self._calls.remove(call)
        if self._fault is not None:
            raise self._fault

    def _cut(self, call: PoolCall) -> list[Batch]:
        """Code checks one by one, since each waits for processes of its own; the others in
        batches."""
        batches = [
            Batch(call=call, tickets=[t]) for t in call.tickets if self._kinds[t.part] == "code"
        ]
        others = [ticket for ticket in call.tickets if self._kinds[ticket.part] != "code"]
        size = min(max(ceil_div(len(others), self._num_workers), 1), _MOST_CHECKS)
        for start in range(0, len(others), size):
            tickets = sorted(
                others[start : start + size], key=lambda t: self._kinds[t.part] not in QUICK
            )
            batches.append(Batch(call=call, tickets=tickets))
        return batches

    def _drop(self, call: PoolCall, why: str) -> None:
        """End what is left of a call: its waiting batches go, its running ones are killed."""
        self._waiting = deque(batch for batch in self._waiting if batch.call is not call)
        for worker in [
            worker
            for worker in self._workers.values()
            if worker.batch and worker.batch.call is call
        ]:
            worker.batch = None
            self._replace(worker, why)
        _give_up(call, why)

    def _settle(self, batch: Batch, result: CheckResult) -> None:
        """Give the batch's current ticket its result."""
        batch.current.result = result
        batch.next += 1
        batch.call.left -= 1
        if batch.call.left == 0:
            batch.call.done.set()

    def _blame(self, worker: Worker, why: str, outcome: str) -> None:
        """Blame the check that the worker was at for the worker's end."""
        assert worker.batch is not None and self._loop is not None
        now_s = self._loop.time()
        self._settle(
            worker.batch, CheckResult(worker.batch.next, 0.0, why, outcome, worker.heard_s, now_s)
        )

    # ---- work

    def _dispatch(self) -> None:
        for worker in list(self._workers.values()):
            if self._waiting and worker.ready and worker.batch is None:
                self._give(worker, self._waiting.popleft())

    def _give(self, worker: Worker, batch: Batch) -> None:
        assert self._loop is not None and worker.channel is not None
        places: dict[bytes, int] = {}
        checks = [
            (places.setdefault(ticket.item, len(places)), ticket.part) for ticket in batch.tickets
        ]
        worker.batch, worker.heard_s = batch, self._loop.time()
        worker.token = os.urandom(_TOKEN_BYTES)
        items = [msgspec.Raw(item) for item in places]
        worker.channel.send(frame(Job(items=items, checks=checks, token=worker.token)))
        self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        """Look again when the current check is due."""
        assert self._loop is not None
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None
        if worker.batch is not None:
            due_s = worker.heard_s + self._limits_s[worker.batch.current.part]
            worker.timer = self._loop.call_at(due_s, self._overdue, worker)

    def _overdue(self, worker: Worker) -> None:
        """Judge a check whose timer ran out. The loop itself may have been busy, so listen
        first."""
        assert self._loop is not None and worker.channel is not None
        worker.timer = None
        worker.channel.receive()
        if worker.batch is None or worker.timer is not None or worker.name not in self._workers:
            return  # it had answered, and the timer is the next check's; or it has been replaced
        why = f"not done after its limit of {self._limits_s[worker.batch.current.part]:g} s"
        self._blame(worker, why, "timeout")
        self._replace(worker, why)

    def _hear(self, worker: Worker, bodies: list[bytes], broken: bool) -> None:
        """Hand each result to its ticket; an idle worker gets new work. `broken`: what comes next
        is no frame."""
        assert self._loop is not None
        for body in bodies:
            result = _read_result(body)
            if result is not None and result.index == READY and not worker.ready:
                worker.ready = True
                self._false_starts = 0
                continue
            batch = worker.batch
            if (
                result is None
                or batch is None
                or (result.token, result.index) != (worker.token, batch.next)
            ):
                broken = True
                break
            self._settle(batch, result)
            if batch.next == len(batch.tickets):
                worker.batch = None
            if result.worn:
                self._replace(worker, result.worn)
                self._dispatch()
                return
        worker.heard_s = self._loop.time()
        if broken:
            self._disown(worker)
        else:
            self._watch(worker)
        self._dispatch()

    def _disown(self, worker: Worker) -> None:
        """Give up a worker whose reward wrote to its channel: nothing that comes from there can be
        relied on any more."""
        why = "it wrote to the channel between its worker and the scorer"
        if worker.batch is not None:
            self._blame(worker, why, "error")
        self._replace(
            worker,
            f"a reward wrote to its channel{'' if worker.batch else ' after its last check'}",
        )

    # ---- workers

    def _attach(self) -> None:
        """Bind to the running loop at the first call, and start the workers."""
        assert not self._closed, "a closed scorer takes no calls"
        loop = asyncio.get_running_loop()
        assert self._loop in (None, loop), "a scorer belongs to one event loop"
        if self._loop is None:
            self._loop = loop
            self._staff()

    def _staff(self) -> None:
        assert self._loop is not None
        self.server.attach(self._loop, self._ended, self.replace_server, self._log_full)
        for _ in range(self._num_workers):
            self._start_worker()

    def _start_worker(self) -> None:
        assert self._loop is not None
        self._names += 1
        worker = Worker(self._names)
        self._workers[worker.name] = worker
        end = self.server.fork(worker.name)
        worker.channel = Channel(
            self._loop, end, lambda bodies, broken: self._hear(worker, bodies, broken)
        )
        worker.channel.send(self._setup)

    def _replace(self, worker: Worker, why: str) -> None:
        """Kill a worker, put back what it had left, start another."""
        self._emit("reward.worker_replaced", worker=worker.name, reason=why)
        self.server.process.kill_child(worker.name, why)
        self._forget(worker)
        self._start_worker()

    def _forget(self, worker: Worker) -> None:
        assert worker.channel is not None
        del self._workers[worker.name]
        worker.channel.close()
        if worker.timer is not None:
            worker.timer.cancel()
        batch, worker.batch = worker.batch, None
        if batch is not None and batch.next < len(batch.tickets):
            self._waiting.appendleft(Batch(call=batch.call, tickets=batch.tickets[batch.next :]))

    def _ended(self, end: Ended) -> None:
        """Take note of a worker that has ended. If we did not end it, the check that it was at
        did."""
        worker, status = self._workers.get(end.name), end.exit_code
        if worker is None:
            return
        assert worker.channel is not None
        worker.channel.receive()
        if worker.name not in self._workers:
            return
        how = f"signal {-status}" if status < 0 else f"exit code {status}"
        if not worker.ready and self._give_up_starting(how):
            return
        if worker.batch is not None:
            ticket = worker.batch.current
            if status in _FROM_OUTSIDE and not ticket.retried:
                ticket.retried = True
                self._emit(
                    "reward.retried",
                    part=self._names_of_parts[ticket.part],
                    worker=worker.name,
                    reason=how,
                )
            else:
                again = " again when it was retried" if ticket.retried else ""
                self._blame(worker, f"it ended its worker process with {how}{again}", "error")
        self._replace(worker, f"it ended with {how}")

    def replace_server(self) -> None:
        """Start again what hung up: the fork server, its workers, their checks. None is to
        blame."""
        for worker in list(self._workers.values()):
            assert worker.channel is not None
            worker.channel.receive()
        try:
            code = self.server.reap()
        except DeadlineError as error:
            self._end_all(error)
            return
        self._emit("reward.fork_server_replaced", exit_code=code)
        ready = any(worker.ready for worker in self._workers.values())
        for worker in list(self._workers.values()):
            if worker.batch is not None:
                worker.batch.current.tries += 1
                if worker.batch.current.tries == _MOST_TRIES:
                    self._blame(
                        worker,
                        f"the worker processes died {_MOST_TRIES} times while it ran",
                        "error",
                    )
            self._forget(worker)
        self.server = self._start_server()
        if ready or not self._give_up_starting(f"exit code {code}"):
            self._staff()

    def _log_full(self) -> None:
        self._emit(
            "reward.output_dropped", log=str(self._log or "stderr"), kept_bytes=self._log_bytes
        )

    def _give_up_starting(self, how: str) -> bool:
        """Count a process that ended before it was ready; past the limit end every call with the
        reason."""
        self._false_starts += 1
        if self._false_starts < _MOST_FALSE_STARTS:
            return False
        self._end_all(
            DeadlineError(
                f"the reward workers did not start in {self._false_starts} tries; the last one "
                f"ended with {how}",
                hint=f"what they said is {f'in {self._log}' if self._log else 'on stderr'}; they "
                "need the packages of "
                "this environment",
            )
        )
        return True

    def _end_all(self, fault: DeadlineError) -> None:
        """There will be no results any more: end every call with the reason, those to come too."""
        for worker in list(self._workers.values()):
            self._forget(worker)
        self._waiting.clear()
        self._fault = fault
        for call in self._calls:
            call.done.set()

    async def close(self) -> None:
        """End the fork server, every worker and what workers started. Calls that still wait end
        with timeouts."""
        if self._closed:
            return
        self._closed = True
        workers = list(self._workers.values())
        for worker in workers:
            self._forget(worker)
        for call in self._calls:
            _give_up(call, "the scorer was closed")
        if not await self.server.close(idle=not any(worker.ready for worker in workers)):
            self._emit("reward.fork_server_killed")


def _give_up(call: PoolCall, why: str) -> None:
    """Mark each ticket without a result as timed out."""
    for index, ticket in enumerate(call.tickets):
        if ticket.result is None:
            ticket.result = CheckResult(index=index, reason=why, outcome="timeout")
    call.done.set()


def _read_result(body: bytes) -> CheckResult | None:
    """Decode a result. None for anything else."""
    try:
        result = decode_result(body)
    except msgspec.DecodeError:
        return None
    return result if result.outcome in OUTCOMES and math.isfinite(result.value) else None


def libraries(setup: Setup) -> list[str]:
    """List what the fork server loads before it forks."""
    latex = any(
        part["kind"] == "answer" and part["compare"] in ("auto", "latex") for part in setup.parts
    )
    gym = any(part["kind"] == "reasoning_gym" for part in setup.parts)
    return ["math_verify"] * latex + ["reasoning_gym"] * gym
