"""Sandbox, strong mode: what a program can see and reach. Each test tries to get out."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import gyre
from gyre.rewards.sandbox import syscalls
from gyre.rewards.sandbox.executors import Cell, IsolationUnavailable
from gyre.rewards.sandbox.records import Limits, Program

LIMITS = Limits(wall_s=10.0, cpu_s=5.0, processes=8)


@pytest.fixture(scope="module")
def cell():
    cell = Cell("strong")
    try:
        cell.start()
    except IsolationUnavailable as error:
        pytest.skip(f"no strong sandbox on this machine: {error}")
    yield cell
    cell.close()


def _output(cell: Cell, source: str, **fields) -> str:
    result = cell.run(Program(source=source, **fields), limits=LIMITS)
    assert result.outcome == "ok", result
    return result.stdout


def test_no_network_not_even_to_this_machine(cell):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        source = f"""
import errno, socket
for address in ("127.0.0.1", "8.8.8.8"):
    with socket.socket() as s:
        s.settimeout(2)
        print(errno.errorcode[s.connect_ex((address, {port}))])
print(open("/proc/net/dev").read().count(":"))
"""
        assert _output(cell, source) == "ENETUNREACH\nENETUNREACH\n1\n"


def test_abstract_sockets_of_this_machine_are_out_of_reach(cell):
    name = f"\0gyre-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        source = f"import socket; print(socket.socket(socket.AF_UNIX).connect_ex({name!r}))"
        assert int(_output(cell, source)) != 0


def test_sees_the_system_and_nothing_of_ours(cell, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    source = f"""
import os
for path in ({str(secret)!r}, {str(Path(gyre.__file__).parent)!r}, {str(Path.home() / ".ssh")!r}, "/etc/shadow", "/var",
             "/home", "/sys", "/run"):
    print(os.path.exists(path))
print(sorted(set(os.listdir("/")) - {{"usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"}}))
print(sorted(os.listdir("/dev")), os.listdir("."), sorted(os.listdir("/etc")))
"""
    lines = _output(cell, source).splitlines()
    assert lines[:8] == ["False"] * 8
    shown = set(eval(lines[8]))
    allowed = {Path(sys.base_prefix).parts[1]}  # the way to Python itself
    assert (
        {"dev", "etc", "proc", "tmp", "work"}
        <= shown
        <= {"dev", "etc", "proc", "tmp", "work", *allowed}
    )
    assert "main.py" in lines[9] and "shadow" not in lines[9]


@pytest.mark.parametrize(
    "path", ["/x", "/usr/x", "/etc/passwd", "/dev/x", "/lib/x", sys.base_prefix + "/x"]
)
def test_only_the_work_folder_can_be_written(cell, path):
    source = f"""
try:
    open({path!r}, "a").write("x")
except OSError as error:
    print("refused")
"""
    assert _output(cell, source) == "refused\n"


def test_sees_only_its_own_processes_and_kills_nothing(cell):
    source = """
import os
print([name for name in os.listdir("/proc") if name.isdigit()], os.getpid(), os.getppid(), os.getuid() != 0)
for pid in (-1, *range(2, 2000)):
    try:
        os.kill(pid, 9)
        print("killed", pid)
    except ProcessLookupError:
        pass
"""
    assert _output(cell, source) == "['1'] 1 0 True\n"
    assert _output(cell, "print('alive')") == "alive\n"


def test_has_no_capabilities_and_gets_none(cell):
    source = """
import os
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print({key: int(status[key], 16) for key in ("CapEff", "CapPrm", "CapInh", "CapAmb")})
print(status["NoNewPrivs"], status["Seccomp"], sorted(set(status["Uid"].split())))
for change in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.nice(-5), lambda: os.chroot("/usr")):
    try:
        change()
        print("changed")
    except OSError:
        pass
"""
    lines = _output(cell, source).splitlines()
    assert lines == ["{'CapEff': 0, 'CapPrm': 0, 'CapInh': 0, 'CapAmb': 0}", "1 2 ['1000']"]


def test_calls_that_are_not_listed_do_not_exist_and_are_named(cell):
    source = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(result):
    return result == -1 and errno.errorcode[ctypes.get_errno()]
print(refused(libc.unshare(0x10000000)), refused(libc.unshare(0x20000)), refused(libc.ptrace(16, 1, 0, 0)))
print(refused(libc.mount(b"x", b"/work", b"tmpfs", 0, None)), refused(libc.umount2(b"/proc", 2)))
print(refused(libc.memfd_create(b"x", 0)), refused(libc.shmget(1, 4096, 0o1777)), refused(libc.syscall(250, 0, 0)))
print(refused(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)), refused(libc.syscall(435, 0, 0)))
print(refused(libc.syscall(999, 0)))
"""
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers in this test are those of x86_64")
    result = cell.run(Program(source=source), limits=LIMITS)
    assert result.stdout.split() == [*["ENOSYS"] * 8, "EPERM", "ENOSYS", "ENOSYS"]
    assert result.refused_calls == {
        "unshare": 2,
        "ptrace": 1,
        "mount": 1,
        "umount2": 1,
        "memfd_create": 1,
        "shmget": 1,
        "keyctl": 1,
        "clone(flags 0x10000011)": 1,
        "call 999": 1,
    }


@pytest.mark.parametrize("mode", ["strong", "bubblewrap"])
def test_settings_of_the_machine_cannot_be_opened_for_writing(mode):
    """Opening is the proof; nothing is written. Namespaces have settings of their own, which their
    user may write."""
    if mode == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    source = """
import os
opened = []
for folder, _, names in os.walk("/proc/sys"):
    for name in names:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY))
            opened.append(os.path.join(folder, name))
        except OSError:
            pass
print(len(list(os.walk("/proc/sys"))) > 5, opened)
"""
    cell = _started(mode)
    try:
        assert _output(cell, source) == "True []\n"
        server = psutil.Process(cell.pid)
        inner = [server, *server.children(recursive=True)][-1]
        assert inner.uids().real == (65534 if os.geteuid() == 0 else os.geteuid())
    finally:
        cell.close()


def _started(mode: str) -> Cell:
    cell = Cell(mode)  # type: ignore[arg-type]
    try:
        cell.start()
    except IsolationUnavailable as error:
        pytest.skip(f"no {mode} sandbox on this machine: {error}")
    return cell


def test_filter_follows_its_tables():
    """Every call of both architectures, decided by a BPF machine that is not the kernel's."""
    for machine, column, audit in (("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)):
        lines = syscalls.filter_lines(machine, notify=False)
        allowed = {
            numbers[column]
            for name, numbers in syscalls.ALLOWED.items()
            if name not in syscalls._ARGUMENTS
        }
        for number in range(-1, 600):
            answer = _interpret(lines, number & 0xFFFFFFFF, audit, (0,) * 6)
            if number in allowed and number >= 0:
                assert answer == 0x7FFF0000, (machine, number)
            elif number not in {syscalls.ALLOWED[name][column] for name in syscalls._ARGUMENTS}:
                assert answer == 0x00050000 | errno.ENOSYS, (machine, number)
        assert _interpret(lines, 0, 0x40000003, (0,) * 6) == 0x00050000 | errno.ENOSYS  # i386
        assert _interpret(lines, 0x40000000, audit, (0,) * 6) == 0x00050000 | errno.ENOSYS  # x32


@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("socket", (1, 1, 0), True), ("socket", (2, 2, 17), True), ("socket", (10, 1, 6), True),
        *((("socket", (family, 1, 0), False)) for family in (0, 4, 9, 16, 17, 38, 40, 44)),
        ("socket", (2, 1, 132), False), ("socket", (2, 1, 262), False), ("socketpair", (40, 1, 0), False),
        ("setsockopt", (3, 1, 2), True), ("setsockopt", (3, 6, 1), True), ("setsockopt", (3, 41, 26), True),
        *((("setsockopt", (3, 1, option), False)) for option in (7, 8, 18, 26, 32, 33, 50, 60)),
        ("setsockopt", (3, 0, 35), False), ("setsockopt", (3, 6, 31), False),
        ("fcntl", (3, 0, 0), True), ("fcntl", (3, 6, 0), True), ("fcntl", (3, 1031, 65536), True),
        ("fcntl", (3, 1031, 65537), False), ("fcntl", (3, 1024, 0), False), ("fcntl", (3, 1026, 0), False),
        ("fcntl", (3, 37, 0), False), ("ioctl", (0, 0x5401), True), ("ioctl", (0, 0x5412), False),
        ("ioctl", (0, 0x40086602), False), ("mmap", (0, 4096, 3, 0x22), True), ("mmap", (0, 4096, 3, 0x40022), False),
        ("mmap", (0, 4096, 3, 0x21), True), ("clone", (0x3D0F00,), True), ("clone", (0x10000000,), False),
        ("clone", (0x40000011,), False), ("prctl", (15,), True), ("prctl", (4,), False), ("prctl", (22,), False),
        ("epoll_ctl", (3, 1), True), ("epoll_ctl", (3, 2), True),
    ],
)  # fmt: skip
def test_filter_reads_arguments(name, arguments, allowed):
    for machine, column, audit in (("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)):
        given = tuple(argument | 0xAB00000000 for argument in arguments) + (0,) * (
            6 - len(arguments)
        )
        number = syscalls.ALLOWED[name][column]
        answer = _interpret(syscalls.filter_lines(machine, notify=False), number, audit, given)
        assert answer == (0x7FFF0000 if allowed else 0x00050000 | syscalls.error_of(name))
        handed_over = _interpret(syscalls.filter_lines(machine, notify=True), number, audit, given)
        assert handed_over == 0x7FC00000 or (allowed and handed_over == 0x7FFF0000)
        if handed_over == 0x7FC00000:
            assert (syscalls.decide(name, given) == syscalls.METER) == allowed


def _interpret(
    lines: list[syscalls.Line], number: int, audit: int, arguments: tuple[int, ...]
) -> int:
    data = struct.pack("IIQ6Q", number, audit, 0, *arguments)
    value = at = 0
    while True:
        code, true, false, constant = lines[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            value = struct.unpack_from("I", data, constant)[0]
        elif code == 0x05:
            at += constant
        else:
            test = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant}[code]
            at += true if test else false


def test_a_parent_with_many_files_leaks_none():
    """The server's socket then has a number beyond the program's limit."""
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    cell = Cell("strong")
    try:
        cell.start()
        assert (
            _output(cell, "import os; print(sorted(os.listdir('/proc/self/fd')))")
            == "['0', '1', '2', '3']\n"
        )
    except IsolationUnavailable as error:
        pytest.skip(f"no strong sandbox on this machine: {error}")
    finally:
        cell.close()
        for fd in kept:
            os.close(fd)


def test_holds_no_file_of_ours(cell):
    with open(os.devnull) as mine:
        os.set_inheritable(mine.fileno(), True)
        assert (
            _output(cell, "import os; print(sorted(os.listdir('/proc/self/fd')))")
            == "['0', '1', '2', '3']\n"
        )


SEARCH = """
import re
needle = bytes.fromhex({backwards!r})[::-1]
found = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps:
        first, last, mode = re.match(r"(\\w+)-(\\w+) (\\S+)", line).groups()
        if mode.startswith("rw"):
            memory.seek(int(first, 16))
            found += memory.read(int(last, 16) - int(first, 16)).count(needle)
print(found)
"""


def test_memory_holds_nothing_of_other_runs(cell):
    def occurrences(marker: bytes) -> int:
        return int(_output(cell, SEARCH.format(backwards=marker[::-1].hex())))

    used, unused = os.urandom(12).hex(), os.urandom(12).hex()
    assert _output(cell, f"print({used!r}, input())", stdin=used) == f"{used} {used}\n"
    assert occurrences(used.encode()) == occurrences(unused.encode()) >= 1  # the needle itself


def test_works_as_an_ordinary_user():
    python = next(
        (
            p
            for p in ("/usr/bin/python3.13", "/usr/bin/python3.12", "/usr/bin/python3.11")
            if Path(p).exists()
        ),
        "",
    )
    if os.geteuid() != 0 or not python or not shutil.which("setpriv"):
        pytest.skip("needs root, to become somebody else, and a Python that everybody may read")
    script = """
from gyre.rewards.sandbox.executors import Cell, IsolationUnavailable
from gyre.rewards.sandbox.records import Limits, Program
cell = Cell("strong")
try:
    cell.start()
    result = cell.run(Program(source="import os; print(os.getuid(), os.listdir('.'))"), limits=Limits())
    print(result.outcome, result.stdout.strip(), result.detail)
    cell.close()
except IsolationUnavailable as error:
    print("unavailable", error)
"""
    source = Path(gyre.__file__).parents[1]
    ordinary = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*ordinary, "test", "-r", str(source / "gyre/core/errors.py")]).returncode:
        pytest.skip("the source tree is not readable by others")
    done = subprocess.run(
        [*ordinary, python, "-c", script],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.stdout.startswith("unavailable"):
        pytest.skip(done.stdout)
    assert done.stdout == "ok 1000 ['main.py'] \n", done.stderr
