"""Answer: runs a command's body and turns what happens into an exit code. In: a function that returns a JSON-able
mapping. Out: its JSON on stdout when asked for; a GyreError as one sentence and a hint, exit 2 (1 for a
reward that broke during a run); Ctrl-C, exit 130.
Caller: cli.main."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gyre.core.errors import GyreError


def answer(body: Callable[[], Mapping[str, Any]], *, as_json: bool) -> None:
    try:
        result = body()
    except GyreError as error:
        print(f"error: {error.message}" + (f"\n hint: {error.hint}" if error.hint else ""), file=sys.stderr)
        if as_json:
            print(json.dumps({"error": error.as_dict()}))
        raise SystemExit(error.exit_code) from error
    except KeyboardInterrupt as stop:
        hint = str(stop)  # a command that can go on says how
        print("stopped by Ctrl-C" + (f"\n hint: {hint}" if hint else ""), file=sys.stderr)
        if as_json:
            print(json.dumps({"error": {"kind": "stopped", "message": "stopped by Ctrl-C", "hint": hint}}))
        raise SystemExit(130) from None
    if as_json:
        print(json.dumps(result))
    if result.get("goal_missed"):
        raise SystemExit(1)
