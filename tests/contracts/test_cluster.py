"""Contract suite of Cluster and WorkerHandle: what whoever starts workers relies on. Ray's is slow:
it starts Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest

from cluster_roles import HERE, end_thread
from gyre.cluster.config import ClusterConfig
from gyre.cluster.process_cluster import ProcessCluster
from gyre.cluster.ray_cluster import RayCluster
from gyre.cluster.worker.rpc import arrive, ask
from gyre.cluster.worker.server import WorkerFault
from gyre.core.errors import ConfigError, DeadlineError, InputError, WorkerLost
from gyre.core.records import Health, Mount, RoleSpec
from local_cluster import LocalCluster

EVENTS: list[tuple[str, str, dict[str, Any]]] = []


def note(worker: str, kind: str, **fields: Any) -> None:
    EVENTS.append((worker, kind, fields))


def make_ray() -> RayCluster:
    # not imported: RayCluster must say what Ray is to read before it is
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    os.environ.setdefault("PYTHONPATH", "")
    return RayCluster(ClusterConfig(kind="ray", object_store_bytes=200 << 20), on_event=note)


CLUSTERS: dict[str, Callable[[], Any]] = {
    "threads": lambda: LocalCluster(on_event=note),
    "processes": lambda: ProcessCluster(gpus=0, on_event=note),
    "ray": make_ray,
}


@pytest.fixture(
    scope="module", params=["threads", "processes", pytest.param("ray", marks=pytest.mark.slow)]
)
def cluster(request) -> Iterator[Any]:
    made = CLUSTERS[request.param]()
    yield made
    asyncio.run(made.close())


def spec(name: str, **fields: Any) -> RoleSpec:
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    fields = {"builder": "odd_role:odd", "cpus": 0.5, "deadline_s": 60.0, **fields}
    return RoleSpec(name=name, environment={"PYTHONPATH": path, "GYRE_SAID": name}, **fields)


class Unreadable:
    """Can be sent by Ray and not be read."""

    def __reduce__(self) -> Any:
        return (float, ("not a number, which only its reader finds out",))


def go(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 90))  # type: ignore[arg-type]


def test_calls_are_answered_and_events_come_along(cluster) -> None:
    async def main() -> None:
        handle = await cluster.start(spec("one"))
        shared = cluster.share(np.arange(5))
        assert (await ask(handle, "echo", shared, deadline_s=20)).tolist() == [0, 1, 2, 3, 4]
        assert ("one", "engine.prefix_cleared", {"pages": 11, "reason": "echo"}) in EVENTS
        assert handle.name == "one" and str(await ask(handle, "pid", deadline_s=20)) in handle.place
        await cluster.stop(handle)

    go(main)


def test_mounts_are_refused_by_name(cluster) -> None:
    async def main() -> None:
        mounts = (Mount(host_path="/srv/data", place="/data"),)
        with pytest.raises(ConfigError, match="one is to have mounts"):
            await cluster.start(spec("one", mounts=mounts))

    go(main)


def test_calls_begin_in_the_order_in_which_they_were_made(cluster) -> None:
    """Large arguments travel another way than small ones, and must not come later for that."""

    async def main() -> None:
        handle = await cluster.start(spec("ordered"))
        large = np.zeros(300_000)
        begun = [handle.begin("note", i, large if i % 3 == 0 else None) for i in range(40)]
        await asyncio.gather(*(arrive(future, handle, "note", 30) for future in begun))
        assert await ask(handle, "noted", deadline_s=20) == list(range(40))
        await cluster.stop(handle)

    go(main)


def test_calls_from_several_threads_are_all_answered(cluster) -> None:
    """A thread fetches tensors from a worker while the event loop polls the engine there."""

    async def main() -> None:
        handle = await cluster.start(spec("shared"))

        def call(first: int) -> list[Any]:
            return [handle.begin("echo", number) for number in range(first, first + 60)]

        begun = await asyncio.gather(*(asyncio.to_thread(call, 60 * thread) for thread in range(4)))
        answers = [
            await arrive(future, handle, "echo", 20) for futures in begun for future in futures
        ]
        assert answers == list(range(240))
        await cluster.stop(handle)

    go(main)


def test_errors_come_as_what_they_were(cluster) -> None:
    async def main() -> None:
        handle = await cluster.start(spec("odd"))
        with pytest.raises(InputError, match="not this") as refused:
            await ask(handle, "refuse", deadline_s=20)
        assert refused.value.hint == "something else"
        with pytest.raises(WorkerFault, match=r"(?s)broken inside.*in worker odd.*break_"):
            await ask(handle, "break_", deadline_s=20)
        assert await ask(handle, "echo", 1, deadline_s=20) == 1
        await cluster.stop(handle)

    go(main)


def test_a_builder_that_fails_leaves_no_worker(cluster) -> None:
    async def main() -> None:
        with pytest.raises(InputError, match="told to fail"):
            await cluster.start(spec("stillborn", arguments={"fail": True}))

    go(main)


def test_a_busy_worker_is_late_and_can_still_be_looked_at(cluster) -> None:
    async def main() -> None:
        handle = await cluster.start(spec("busy"))
        blocked = handle.begin("block", 1.5)
        with pytest.raises(DeadlineError, match="worker busy"):
            await ask(handle, "pid", deadline_s=0.2)
        stacks = await arrive(handle.look("stacks"), handle, "stacks", 20)
        assert "block" in stacks
        assert isinstance(await arrive(handle.look("pulse"), handle, "pulse", 20), int)
        await arrive(blocked, handle, "block", 20)
        await cluster.stop(handle)

    go(main)


def test_a_call_whose_arguments_cannot_be_sent_or_read_holds_up_no_other(cluster) -> None:
    """Calls are answered in order, and one that never reaches the worker must not be waited for."""
    if isinstance(cluster, LocalCluster):
        pytest.skip("threads send nothing")

    async def main() -> None:
        handle = await cluster.start(spec("mailbox"))
        is_ray = isinstance(cluster, RayCluster)
        with pytest.raises(TypeError, match="pickle" if is_ray else "got lock"):
            handle.begin("note", 0, threading.Lock())
        wrong: Any = "its types do not fit, which only its reader finds out"
        unreadable = handle.begin("note", 1, Unreadable() if is_ray else Health(ok=wrong))
        after = handle.begin("note", 2, None)
        with pytest.raises(WorkerFault, match="worker mailbox"):
            await arrive(unreadable, handle, "note", 20)
        await arrive(after, handle, "note", 20)
        assert await ask(handle, "noted", deadline_s=20) == [2]
        await cluster.stop(handle)

    go(main)


def test_an_answer_that_cannot_be_sent_is_the_callers_error(cluster) -> None:
    if isinstance(cluster, LocalCluster):
        pytest.skip("threads send nothing")

    async def main() -> None:
        handle = await cluster.start(spec("keeper"))
        with pytest.raises(WorkerFault, match="keeper"):
            await ask(handle, "lock", deadline_s=20)
        assert await ask(handle, "echo", 1, deadline_s=20) == 1
        await cluster.stop(handle)

    go(main)


def test_a_worker_that_does_not_move_is_stopped_all_the_same(cluster) -> None:
    """A process that was stopped by a signal, or hangs in a driver, keeps its device until it is
    gone."""
    if isinstance(cluster, LocalCluster):
        pytest.skip("a thread cannot be stopped by a signal")

    async def main() -> None:
        handle = await cluster.start(spec("frozen"))
        process = psutil.Process(await_pid(handle))
        process.suspend()
        # more than a socket holds: the caller does not wait for one that does not read
        unread = handle.begin("note", 0, np.zeros(2_000_000))
        await cluster.stop(handle)
        assert not process.is_running()
        with pytest.raises(WorkerLost, match="frozen"):
            await arrive(unread, handle, "note", 20)
        assert not [kind for worker, kind, _ in EVENTS if worker == "frozen"]

    go(main)


def test_the_end_of_a_worker_is_noticed(cluster) -> None:
    async def main() -> None:
        handle = await cluster.start(spec("mortal"))
        watch = asyncio.create_task(cluster.watch(handle))
        waiting = handle.begin("block", 5.0)
        if isinstance(cluster, LocalCluster):
            end_thread(cluster, "mortal")
        else:
            os.kill(await_pid(handle), 9)
        cause = await asyncio.wait_for(watch, 30)
        assert cause
        for future in (waiting, handle.begin("pid")):
            with pytest.raises(WorkerLost, match="mortal"):
                await arrive(future, handle, "pid", 20)
        await cluster.stop(handle)

    go(main)


def await_pid(handle: Any) -> int:
    return int(handle.place.rpartition(" ")[2])


def test_a_stopped_worker_is_gone(cluster) -> None:
    async def main() -> None:
        handle = await cluster.start(spec("stopped"))
        pid = await_pid(handle) if not isinstance(cluster, LocalCluster) else None
        await cluster.stop(handle)
        await cluster.stop(handle)
        with pytest.raises(WorkerLost, match="stopped"):
            await ask(handle, "pid", deadline_s=20)
        if pid is not None:
            with suppress(ProcessLookupError):
                for _ in range(200):
                    os.kill(pid, 0)
                    await asyncio.sleep(0.05)
                raise AssertionError("the process is still there")

    go(main)


def test_a_worker_has_the_environment_and_the_devices_that_were_asked_for(cluster) -> None:
    if isinstance(cluster, LocalCluster):
        pytest.skip("a thread has no environment of its own")

    async def main() -> None:
        handle = await cluster.start(spec("environed"))
        assert await ask(handle, "environment", "GYRE_SAID", deadline_s=20) == "environed"
        with pytest.raises((DeadlineError, ConfigError), match=r"9 of 0 GPUs") as late:
            await cluster.start(spec("greedy", gpus=9.0, deadline_s=2.0))
        if isinstance(cluster, RayCluster):  # where GPUs may come free it waits for them
            assert "cluster.start_deadline_s" in late.value.hint
        await cluster.stop(handle)

    go(main)


def test_what_was_started_here_listens_on_loopback_only(cluster) -> None:
    if not isinstance(cluster, RayCluster):
        pytest.skip("threads and socket pairs listen on nothing")
    heard: list[str] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that ended meanwhile
            places = process.net_connections("inet")
            heard += [
                place.laddr.ip.removeprefix("::ffff:")
                for place in places
                if place.status == "LISTEN"
            ]
    assert heard and set(heard) <= {"127.0.0.1", "::1"}
