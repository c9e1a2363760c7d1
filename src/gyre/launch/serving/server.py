"""Serve: a model behind the OpenAI-compatible API. In: a model folder, its config, where to listen.
Out: a server, until a signal ends it.

    this process: HTTP, JSON, text ──▶ engine pool ──socket──▶ worker process: one engine
                                                   ──socket──▶ …

With engine.tensor_ranks an engine is a group of such processes (engine_groups.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import uvloop

from gyre.cluster.engine_pool.ejection import EjectionPolicy
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.process_cluster import ProcessCluster
from gyre.cluster.worker.rpc import ask
from gyre.core.contracts import Cluster, WorkerHandle
from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.core.files import read_json
from gyre.core.records import RoleSpec
from gyre.distributed.environment import child_environment
from gyre.engine.config import engine_part
from gyre.engine.frontend.admission import RequestLimits
from gyre.launch.serving.access import Access, bind, find_url, make_access, refuse_open_bind
from gyre.launch.serving.engine_groups import EngineGroups
from gyre.launch.serving.follow import Follower
from gyre.launch.serving.model import served_model
from gyre.launch.serving.served_weights import ServedFolder, ServedWeights
from gyre.launch.serving.telemetry import (
    libraries_logged,
    tracing,
    worker_events,
    write_server_event,
)
from gyre.models.hub.folders import CONFIG_FILE, LOAD_FORMATS, LoadFormat, refuse_reward_model
from gyre.models.spec import spec_from_hub_config
from gyre.observability.hardware import count_gpus as count_visible_gpus
from gyre.observability.hardware import describe_hardware
from gyre.observability.tracing.otlp_sender import read_endpoint
from gyre.runconfig.run_config import RunConfig
from gyre.server.app import make_app
from gyre.server.gateway.bounded_http import BoundedHttp, ConnectionLimits
from gyre.server.gateway.tls import check_tls_files
from gyre.server.metrics.server_metrics import ServerMetrics
from gyre.server.parsers.choose import check_parsers
from gyre.server.tracing.traced_app import RequestTraces
from gyre.server.web.page import PageFile, page_routes, read_page
from gyre.text.hub_child import load_apart
from gyre.text.tokenizer import Tokenizer, load_tokenizer

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BUILDER = "gyre.launch.placement.worker:build_served_engine"
RANK_BUILDER = "gyre.launch.serving.served_rank:build_served_rank"
KEPT_TOKENIZER = "tokenizer.json"
# one that dies more often is not brought back: its host or its model is at fault
RESTARTS = RestartPolicy(max_restarts=5, window_s=600.0, first_wait_s=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """What the command line said."""

    folder: Path  # of the model, in hub layout
    config: RunConfig
    name: str  # that clients ask for
    host: str
    port: int  # 0 takes a free one
    replicas: int
    tool_parser: str  # how calls are written; "auto" decides by the chat template
    reasoning_parser: str
    insecure: bool  # listen beyond loopback, though no key is needed
    keys: Path | None  # file of API keys; None lets everybody ask
    tls_cert: Path | None  # with `tls_key`; None is plain HTTP
    tls_key: Path | None
    receive_s: int  # for a request to arrive
    drain_s: int  # for the answers under way after a signal
    access_log: bool = False  # an event for each HTTP request
    load_format: LoadFormat = "auto"  # "dummy" draws the first version's weights
    otlp_endpoint: str = ""  # collector that gets a trace of each request; "" traces none
    trace_ratio: float = 1.0  # share of those that begin here which are recorded
    admin_key_file: Path | None = None  # a client with its key may change the weights
    follow: Path | None = None  # run or model folder whose new weights are taken
    poll_s: float = 2.0  # between two looks at it


def serve(args: ServeArgs, *, as_json: bool) -> dict[str, Any]:
    """Serve until SIGINT or SIGTERM. Requests under way have `drain_s`; a second signal ends at
    once."""
    refuse_reward_model(args.folder)
    check_parsers(args.tool_parser, args.reasoning_parser)
    if args.load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"--load-format {args.load_format}: need {' or '.join(LOAD_FORMATS)}",
            hint="auto reads the weights of the folder; dummy draws them, for benches",
        )
    refuse_open_bind(args.host, insecure=args.insecure, has_keys=args.keys is not None)
    check_tls_files(args.tls_cert, args.tls_key)
    page = read_page()
    if args.otlp_endpoint:
        endpoint = read_endpoint(args.otlp_endpoint, "--otlp-endpoint")
        args = replace(args, otlp_endpoint=endpoint)
    access = make_access(args.keys, args.admin_key_file, host=args.host, open_paths=page)
    gpus = count_gpus(args.config, args.replicas)
    refuse_uneven(args.folder, args.config)
    with (
        bind(args.host, args.port) as listener,
        libraries_logged(write_server_event),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(args, listener, access, page, gpus=gpus, as_json=as_json))


def count_gpus(config: RunConfig, replicas: int) -> int:
    """Return the GPUs that replicas may have, 0 on a CPU. ConfigError where they are too few."""
    ranks = config.engine.tensor_ranks
    gpus = count_visible_gpus() if config.run.device != "cpu" else 0
    if gpus and replicas * ranks > gpus:
        cut = "" if ranks == 1 else f" with engine.tensor_ranks = {ranks}"
        who = "a replica has a GPU" if ranks == 1 else "each rank of a replica has a GPU"
        raise ConfigError(
            f"--replicas {replicas}{cut}: this host has {gpus} GPUs",
            hint=f"{who} of its own; start at most as many, or serve on the CPU: "
            "--set run.device=cpu",
        )
    return gpus


def refuse_uneven(folder: Path, config: RunConfig) -> None:
    """Raise ConfigError where the model does not divide over the ranks of an engine."""
    if config.engine.tensor_ranks > 1:
        engine_part(config.engine, spec_from_hub_config(read_json(folder / CONFIG_FILE)))


async def _serve(
    args: ServeArgs,
    listener: socket.socket,
    access: Access,
    page: Mapping[str, PageFile],
    *,
    gpus: int,
    as_json: bool,
) -> dict[str, Any]:
    """Serve on the listener, from the engines' start to their end. Returns the URL and the model.
    Waits for: the engines' start, a signal."""
    imports_s, begun_s = time.time() - psutil.Process().create_time(), time.monotonic()
    traces = make_traces(args)
    emit = write_server_event if traces is None else traces.stamped(write_server_event)
    served = ServedFolder(args.folder)
    async with running_engines(args, served, emit, gpus=gpus) as running:
        pool = running.pool
        model = served_model(
            running.tokenizer,
            args.config,
            args.name,
            running.limits,
            tool_parser=args.tool_parser,
            reasoning_parser=args.reasoning_parser,
            find_version=lambda: pool.version,
        )
        weights = ServedWeights(pool, served, args.config, tokenizer=model.tokenizer, emit=emit)
        metrics = ServerMetrics(
            model.name, context_tokens=model.context_tokens, inspect=pool.inspect
        )
        app = make_app(
            pool,
            model,
            emit=emit,
            metrics=metrics,
            gate=access.gate,
            logs_access=args.access_log,
            more_routes=[*access.admin_routes(weights, args.name), *page_routes(page)],
        )
        url = find_url(listener, has_tls=args.tls_cert is not None)
        async with (
            contextlib.aclosing(weights),
            following(weights, args, emit),
            tracing(app, args.otlp_endpoint, traces, metrics, emit) as traced,
        ):
            emit(
                "serve.ready",
                url=url,
                imports_s=imports_s,
                workers_s=running.workers_s,
                engines_s=running.engines_s,
                seconds=imports_s + time.monotonic() - begun_s,
            )
            say_ready(url, args, as_json=as_json)
            http = HttpServer(http_config(traced, args, metrics), drain_s=args.drain_s)
            await http.serve(sockets=[listener])
    return {"url": url, "model": args.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngines:
    """The replicas as one engine, and what was read beside their start."""

    pool: EnginePool
    tokenizer: Tokenizer
    limits: RequestLimits
    workers_s: float  # that the processes took to start
    engines_s: float  # that the engines took in them


@contextlib.asynccontextmanager
async def running_engines(
    args: ServeArgs, served: ServedFolder, emit: Emit, *, gpus: int
) -> AsyncIterator[RunningEngines]:
    """Start the replicas, and stop them at the end of the block. Waits for: their start, and a
    tokenizer's files."""
    begun_s = time.monotonic()
    cluster = ProcessCluster(gpus=gpus, on_event=worker_events(emit))
    ranks = args.config.engine.tensor_ranks
    engines = cluster if ranks == 1 else EngineGroups(cluster, ranks, emit=emit)

    def start(name: str, kept: Path | None = None) -> Awaitable[WorkerHandle]:
        served.refuse_changed()
        return engines.start(engine_spec(args, name, served, gpus=gpus, kept_tokenizer=kept))

    try:
        names = [f"engine-{number}" for number in range(args.replicas)]
        # read meanwhile, in a process of its own for a hub folder: transformers takes seconds
        with tempfile.TemporaryDirectory(prefix="gyre-serve-") as shared:
            kept = Path(shared) / KEPT_TOKENIZER
            tokenizer, handles = await asyncio.gather(
                asyncio.to_thread(read_tokenizer, args, kept),
                asyncio.gather(*(start(name, kept) for name in names)),
            )
        workers_s = time.monotonic() - begun_s
        pool = make_pool(engines, start, handles, args.config, emit)
        try:
            await pool.start(dummy=False)
            engines_s = time.monotonic() - begun_s - workers_s
            yield RunningEngines(
                pool=pool,
                tokenizer=tokenizer,
                limits=await ask(handles[0], "limits", deadline_s=60.0),
                workers_s=workers_s,
                engines_s=engines_s,
            )
        finally:
            await pool.terminate()
            await pool.close()
    finally:
        await cluster.close()


@contextlib.asynccontextmanager
async def following(weights: ServedWeights, args: ServeArgs, emit: Emit) -> AsyncIterator[None]:
    """Take new weights meanwhile, where that is asked for. A fault ends this alone."""
    if args.follow is None:
        yield
        return

    def note_end(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            emit("serve.follow_ended", error="".join(traceback.format_exception(error)))

    task = asyncio.create_task(Follower(weights, args.follow, poll_s=args.poll_s).run())
    task.add_done_callback(note_end)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class HttpServer(uvicorn.Server):
    """uvicorn's server, which here ends without raising its signal again: engines are stopped
    after it, so that answers still under way end with an error. uvicorn's own deadline would cut
    them off without one."""

    def __init__(self, config: uvicorn.Config, *, drain_s: float) -> None:
        super().__init__(config)
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """Let answers under way end within their deadline; the second time end them at once."""
        if self.should_exit:
            self._end()
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_s, self._end)

    def _end(self) -> None:
        self.force_exit = True


def read_tokenizer(args: ServeArgs, keep: Path) -> Tokenizer:
    """Return the served model's tokenizer, without torch in this process. What is read of a hub
    folder is kept in the file `keep`, for the engines."""
    end_token = args.config.tokenizer.end_token
    return load_tokenizer(args.folder, end_token=end_token, read=partial(load_apart, keep=keep))


def engine_spec(
    args: ServeArgs,
    name: str,
    served: ServedFolder,
    *,
    gpus: int,
    kept_tokenizer: Path | None = None,
) -> RoleSpec:
    """Return the worker of one replica, with the weights that are served now; of one over ranks,
    what they have in common and the GPUs of them all."""
    ranks = args.config.engine.tensor_ranks
    first = int(name.rpartition("-")[2]) * ranks
    role = RoleSpec(
        name=name,
        builder=BUILDER,
        arguments={
            "folder": str(served.folder),
            "version": served.version,
            "config_json": args.config.model_dump_json(),
            # a later version is of files, also in a worker that is started again
            "load_format": args.load_format if served.version == 0 else "auto",
            "kept_tokenizer": "" if kept_tokenizer is None else str(kept_tokenizer),
        },
        gpus=1.0 if gpus else 0.0,
        deadline_s=args.config.cluster.start_deadline_s,
    )
    if ranks == 1:
        return role
    return replace(
        role,
        builder=RANK_BUILDER,
        environment=rank_environment(args.config, args.replicas * ranks),
        gpus=0.0,
        devices=tuple(range(first, first + ranks)) if gpus else (),
    )


def rank_environment(config: RunConfig, num_processes: int) -> dict[str, str]:
    """Return the environment of an engine's ranks. They wait for each other, so a core that two of
    them spin on holds up both."""
    threads = config.run.threads or max(1, describe_hardware()["cores"] // num_processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **child_environment(multicast=config.cluster.multicast),
    }


def make_pool(
    cluster: Cluster,
    start: Callable[[str], Awaitable[WorkerHandle]],
    handles: Sequence[WorkerHandle],
    config: RunConfig,
    emit: Emit,
) -> EnginePool:
    """Return the replicas as one engine. One that is lost is started again by its name."""
    settings = config.cluster
    return EnginePool(
        cluster,
        handles,
        settings=PoolSettings(
            call_deadline_s=settings.call_deadline_s,
            hang_s=settings.hang_s,
            stall_s=settings.stall_s,
            progress_tokens=settings.progress_tokens,
            routing=settings.routing,
            ejection=EjectionPolicy(still_s=settings.stall_s, return_s=settings.return_s),
            restarts=RESTARTS,
            max_waiting=config.engine.max_queued,
        ),
        emit=emit,
        revive=start,
        starts_with_weights=True,
    )


def make_traces(args: ServeArgs) -> RequestTraces | None:
    """Return the traces of the server, where they are asked for."""
    return RequestTraces(args.name, ratio=args.trace_ratio) if args.otlp_endpoint else None


def http_config(app: Any, args: ServeArgs, metrics: ServerMetrics) -> uvicorn.Config:
    """Return the settings of the HTTP server."""
    limits = ConnectionLimits(receive_s=args.receive_s)
    protocol: Any = partial(BoundedHttp, limits=limits, count=metrics.count_error)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
        log_config=None,  # `libraries_logged` makes events of its warnings
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing reads the client's address
        timeout_keep_alive=65,
        lifespan="off",
    )


def say_ready(url: str, args: ServeArgs, *, as_json: bool) -> None:
    """Print where the server listens, its page, and how to ask it."""
    if as_json:
        print(json.dumps({"url": url, "model": args.name}), flush=True)
        return
    question = {"role": "user", "content": "…"}
    body = json.dumps({"model": args.name, "messages": [question]}, ensure_ascii=False)
    print(
        f"serving {args.name} on {url}/v1\n"
        f"  in a browser: {url}\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        flush=True,
    )
