"""The ranks of a served engine are one worker: started, looked at, watched and stopped together."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from gyre.core.errors import InputError, WorkerLost
from gyre.core.records import RoleSpec
from gyre.launch.serving.engine_groups import EngineGroups, joined, rank_role


class Handle:
    """A rank that answers what a test gives it."""

    def __init__(self, spec: RoleSpec, refuses: str) -> None:
        self.name, self.place, self.spec = spec.name, f"pid of {spec.name}", spec
        self.refuses = refuses
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.looks: list[Future[Any]] = []
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.answer: Future[Any] | None = None  # that a test gives

    def begin(self, method: str, *args: Any) -> Future[Any]:
        self.asked.append((method, args))
        if self.answer is not None:
            return self.answer
        answer: Future[Any] = Future()
        if self.refuses == f"{self.name} {method}":
            answer.set_exception(InputError(f"{self.name} refuses"))
        else:
            answer.set_result(7 if method == "open_store" else None)
        return answer

    def look(self, what: str) -> Future[Any]:
        self.looks.append(Future())
        return self.looks[-1]


class Cluster:
    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.there, self.started = refuses, set[Handle](), list[Handle]()

    async def start(self, spec: RoleSpec) -> Handle:
        if self.refuses == f"{spec.name} start":
            raise InputError(f"{spec.name} refuses")
        self.started.append(handle := Handle(spec, self.refuses))
        self.there.add(handle)
        return handle

    async def stop(self, handle: Handle) -> None:
        self.there.discard(handle)

    async def watch(self, handle: Handle) -> str:
        return await handle.gone


SPEC = RoleSpec(name="engine-1", builder="b", arguments={"version": 4}, devices=(2, 3))


def groups(cluster: Cluster, num_ranks: int = 2) -> tuple[EngineGroups, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    made: Any = cluster
    return EngineGroups(made, num_ranks, emit=lambda kind, **fields: told.append(fields)), told


def test_each_rank_has_its_own_device_and_number() -> None:
    first, second = (rank_role(SPEC, rank) for rank in (0, 1))
    assert (first.name, first.devices) == ("engine-1", (2,))
    assert (second.name, second.devices) == ("engine-1.1", (3,))
    assert second.arguments == {"version": 4, "tensor_rank": 1}
    assert rank_role(RoleSpec(name="e", builder="b"), 1).devices == ()  # on a CPU


def test_ranks_meet_at_the_first_ones_store_and_it_alone_is_called() -> None:
    async def main() -> None:
        engines, told = groups(cluster := Cluster())
        group: Any = await engines.start(SPEC)
        first, second = cluster.started
        assert first.asked == [("open_store", ()), ("meet", (7,))]
        assert second.asked == [("meet", (7,))]
        assert told == [{"workers": {"engine-1": first.place, "engine-1.1": second.place}}]
        group.begin("engine.stats")
        assert first.asked[2:] == [("engine.stats", ())] and len(second.asked) == 1
        assert group.name == "engine-1" and second.place in group.place
        await engines.stop(group)
        assert not cluster.there

    asyncio.run(main())


@pytest.mark.parametrize(
    "refuses",
    ["engine-1 start", "engine-1.1 start", "engine-1 open_store", "engine-1 meet",
     "engine-1.1 meet"],
)  # fmt: skip
def test_of_a_start_that_fails_no_rank_stays(refuses) -> None:
    async def main() -> None:
        engines, told = groups(cluster := Cluster(refuses))
        with pytest.raises(InputError, match=f"{refuses.split()[0]} refuses"):
            await engines.start(SPEC)
        assert not cluster.there and not told

    asyncio.run(main())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_any_rank_is_that_of_the_engine(rank) -> None:
    async def main() -> None:
        engines, _ = groups(cluster := Cluster())
        group = await engines.start(SPEC)
        watching = asyncio.create_task(engines.watch(group))
        await asyncio.sleep(0)
        cluster.started[rank].gone.set_result("it was ended by SIGKILL")
        told = await asyncio.wait_for(watching, 30)
        place = cluster.started[rank].place
        assert told == f"rank {rank} of the engine ({place}): it was ended by SIGKILL"

    asyncio.run(main())


def test_a_call_that_ends_with_its_engine_names_the_rank_that_was_gone_first() -> None:
    """The first rank is stopped after another one has ended."""

    async def main() -> None:
        engines, _ = groups(cluster := Cluster())
        group = await engines.start(SPEC)
        watching = asyncio.create_task(engines.watch(group))
        await asyncio.sleep(0)
        first, second = cluster.started
        first.answer = Future()
        call = group.begin("engine.start")
        second.gone.set_result("it was ended by SIGKILL")
        await asyncio.wait_for(watching, 30)
        first.answer.set_exception(WorkerLost("worker engine-1 is gone: it was stopped"))
        with pytest.raises(WorkerLost, match=r"engine-1 is lost: rank 1 .* ended by SIGKILL"):
            call.result(0)
        first.answer = Future()
        call = group.begin("engine.start")
        first.answer.set_exception(InputError("its own"))
        with pytest.raises(InputError, match="its own"):
            call.result(0)

    asyncio.run(main())


def test_a_look_is_answered_once_every_rank_has_answered() -> None:
    async def main() -> None:
        engines, _ = groups(cluster := Cluster())
        group = await engines.start(SPEC)
        pulse, stacks = group.look("pulse"), group.look("stacks")
        (first, texts), (second, others) = (one.looks for one in cluster.started)
        first.set_result(3)
        assert not pulse.done()
        second.set_result(4)
        assert pulse.result(0) == 7
        texts.set_result("here")
        others.set_result("there")
        assert stacks.result(0) == "= rank 0\nhere\n= rank 1\nthere"

    asyncio.run(main())


def test_the_first_error_of_any_part_is_that_of_the_whole() -> None:
    parts: list[Future[int]] = [Future() for _ in range(3)]
    whole = joined(parts, sum)
    parts[1].set_exception(WorkerLost("rank 1 is gone"))
    with pytest.raises(WorkerLost, match="rank 1"):
        whole.result(0)
    parts[0].set_result(1)
    parts[2].set_exception(WorkerLost("rank 2 is gone"))  # told before


def test_parts_may_be_answered_by_many_threads() -> None:
    for _ in range(50):
        parts: list[Future[int]] = [Future() for _ in range(4)]
        whole = joined(parts, sum)
        threads = [threading.Thread(target=part.set_result, args=(1,)) for part in parts]
        for thread in threads:
            thread.start()
        assert whole.result(30) == 4
        for thread in threads:
            thread.join(30)
