"""Function rewards: a user's own reward by dotted path. In: "module:function". Out: value, reason
and outcome.

    def reward(task, completion, **options) -> float | tuple[float, str]

task: the problem's mapping (answer, tests, …); completion: the text that the policy wrote; options:
the part's `options` in the TOML. A parameter named `prompt`, `finish` or `num_tokens` is given the
prompt's text, how the completion ended, or its number of tokens, the end token included. The module
is looked for as Python does it, the working folder included.

Before anything expensive, `rewards.pool.validate.check_reward_function` runs it on samples in a
process of its own and refuses it with the case that fails. During a run a raise is a score with
outcome "error". NaN, ±inf or no number is one with "invalid". Either is a failed part and an event,
never a crash. A reason has the exception, file and line before its first ": ", and what differs
from completion to completion behind it. So equal failures are counted together.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from gyre.core.errors import InputError

EXTRAS = ("prompt", "finish", "num_tokens")
PartResult = tuple[float, str, str]  # value, reason, outcome of a ScorePart


def load_function(path: str) -> Callable[..., Any]:
    """Import "module:function". InputError names what is missing."""
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise InputError(
            f"reward function {path!r} is not a dotted path",
            hint='write "package.module:function", as in "my_rewards:score"',
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        raise InputError(
            f"reward function {path!r}: importing {module_name!r} failed: {type(error).__name__}: "
            f"{error}",
            hint="run the command from the folder that holds the module, or install it",
        ) from error
    target: Any = module
    for step in name.split("."):
        target = getattr(target, step, None)
    if not callable(target):
        raise InputError(
            f"reward function {path!r}: {module_name!r} has no function {name!r}",
            hint=f"it has: {_public(module)}",
        )
    return target


def _public(module: Any) -> str:
    names = [
        name for name, value in vars(module).items() if callable(value) and not name.startswith("_")
    ]
    return ", ".join(sorted(names)[:20]) or "nothing callable"


def wanted_extras(function: Callable[..., Any]) -> tuple[str, ...]:
    """List which of EXTRAS the function names among its parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions written in C may have none
        return ()
    return tuple(name for name in EXTRAS if name in parameters)


def call_function(
    function: Callable[..., Any],
    task: Any,
    text: str,
    extras: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    name: str = "it",
) -> PartResult:
    """Call it and judge what comes back. Never raises. `name` is what reasons call it."""
    try:
        result = function(task, text, **extras, **options)
    except BaseException as error:  # noqa: BLE001 - becomes a labeled score and an event
        return (
            0.0,
            f"{name} raised {type(error).__name__}{place_of(error)}: {_text(error)}"[:500],
            "error",
        )
    reason = ""
    if isinstance(result, tuple) and len(result) == 2:
        result, reason = result
    value = as_number(result)
    if value is None:
        kind = type(result).__name__
        return (
            0.0,
            f"{name} returned {kind}, not a number{_defined_at(function)}: {_describe(result)}",
            "invalid",
        )
    if not math.isfinite(value):
        return 0.0, f"{name} returned {value}{_defined_at(function)}", "invalid"
    return value, _text(reason)[:500] or f"it returned {value:g}", "ok"


def place_of(error: BaseException) -> str:
    """Return " at FILE:LINE" of what raised: the innermost line of the user's own, and where that
    called into a library. "" when nothing but our own call is known."""
    where = traceback.extract_tb(error.__traceback__)[1:]  # the first is our call
    if not where:
        return ""
    own = [frame for frame in where if not _is_library(frame.filename)]
    frame = own[-1] if own else where[-1]
    called = (
        ""
        if frame is where[-1]
        else f" (in {os.path.basename(where[-1].filename)}:{where[-1].lineno})"
    )
    return f" at {_short_path(frame.filename)}:{frame.lineno}{called}"


def _defined_at(function: Callable[..., Any]) -> str:
    """Return " (FILE:LINE)" where a Python function begins; "" for others."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({_short_path(code.co_filename)}:{code.co_firstlineno})"


def _is_library(path: str) -> bool:
    return path.startswith(("<", os.path.dirname(os.__file__))) or "site-packages" in path


def _short_path(path: str) -> str:
    """Make a path relative to the working folder if the file is below it."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a __str__ that raises must not hide the result
        return type(value).__name__


def as_number(result: Any) -> float | None:
    """Numbers of Python and numpy, and arrays or tensors of one element. Text is none, even if it
    looks like one."""
    if (
        not isinstance(result, numbers.Real)
        and hasattr(result, "item")
        and not isinstance(result, str | bytes)
    ):
        try:
            result = result.item()
        except Exception:  # noqa: BLE001
            # several elements, or an object of another kind: no number, which the caller reports
            return None
    if not isinstance(result, numbers.Real):
        return None
    try:
        return float(result)
    except OverflowError:
        return math.inf


def _describe(value: Any) -> str:
    try:
        return repr(value)[:120]
    except Exception:  # noqa: BLE001 - a repr that raises must not hide the result
        return type(value).__name__
