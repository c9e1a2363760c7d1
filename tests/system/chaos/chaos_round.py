"""A round of chaos: one run, struck at its phases and points, and started again as a supervisor
would. In: a plan of faults. Out: what struck, the events of all attempts, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import ChaosFaults, Targets
from chaos_plan import (
    KIND_BY_NAME,
    POINTS,
    PlannedFault,
    RunShape,
    StruckFault,
    find_teller,
)
from slow_link import SlowLink
from system_runs import MARK, processes_with, write_config

from etcd_process import EtcdProcess
from gyre.launch.placement.worker_placement import name_run
from gyre.weights.transports.addresses import SHARED_MEMORY

HERE = Path(__file__).parent
GYRE = "from gyre.cli.main import main; main()"
MEMBER_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'
LOOK_S = 0.003
RUN_S = 200.0  # for one run, with all its faults
HOLD_S = 30.0  # longest that rollouts wait for a fault to be told
MEMBER_WAIT_S = 5.0  # between two starts of a member
AGAIN_S = 0.2  # before a victim that is not there is looked for again
MOST_RESUMES = 10
NAMED_ERROR = 2  # exit code of an error that a user can act on


@dataclass
class PendingFault:
    """A planned fault on its way: due at a time, or at a point that is armed."""

    fault: PlannedFault
    due_s: float | None = None
    is_armed: bool = False


@dataclass
class Found:
    """What a round came to."""

    rows: list[dict[str, Any]]  # of all attempts, also those that a resume fences off
    struck: list[StruckFault] = field(default_factory=list)
    missed: list[PlannedFault] = field(default_factory=list)  # the run was over before
    ends: list[str] = field(default_factory=list)  # of commands that did not end with code 0
    said: list[str] = field(default_factory=list)  # what should not be
    num_members: int = 0  # that were started


class EventTail:
    """Rows of a run's log as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0
        self.rows: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        new = []
        for line in whole.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # its writer was killed in it
                new.append(json.loads(line))
        self.rows += new
        return new


class ChaosRound:
    """`settings` makes a run's config keys from its folder, its shape and a rendezvous."""

    def __init__(
        self,
        folder: Path,
        shape: RunShape,
        plan: Sequence[PlannedFault],
        settings: Callable[[Path, RunShape, dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._folder, self._shape, self._settings = folder, shape, settings
        self._run = folder / "runs" / "tiny"
        self._tail = EventTail(self._run / "events.jsonl")
        self._waiting = [PendingFault(fault=fault) for fault in plan]
        self._points, self._gate = folder / "points", folder / "gate"
        self._points.mkdir()
        self._gate.touch()
        self._targets = Targets(run=self._run, points=self._points)
        self._faults = ChaosFaults(self._targets)
        self._phase, self._closed_s = "", 0.0  # since when rollouts wait
        self._mark = uuid.uuid4().hex
        self._member: subprocess.Popen[bytes] | None = None
        self._listening: Mapping[str, Any] = {}
        self._member_s = 0.0  # when it was started
        self.found = Found(rows=self._tail.rows)

    def play(self) -> Found:
        """Let the run come to its end, whatever strikes it."""
        before = self._list_memory()
        with self._meeting() as rendezvous:
            try:
                self._supervise(rendezvous)
            finally:
                self._faults.undo_all()
                self._end_member()
        found = self.found
        found.missed = [one.fault for one in self._waiting]
        if left := processes_with(self._mark, gone_within_s=20.0):
            found.said.append(f"processes that stay: {left}")
        if left := sorted(self._list_memory() - before):
            found.said.append(f"left in shared memory: {left}")
        return found

    def _list_memory(self) -> set[str]:
        """Return what is in shared memory; of one that others use too, what is this run's."""
        found = set(os.listdir(SHARED_MEMORY))
        if "own shared memory" in self._shape.abilities or not self._run.exists():
            return found
        return {name for name in found if name.startswith(f"gyre-{name_run(self._run)}-")}

    def _supervise(self, rendezvous: dict[str, Any]) -> None:
        sets = self._settings(self._folder, self._shape, rendezvous)
        config, end_s = write_config(self._folder, sets), time.monotonic() + RUN_S
        words = ["train", str(config), "--plain"]
        while (code := self._attempt(words, end_s)) != 0:
            error = (self._folder / "err").read_text(errors="replace")
            self.found.ends.append(f"code {code}: {error[-600:]}")
            self._faults.note_end()
            # a supervisor starts again after a named error or a kill, not after a fault of ours
            is_named = code == NAMED_ERROR and "Traceback" not in error
            may_go_on = is_named or code == -signal.SIGKILL
            if not may_go_on or len(self.found.ends) > MOST_RESUMES or time.monotonic() > end_s:
                self.found.said.append(f"the run is given up: {self.found.ends[-1]}")
                return
            if self._run.exists():
                words = ["train", "--resume", str(self._run), "--plain"]

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[dict[str, Any]]:
        """An etcd that the run reaches by a link which may be slow."""
        if "etcd" not in self._shape.abilities:
            yield {}
            return
        etcd = self._targets.etcd = EtcdProcess(self._folder / "etcd")
        link = self._targets.link = SlowLink(int(etcd.url.rpartition(":")[2]))
        try:
            etcd.kill()
            etcd.copy_data("older")
            etcd.start()
            url = f"http://127.0.0.1:{link.port}"
            yield {"kind": "etcd", "endpoints": [url], "lease_s": 2.0, "deadline_s": 20.0}
        finally:
            link.close()
            etcd.close()

    def _attempt(self, words: Sequence[str], end_s: float) -> int:
        """Run a command to its end, and strike it meanwhile."""
        with (self._folder / "out").open("ab") as out, (self._folder / "err").open("wb") as err:
            command = subprocess.Popen(
                [sys.executable, "-c", GYRE, *words],
                stdout=out,
                stderr=err,
                env=self._environment(),
                cwd=self._folder,
                start_new_session=True,
            )
        self._targets.pids = {"driver": command.pid}
        try:
            while command.poll() is None:
                self._turn()
                if time.monotonic() > end_s:
                    kinds = [row["kind"] for row in self._tail.rows[-5:]]
                    self.found.said.append(f"it hangs after {kinds}, {self._phase}")
                    break
                time.sleep(LOOK_S)
        finally:
            command.kill()
            command.wait(20)
        self._take_rows()
        self._targets.pids = {}
        return command.returncode

    def _environment(self) -> dict[str, str]:
        paths = [str(HERE / "points"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "CHAOS_POINTS": str(self._points),
            MARK: self._mark,
        }

    # a look at the run

    def _turn(self) -> None:
        now_s = time.monotonic()
        self._take_rows()
        for pending in [one for one in self._waiting if one.due_s is not None]:
            if now_s >= (pending.due_s or 0.0):
                self._strike(pending)
        for reached in self._points.glob("*.*"):
            self._strike_at(reached)
        self._faults.look()
        self._keep_member()
        self._open_gate(now_s)

    def _take_rows(self) -> None:
        for row in self._tail.look():
            self._take(row)

    def _take(self, row: Mapping[str, Any]) -> None:
        pids = self._targets.pids
        if row["kind"] == "cluster.started":
            pids |= {name: pid_of(place) for name, place in row["workers"].items()}
        elif row["kind"] == "member.joined":
            pids[row["member"]] = pid_of(row["place"])
        elif row["kind"] == "member.left":
            pids.pop(row["member"], None)
        elif row["kind"] == "member.listening":
            self._listening = row
        elif row["kind"] == "cluster.starting":  # an attempt, which tries the rewards first
            self._phase = ""
            self._gate.touch()
        elif row["kind"] == "phase.started":
            self._phase, step = row["phase"], row.get("step", 0)
            self._make_ready(step)
            if self._phase == "train" and any(one.fault.step <= step + 1 for one in self._waiting):
                # before the next rollouts begin
                self._gate.unlink(missing_ok=True)
                self._closed_s = time.monotonic()

    def _make_ready(self, step: int) -> None:
        """Let the first fault whose step has come strike at its phase, or arm its point."""
        first = next((one for one in self._waiting if one.fault.step <= step), None)
        if first is None or first.due_s is not None or first.is_armed:
            return
        if first.fault.moment in POINTS:
            if self._phase in ("rollout", "train"):
                (self._points / first.fault.moment).touch()
                first.is_armed = True
        elif first.fault.moment == self._phase:
            first.due_s = time.monotonic() + first.fault.delay_s

    def _open_gate(self, now_s: float) -> None:
        """Let rollouts end, unless a fault is to strike in them or to be told first."""
        if self._gate.exists():
            return
        is_late = now_s > self._closed_s + HOLD_S
        if self._phase in ("train", "handover", "snapshot") and not is_late:
            return
        waits = any(one.due_s is not None for one in self._waiting) or any(
            KIND_BY_NAME[one.fault.kind].holds and not find_teller(one, self._tail.rows)
            for one in self.found.struck
        )
        if not waits or is_late:
            self._gate.touch()

    def _strike_at(self, reached: Path) -> None:
        """Strike where a process waits at a point, and let it go on."""
        point, _, pid = reached.name.partition(".")
        for pending in list(self._waiting):
            if pending.is_armed and pending.fault.moment == point:
                pending.is_armed = False
                self._strike(pending, int(pid))
        reached.unlink(missing_ok=True)

    def _strike(self, pending: PendingFault, at_pid: int = 0) -> None:
        fault = pending.fault
        struck = self._faults.strike(fault, row=len(self._tail.rows), at_pid=at_pid)
        if struck is not None:
            self._waiting.remove(pending)
            self.found.struck.append(struck)
        elif fault.moment not in POINTS:  # its victim is being started
            pending.due_s = time.monotonic() + AGAIN_S

    def _keep_member(self) -> None:
        """As a supervisor: start a member that is not there."""
        if not self._shape.members or not self._listening:
            return
        if self._member is not None and self._member.poll() is None:
            return
        if time.monotonic() < self._member_s + MEMBER_WAIT_S:
            return
        self._member_s = time.monotonic()
        words = ["sidecar", "join", self._listening["address"], "--token-file"]
        words += [self._listening["token_file"], "--name", f"a{self.found.num_members}"]
        # with a shared memory of its own weights can come by TCP alone
        has_own = "own shared memory" in self._shape.abilities
        own = ["unshare", "-m", "sh", "-c", MEMBER_MEMORY, "sh"] if has_own else []
        with (self._folder / "member.err").open("ab") as err:
            self._member = subprocess.Popen(
                [*own, sys.executable, "-c", GYRE, *words], stderr=err, env=self._environment()
            )
        self.found.num_members += 1

    def _end_member(self) -> None:
        if self._member is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._member.wait(10)
            self._member.kill()
            self._member.wait(20)


def pid_of(place: str) -> int:
    return int(place.rpartition(" ")[2])
