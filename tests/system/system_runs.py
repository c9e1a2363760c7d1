"""Runs for the system tests: tiny configs, the real command in real processes, faults at exact
points, and what a run left behind. In: config keys to change, argv. Out: exit code, stdout, stderr;
a run's story.

Processes are forked from one server that has loaded torch and the tasks already, so that a run that
is killed ten times costs seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from safetensors import safe_open

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "gyre.launch.commands",
        "gyre.cli.train",
        "gyre.cli.main",
        "gyre.observability.report.build",
        "reasoning_gym",  # brings matplotlib
    ]
)
MARK = "GYRE_SYSTEM_TEST"
SIGNALS = {
    "interrupt": signal.SIGINT,
    "interrupt_busy": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "hang_up": signal.SIGHUP,
}
RAY_LOGS = ("worker-", "python-core-worker", "raylet", "gcs_server")  # the files worth reading

TINY: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 3, "device": "cpu", "dtype": "float32", "threads": 1},
    "model": {
        "shape": {
            "family": "qwen3",
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 16,
            "mlp_size": 64,
            "context_tokens": 128,
        }
    },
    "data": {
        "source": "reasoning_gym",
        "task": "chain_sum",
        "task_options": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "num_problems": 300,
    },
    "cold_start": {"steps": 4, "examples_per_step": 8, "warmup_steps": 1},
    "objective": {"kind": "grpo"},
    "trainer": {"steps": 5, "learning_rate": 1e-3, "tokens_per_chunk": 256},
    "rollout": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_tokens": 16},
    "rewards": {
        "workers": 1,
        "parts": [
            {"kind": "function", "path": "system_rewards:varied"},
            {"kind": "format", "weight": 0.1},
        ],
    },
    "eval": {"num_problems": 8, "metric": {"part": "function", "threshold": 1.0}},
    "snapshot": {"every_steps": 2, "keep": 2},
    "observe": {"report": False},
}


# changes of TINY with which a run learns in half a minute: the share of digits in an answer
LEARNS = {
    "rollout.ignore_eos": False,
    "snapshot.every_steps": 0,
    "rewards": {
        "workers": 1,
        "parts": [{"kind": "function", "path": "system_rewards:digit_share"}],
    },
    "trainer.steps": 25,
    "trainer.learning_rate": 1e-2,
    "rollout.prompts_per_step": 8,
    "rollout.completions_per_prompt": 8,
}


# ---- configs


def write_config(
    folder: Path, sets: Mapping[str, Any] | None = None, *, base: Mapping[str, Any] = TINY
) -> Path:
    """Write base with "a.b" keys changed (None removes one) as RUN.toml; runs land in
    FOLDER/runs."""
    tree = json.loads(json.dumps(base))
    for key, value in {"run.folder": str(folder / "runs"), **(sets or {})}.items():
        *tables, last = key.split(".")
        table = tree
        for name in tables:
            table = table.setdefault(name, {})
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    path = folder / "run.toml"
    path.write_text(
        "".join(f"{name} = {as_toml(value)}\n" for name, value in tree.items()), encoding="utf-8"
    )
    return path


def as_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{json.dumps(name)} = {as_toml(item)}" for name, item in value.items())
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    return json.dumps(value)


# ---- processes


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to the process at an exact point of its own work."""

    point: Literal["event", "line", "fsync", "rename", "copy", "burst"]
    number: int = 1  # the how-manieth time the point is passed
    # event, line: pattern that "kind phase" must begin with; rename, copy: one in the target's path
    match: str = ""
    action: Literal[
        "kill",
        "interrupt",
        "interrupt_group",
        "interrupt_busy",
        "terminate",
        "hang_up",
        "kill_worker",
        "stop_worker",
        "kill_raylet",
    ] = "kill"
    worker: str = ""  # whose process is killed or stopped (SIGSTOP), of a run on a cluster


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a command ended."""

    code: int  # negative: the signal that ended it
    out: str
    err: str
    left_behind: tuple[str, ...]  # processes that were still there when they should not be

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


class Command:
    """One gyre command in a process of its own, in a process group of its own."""

    def __init__(
        self,
        *argv: str | Path,
        folder: Path,
        fault: Fault | None = None,
        file_bytes: int = 0,
        env: Mapping[str, str] | None = None,
        links: Path | None = None,
    ) -> None:
        """`file_bytes` is the size past which no file may grow (0: no limit). A file of `links` gets
        what went over the links to workers (`link_audit`)."""
        self._mark = uuid.uuid4().hex
        # not in `folder`, which may be a full disk
        self._logs = tempfile.TemporaryDirectory(prefix="gyre-logs-")
        self._out, self._err = Path(self._logs.name) / "out", Path(self._logs.name) / "err"
        self.process = SERVER.Process(
            target=_child,
            args=([str(word) for word in argv], str(folder), str(self._out), str(self._err)),
            kwargs={
                "fault": fault,
                "file_bytes": file_bytes,
                "env": {**(env or {}), MARK: self._mark},
                "links": links,
            },
        )
        self.process.start()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def wait(self, *, timeout_s: float = 240.0) -> Answer:
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(
                f"still running after {timeout_s} s; stderr: {self._err.read_text()[-3000:]}"
            )
        left = processes_with(self._mark, gone_within_s=20.0)
        return Answer(
            code=self.process.exitcode,
            out=self._out.read_text(),
            err=self._err.read_text(),
            left_behind=left,
        )


def gyre(*argv: str | Path, folder: Path, **options: Any) -> Answer:
    """Run a command to its end."""
    return Command(*argv, folder=folder, **options).wait()


def processes_with(mark: str, *, gone_within_s: float) -> tuple[str, ...]:
    """Processes that carry this mark in their environment and did not end in time."""
    end_s = time.monotonic() + gone_within_s
    while True:
        left = tuple(_marked(mark))
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.05)


def _marked(mark: str) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                yield (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()


def _child(
    argv: list[str],
    cwd: str,
    out: str,
    err: str,
    *,
    fault: Fault | None,
    file_bytes: int,
    env: Mapping[str, str],
    links: Path | None,
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, number in ((out, 1), (err, 2)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv = ["gyre", *argv]
    if fault is not None:
        _arm(fault)
    if file_bytes:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    from link_audit import LinkWatch

    from gyre.cli.main import main

    watch = LinkWatch() if links is not None else None
    try:
        main()
    finally:
        if watch is not None and links is not None:
            watch.write(links)


def _arm(fault: Fault) -> None:
    from gyre.observability.events import EventLog
    from gyre.observability.jsonl import LineWriter, encode_row

    count = itertools.count(1)
    pids: dict[str, int] = {}  # of workers

    def strike(text: str = "") -> None:
        if re.match(fault.match, text) and next(count) == fault.number:
            if fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.action in ("kill_worker", "stop_worker"):
                os.kill(
                    pids[fault.worker],
                    signal.SIGKILL if fault.action == "kill_worker" else signal.SIGSTOP,
                )
            elif fault.action == "kill_raylet":
                (raylet,) = (
                    child for child in psutil.Process().children() if child.name() == "raylet"
                )
                raylet.kill()
            elif fault.action in SIGNALS:
                os.kill(os.getpid(), SIGNALS[fault.action])
                # in the middle of something that looks at nothing
                if fault.action == "interrupt_busy":
                    time.sleep(600.0)
            else:
                os.killpg(os.getpid(), signal.SIGINT)

    if fault.point == "event":

        def emit(self: EventLog, kind: str, /, **fields: Any) -> None:
            plain_emit(self, kind, **fields)
            if kind == "member.joined":
                pids[fields["member"]] = int(fields["place"].rpartition(" ")[2])
            if kind == "cluster.started":
                pids.update(
                    {
                        name: int(place.rpartition(" ")[2])
                        for name, place in fields["workers"].items()
                    }
                )
            strike(f"{kind} {fields.get('phase', '')}")

        plain_emit, EventLog.emit = EventLog.emit, emit
    elif fault.point == "line":  # dies with half a line written

        def append(self: LineWriter, row: Mapping[str, Any]) -> None:
            os.write(self._fd, encode_row(row).encode()[: len(encode_row(row)) // 2])
            strike(f"{row.get('kind', 'sample')} {row.get('phase', '')}")
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - len(encode_row(row)) // 2)
            plain_append(self, row)

        plain_append, LineWriter.append = LineWriter.append, append
    elif fault.point == "fsync":
        _before(os, "fsync", lambda *_: strike())
    elif fault.point == "rename":
        for name in ("rename", "replace"):
            _before(os, name, lambda _, target: strike(str(target)))
    elif fault.point == "burst":
        from gyre.engine.core_worker import CoreWorker

        _before(CoreWorker, "burst", lambda *_: strike())
    else:
        import shutil

        _before(shutil, "copyfile", lambda _, target, **__: strike(str(target)))


def _before(module: Any, name: str, hook: Callable[..., None]) -> None:
    plain = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(module, name, wrapped)


# ---- what a run left


@dataclass(frozen=True, kw_only=True)
class Story:
    """Everything about a run that no clock decides."""

    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    weights: str  # digest of the exported tensors
    num_dead: int = field(compare=False)  # rows that a resume fenced off
    num_attempts: int = field(compare=False)


def read_story(run: Path) -> Story:
    from gyre.observability.events import read_events
    from run_logs import is_measured, read_samples

    rows = read_events(run / "events.jsonl")
    steps = [
        {
            **{
                name: row[name]
                for name in ("stage", "step", "version", "num_tokens", "num_updates")
            },
            "metrics": {
                name: value for name, value in row["metrics"].items() if not is_measured(name)
            },
        }
        for row in rows
        if row["kind"] == "step.done"
    ]
    places = [(step["stage"], step["step"]) for step in steps]
    assert len(places) == len(set(places)), f"a step is told twice: {places}"
    evals = [without(row, "seq", "t", "attempt") for row in rows if row["kind"] == "eval.done"]
    samples = [
        without(row, "seq", "attempt") for row in read_samples(run / "samples.jsonl", rows.lineage)
    ]
    return Story(
        steps=steps,
        evals=evals,
        samples=samples,
        weights=digest_of(run / "export" / "model.safetensors"),
        num_dead=rows.num_dead,
        num_attempts=rows.lineage.num_attempts,
    )


def check_learned(story: Story) -> None:
    """The reward of a run with LEARNS has risen."""
    rewards = [step["metrics"]["reward"] for step in story.steps]
    before, after = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert before < 0.4 and after > before + 0.3, rewards


def tell_cluster_run(
    answer: Answer, run: Path, ray_folder: Path, *, num_events: int = 60, num_chars: int = 4000
) -> str:
    """What a run on Ray left to read, for the message of a failed assertion: its answer, its last
    events, and what its workers and Ray itself wrote under `ray_folder`, which the run was given as
    RAY_TMPDIR."""
    parts = [
        f"exit code {answer.code}, left behind: {answer.left_behind or 'nothing'}",
        f"== stderr\n{answer.err}",
    ]
    rows = events_of(run) if (run / "events.jsonl").is_file() else []
    parts.append("== events\n" + "\n".join(json.dumps(row)[:1000] for row in rows[-num_events:]))
    for path in sorted(ray_folder.glob("**/session_2*/logs/*")):
        text = (
            path.read_text(errors="replace")
            if path.is_file() and path.name.startswith(RAY_LOGS)
            else ""
        )
        if text.strip():
            parts.append(f"== {path.name}\n{text[-num_chars:]}")
    return "\n".join(parts)


def without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def digest_of(path: Path) -> str:
    digest = hashlib.blake2b()
    with safe_open(path, framework="np") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode())
    digest.update(path.read_bytes())
    return digest.hexdigest()


def events_of(run: Path, *kinds: str) -> list[dict[str, Any]]:
    from gyre.observability.events import read_events

    return [row for row in read_events(run / "events.jsonl") if row["kind"] in kinds or not kinds]
