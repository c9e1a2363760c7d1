"""Traces: worked solutions of procedural problems, correct and wrong (pure). In: task name and
metadata. Out: a `Trace` whose reasoning ends with its answer, or None when there is no short
mechanical solution.

A wrong trace resembles a correct one: one step contains a slip and the rest follows consistently.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    think: str  # lines of steps; the last one ends with the answer
    answer: str


def write_trace(task: Mapping[str, Any]) -> Trace | None:
    """Return a worked solution of a `Problem.task`. Its answer is computed, not copied: callers
    verify it with the scorer."""
    writer = _WRITERS.get(task["task"])
    return writer(task) if writer else None


def traced_tasks() -> tuple[str, ...]:
    """Return the names of the tasks with worked solutions."""
    return tuple(sorted(_WRITERS))


def corrupt_trace(task: Mapping[str, Any], rng: random.Random) -> Trace | None:
    """Return a worked solution with one slip. Its answer should be wrong; callers verify that
    too."""
    slipping = _SLIPPING.get(task["task"])
    if slipping is not None:
        return slipping(task["metadata"]["expression"], rng)
    right = write_trace(task)
    if right is None:
        return None
    wrong = _wrong_answer(right.answer, rng)
    return (
        None
        if wrong is None
        else Trace(think=right.think.removesuffix(right.answer) + wrong, answer=wrong)
    )


# --- chains of + - *, worked from the left
# --------------------------------------------------------------------------------------------------


def _chain(expression: str, rng: random.Random | None = None) -> Trace:
    """Expand "15 - 43 - 75" to the lines "15 - 43 = -28" and "-28 - 75 = -103".

    With `rng`, one line is wrong.
    """
    parts = expression.split()
    total = int(parts[0])
    steps = list(zip(parts[1::2], map(int, parts[2::2]), strict=True))
    slip_at = rng.randrange(max(1, len(steps))) if rng else -1
    lines = []
    for index, (operator, value) in enumerate(steps):
        result = _apply(operator, total, value)
        if rng and index == slip_at:
            result = rng.choice(_slips(result, rng))
        lines.append(f"{total} {operator} {value} = {result}")
        total = result
    if not steps:
        total = rng.choice(_slips(total, rng)) if rng else total
        lines.append(str(total))
    return Trace(think="\n".join(lines), answer=str(total))


def _apply(operator: str, left: int, right: int) -> int:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    assert operator == "*", operator
    return left * right


def _slips(value: int, rng: random.Random) -> list[int]:
    """Return plausible wrong numbers: slightly off, a wrong digit, the wrong sign."""
    near = [
        value + 1,
        value - 1,
        value + 2,
        value - 2,
        value + 10,
        value - 10,
        _other_digit(value, rng),
    ]
    return [*near, -value] if value else near


def _other_digit(value: int, rng: random.Random) -> int:
    digits = list(str(abs(value)))
    at = rng.randrange(len(digits))
    digits[at] = rng.choice([d for d in "0123456789" if d != digits[at]])
    return int("".join(digits)) * (-1 if value < 0 else 1)


def _wrong_answer(answer: str, rng: random.Random) -> str | None:
    """Return another number for a number. For anything else, swap two different neighbors (list
    items, or letters)."""
    if answer.removeprefix("-").isdecimal():
        value = int(answer)
        options = _slips(value, rng)
        # counts are never negative
        return str(rng.choice(options if value < 0 else [o for o in options if o >= 0]))
    separator = ", " if answer.startswith("[") else ""
    items = answer[1:-1].split(separator) if separator else list(answer)
    places = [i for i in range(len(items) - 1) if items[i] != items[i + 1]]
    if not places:
        return None
    at = rng.choice(places)
    items[at], items[at + 1] = items[at + 1], items[at]
    return f"[{separator.join(items)}]" if separator else "".join(items)


# --- one writer per task
# --------------------------------------------------------------------------------------------------


def _chain_task(task: Mapping[str, Any]) -> Trace:
    return _chain(task["metadata"]["expression"])


def _basic_arithmetic(task: Mapping[str, Any]) -> Trace | None:
    """Apply the operations by precedence and parentheses; "/" rounds down, as in the task's
    answers.

    Returns None for a division by zero. The task writes some without parentheses, since its answers
    ignore precedence.
    """
    lines: list[str] = []
    tree = ast.parse(task["metadata"]["expression"].strip(), mode="eval").body
    try:
        answer = str(_reduce(tree, lines))
    except ZeroDivisionError:
        return None
    return Trace(think="\n".join(lines) or answer, answer=answer)


def _reduce(node: ast.expr, lines: list[str]) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # pyright: ignore[reportArgumentType]  the grammar has integers only
    if isinstance(node, ast.UnaryOp):
        value = _reduce(node.operand, lines)
        if not isinstance(node.op, ast.USub):
            return value
        if not isinstance(node.operand, ast.Constant):
            lines.append(f"-({value}) = {-value}")
        return -value
    assert isinstance(node, ast.BinOp), ast.dump(node)
    left, right = _reduce(node.left, lines), _reduce(node.right, lines)
    if isinstance(node.op, ast.Div):
        operator, result = "/", left // right
    else:
        operator = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}[type(node.op)]
        result = _apply(operator, left, right)
    lines.append(f"{left} {operator} {right} = {result}")
    return result


def _count_bits(task: Mapping[str, Any]) -> Trace:
    """Subtract powers of two, largest first, with numbers: "1: 37 - 32 = 5"."""
    rest = int(task["metadata"]["number"])
    lines = []
    while rest:
        power = 1 << (rest.bit_length() - 1)
        lines.append(f"{len(lines) + 1}: {rest} - {power} = {rest - power}")
        rest -= power
    return Trace(think="\n".join([*lines, str(len(lines))]), answer=str(len(lines)))


def _spell_backward(task: Mapping[str, Any]) -> Trace:
    word = str(task["metadata"]["word"])
    return Trace(
        think="\n".join([" ".join(word), " ".join(word[::-1]), word[::-1]]), answer=word[::-1]
    )


def _letter_counting(task: Mapping[str, Any]) -> Trace:
    """Write each word with the running count."""
    letter, count, lines = str(task["metadata"]["target_letter"]), 0, []
    for word in task["metadata"]["span"]:
        count += word.lower().count(letter)
        lines.append(f"{word} {count}")
    return Trace(think="\n".join([*lines, str(count)]), answer=str(count))


def _number_sorting(task: Mapping[str, Any]) -> Trace:
    """Write the next number in order, one per line, then the list in the task's format."""
    metadata = task["metadata"]
    ordered = sorted(
        metadata["original_numbers"], key=float, reverse=metadata["direction"] == "descending"
    )
    return Trace(think="\n".join([*ordered, str(ordered)]), answer=str(ordered))


def _gcd(task: Mapping[str, Any]) -> Trace:
    """Write Euclid's steps; more than two numbers are processed one after the other."""
    first, *others = (int(number) for number in task["metadata"]["numbers"])
    lines = []
    for other in others:
        large, small = max(first, other), min(first, other)
        while small:
            lines.append(f"{large} = {large // small} * {small} + {large % small}")
            large, small = small, large % small
        first = large
    return Trace(think="\n".join([*lines, str(first)]), answer=str(first))


_WRITERS: dict[str, Callable[[Mapping[str, Any]], Trace | None]] = {
    "chain_sum": _chain_task,
    "products": _chain_task,
    "basic_arithmetic": _basic_arithmetic,
    "count_bits": _count_bits,
    "spell_backward": _spell_backward,
    "letter_counting": _letter_counting,
    "number_sorting": _number_sorting,
    "gcd": _gcd,
}

_SLIPPING: dict[str, Callable[[str, random.Random], Trace]] = {
    "chain_sum": _chain,
    "products": _chain,
}
