"""Ray cluster: workers as Ray actors, one process each. In: RoleSpecs. Out: handles. Implements
Cluster.

A Ray that is started here listens on loopback only, has no dashboard and sends no usage data; it
ends with `close`. With an address the workers are started on the nodes of that cluster, where gyre
must be installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import psutil

from gyre.cluster.config import ClusterConfig
from gyre.cluster.worker.rpc import STARTS, arrive, refuse_mounts
from gyre.cluster.worker.server import OnEvent, Reply, WorkerFault, WorkerServer, settle_reply
from gyre.core.contracts import WorkerHandle
from gyre.core.errors import ConfigError, WorkerLate, WorkerLost
from gyre.core.records import ProcessLimits, RoleSpec

WATCH = "watch"  # the concurrency group that answers while the object is busy
LEAVE_S = 3.0  # for a killed worker to go by Ray's hand
STOP_S = 20.0  # longest wait for a killed worker to be gone
MOST_CALLS = 1000  # at a time, per worker
TYPE_PREFIX = "accelerator_type:"  # of the resource by which Ray names the GPUs of a node
# Read by Ray when it is imported. The second one is what keeps a local Ray on 127.0.0.1: it means
# "local only".
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
LOOPBACK = "127.0.0.1"
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
INSTALL = "pip install 'gyre-rl[cluster]'"


class Actor:
    """What runs in the worker's process. Calls start in the order in which they were given
    numbers."""

    def __init__(self, spec: RoleSpec) -> None:
        self._host = WorkerServer(spec)
        self._next = 0
        self._turns: dict[int, asyncio.Event] = {}

    async def build(self) -> tuple[Reply, int, str]:
        import ray

        return await self._host.build(), os.getpid(), ray.util.get_node_ip_address()

    async def ask(self, number: int, method: str, *args: Any) -> Reply:
        await self._turn(number)
        work = asyncio.ensure_future(self._host.ask(method, args))
        await asyncio.sleep(0)  # the call has started before the next one does
        self._end_turn()
        return await work

    async def skip(self, number: int) -> None:
        """Skip the number of a call that will not come: its arguments could not be read here."""
        if number >= self._next:
            await self._turn(number)
            self._end_turn()

    async def _turn(self, number: int) -> None:
        # large arguments may have come later than a call that was made after
        if number != self._next:
            await self._turns.setdefault(number, asyncio.Event()).wait()

    def _end_turn(self) -> None:
        self._next += 1
        if (waiting := self._turns.pop(self._next, None)) is not None:
            waiting.set()

    async def look(self, what: str) -> Any:
        return self._host.look(what)

    async def until_end(self) -> None:
        await asyncio.Event().wait()


class RayHandle:
    """One actor. Any thread may call it."""

    def __init__(self, spec: RoleSpec, actor: Any, on_event: OnEvent, *, here: str) -> None:
        """Keep `here`, this process's address as workers on its machine give theirs."""
        self.name = spec.name
        self.place = "starting"
        self._here = here
        self.process: psutil.Process | None = None  # on this machine
        self.actor = actor
        self._on_event = on_event
        self._number = 0
        # the worker waits for every number: none may be taken twice or left out
        self._sending = threading.Lock()
        self.stopped = ""

    def begin(self, method: str, *args: Any) -> Future[Any]:
        with self._sending:
            number = self._number
            ref = self.actor.ask.remote(number, method, *args)
            self._number += 1  # only a call that went out takes one
        return self._follow(ref, self._settle, on_fault=lambda: self.actor.skip.remote(number))

    def look(self, what: Literal["pulse", "stacks"]) -> Future[Any]:
        return self._follow(self.actor.look.options(concurrency_group=WATCH).remote(what), _pass_on)

    def build(self) -> Future[Any]:
        def settle(out: Future[Any], answer: tuple[Reply, int, str]) -> None:
            reply, pid, address = answer
            self.place = f"node {address}, pid {pid}"
            self.process = _find_process(pid) if address == self._here else None
            self._settle(out, reply)

        return self._follow(self.actor.build.remote(), settle)

    def until_end(self) -> Future[Any]:
        return self._follow(
            self.actor.until_end.options(concurrency_group=WATCH).remote(), _pass_on
        )

    def _settle(self, out: Future[Any], reply: Reply) -> None:
        settle_reply(out, reply, self.name, self._on_event)

    def _follow(
        self,
        ref: Any,
        settle: Callable[[Future[Any], Any], None],
        *,
        on_fault: Callable[[], Any] = lambda: None,
    ) -> Future[Any]:
        """Return the answer to be, with Ray's words for a dead process and for a call that never
        reached its object made ours; `on_fault` comes before the latter."""
        out: Future[Any] = Future()
        out.set_running_or_notify_cancel()  # a caller that stops waiting does not end it

        def done(answer: Future[Any]) -> None:
            from ray.exceptions import RayActorError

            try:
                value = answer.result()
            except RayActorError as error:
                out.set_exception(
                    WorkerLost(f"worker {self.name} ({self.place}) is gone: {self._cause(error)}")
                )
            except Exception as error:  # noqa: BLE001  it belongs to the waiting caller
                on_fault()
                out.set_exception(
                    WorkerFault(
                        f"worker {self.name} ({self.place}): {type(error).__name__}: {error}"
                    )
                )
            else:
                settle(out, value)

        ref.future().add_done_callback(done)
        return out

    def _cause(self, error: Exception) -> str:
        told = [line.strip() for line in str(error).splitlines() if line.strip()]
        wanted = [
            line
            for line in told
            if not line.startswith(("class_name:", "actor_id:", "pid:", "namespace:", "ip:"))
        ]
        return self.stopped or " ".join(wanted)[:600]


def _find_process(pid: int) -> psutil.Process | None:
    """Return a worker's process, when it is one of this machine's."""
    try:
        process = psutil.Process(pid)
        return (
            process if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::") else None
        )
    except psutil.Error:
        return None


def _end_process(process: psutil.Process) -> bool:
    """Kill a process that outlives its actor, and return whether it is gone. Blocks. Ray calls an
    actor dead as soon as it asks it to end; one that hangs is still there then, with its device.
    Others end by themselves: killed at once, Ray would warn of them."""
    try:
        with suppress(psutil.TimeoutExpired):
            process.wait(LEAVE_S)
        process.kill()
        process.wait(STOP_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    return True


def _pass_on(out: Future[Any], value: Any) -> None:
    out.set_result(value)


class RayCluster:
    """Actors as workers."""

    def __init__(self, config: ClusterConfig, *, on_event: OnEvent) -> None:
        """Start Ray, or join the cluster at `config.address`. ConfigError when neither can be
        done."""
        self._on_event = on_event
        self._handles: set[RayHandle] = set()
        self._numbers = itertools.count()  # a name is not free as soon as its actor is killed
        os.environ.update(QUIET if config.address else QUIET | LOOPBACK_ONLY)
        import ray

        if ray.is_initialized():
            raise ConfigError(
                "this process is part of a Ray cluster already",
                hint="train in a process of its own",
            )
        try:
            if config.address:
                ray.init(address=config.address, log_to_driver=False, configure_logging=False)
            else:
                ray.init(
                    address="local",
                    object_store_memory=config.object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            where = (
                f"no Ray cluster answers at cluster.address = '{config.address}'"
                if config.address
                else "Ray"
            )
            raise ConfigError(
                f"{where}: {str(error).splitlines()[0]}",
                hint="leave cluster.address out to start Ray here, or start it with `ray start "
                "--head`",
            ) from error
        self._ray = ray
        if not config.address and (heard := ray.util.get_node_ip_address()) != LOOPBACK:
            ray.shutdown()
            raise ConfigError(
                f"Ray was imported before gyre could keep it on {LOOPBACK}, and would listen on "
                f"{heard}",
                hint="set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the environment, or do not "
                "import ray in this process",
            )
        options: dict[str, Any] = {"max_concurrency": MOST_CALLS, "concurrency_groups": {WATCH: 8}}
        self._remote: Any = ray.remote(**options)
        # where this process can be reached by workers
        self.address = ray.util.get_node_ip_address()

    @property
    def num_gpus(self) -> int:
        return int(self._ray.cluster_resources().get("GPU", 0))

    @property
    def gpus_by_type(self) -> dict[str, int]:
        """GPUs of the nodes that are alive, by the type that Ray found ("H200"); "unknown" where it
        found none."""
        return count_types([node["Resources"] for node in self._ray.nodes() if node["Alive"]])

    @property
    def num_cpus(self) -> float:
        return float(self._ray.cluster_resources().get("CPU", 0))

    @property
    def num_nodes(self) -> int:
        return sum(node["Alive"] for node in self._ray.nodes())

    async def start(self, spec: RoleSpec) -> WorkerHandle:
        refuse_mounts(spec)
        if spec.interpreter or spec.limits != ProcessLimits() or spec.devices:
            own = spec.interpreter or ("GPUs of a number" if spec.devices else "limits of its own")
            raise ConfigError(
                f"worker {spec.name} is to run in {own}, and Ray's workers run in the environment, "
                "the limits and the GPUs of their node",
                hint='start it with cluster.kind = "pod"',
            )
        actor_class = self._remote(Actor)
        actor = actor_class.options(
            name=f"gyre-{spec.name}-{os.getpid()}-{next(self._numbers)}",
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": dict(spec.environment)},
        ).remote(spec)
        handle = RayHandle(spec, actor, self._on_event, here=self.address)
        self._handles.add(handle)
        build = handle.build()
        try:
            await arrive(
                build, handle, f"build on {self._offer(spec)}", spec.deadline_s, key=STARTS
            )
        except BaseException:
            await self.stop(handle)
            raise
        return handle

    async def stop(self, handle: WorkerHandle) -> None:
        assert isinstance(handle, RayHandle)
        self._handles.discard(handle)
        handle.stopped = handle.stopped or "it was stopped"
        with suppress(ValueError):  # of another Ray
            self._ray.kill(handle.actor)
        try:
            await arrive(handle.until_end(), handle, "its end", STOP_S)
        except (WorkerLost, WorkerFault):
            if handle.process is None or await asyncio.to_thread(_end_process, handle.process):
                return
        except WorkerLate:
            pass
        self._on_event(handle.name, "warn.worker_not_gone", place=handle.place, waited_s=STOP_S)

    async def watch(self, handle: WorkerHandle) -> str:
        assert isinstance(handle, RayHandle)
        try:
            await asyncio.wrap_future(handle.until_end())
        except (WorkerLost, WorkerFault) as error:
            return str(error)
        raise AssertionError("an actor's end is an error")

    def share(self, value: Any) -> Any:
        return self._ray.put(value)

    async def stop_all(self) -> None:
        """Stop every worker that is left; Ray stays."""
        await asyncio.gather(*(self.stop(handle) for handle in list(self._handles)))

    async def close(self) -> None:
        await self.stop_all()
        await asyncio.to_thread(self.leave)

    def leave(self) -> None:
        """Leave Ray, or end it where this process started it. No worker is running any more."""
        self._ray.shutdown()

    def _offer(self, spec: RoleSpec) -> str:
        """Return what was asked for and what there is, for an error."""
        total = self._ray.cluster_resources()
        return (
            f"{spec.cpus:g} of {total.get('CPU', 0):g} cores and {spec.gpus:g} of "
            f"{total.get('GPU', 0):g} GPUs"
        )


def count_types(nodes: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """GPUs by type, from the resources of each node. Pure."""
    found: dict[str, int] = {}
    for resources in nodes:
        names = [
            name.removeprefix(TYPE_PREFIX) for name in resources if name.startswith(TYPE_PREFIX)
        ]
        if gpus := int(resources.get("GPU", 0)):
            kind = " and ".join(sorted(names)) or "unknown"
            found[kind] = found.get(kind, 0) + gpus
    return found


def refuse_missing_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("cluster.kind = 'ray': Ray is not installed", hint=INSTALL)
