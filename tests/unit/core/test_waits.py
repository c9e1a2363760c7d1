"""Every wait in the package has a deadline, or stands in OWNED with who ends it. And no object
reads the private state of another."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gyre

PACKAGE = Path(gyre.__file__).parent
WAITS = {"wait", "result", "recv", "recv_into", "select", "poll", "acquire", "communicate"}
BOUNDS = {"wait_for", "timeout", "timeout_at"}

# file and function of each wait without a deadline of its own, and what ends it
OWNED = {
    ("cluster/driver_guard.py", "_follow"): "the driver's end, or that of the process before it",
    ("cluster/watchdog.py", "settle"): "nothing: the task is done",
    ("cluster/phase_barrier.py", "enter"): "nothing: the calls are done",
    ("cluster/ray_cluster.py", "_turn"): "`skip`, which takes the number of a lost call",
    ("cluster/ray_cluster.py", "until_end"): "the actor's end, which is what it waits for",
    ("cluster/ray_cluster.py", "done"): "nothing: a callback of a future that is done",
    ("cluster/trainer_group.py", "run"): "nothing: the watchdog has waited for the tasks",
    ("cluster/worker/endpoints.py", "_withdraw"): "copies on the compute thread",
    ("core/chunks.py", "__anext__"): "the engine or the router, which ends every stream",
    ("distributed/process_group.py", "_finish"): "nothing: it enqueues a wait of the GPU's stream",
    ("engine/frontend/async_frontend.py", "by_deadline"): "nothing: the work is done",
    ("engine/memory.py", "_move_host"): "copies that the device runs",
    ("engine/runners/gpu_runner.py", "fetch"): "the device; the watchdog judges one that hangs",
    ("engine/runners/torch_runner.py", "_fetch_supports"): "the device, as in `fetch`",
    ("engine/runners/torch_runner.py", "fetch"): "the device; the watchdog judges one that hangs",
    ("engine/scheduler/sequence.py", "make_chunk"): "nothing: it cuts arrays",
    ("kernels/flash.py", "training_flash4"): "a compiler and a trial on the device, at the start",
    ("launch/placement/ray_placement.py", "all_or_first_error"): "nothing: the tasks are done",
    ("loop/collect.py", "_run_part"): "nothing: the task is done",
    ("loop/scoring.py", "finish"): "nothing: the task is done",
    ("loop/stopping.py", "_expire"): "its caller, which cancels it",
    ("loop/stopping.py", "within"): "nothing: the task is done",
    ("models/init.py", "_blocks"): "arithmetic on threads of this process",
    ("rewards/fork_server/client.py", "exit_code"): "nothing: Popen.poll looks and returns",
    ("rewards/pool/channel.py", "receive"): "nothing: the socket does not block",
    ("rewards/pool/supervisor.py", "supervise"): "the fork server's end, or the scorer's",
    ("rewards/pool/validate.py", "check_reward_function"): "the process, which has been killed",
    ("rewards/pool/worker.py", "_next_frame"): "the scorer's next job, or its end",
    ("text/chat_template.py", "_read"): "the socket's timeout",
    ("text/chat_template.py", "stop"): "the process, which has been killed",
    ("text/chat_template_child.py", "_read"): "the parent's next request, or its end",
    ("trainer/checkpoint/staging.py", "_take_prepared"): "nothing: the work is done",
    ("trainer/checkpoint/staging.py", "fill"): "copies in memory",
    ("trainer/offload/state_stream.py", "_result"): "nothing: the work is done",
}


def test_a_wait_has_a_deadline_or_an_owner() -> None:
    found = list(_waits())
    new = sorted(
        f"{file}:{line} in {name}" for file, name, line in found if (file, name) not in OWNED
    )
    assert not new, new
    assert not sorted(set(OWNED) - {(file, name) for file, name, _ in found}), "these wait no more"


def test_private_state_is_read_by_its_owner_alone() -> None:
    outside = {"os", "sys", "threading", "atexit", "torch", "dist"}  # other packages' names
    theirs = {"_cdata", "_flatten", "_get_backend"}  # of torch's objects
    reaches = []
    for file, tree in _trees():
        own = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
        }
        reaches += [
            f"{file}:{node.lineno} {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in own | theirs
            and ast.unparse(node.value).split(".")[0] not in outside
        ]
    assert not reaches, reaches


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def _waits() -> Iterator[tuple[str, str, int]]:
    """File, function and line of each call of WAITS that has neither an argument, which is its
    deadline, nor an `asyncio.timeout` or `wait_for` around it."""
    for file, tree in _trees():
        above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name, deadline = node.func.attr, bool(node.args or node.keywords)
            if name in ("recv", "recv_into"):  # their argument is a size
                deadline = False
            if ast.unparse(node) == "select.poll()":  # makes an object
                continue
            if ast.unparse(node.func) == "select.select":  # the fourth is a timeout
                deadline = len(node.args) > 3
            if name not in WAITS or deadline:
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


def _head(node: ast.Call | ast.With | ast.AsyncWith) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    return " ".join(ast.unparse(item.context_expr) for item in node.items)
