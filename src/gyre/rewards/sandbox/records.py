"""Sandbox: what a program may use and what came of it. In: Program, Limits. Out: ProgramResult.
Pure records.

What is isolated, by mode (the chosen one is in `Sandbox.isolation` and in the event
`sandbox.started`):

    strong      own user, mount, process, network, IPC and host-name namespaces per program. It sees
                the system, Python and /proc read-only, an empty work folder in memory and its own
                processes; no network at all, no home, no run folder. No capabilities, no new
                privileges. It is process 1 of its namespace: all that it starts dies with it, and
                signals to itself have no effect. Started by root, it has user id 65534.
    bubblewrap  the same walls put up by `bwrap`, where only that may make namespaces. Slower: a new
                Python each time.
    weak        kernel limits, a work folder that is removed, a scrubbed environment, every
                descendant killed. NO network isolation, NO file system isolation, same user as
                Gyre, whose processes it could signal.

In all modes: a fresh process per program; CPU, wall, memory, process, output and file limits; an
allow-list of system calls (sandbox.syscalls). Other calls answer ENOSYS and are named in
`ProgramResult.refused_calls`. Among them are sockets of families other than UNIX and INET, and
larger socket buffers and pipes. So are System V and POSIX queues, memfd, namespaces, mounts and
tracing.

CPU and memory are limited per process by the kernel, and in sum by a watchdog that looks every 20
ms. Between two looks memory can pass the limit by what 20 ms of writing allow. Memory is that of
the processes and the kernel memory that sandbox.meter counts: sockets (not counted in weak mode),
shared mappings, file locks, watched files. Pipes (64 MiB for a user) and tables of pages and
mappings (16 MiB for a process) are not counted. The limits on files and processes bound them. Some
kernels give no listener: before Linux 5.0, or under another listener. Then refused calls are not
named, and shared mappings and watched files are not counted. No memory cgroup is made. Not
protected against: bugs of the kernel, timing side channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gyre.core.errors import InputError

Mode = Literal["strong", "bubblewrap", "weak"]
Outcome = Literal[
    "ok", "exit", "timeout", "cpu", "memory", "processes", "output", "files", "killed", "failed"
]
MOST_FILES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 5.0  # from fork to the death of its last process
    cpu_s: float = 4.0  # over all its processes
    memory_bytes: int = 512 << 20  # over all its processes; also the address space of each
    processes: int = 16  # processes and threads at once
    output_bytes: int = 1 << 20  # stdout and stderr together
    # its work folder in all, with up to MOST_FILES files and folders; also each file
    file_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise InputError(f"sandbox limit {name} = {getattr(self, name)}: need more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One Python program, run as `python main.py ARGV < stdin` in an empty work folder."""

    source: str
    stdin: str = ""
    argv: tuple[str, ...] = ()
    # relative path → text, put into the work folder
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or name.startswith("/") or ".." in name.split("/"):
                raise InputError(
                    f"program file {name!r}: need a relative path inside the work folder"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended.

    ok: exit code 0. exit: another code. timeout, cpu, memory, processes, output, files: ended over
    that limit. killed: by a signal of its own making. failed: the sandbox itself could not run it;
    `detail` says why.
    """

    outcome: Outcome
    stdout: str  # undecodable bytes replaced; cut at the output limit
    stderr: str
    exit_code: int | None  # None when a signal ended it
    wall_s: float
    cpu_s: float
    detail: str = ""
    # system call → how often it was refused
    refused_calls: Mapping[str, int] = field(default_factory=dict)


def classify(
    code: int, reason: str | None, stderr: str, *, error: str = "", cpu_s: float, limits: Limits
) -> tuple[Outcome, str]:
    """Name the outcome from the exit code (negative: a signal), why it was killed, its stderr and
    the sandbox's own error. No program can write the last."""
    if error:
        return (
            "failed",
            f"the sandbox could not run the program: {error} {stderr.strip()[-300:]}".strip(),
        )
    if reason in ("timeout", "cpu", "memory", "processes", "output", "files"):
        allowed = {
            "timeout": f"{limits.wall_s:g} s of wall time",
            "cpu": f"{limits.cpu_s:g} s of CPU time",
            "memory": f"{limits.memory_bytes >> 20} MiB of memory",
            "processes": f"{limits.processes} processes",
            "output": f"{limits.output_bytes} bytes of output",
            "files": f"{limits.file_bytes} bytes or {MOST_FILES} files in its work folder",
        }[reason]
        return reason, f"ended over its limit of {allowed}"
    assert reason is None, reason
    # SIGXCPU, or SIGKILL at the hard limit
    if code == -24 or (code == -9 and cpu_s >= limits.cpu_s):
        return "cpu", f"ended over its limit of {limits.cpu_s:g} s of CPU time"
    if code < 0:
        return "killed", f"ended by signal {-code}"
    last = stderr.rstrip().rpartition("\n")[2]
    if code != 0 and last.startswith("MemoryError"):
        return "memory", f"refused memory over its limit of {limits.memory_bytes >> 20} MiB"
    return (
        ("ok", "")
        if code == 0
        else ("exit", f"exit code {code}" + (f": {last[:200]}" if last else ""))
    )
