"""Which devices a worker sees, and how its end is told. The contract suite has the rest."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import venv
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cluster_roles import HERE
from gyre.cluster.process_cluster import ProcessCluster, describe_end, visible_devices
from gyre.cluster.worker.process_group import find_members
from gyre.cluster.worker.rpc import ask
from gyre.core.errors import ConfigError, WorkerLate, WorkerLost
from gyre.core.records import ProcessLimits, RoleSpec
from scripted_vllm import ROLE

SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize(
    ("given", "count", "names"),
    [
        (None, 2, ("0", "1")),
        ("3,5", 2, ("3", "5")),
        ("GPU-a, GPU-b", 2, ("GPU-a", "GPU-b")),
        ("3,5", 1, ("3",)),
        ("", 0, ()),
        (None, 0, ()),
    ],
)
def test_devices_are_those_that_the_starter_sees(given, count, names) -> None:
    assert visible_devices(given, count) == names


def test_an_end_is_told_in_words() -> None:
    assert describe_end(3) == "it ended with exit code 3"
    assert describe_end(-9) == "it was ended by SIGKILL"
    assert describe_end(None) == "it hung up and does not end"


def spec(**fields: Any) -> RoleSpec:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    given = {"name": "w", "builder": "process_roles:make", "environment": {"PYTHONPATH": path}}
    return RoleSpec(**{**given, **fields})


def go(work: Callable[[ProcessCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = ProcessCluster(gpus=0, on_event=lambda worker, kind, **fields: None)
        try:
            await asyncio.wait_for(work(cluster), 60)
        finally:
            await cluster.close()

    asyncio.run(main())


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The Python of an environment with msgspec and numpy alone, as a worker's link needs them."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for name in ("msgspec", "numpy"):
        (site / name).symlink_to(Path(__import__(name).__file__).parent)
    (site / "numpy.libs").symlink_to(Path(__import__("numpy").__file__).parents[1] / "numpy.libs")
    (site / "process_roles.py").symlink_to(Path(HERE) / "process_roles.py")
    return tmp_path / "env" / "bin" / "python"


def test_another_interpreter_sees_gyre_and_none_of_our_packages(bare: Path) -> None:
    async def main(cluster: ProcessCluster) -> None:
        handle = await cluster.start(spec(interpreter=str(bare), environment={}))
        told = await ask(handle, "packages", ["gyre", "numpy", "torch", "pytest"], deadline_s=30)
        assert told == {"gyre": True, "numpy": True, "torch": False, "pytest": False}
        assert await ask(handle, "prefix", deadline_s=30) == str(bare.parents[1])

    go(main)


def test_an_environment_that_lacks_a_package_is_named(bare: Path) -> None:
    """A sidecar's builder imports more than a link does."""
    builder = "gyre.launch.placement.vllm_worker:build_vllm_engine"

    async def main(cluster: ProcessCluster) -> None:
        with pytest.raises(ConfigError, match=r"lacks what .*vllm_worker imports: No module named"):
            await cluster.start(spec(interpreter=str(bare), environment={}, builder=builder))

    go(main)


def test_a_vllm_that_lacks_a_package_is_named(bare: Path) -> None:
    """All that we import is there; what vLLM imports is not."""
    (site,) = bare.parents[1].glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(str(Path(psutil.__file__).parents[1]))
    (site / "vllm").mkdir()
    (site / "vllm" / "__init__.py").write_text("import of_vllm_alone")
    builder = "gyre.launch.placement.vllm_worker:build_vllm_engine"
    arguments = {"role_json": msgspec.json.encode(ROLE).decode()}
    role = spec(interpreter=str(bare), environment={}, builder=builder, arguments=arguments)
    told = r"has no whole vLLM: No module named 'of_vllm_alone'"

    async def main(cluster: ProcessCluster) -> None:
        with pytest.raises(ConfigError, match=told) as raised:
            await cluster.start(role)
        assert "gyre sidecar install vllm" in raised.value.hint

    go(main)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def main(cluster: ProcessCluster) -> None:
        with pytest.raises(ConfigError, match=r"cannot be started by .*none: No such file"):
            await cluster.start(spec(interpreter=str(tmp_path / "none")))

    go(main)


def test_an_interpreter_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    """It is there, and never gets to our program."""
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)

    async def main(cluster: ProcessCluster) -> None:
        with pytest.raises(WorkerLate, match=r"w \(this host, pid \d+\).*build"):
            await cluster.start(spec(interpreter=str(hanging), deadline_s=0.3))
        left = [one.cmdline() for one in psutil.Process().children(recursive=True)]
        assert ["sleep", "600"] not in left

    go(main)


def test_limits_hold_for_the_process_and_what_it_starts() -> None:
    core = min(os.sched_getaffinity(0))

    async def main(cluster: ProcessCluster) -> None:
        limits = ProcessLimits(data_bytes=1 << 30, cores=(core,))
        handle = await cluster.start(spec(limits=limits))
        for who in ("itself", "child"):
            assert await ask(handle, "limits", who, deadline_s=30) == (1 << 30, (core,))
        with pytest.raises(Exception, match="MemoryError"):
            await ask(handle, "take", 2 << 30, deadline_s=30)

    go(main)


@pytest.mark.parametrize("way", ["stopped", "killed"])
def test_what_a_worker_has_started_ends_with_it(way: str) -> None:
    async def main(cluster: ProcessCluster) -> None:
        handle = await cluster.start(spec())
        own, child = await ask(handle, "start_child", deadline_s=30)
        if way == "stopped":
            await cluster.stop(handle)
        else:
            psutil.Process(own).kill()
            with pytest.raises(WorkerLost):
                await ask(handle, "prefix", deadline_s=30)
            await cluster.watch(handle)
        until_s = time.monotonic() + 20
        while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
            assert time.monotonic() < until_s
            await asyncio.sleep(0.02)

    go(main)


@pytest.mark.slow
def test_a_call_to_a_process_that_stands_still_ends_before_its_deadline() -> None:
    async def main(cluster: ProcessCluster) -> None:
        handle = await cluster.start(spec())
        own, _ = await ask(handle, "start_child", deadline_s=30)
        assert await ask(handle, "work", 3.0, deadline_s=30, hang_s=2.0) == "done", "it is busy"
        psutil.Process(own).suspend()
        with pytest.raises(WorkerLate, match="answers nothing for 2 s, and was asked for 'prefix'"):
            await ask(handle, "prefix", deadline_s=600, hang_s=2.0)

    go(main)


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux")
@pytest.mark.parametrize("way", ["stopped", "killed", "stopped by SIGSTOP"])
def test_what_a_worker_has_in_shared_memory_ends_with_it(way: str) -> None:
    async def main(cluster: ProcessCluster) -> None:
        handle = await cluster.start(spec())
        own, names = await ask(handle, "share_memory", deadline_s=30)
        assert all((SHARED_MEMORY / name).exists() for name in names)
        if way == "killed":
            psutil.Process(own).kill()
            await cluster.watch(handle)
        elif way == "stopped by SIGSTOP":
            psutil.Process(own).suspend()
        await cluster.stop(handle)
        assert not [name for name in names if (SHARED_MEMORY / name).exists()]
        assert not find_members(own)

    go(main)


STARTER = """
import asyncio, sys, time
from gyre.cluster.process_cluster import ProcessCluster
from gyre.cluster.worker.rpc import ask
from gyre.core.records import RoleSpec

async def main():
    cluster = ProcessCluster(gpus=0, on_event=lambda *_, **__: None)
    handle = await cluster.start(RoleSpec(name="w", builder="process_roles:make"))
    own, names = await ask(handle, "share_memory", deadline_s=30)
    print(own, *names, flush=True)
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux")
@pytest.mark.parametrize("stands_still", [False, True])
def test_a_worker_whose_starter_is_killed_leaves_nothing(stands_still: bool) -> None:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert starter.stdout is not None
    own, *names = starter.stdout.readline().split()
    assert len(names) == 2 and all((SHARED_MEMORY / name).exists() for name in names)
    if stands_still:
        psutil.Process(int(own)).suspend()
    starter.kill()
    starter.communicate(timeout=20)
    until_s = time.monotonic() + 20
    while find_members(int(own)) or any((SHARED_MEMORY / name).exists() for name in names):
        assert time.monotonic() < until_s
        time.sleep(0.02)
