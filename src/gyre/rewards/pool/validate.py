"""Contract check: runs a user's reward function on samples before anything expensive. In: path,
sample rollouts. Out: nothing, or InputError with the case that fails.

The function runs in a process of its own, which is ended when it takes too long. What it prints
goes to the log, up to a bound.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre.core.errors import InputError
from gyre.core.records import Rollout
from gyre.rewards.config import RewardsConfig
from gyre.rewards.messages import (
    MOST_RESULT_BYTES,
    CheckResult,
    Item,
    Setup,
    decode_result,
    encode_item,
    frame,
    take_frame,
)
from gyre.rewards.pool.channel import worker_environment
from gyre.rewards.pool.supervisor import BoundedLog

_IMPORT_S = 120.0  # for the user's module and what it imports
_LOG_BYTES = 1 << 20
_HINT = (
    "the function must return a finite number (or a number and a reason) for every "
    "completion, also a senseless one"
)


def check_rewards(
    config: RewardsConfig, samples: Sequence[Rollout], *, log: Path | None = None
) -> None:
    """Check every function part of a config. `log` takes what they print; None is stderr."""
    for part in config.parts:
        if part.kind == "function":
            check_reward_function(
                part.path, samples, options=part.options, limit_s=part.limit_s, log=log
            )


def check_reward_function(
    fn: str,
    samples: Sequence[Rollout],
    *,
    options: Mapping[str, Any] | None = None,
    limit_s: float = 5.0,
    log: Path | None = None,
) -> None:
    """Run "module:function" on each sample and on an empty completion. InputError when it cannot be
    imported, raises, returns no finite number, or takes longer than `limit_s` on one."""
    assert samples, "needs at least one sample"
    items = [_item(rollout, rollout.text) for rollout in samples]
    items.append(_item(samples[0], ""))
    part = {"kind": "function", "path": fn, "options": dict(options or {})}
    request = frame(Setup(parts=[part], sandbox="", memory_bytes=0))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gyre.rewards.pool.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=worker_environment(),
        start_new_session=True,
    )
    kept_bytes = log.stat().st_size if log is not None and log.is_file() else 0
    printed = BoundedLog(str(log or ""), kept_bytes + _LOG_BYTES)
    try:
        _hear(process, request, _IMPORT_S, fn, "while it was imported", printed)
        for item in items:
            case = f"on the completion {_short(item.text)} of the task {_short(item.task)}"
            body = _encode(item, case)
            result = _hear(
                process, len(body).to_bytes(4, "little") + body, limit_s, fn, case, printed
            )
            if result.outcome != "ok":
                said = result.reason.removeprefix(f"{fn} ")
                raise InputError(f"reward function {fn!r}: {said}, {case}", hint=_HINT)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it and all that it started have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # what was not sent yet
                stream.close()
        printed.close()


def _item(rollout: Rollout, text: str) -> Item:
    num_tokens = int(rollout.sampled.sum())
    return Item(
        text=text,
        task=dict(rollout.prompt.task),
        prompt=rollout.prompt.text,
        finish=rollout.finish,
        num_tokens=num_tokens,
    )


def _encode(item: Item, case: str) -> bytes:
    try:
        return encode_item(item)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a reward's sample is not plain data: {error}, {case}", hint="keep tasks JSON-able"
        ) from error


def _hear(
    process: subprocess.Popen[bytes],
    request: bytes,
    limit_s: float,
    fn: str,
    case: str,
    printed: BoundedLog,
) -> CheckResult:
    """Send one request and wait for its result, `limit_s` at most."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    buffer, body, end_s = bytearray(), None, time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector, contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.flush()
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while (body := _take(buffer, fn, case)) is None:
            ready = selector.select(max(end_s - time.monotonic(), 0.0))
            if not ready or time.monotonic() > end_s:
                said = f"reward function {fn!r} took longer than {limit_s:g} s {case}"
                raise InputError(said, hint="make it faster, or give the part a larger limit_s")
            data = {key.fd: os.read(key.fd, 1 << 16) for key, _ in ready}
            printed.write(data.get(process.stderr.fileno(), b""))
            if data.get(process.stderr.fileno()) == b"":
                selector.unregister(process.stderr)
            if data.get(process.stdout.fileno()) == b"":
                break
            buffer += data.get(process.stdout.fileno(), b"")
    if body is None:
        try:
            code = process.wait(max(end_s - time.monotonic(), 0.0))
            how = f"ended its process with exit code {code}"
        except subprocess.TimeoutExpired:
            how = "closed the channel of its process"
        raise InputError(f"reward function {fn!r} {how} {case}", hint=_HINT)
    try:
        result = decode_result(body)
    except msgspec.DecodeError as error:
        raise _strange(fn, case) from error
    if result.index < 0 and result.outcome != "ok":
        raise InputError(
            result.reason, hint="run from the folder that holds the module, or install it"
        )
    return result


def _take(buffer: bytearray, fn: str, case: str) -> bytes | None:
    try:
        return take_frame(buffer, most_bytes=MOST_RESULT_BYTES)
    except ValueError as error:
        raise _strange(fn, case) from error


def _strange(fn: str, case: str) -> InputError:
    return InputError(
        f"reward function {fn!r} wrote to the channel that its results go by {case}", hint=_HINT
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:150] + "…" + text[-40:]
