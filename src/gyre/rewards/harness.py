"""Harness: runs inside the sandbox as the program; calls the function under test and tells what it returned.

In (stdin): JSON {"source", "calls", "token"}, a call is {"call": name, "args", "kwargs"}, {"expression"} or {"check"}.
Out (stdout): one JSON line when a call has ended. Expected values never come in here, so the code under test cannot
read them, print them or end the process to pass; only a {"check"} (an assert that is no plain comparison) is decided
here. Lines without the token are not ours. Standard library only. Sent as text by rewards.code; never imported by Gyre.
"""

import json
import os
import sys


def plain(value):
    """Turn subclasses and containers into what `ast.literal_eval` reads back."""
    if isinstance(value, bool) or value is None:
        return value
    simple: tuple = (int, float, complex, str, bytes)
    for kind in simple:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, frozenset):
        return {plain(item) for item in value}
    for kind in (list, set):
        if isinstance(value, kind):
            return kind(plain(item) for item in value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if type(value).__name__ in ("deque", "range", "generator", "map", "filter", "zip", "dict_keys", "dict_values"):
        return [plain(item) for item in value]
    return value


def perform(call, space):
    """Make one call; return the text of its value."""
    if "call" in call:
        name = call["call"]
        if name in space:
            function = space[name]
        elif "Solution" in space:
            function = getattr(space["Solution"](), name)
        else:
            raise NameError(f"no function named {name!r} is defined")
        value = function(*call["args"], **call["kwargs"])
    elif "expression" in call:
        value = eval(call["expression"], space)
    else:
        exec(call["check"], space)
        value = True
    return repr(plain(value))


def main():
    spec = json.loads(sys.stdin.buffer.read())
    report = os.fdopen(os.dup(1), "w")
    quiet = os.open("/dev/null", os.O_WRONLY)
    os.dup2(quiet, 1)  # what the code under test prints is not a result

    def tell(token=spec.pop("token"), **fields):
        report.write(json.dumps({"token": token, **fields}) + "\n")
        report.flush()

    space = {"__name__": "solution"}
    try:
        exec(compile(spec["source"], "solution.py", "exec"), space)
    except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
        tell(broken=f"{type(error).__name__}: {error}")
        os._exit(0)
    tell(loaded=True)
    for index, call in enumerate(spec["calls"]):
        try:
            tell(ended=index, value=perform(call, space))
        except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
            tell(ended=index, error=f"{type(error).__name__}: {error}"[:500])
    os._exit(0)


main()
