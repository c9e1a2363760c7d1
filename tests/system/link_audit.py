"""Link audit: what the processes of a pod told each other in a run, and by what means. In: a folder for
its notes. Out: options of a command; bytes of the links' frames in hand-overs, what was unpickled,
and who has Ray."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import psutil

HOOK = Path(__file__).parent / "audit"
OF_ARRAYS = ("torch", "numpy")  # modules whose classes a pickle of weights names


@dataclass
class LinkCounts:
    """What went over the links of the driver's process, which has one to each other process."""

    sent_bytes: int = 0  # in hand-overs
    received_bytes: int = 0
    handovers: int = 0
    with_ray: list[str] = field(default_factory=list)  # processes that have Ray's library


def audited(folder: Path) -> dict[str, Any]:
    """Return the options with which a command is audited."""
    paths = [str(HOOK), os.environ.get("PYTHONPATH", "")]
    env = {"GYRE_AUDIT": str(folder / "audit"), "PYTHONPATH": os.pathsep.join(paths)}
    return {"env": env, "links": folder / "links.json"}


def check_audit(folder: Path, weight_bytes: int, *, handovers: int, processes: int) -> None:
    """Assert that no weights crossed a link or a pickle, and that nobody has Ray. `processes` are
    those at least that told of themselves."""
    counts = LinkCounts(**json.loads((folder / "links.json").read_text()))
    assert counts.handovers == handovers
    assert 0 < counts.sent_bytes < handovers * weight_bytes / 4, (counts, weight_bytes)
    assert 0 < counts.received_bytes < handovers * weight_bytes / 4, (counts, weight_bytes)
    assert not counts.with_ray, counts
    notes = [line.split() for line in (folder / "audit").read_text().splitlines()]
    assert len({pid for pid, what, *_ in notes if what == "begins"}) >= processes, notes
    assert "ray" not in {what for _, what, *_ in notes}, notes
    unpickled = {rest[0] for _, what, *rest in notes if what == "pickle"}
    assert not [name for name in unpickled if name.partition(".")[0] in OF_ARRAYS], unpickled


class LinkWatch:
    """Counts in the driver's own process, from its start to `write`."""

    def __init__(self) -> None:
        self._counts = LinkCounts()
        self._phase = ""
        self._pids: dict[str, int] = {}
        self._watch_frames()
        self._watch_events()
        # one that was forked has not imported it at its start
        spec = spec_from_file_location("link_audit_hook", HOOK / "sitecustomize.py")
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module_from_spec(spec))

    def write(self, path: Path) -> None:
        if "ray" in sys.modules:
            self._counts.with_ray.append("driver")
        path.write_text(json.dumps(vars(self._counts)))

    def _watch_frames(self) -> None:
        from gyre.cluster.worker import frames

        framed, take = frames.framed, frames.Inbox.take

        def count_sent(number: int, payload: bytes) -> bytes:
            if self._phase == "handover":
                self._counts.sent_bytes += len(payload)
            return framed(number, payload)

        def count_received(inbox: frames.Inbox, data: bytes) -> Any:
            if self._phase == "handover":
                self._counts.received_bytes += len(data)
            return take(inbox, data)

        frames.framed, frames.Inbox.take = count_sent, count_received

    def _watch_events(self) -> None:
        from gyre.observability.events import EventLog

        plain = EventLog.emit

        def emit(log: EventLog, kind: str, /, **fields: Any) -> None:
            plain(log, kind, **fields)
            self._note(kind, fields)

        EventLog.emit = emit

    def _note(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "cluster.started":
            places = fields["workers"].items()
            self._pids = {name: int(place.rpartition(" ")[2]) for name, place in places}
        elif kind == "phase.started":
            self._phase = fields["phase"]
            if self._phase == "handover":
                self._counts.handovers += 1
            elif self._phase == "train":
                self._look_for_ray()

    def _look_for_ray(self) -> None:
        """Look at libraries, also in the processes that vLLM starts."""
        for name, pid in self._pids.items():
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                worker = psutil.Process(pid)
                for process in (worker, *worker.children(recursive=True)):
                    if "/ray/_raylet" in Path(f"/proc/{process.pid}/maps").read_text():
                        self._counts.with_ray.append(name)
