"""Every wait in the package has a deadline, or stands in OWNED with who ends it. And no object
reads the private state of another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gyre

PACKAGE = Path(gyre.__file__).parent
WAITS = {"wait", "result", "select", "poll", "acquire", "communicate", "join", "get"}
# none of these takes a deadline
ENDLESS = {"recv", "recv_into", "synchronize", "run_in_executor"}
# may wait by what they are called on or with
JUDGED = {"gather", "shield", "to_thread", "waitpid", "flock", "shutdown"}
BOUNDS = {"wait_for", "timeout", "timeout_at"}

# file and function of each wait without a deadline of its own, and what ends it
OWNED = {
    ("cluster/driver_guard.py", "_follow"): "the driver's end, or that of the process before it",
    ("cluster/watchdog.py", "settle"): "nothing: the task is done",
    ("cluster/phase_barrier.py", "enter"): "nothing: the calls are done",
    ("cluster/phase_barrier.py", "_look_at"): "cluster.call_deadline_s, of each call",
    ("launch/placement/pod_metadata.py", "_write"): "a note, or `leave`, which cancels it",
    ("launch/placement/pod_metadata.py", "leave"): "nothing: the task was cancelled",
    ("launch/placement/worker.py", "_join_pod"): "cluster.rendezvous.deadline_s",
    ("launch/placement/worker_placement.py", "_join_pod"): "cluster.rendezvous.deadline_s",
    ("cluster/members.py", "close"): "nothing: the tasks are cancelled",
    ("cluster/worker/handshake.py", "_read"): "the socket's timeout",
    ("launch/placement/pod_members.py", "leave_pool"): "the tasks, which are cancelled",
    ("launch/placement/pod_members.py", "close"): "the tasks, and a server's close",
    ("cluster/worker/rpc.py", "_arrive_alive"): "the call's deadline, or looks that are missed",
    ("cluster/worker/link.py", "_write"): "`_read`, at the worker's end",
    ("cluster/worker/link.py", "_lost"): "nothing: it asks whether the future is done",
    ("cluster/worker/link.py", "_read"): "nothing: it takes what is there",
    ("launch/placement/member.py", "until_leaving"): "a signal, or the end of the link",
    ("cluster/worker/frames.py", "_read"): "the other process, or its end",
    ("launch/placement/worker.py", "build_served_engine"): "cluster.start_deadline_s",
    ("launch/placement/vllm_worker.py", "build_vllm_engine"): "cluster.start_deadline_s",
    ("sidecars/vllm/engine.py", "_complete"): "`commit`, whose parts have deadlines",
    ("launch/placement/vllm_worker.py", "_take_memory"): "nothing: the task is done",
    ("sidecars/vllm/llm.py", "begin"): "`start`, which has a deadline, or `stop`, which kills",
    ("sidecars/vllm/llm.py", "_end_making"): "psutil's wait, which has a limit",
    ("sidecars/vllm/llm.py", "stop"): "psutil's wait, which has a limit",
    ("launch/python/engine_thread.py", "__init__"): "the engine's start, or Ctrl-C",
    ("launch/python/engine_thread.py", "run"): "the engine, which ends every stream, or Ctrl-C",
    ("launch/python/engine_thread.py", "_serve"): "`stop`; the compute thread, whose work ends",
    ("launch/python/engine_thread.py", "close"): "the compute thread, which plays the aborts",
    ("launch/python/engine_thread.py", "complete"): "nothing: the tasks are done",
    ("launch/python/engine.py", "aclose"): "`close`, which has a deadline",
    ("launch/serving/server.py", "running_engines"): "the start, whose parts have deadlines",
    ("cluster/engine_pool/probe.py", "ask"): "nothing: the call is done",
    ("server/batch.py", "interleave"): "the engine, which ends every stream, or the client",
    ("server/work_threads.py", "_serve"): "the next piece of work, or the end of its owner",
    ("server/respond.py", "__call__"): "arithmetic on a thread: an answer is formed",
    ("launch/serving/served_weights.py", "change"): "the change, whose parts have deadlines",
    ("launch/serving/served_weights.py", "aclose"): "the change, which is cancelled",
    ("launch/serving/served_weights.py", "_run"): "the disk, which reads a tokenizer's files",
    ("launch/serving/telemetry.py", "tracing"): "`close` of the queue, which has a deadline",
    ("observability/prometheus.py", "close"): "the server's thread, which looks twice a second",
    ("observability/tracing/otlp_sender.py", "close"): "nothing: it closes sockets",
    ("launch/serving/engine_groups.py", "watch"): "the end of a rank, which is what it waits for",
    ("launch/serving/engine_groups.py", "note"): "nothing: the futures are done",
    ("launch/serving/engine_groups.py", "pass_on"): "nothing: the future is done",
    ("launch/serving/follow.py", "_look"): "the disk, which tells the files of a folder",
    ("launch/serving/server.py", "following"): "the task, which is cancelled",
    ("launch/placement/inline.py", "_export_live"): "the compute thread",
    ("launch/placement/step_exports.py", "export"): "the disk, which renames a folder",
    ("cluster/ray_cluster.py", "_turn"): "`skip`, which takes the number of a lost call",
    ("cluster/ray_cluster.py", "until_end"): "the actor's end, which is what it waits for",
    ("cluster/ray_cluster.py", "done"): "nothing: a callback of a future that is done",
    ("cluster/trainer_group.py", "run"): "nothing: the watchdog has waited for the tasks",
    ("cluster/worker/trainer_endpoint.py", "_withdraw"): "copies on the compute thread",
    ("core/chunks.py", "__anext__"): "the engine or the router, which ends every stream",
    ("distributed/rendezvous/record_keeper.py", "_check"): "nothing: the task is done",
    ("distributed/rendezvous/record_keeper.py", "_compare_again"): "`stop`, which cancels it",
    ("distributed/rendezvous/tcp_store.py", "_run"): "nothing: the task is done",
    ("distributed/rendezvous/tcp_store.py", "_follow"): "`close`, or the store's end",
    ("engine/tensor_group.py", "_greeted"): "the socket's timeout",
    ("engine/tensor_group.py", "_read"): "the socket's timeout",
    ("engine/beside_trainer.py", "close"): "the group's timeout, which `_until` keeps",
    ("distributed/point_to_point.py", "wait"): "`_watch`; on a GPU nothing: the stream waits",
    ("distributed/point_to_point.py", "_watch"): "the group's timeout, which Gloo keeps",
    ("distributed/process_group.py", "end"): "the group's timeout; on a GPU nothing, as above",
    ("distributed/process_group.py", "_finish"): "nothing: it enqueues a wait of the GPU's stream",
    ("engine/frontend/async_frontend.py", "by_deadline"): "nothing: the work is done",
    ("engine/memory.py", "_move_host"): "copies that the device runs",
    ("engine/runners/peer_memory.py", "meet_peers"): "the device, which sets bytes to zero",
    ("engine/runners/gpu_runner.py", "fetch"): "the device; the watchdog judges one that hangs",
    ("engine/runners/torch_runner.py", "_fetch_supports"): "the device, as in `fetch`",
    ("engine/runners/torch_runner.py", "fetch"): "the device; the watchdog judges one that hangs",
    ("engine/scheduler/sequence.py", "make_chunk"): "nothing: it cuts arrays",
    ("kernels/flash.py", "training_flash4"): "a compiler and a trial on the device, at the start",
    ("launch/placement/following_rank.py", "__init__"): "nothing: it starts what rank 0 ends",
    ("launch/placement/following_rank.py", "_next"): "`enter`'s deadline; at a start the driver's",
    ("launch/placement/following_rank.py", "ask"): "the device's readings, which have a deadline",
    ("launch/placement/engine_ranks.py", "all_or_first_error"): "nothing: the tasks are done",
    ("launch/placement/worker_placement.py", "start_engine"): "its calls, each with a deadline",
    ("loop/collect.py", "_run_part"): "nothing: the task is done",
    ("loop/asynchronous/pipeline.py", "_until"): "the other task, or `close`, which cancels it",
    ("loop/scoring.py", "finish"): "nothing: the task is done",
    ("loop/stopping.py", "_expire"): "its caller, which cancels it",
    ("loop/stopping.py", "within"): "nothing: the task is done",
    ("launch/factories.py", "load_policy"): "hub_child.READ_S, of a tokenizer's files",
    ("launch/serving/served_rank.py", "_load"): "hub_child.READ_S, of a tokenizer's files",
    ("models/init.py", "blocks"): "arithmetic on threads of this process",
    ("rewards/fork_server/client.py", "exit_code"): "nothing: Popen.poll looks and returns",
    ("rewards/pool/channel.py", "receive"): "nothing: the socket does not block",
    ("rewards/pool/supervisor.py", "supervise"): "the fork server's end, or the scorer's",
    ("rewards/pool/validate.py", "check_reward_function"): "the process, which has been killed",
    ("rewards/pool/worker.py", "_next_frame"): "the scorer's next job, or its end",
    ("observability/spans.py", "phase"): "nothing: it reads a context variable",
    ("text/chat_template.py", "_read"): "the socket's timeout",
    ("text/chat_template.py", "stop"): "the process, which has been killed",
    ("text/chat_template_child.py", "_read"): "the parent's next request, or its end",
    ("trainer/checkpoint/staging.py", "_take_prepared"): "nothing: the work is done",
    ("trainer/checkpoint/staging.py", "fill"): "copies in memory",
    ("trainer/offload/state_stream.py", "_result"): "nothing: the work is done",
    # calls whose parts have deadlines, or are cancelled by the line above
    ("cluster/engine_pool/pool.py", "_gather"): "the tasks, which are cancelled",
    ("cluster/engine_pool/pool.py", "inspect"): "`Probe.ask`, which has a deadline",
    ("cluster/engine_pool/pool.py", "_probe"): "`Probe.ask`, which has a deadline",
    ("server/metrics/server_metrics.py", "inspect"): "`ServerMetrics.expose`, which has a deadline",
    ("cluster/engine_pool/pool.py", "close"): "the tasks, which are cancelled",
    ("cluster/engine_pool/replica.py", "close"): "the tasks, which are cancelled",
    ("cluster/process_cluster.py", "stop"): "Popen's two waits, each with a limit",
    ("cluster/process_cluster.py", "close"): "`stop`, which has a deadline for each worker",
    ("launch/serving/engine_groups.py", "start"): "`stop`, which has a deadline for each worker",
    ("launch/serving/engine_groups.py", "stop"): "`stop`, which has a deadline for each worker",
    ("cluster/ray_cluster.py", "stop"): "psutil's two waits, each with a limit",
    ("cluster/ray_cluster.py", "stop_all"): "`stop`, which has a deadline for each worker",
    ("cluster/watchdog.py", "_describe"): "`read_stacks`, which has a deadline",
    ("cluster/watchdog.py", "_look"): "`arrive`, which has a deadline",
    ("loop/collect.py", "_leave_none"): "the tasks, which are cancelled",
    ("loop/asynchronous/pipeline.py", "halt"): "the collector, which is cancelled",
    ("loop/scoring.py", "close"): "the tasks, which are cancelled",
    ("rewards/sandbox/executors.py", "run"): "the program's wall limit",
    ("rewards/sandbox/executors.py", "close"): "the programs' wall limits",
    ("trainer/offload/host_gradients.py", "close"): "the additions, each with a deadline",
    # the compute thread. The engine's waits for its device have engine.step_deadline_s, those for
    # offloaded state trainer.offload_deadline_s; a collective has the group's timeout; on a
    # cluster the driver's watchdog judges the whole
    ("cluster/worker/trainer_endpoint.py", "_on_compute"): "the compute thread",
    ("cluster/worker/trainer_endpoint.py", "tensors"): "the compute thread",
    ("engine/frontend/async_frontend.py", "_burst"): "the compute thread",
    ("engine/frontend/async_frontend.py", "on_compute"): "the compute thread",
    ("engine/frontend/async_frontend.py", "play"): "the compute thread",
    ("launch/chat.py", "chat"): "the compute thread, whose work has ended",
    ("launch/commands.py", "evaluate"): "the compute thread, whose work has ended",
    ("launch/commands.py", "plan"): "the compute thread, whose work has ended",
    ("launch/serving/plan.py", "plan_serve"): "the compute thread, which has no work",
    ("launch/stages.py", "read_stage_data"): "the disk or the hub, which give a run's records",
    ("launch/run.py", "close"): "the compute thread, whose work has ended",
    ("launch/placement/inline.py", "look_through"): "the compute thread",
    ("launch/placement/snapshots.py", "finish"): "the compute thread; snapshot.deadline_s in it",
    ("launch/placement/snapshots.py", "save"): "the compute thread; snapshot.deadline_s in it",
    ("launch/placement/stage_runtime.py", "_on_compute"): "the compute thread",
    ("launch/placement/worker.py", "_on_compute"): "the compute thread",
    ("launch/placement/worker.py", "build_rank"): "cluster.start_deadline_s of the driver",
    ("launch/serving/served_rank.py", "_on_compute"): "the compute thread",
    ("trainer/trainer.py", "_computed"): "the compute thread",
    ("weights/transports/shared_memory.py", "_take_room"): "the system: it has the pages, or not",
    # CUDA, whose synchronize has no deadline: at a start, an end or a move, not in an engine's step
    ("weights/registered.py", "_read_ahead"): "the thread, whose reads have deadlines",
    ("weights/registered.py", "read"): "the device, which copies",
    ("weights/landed.py", "finish"): "the device, which copies from host memory and sums",
    ("weights/transports/publish.py", "_to_host"): "the device, which copies to host memory",
    ("distributed/comm_stats.py", "take"): "the device, behind a step that has ended",
    ("engine/kv_cache/host_pool.py", "wait"): "the device's copies",
    ("engine/runners/gpu_attention.py", "_probe"): "the device, at the start",
    ("engine/runners/gpu_runner.py", "_compile_sampling"): "the device, at the start",
    ("engine/runners/gpu_runner.py", "capture_all"): "compilers, at the start",
    ("launch/export.py", "follow"): "the device's copies",
    ("memory/pools/cuda_vmm.py", "_give_back"): "the device, before memory is given back",
    ("memory/pools/cuda_vmm.py", "_unmap"): "the device, before memory is unmapped",
    ("memory/pools/storage.py", "_copy"): "the device's copies",
    ("memory/pools/storage.py", "move"): "the device, before memory is moved",
    ("memory/probe.py", "give_back"): "the device, before memory is given back",
    ("trainer/checkpoint/staging.py", "_copy_down"): "the saver, which waits by its deadline",
    ("trainer/trainer.py", "step_now"): "the device, at a step's end",
    ("weights/swap.py", "run"): "the device's copies",
    # TCP between a publisher and the readers of its versions
    ("weights/transports/tcp_reader.py", "close"): "the threads' requests, each with a deadline",
    ("weights/transports/tcp_server.py", "_next"): "the reader's next request, or its end",
    # a unix socket between a publisher and the readers of its device
    ("weights/transports/device/reader_connection.py", "_receive"): "the reader, or its end",
    ("weights/transports/device/reader_connection.py", "_serve"): "the device, which fills buckets",
    ("weights/transports/device/served_part.py", "finish"): "the device, which fills a bucket",
    ("weights/transports/device/control.py", "answer"): "the socket's timeout",
    ("weights/transports/device/live_part.py", "fill"): "the device, which copies",
    ("weights/transports/device/group_part.py", "_read"): "the device, which copies",
    ("weights/transports/device/staged_part.py", "read"): "the device, which copies",
    ("weights/transports/device/staged_part.py", "_ask"): "the device, which copies",
    ("weights/transports/device/cuda_ipc.py", "_call"): "the device, at a version's start and end",
    ("weights/transports/tcp_wire.py", "read_exactly"): "`ends_at`: it sets what is left of it",
    # processes
    ("cluster/driver_guard.py", "guard_driver"): "the guard, which is what the front waits for",
    ("cluster/ray_cluster.py", "__init__"): "Ray, which ends the processes that it started",
    ("cluster/ray_cluster.py", "close"): "Ray, which ends the processes that it started",
    ("cluster/ray_cluster.py", "leave"): "Ray, which ends the processes that it started",
    ("rewards/fork_server/server.py", "_reap"): "nothing: the process has ended",
    ("rewards/sandbox/server.py", "_enter_strong"): "the inner process, which is the server",
}


def test_a_wait_has_a_deadline_or_an_owner() -> None:
    found = list(_waits())
    new = sorted(
        f"{file}:{line} in {name}" for file, name, line in found if (file, name) not in OWNED
    )
    assert not new, new
    assert not sorted(set(OWNED) - {(file, name) for file, name, _ in found}), "these wait no more"


@pytest.mark.parametrize(
    ("call", "may_wait"),
    [
        ("queue.get()", True),
        ("queue.get(timeout=1.0)", False),
        ("thread.join()", True),
        ("thread.join(limit_s)", False),
        ("future.result()", True),
        ("asyncio.wait(tasks, return_when=FIRST_COMPLETED)", True),
        ("asyncio.wait(tasks, timeout=1.0)", False),
        ("asyncio.gather(*tasks)", True),
        ("loop.run_in_executor(compute, work)", True),
        ("torch.cuda.synchronize(device)", True),
        ("os.waitpid(pid, 0)", True),
        ("os.waitpid(pid, os.WNOHANG)", False),
        ("threads.shutdown(wait=False)", False),
        ("threads.shutdown()", True),
        ("select.select([fd], [], [])", True),
        ("select.select([fd], [], [], 1.0)", False),
    ],
)
def test_a_new_wait_would_be_seen(call: str, may_wait: bool) -> None:
    (expression,) = ast.parse(call).body
    assert isinstance(expression, ast.Expr) and isinstance(expression.value, ast.Call)
    assert _may_wait_for_ever(expression.value) == may_wait


def test_private_state_is_read_by_its_owner_alone() -> None:
    outside = {"os", "sys", "threading", "atexit", "torch", "dist"}  # other packages' names
    # of torch's objects
    theirs = {"_cdata", "_flatten", "_get_backend", "_timeout", "_devices"}
    reaches = []
    for file, tree in _trees():
        above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            owner = ast.unparse(node.value).split(".")[0]
            if node.attr.startswith("__") or node.attr in theirs or owner in outside:
                continue
            room = above.get(node)
            while room is not None and not isinstance(room, ast.ClassDef):
                room = above.get(room)
            # a class may read an object of its own kind, as one that it makes
            if node.attr not in _own(room):
                reaches.append(f"{file}:{node.lineno} {ast.unparse(node)}")
    assert not reaches, reaches


def _own(room: ast.AST | None) -> set[str]:
    """Names that a class keeps on itself."""
    return {
        node.attr
        for node in ast.walk(room or ast.Module([], []))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("self", "cls")
    }


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def _waits() -> Iterator[tuple[str, str, int]]:
    """File, function and line of each call that may wait, that has no deadline among its arguments
    and no `asyncio.timeout` or `wait_for` around it."""
    for file, tree in _trees():
        above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not _may_wait_for_ever(node):
                continue
            function, bounded, at = "", False, above.get(node)
            while at is not None:
                if isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef) and not function:
                    function = at.name
                if not function and isinstance(at, ast.Call | ast.With | ast.AsyncWith):
                    bounded |= any(word in _head(at) for word in BOUNDS)
                at = above.get(at)
            if not bounded:
                yield file, function, node.lineno


def _may_wait_for_ever(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WAITS | ENDLESS | JUDGED:
        return False
    if ast.unparse(call) == "select.poll()":
        return False
    whole, name = ast.unparse(call.func), call.func.attr
    keywords = {keyword.arg for keyword in call.keywords}
    if whole in ("asyncio.wait", "asyncio.gather", "asyncio.shield", "asyncio.to_thread"):
        return "timeout" not in keywords
    if whole == "select.select":  # the fourth is a timeout
        return len(call.args) < 4
    if whole == "os.waitpid":
        return ast.unparse(call.args[1]) == "0"
    if whole == "fcntl.flock":
        return "LOCK_NB" not in ast.unparse(call.args[1])
    if name == "shutdown":  # of an executor; a socket's has an argument
        waits = [keyword.value for keyword in call.keywords if keyword.arg == "wait"]
        return not call.args and all(ast.unparse(value) != "False" for value in waits)
    if name in ENDLESS:
        return True
    return name in WAITS and not call.args and not call.keywords


def _head(node: ast.Call | ast.With | ast.AsyncWith) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    return " ".join(ast.unparse(item.context_expr) for item in node.items)
