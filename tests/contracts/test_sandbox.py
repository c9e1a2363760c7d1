"""Contract suite of the sandbox: what rewards rely on, for every mode that this machine has."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from dataclasses import replace

import psutil
import pytest

from gyre.core.errors import InputError
from gyre.rewards.sandbox.executors import Cell, Cells, IsolationUnavailable, _probe
from gyre.rewards.sandbox.records import Limits, Program

LIMITS = Limits(
    wall_s=10.0,
    cpu_s=5.0,
    memory_bytes=128 << 20,
    processes=8,
    output_bytes=1 << 16,
    file_bytes=1 << 20,
)
SHORT = Limits(
    wall_s=0.5,
    cpu_s=5.0,
    memory_bytes=128 << 20,
    processes=8,
    output_bytes=1 << 16,
    file_bytes=1 << 20,
)


def _available(mode: str) -> bool:
    try:
        _probe(mode)  # type: ignore[arg-type]
    except IsolationUnavailable:
        return False
    return True


MODES = ["weak", *(mode for mode in ("strong", "bubblewrap") if _available(mode))]


# make test has one that isolates strongly
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(mode, marks=pytest.mark.slow if mode == "bubblewrap" else ()) for mode in MODES
    ],
)
def cells(request):
    others = _below()  # what other tests of this process left running
    sandbox = Cells(request.param, in_flight=2)
    for _ in range(2):  # one program per cell, in turn, starts both servers
        _run(sandbox, "")
    yield sandbox
    servers = [process for process in _below() if process not in others]
    assert servers
    sandbox.close()
    assert not [
        process for process in servers if process.is_running() and process.status() != "zombie"
    ]


def _below() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _run(sandbox: Cells, source: str, *, limits: Limits = LIMITS, **fields):
    return asyncio.run(sandbox.run(Program(source=source, **fields), limits=limits))


def test_says_what_isolates(cells):
    assert cells.isolation.startswith(
        {"strong": "namespaces", "weak": "weak", "bubblewrap": "bubblewrap"}[cells.mode]
    )
    assert ("no network" in cells.isolation) == (cells.mode != "weak")


def test_runs_as_python_would(cells):
    source = (
        "import sys\nname = input()\nprint('hello', name, sys.argv[1:], open('a/b.txt').read())"
    )
    result = _run(cells, source, stdin="world\n", argv=("-x", "y"), files={"a/b.txt": "text"})
    assert (result.outcome, result.stdout, result.exit_code) == (
        "ok",
        "hello world ['-x', 'y'] text\n",
        0,
    )
    assert result.stderr == "" and result.wall_s > 0.0


@pytest.mark.parametrize(
    ("source", "outcome", "code", "said"),
    [
        ("1/0", "exit", 1, "ZeroDivisionError"),
        ("def (", "exit", 1, "SyntaxError"),
        ("import sys; sys.exit(7)", "exit", 7, ""),
        ("import sys; sys.exit('sorry')", "exit", 1, "sorry"),
        ("import ctypes; ctypes.string_at(0)", "killed", None, ""),
        ("x = 'x' * 2_000_000_000", "memory", 1, "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "memory", 1, "MemoryError"),
    ],
)
def test_ends_are_told_apart(cells, source, outcome, code, said):
    result = _run(cells, source)
    assert (result.outcome, result.exit_code) == (outcome, code)
    assert said in result.stderr
    assert result.outcome == "ok" or result.detail


def test_threads_exit_functions_and_children_are_waited_for(cells):
    source = """
import atexit, subprocess, sys, threading, time
atexit.register(lambda: print("last"))
print(subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True).stdout.strip())
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
"""
    result = _run(cells, source)
    assert (result.outcome, result.stdout) == ("ok", "5\nthread\nlast\n"), result


IGNORE_ALL = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("source", "outcomes"),
    [
        ("import time; time.sleep(1000)", {"timeout"}),
        ("while True: pass", {"timeout"}),
        (IGNORE_ALL + "while True: pass", {"timeout"}),
        (IGNORE_ALL + "import time\nwhile True: time.sleep(1)", {"timeout"}),
        ("import os\nos.close(1); os.close(2)\nwhile True: pass", {"timeout"}),
        pytest.param(
            "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
            {"timeout", "processes", "cpu"},
            marks=pytest.mark.slow,  # it slows what runs beside it
        ),
        (
            "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
            "args=(99,)).start()",
            None,
        ),
        ("while True: print('x' * 1000)", {"output"}),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output"}),
        (DAEMON, {"ok"}),
        (DAEMON + "time.sleep(1000)", {"timeout"}),
        ("import os\nif os.fork() == 0:\n  os.setsid()\n  while True: pass", {"ok"}),
    ],
)
def test_what_will_not_end_is_ended_whole(cells, source, outcomes):
    before = set(_below())
    by_itself = outcomes is not None and "timeout" not in outcomes
    # what does not end by the clock does so however late it gets a processor
    limits = replace(SHORT, wall_s=20.0) if by_itself else SHORT
    result = _run(cells, source, limits=limits)
    assert outcomes is None or result.outcome in outcomes, result
    assert len(result.stdout) + len(result.stderr) <= SHORT.output_bytes
    assert set(_below()) <= before


def test_cpu_time_of_all_processes_is_limited(cells):
    limits = Limits(wall_s=20.0, cpu_s=0.3, processes=8)
    result = _run(cells, "import os\nos.fork()\nwhile True: pass", limits=limits)
    assert result.outcome == "cpu", result


def test_memory_of_all_processes_is_limited(cells):
    source = "import os, time\nchild = os.fork()\nblock = bytearray(90 << 20)\ntime.sleep(1000)"
    result = _run(cells, source)
    assert result.outcome == "memory" and "128 MiB" in result.detail, result


def test_files_are_limited(cells):
    result = _run(cells, "open('big', 'wb').write(b'x' * (2 << 20))")
    assert result.outcome == "exit" and "OSError" in result.stderr


def test_files_are_limited_together(cells):
    """100 MiB in files of an allowed size, into a folder of 4 MiB."""
    limits = Limits(wall_s=10.0, memory_bytes=128 << 20, file_bytes=4 << 20)
    source = (
        "for n in range(50):\n  with open(f'f{n}', 'wb') as f: f.write(bytes(2 << "
        "20))\nprint('written')"
    )
    result = _run(cells, source, limits=limits)
    if cells.mode == "weak":  # the folder is looked at, now and then
        assert result.outcome == "files", result
    else:
        assert result.outcome == "exit" and "written" not in result.stdout, result


DEEP = """
import os
for _ in range(300):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
open("f", "w").write("x")
"""
LOCKED = """
import os
os.makedirs("a/b/c")
open("a/b/f", "w").write("x")
for path in ("a/b/c", "a/b", "a", "."):
    os.chmod(path, 0)
"""


@pytest.mark.parametrize("source", [DEEP, LOCKED], ids=["deep", "locked"])
def test_folders_are_removed_however_deep_and_locked(cells, source):
    result = _run(cells, "import os\nprint(os.getcwd())\n" + source)
    assert result.outcome == "ok", result
    assert not os.path.lexists(result.stdout.strip()) or cells.mode != "weak"


def test_a_program_cannot_say_that_the_sandbox_failed(cells):
    source = "import os\nos.write(2, b'the sandbox could not start the program: x')\nos._exit(125)"
    result = _run(cells, source)
    assert (result.outcome, result.exit_code) == ("exit", 125), result


def test_a_program_that_cannot_be_put_up_is_the_sandboxs_own_failure(cells):
    result = _run(cells, "print(1)" + " " * (2 << 20))  # larger than its work folder
    assert result.outcome == "failed" and "could not run the program" in result.detail, result
    assert _run(cells, "print(1)").outcome == "ok"


def test_pipes_that_stay_open_are_not_waited_for(tmp_path):
    """Somebody outside holds the program's stdout; only weak mode lets a program reach anybody."""
    cell = Cell("weak")
    source = f"""
import array, socket
with socket.socket(socket.AF_UNIX) as s:
    s.connect({str(tmp_path / "s")!r})
    s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1, 2]))])
print("sent")
"""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        result = cell.run(Program(source=source), limits=LIMITS)
        cell.close()
    assert (result.outcome, result.stdout) == ("ok", "sent\n"), result


def test_refused_calls_are_told(cells):
    result = _run(cells, "import socket\nsocket.socket(40, socket.SOCK_STREAM)")
    assert result.outcome == "exit" and "not supported" in result.stderr, result
    assert result.refused_calls == {"socket(family 40, protocol 0)": 1}


def test_nothing_survives_to_the_next_run(cells):
    leave = """
import builtins, os, random, sys, tempfile
random.seed(1)
builtins.left = sys.left = os.left = 1
os.environ["LEFT"] = "1"
sys.modules["left"] = os
open("left.txt", "w").write("here")
open(os.path.join(tempfile.gettempdir(), "left-too.txt"), "w").write("here")
print(os.getcwd(), "done")
"""
    look = """
import builtins, os, sys, tempfile
found = [owner.__name__ for owner in (builtins, sys, os) if hasattr(owner, "left")]
found += [name for name in ("left",) if name in sys.modules] + [key for key in os.environ if key == "LEFT"]
found += [name for folder in (".", tempfile.gettempdir()) for name in os.listdir(folder) if name.startswith("left")]
print(found)
"""
    for _ in range(2):
        assert _run(cells, leave).outcome == "ok"
        assert _run(cells, look).stdout == "[]\n"


def test_prints_the_same_each_time(cells):
    source = "print(list({'a', 'b', 'c', 'd', 'e'}), hash('gyre'))"
    assert len({_run(cells, source).stdout for _ in range(4)}) == 1


def test_undecodable_output_is_replaced(cells):
    assert _run(cells, "import os; os.write(1, b'a\\xffb')").stdout == "a�b"


def test_programs_in_flight_do_not_mix(cells):
    async def many():
        programs = [
            Program(source="import time\nn = input()\ntime.sleep(0.01)\nprint(n)", stdin=str(n))
            for n in range(8)
        ]
        return await asyncio.gather(*(cells.run(program, limits=LIMITS) for program in programs))

    assert [result.stdout for result in asyncio.run(many())] == [f"{n}\n" for n in range(8)]


def test_a_dead_server_costs_one_program(cells):
    servers = [
        process
        for process in _below()
        if "gyre.rewards.sandbox.server" in " ".join(process.cmdline())
    ]
    assert servers
    for process in servers:
        process.kill()
    psutil.wait_procs(servers, timeout=5)
    results = [_run(cells, "print(1)") for _ in range(6)]
    assert {result.outcome for result in results} <= {"ok", "failed"}
    assert [result.outcome for result in results[-2:]] == ["ok", "ok"]


def test_refuses_senseless_limits_and_files():
    with pytest.raises(InputError, match="wall_s"):
        Limits(wall_s=0.0)
    for name in ("/etc/passwd", "../up", "a/../../up", ""):
        with pytest.raises(InputError, match="relative path"):
            Program(source="", files={name: ""})


def test_bubblewrap_is_tried_where_it_is_installed():
    assert ("bubblewrap" in MODES) <= (shutil.which("bwrap") is not None)
