"""Values: what a tested program returned, as plain data from the sandbox. In: the harness's wire
form. Out: bounded Python values, their equality, a short text of them.

The wire form is JSON without objects. None, booleans, numbers and strings stand for themselves. A
list is [tag, content…]; the tags are in `_decode_tagged` and in rewards.code.harness. Nothing from
outside is hashed: a set is a `Set`, a dict is a `Dict`. Both are compared by sorting, so elements
of one hash cost no more than others. A `WorkBudget` bounds the work for one completion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MOST_DEPTH = 150  # of lists in lists
MOST_INT_BITS = 1 << 18  # 78,000 digits; a division of two such numbers takes 20 ms
# elements up to which a set or dict may be hashed: 500,000 comparisons if all hashes are one
_NATIVE = 1000


class TooMuch(Exception):
    """A value, or the work with it, is past what the judge spends on one completion."""


@dataclass(slots=True)
class WorkBudget:
    """Work left for one completion; a unit is about 0.3 µs."""

    left: int = 800_000

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TooMuch("its values are too large to be judged")


@dataclass(slots=True, eq=False)
class Set:
    """A set, its elements in no order and each once if the sender was honest."""

    elements: list[Any]
    keys: tuple[Any, ...] | None = None  # sorted, made at the first comparison

    def __len__(self) -> int:
        return len(self.elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Set) and same(self, other)

    def order(self) -> tuple[Any, ...]:
        if self.keys is None:
            self.keys = tuple(sorted(order(item) for item in self.elements))
        return self.keys

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True, eq=False)
class Dict:
    """A dict as pairs in the order of insertion."""

    pairs: list[tuple[Any, Any]]
    ordered: list[tuple[Any, Any]] | None = None  # sort key and item, made at the first comparison
    has_default: bool = False  # of a defaultdict or Counter
    default: Any = None

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self.pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dict) and same(self, other)

    def order(self) -> list[tuple[Any, Any]]:
        if self.ordered is None:
            self.ordered = sorted(
                ((order(key), item) for key, item in self.pairs), key=lambda pair: pair[0]
            )
        return self.ordered

    __hash__ = None  # type: ignore[assignment]


class NumberValue(float):
    """A Fraction or Decimal: its nearest float, and its own text."""

    text: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An object that is no plain value: equal to nothing; its truth is what the sandbox said."""

    kind: str
    truth: bool

    def __eq__(self, other: object) -> bool:
        return False

    def __bool__(self) -> bool:
        return self.truth

    __hash__ = None  # type: ignore[assignment]


def holds_object(value: Any) -> bool:
    """Check that an Opaque is in the value."""
    if isinstance(value, Dict):
        return any(holds_object(part) for pair in value.pairs for part in pair)
    return isinstance(value, Opaque) or (
        isinstance(value, list | tuple | Set) and any(holds_object(part) for part in value)
    )


# ---- in


def decode(wire: Any, meter: WorkBudget, depth: int = 0) -> Any:
    """Read the wire form. ValueError where it is none; TooMuch past a bound."""
    if not isinstance(wire, list):
        if isinstance(wire, dict):
            raise ValueError("it is no plain value")
        return wire
    meter.charge(1 + len(wire))
    if depth > MOST_DEPTH:
        raise TooMuch(f"its value is nested more than {MOST_DEPTH} deep")
    if not wire or not isinstance(wire[0], str):
        raise ValueError("it is no plain value")
    return _decode_tagged(wire[0], wire[1:], meter, depth)


def _decode_tagged(tag: str, content: list[Any], meter: WorkBudget, depth: int) -> Any:
    if tag in ("list", "tuple", "set", "dict", "defaults"):
        items = [
            decode(item, meter, depth + 1) if isinstance(item, list | dict) else item
            for item in content
        ]
        if tag == "defaults" and len(items) % 2:
            return Dict(
                list(zip(items[1::2], items[2::2], strict=True)), has_default=True, default=items[0]
            )
        if tag in ("dict", "defaults"):
            if len(items) % 2 or tag == "defaults":
                raise ValueError("it is no plain value")
            return Dict(list(zip(items[::2], items[1::2], strict=True)))
        return items if tag == "list" else tuple(items) if tag == "tuple" else Set(items)
    if len(content) == 1 and isinstance(content[0], str) and tag in ("int", "bytes", "large"):
        if tag == "large":
            raise TooMuch(content[0][:100])
        if tag == "bytes":
            return bytes.fromhex(content[0])
        if len(content[0]) > MOST_INT_BITS // 4:
            raise TooMuch(f"its value is a whole number of more than {MOST_INT_BITS} bits")
        return int(content[0], 16)
    if tag == "complex" and len(content) == 2 and all(isinstance(part, float) for part in content):
        return complex(*content)
    if (
        tag == "number"
        and len(content) == 2
        and isinstance(content[0], float)
        and isinstance(content[1], str)
    ):
        number = NumberValue(content[0])
        number.text = content[1]
        return number
    if tag == "object" and len(content) == 2 and isinstance(content[0], str):
        return Opaque(content[0][:100], content[1] is True)
    raise ValueError("it is no plain value")


def wrap(value: Any) -> Any:
    """Return a plain Python value of ours (a label, an expected value) in the form that values from
    the sandbox have."""
    if isinstance(value, list | tuple):
        return (
            type(value)(map(wrap, value))
            if type(value) in (list, tuple)
            else list(map(wrap, value))
        )
    if isinstance(value, set | frozenset):
        return Set(list(map(wrap, value)))
    if isinstance(value, dict):
        return Dict([(wrap(key), wrap(item)) for key, item in value.items()])
    return value


def native(value: Any) -> Any:
    """Return the value with Python's own sets and dicts, where they are small enough to be
    hashed."""
    if isinstance(value, Set | Dict) and len(value) > _NATIVE:
        raise TooMuch(f"its value is a set or dict of more than {_NATIVE} elements")
    if isinstance(value, Set):
        return frozenset(map(native, value))
    if isinstance(value, Dict):
        return {native(key): native(item) for key, item in value.pairs}
    return type(value)(map(native, value)) if isinstance(value, list | tuple) else value


# ---- equality


def same(got: Any, wanted: Any, tolerance: float = 0.0, *, loose: bool = False) -> bool:
    """Compare as Python's == does, but decimals within the tolerance: relative to `wanted`,
    absolute where that is 0.

    `loose`: wanted came from JSON. So a tuple or set may stand for a list, a key for its text, and
    a near whole number for a decimal.
    """
    if isinstance(wanted, float) and isinstance(got, int | float):
        return _close(got, wanted, tolerance) if loose or isinstance(got, float) else got == wanted
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        if not loose and type(got) is not type(wanted):
            return False
        same_length = len(got) == len(wanted)
        return same_length and all(
            same(a, b, tolerance, loose=loose) for a, b in zip(got, wanted, strict=True)
        )
    if isinstance(wanted, Dict) and isinstance(got, Dict):
        return _same_pairs(got, wanted, tolerance, loose=loose)
    if isinstance(got, Set) and (isinstance(wanted, Set) or (loose and isinstance(wanted, list))):
        return _same_elements(got, wanted)
    return bool(got == wanted)


def _close(got: float, wanted: float, tolerance: float) -> bool:
    try:
        return got == wanted or is_close(got, wanted, tolerance)
    except OverflowError:  # a whole number past the range of floats
        return False


def is_close(got: float, wanted: float, tolerance: float) -> bool:
    """Within the tolerance, relative to the label; absolute only where the label is 0, which
    nothing is relative to."""
    return math.isclose(got, wanted, rel_tol=tolerance, abs_tol=0.0 if wanted else tolerance)


def _same_elements(got: Set, wanted: Set | list[Any]) -> bool:
    """Return whether two sets are equal. One from the sandbox that holds an element twice is
    forged, and equal to none."""
    if len(got) != len(wanted):
        return False
    ours, theirs = got.order(), (wanted if isinstance(wanted, Set) else Set(wanted)).order()
    return ours == theirs and _each_once(ours)


def _same_pairs(got: Dict, wanted: Dict, tolerance: float, *, loose: bool) -> bool:
    if len(got) != len(wanted):
        return False
    if loose:
        got, wanted = (
            Dict([(_text(key), item) for key, item in each.pairs]) for each in (got, wanted)
        )
    ours, theirs = got.order(), wanted.order()
    keys = [key for key, _ in ours]
    if keys != [key for key, _ in theirs] or not _each_once(keys):
        return False
    return all(
        same(a, b, tolerance, loose=loose) for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


def _each_once(keys: Sequence[Any]) -> bool:
    return all(a != b for a, b in pairwise(keys))


def _text(key: Any) -> Any:
    """Return a key as JSON has it: text."""
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key) if key.bit_length() <= 4096 else key
    return str(key) if isinstance(key, float | bool | None) else key


def order(value: Any) -> tuple[Any, ...]:
    """Return a key with a total order: two values have the same one exactly when Python's == holds
    between them."""
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    if isinstance(value, int | float):
        return (0, value) if value == value else (1, id(value))  # NaN equals nothing
    if isinstance(value, str):
        return 2, value
    if isinstance(value, list | tuple):
        return 3 if isinstance(value, tuple) else 4, tuple(order(item) for item in value)
    if isinstance(value, Set):
        return 5, value.order()
    if isinstance(value, Dict):
        return 6, tuple((key, order(item)) for key, item in value.order())
    if isinstance(value, bytes):
        return 7, value
    if isinstance(value, complex):
        return 8, value.real, value.imag
    return (9,) if value is None else (10, id(value))


# ---- out


def shown(value: Any, most_chars: int = 120) -> str:
    """Return a text of the value for people; what it costs does not grow with the value."""
    text = _shown(value, 3)
    return text if len(text) <= most_chars else text[: most_chars - 30] + "…" + text[-25:]


def _shown(value: Any, depth: int) -> str:
    if isinstance(value, int) and value.bit_length() > 4096:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:200]) + ("…" if len(value) > 200 else "")
    if isinstance(value, Opaque):
        return f"an object of type {value.kind}, which is no plain value"
    if isinstance(value, NumberValue):
        return value.text[:200]
    if not isinstance(value, list | tuple | Set | Dict):
        return repr(value)
    opened, closed = {list: "[]", tuple: "()"}.get(type(value), "{}")
    if depth == 0:
        return f"{opened}…{closed}"
    few = value.pairs[:40] if isinstance(value, Dict) else list(value)[:40]
    if isinstance(value, Dict):
        parts = [f"{_shown(key, depth - 1)}: {_shown(item, depth - 1)}" for key, item in few]
    else:
        parts = [_shown(item, depth - 1) for item in few]
    if not parts and isinstance(value, Set):
        return "set()"
    more = ["…"] if len(value) > 40 else []
    comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
    return opened + ", ".join(parts + more) + comma + closed
