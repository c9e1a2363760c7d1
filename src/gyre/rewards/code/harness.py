"""Harness: runs inside the sandbox as the program; calls the function under test and reports what
it returned.

In (stdin): JSON {"source", "calls", "token"}, a call is {"call": name, "args", "kwargs"},
{"expression"}, {"statement"} or {"check"}. Out (stdout): one JSON list when a call has ended:
[token, "value", index, wire form], or [token, "error", index, text]. Expected values never come in
here. So the code under test cannot read them, print them or end the process to pass. Only a
{"check"} (a test that rewards.code.asserts cannot split) is decided here. Lines without the token
are not ours. Standard library only. Sent as text by rewards.code.code; never imported by Gyre.
"""

import json
import os
import sys
import types

MOST_NODES = 100_000
MOST_CHARS = 1 << 19  # of all texts in one value
MOST_INT_BITS = 1 << 18
MOST_DEPTH = 150
SEQUENCES: tuple = ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "set"))
LISTS = (
    "deque",
    "range",
    "generator",
    "map",
    "filter",
    "zip",
    "enumerate",
    "reversed",
    "dict_values",
)
SETS = ("dict_keys", "dict_items")


class TooLarge(Exception):
    pass


def plain(value, room, depth=0):
    """Turn a value into the wire form of rewards.code.values; subclasses become what they
    extend."""
    room[0] -= 1
    if room[0] < 0:
        raise TooLarge(f"its value has more than {MOST_NODES} elements")
    if depth > MOST_DEPTH:
        raise TooLarge(f"its value is nested more than {MOST_DEPTH} deep, or holds itself")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        value = int.__int__(value)
        if value.bit_length() > MOST_INT_BITS:
            raise TooLarge(f"its value is a whole number of {value.bit_length()} bits")
        return value if -(1 << 60) < value < 1 << 60 else ["int", hex(value)]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        room[1] -= str.__len__(value)
        if room[1] < 0:
            raise TooLarge(f"its value has more than {MOST_CHARS} characters")
        return str.__str__(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", plain(value.hex(), room, depth)]
    module = getattr(type(value), "__module__", "")
    if (module, type(value).__name__) in (("fractions", "Fraction"), ("decimal", "Decimal")):
        return number(value, room, depth)
    if module == "collections" and (
        type(value).__name__ == "Counter" or getattr(value, "default_factory", None)
    ):
        missing = 0 if type(value).__name__ == "Counter" else value.default_factory()
        pairs = (plain(each, room, depth + 1) for pair in dict.items(value) for each in pair)
        return ["defaults", plain(missing, room, depth + 1), *pairs]
    if isinstance(value, dict):
        return [
            "dict",
            *(plain(each, room, depth + 1) for pair in dict.items(value) for each in pair),
        ]
    for kind, tag in SEQUENCES:
        if isinstance(value, kind):
            return [tag, *(plain(item, room, depth + 1) for item in kind.__iter__(value))]
    if module == "builtins" and type(value).__name__ in SETS:
        return ["set", *(plain(item, room, depth + 1) for item in value)]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), room, depth + 1)
    if type(value).__name__ in LISTS or (
        module == "builtins" and type(value).__name__.endswith("_iterator")
    ):
        return ["list", *(plain(item, room, depth + 1) for item in value)]
    return ["object", type(value).__name__[:100], bool(value)]


def number(value, room, depth):
    """Write a Fraction or Decimal: an int where it is one, else its nearest float with its text."""
    try:
        whole = int(value)
    except (ValueError, OverflowError):  # NaN or infinity
        whole = None
    if str(whole) == str(value):
        return plain(whole, room, depth)
    try:
        return ["number", float(value), plain(str(value), room, depth)]
    except OverflowError:
        return ["object", type(value).__name__, bool(value)]


def perform(call, space):
    """Make one call; return the wire form of its value."""
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
        exec(call.get("statement") or call["check"], space)
        value = True
    try:
        return plain(value, [MOST_NODES, MOST_CHARS])
    except TooLarge as fault:
        return ["large", str(fault)]


def main():
    spec = json.loads(sys.stdin.buffer.read())
    report = os.fdopen(os.dup(1), "w")
    quiet = os.open("/dev/null", os.O_WRONLY)
    os.dup2(quiet, 1)  # what the code under test prints is not a result

    def tell(*fields, token=spec.pop("token")):
        report.write(json.dumps([token, *fields]) + "\n")
        report.flush()

    # dataclasses, pickle and the like look it up
    module = sys.modules["solution"] = types.ModuleType("solution")
    space = module.__dict__
    try:
        exec(compile(spec["source"], "solution.py", "exec"), space)
    except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
        tell("broken", f"{type(error).__name__}: {error}"[:500])
        os._exit(0)
    tell("loaded")
    for index, call in enumerate(spec["calls"]):
        try:
            tell("value", index, perform(call, space))
        except BaseException as error:  # noqa: BLE001 - the code under test may raise anything
            tell("error", index, f"{type(error).__name__}: {error}"[:500])
    os._exit(0)


main()
