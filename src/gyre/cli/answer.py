"""Answer: runs a command's body and maps the result to an exit code. In: a function that returns a
JSON-able mapping. Out: its JSON on stdout on request. A GyreError prints one sentence and a hint
and exits with 2 (1 for a reward that broke during a run). Ctrl-C exits with 130; other signals that
stopped a run exit with 128 + their number."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any

import typer

from gyre.core.errors import GyreError, RunStopped

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")
]


def answer(body: Callable[[], Mapping[str, Any]], *, as_json: bool) -> None:
    try:
        result = body()
    except GyreError as error:
        print(
            f"error: {error.message}" + (f"\n hint: {error.hint}" if error.hint else ""),
            file=sys.stderr,
        )
        if as_json:
            print(json.dumps({"error": error.as_dict()}))
        raise SystemExit(error.exit_code) from error
    except RunStopped as stopped:
        say_stopped(stopped, as_json=as_json)
        raise SystemExit(stopped.exit_code) from None
    except KeyboardInterrupt:
        say_stopped(RunStopped(signal.SIGINT), as_json=as_json)
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(result))
    if result.get("interrupted"):  # Ctrl-C, with what there was until then
        raise SystemExit(130)
    if result.get("goal_missed") or result.get("all_failed"):
        raise SystemExit(1)


def say_stopped(stopped: RunStopped, *, as_json: bool) -> None:
    """Report the stop, ignoring a closed terminal: SIGHUP means that it is gone."""
    with suppress(OSError):
        print(f"{stopped}" + (f"\n hint: {stopped.hint}" if stopped.hint else ""), file=sys.stderr)
        if as_json:
            print(
                json.dumps(
                    {"error": {"kind": "stopped", "message": str(stopped), "hint": stopped.hint}}
                )
            )


@contextmanager
def loading() -> Iterator[None]:
    """Record Ctrl-C while slow imports run, and raise it at the end: code that initializes a C
    extension may swallow a KeyboardInterrupt. Signals belong to the main thread; elsewhere this
    does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        raise KeyboardInterrupt
