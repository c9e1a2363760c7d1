"""Judging: evaluates an assert's expression outside the sandbox, on the values that came out of it.
Past 500 lines: the kinds of expression call each other. In: an expression tree, values by name, a
WorkBudget. Out: whether it holds.

The tree is the task's, the values are the tested program's. So only the functions and methods below
are known, each with a bound on its cost. None of them calls anything that a value brings along.
Decimals are compared by == within the tolerance; every other comparison is exact.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from gyre.rewards.code.values import (
    MOST_INT_BITS,
    Dict,
    NumberValue,
    Opaque,
    Set,
    TooMuch,
    WorkBudget,
    native,
    order,
    same,
    wrap,
)

FAULTS = (
    ArithmeticError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)
# kinds of objects
_CALLABLE = ("function", "builtin_function_or_method", "method", "partial", "type")
_MOST_ITEMS = 1_000_000  # of a list or text that an operator or method makes


class NotKnown(Exception):
    """Raised where only the sandbox can decide an expression."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Stands for the value of a call that raised or ended its process."""

    why: str


class CallFailed(Exception):
    """The expression needs the value of a call that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What names in the expression mean, and what may be spent."""

    values: Mapping[str, Any]  # of placeholders and bound names
    meter: WorkBudget
    tolerance: float


# ---- what is known


def _items(value: Any) -> Sequence[Any]:
    """List what iterating over a value gives."""
    if isinstance(value, Set):
        return value.elements
    if isinstance(value, Dict):
        return list(value)
    if isinstance(value, list | tuple | str | bytes | range):
        return value
    raise TypeError(f"{type(value).__name__} is not iterable")


def _unique(value: Any = ()) -> Set:
    elements = list(_items(value))
    if any(isinstance(item, list | Dict) for item in elements):
        raise TypeError("a set holds no lists")
    keyed = sorted((order(item), place) for place, item in enumerate(elements))
    return Set(
        [
            elements[place]
            for at, (key, place) in enumerate(keyed)
            if at == 0 or keyed[at - 1][0] != key
        ]
    )


def _round(number: Any, ndigits: Any = None) -> Any:
    if ndigits is not None and abs(ndigits) > 400:
        raise ValueError(f"rounding to {ndigits} digits")
    return round(number, ndigits)


def _sum(value: Any, start: Any = 0) -> Any:
    items = _items(value)
    if type(start) in (list, tuple) and all(type(item) is type(start) for item in items):
        return type(start)(chain(start, *items))  # not larger than the value that holds them
    if not all(isinstance(item, int | float | complex) for item in (*items, start)):
        raise TypeError("a sum of what are no numbers")
    return sum(items, start)


def _sorted(value: Any, *, key: Any = None, reverse: Any = False) -> list[Any]:
    return sorted(
        _items(value), key=_function(key) if key is not None else None, reverse=bool(reverse)
    )


def _extreme(pick: Callable[..., Any], *args: Any, key: Any = None, **default: Any) -> Any:
    """Return min or max."""
    items = _items(args[0]) if len(args) == 1 else args
    return pick(items, key=_function(key) if key is not None else None, **default)


def _function(value: Any) -> Callable[..., Any]:
    if not (callable(value) and value in (*FUNCTIONS.values(), *TYPES.values())):
        raise TypeError("not a function that is judged outside the sandbox")
    return _CONSTRUCTORS.get(value, value)


def _range(*bounds: int) -> range:
    made = range(*bounds)
    if len(made) > _MOST_ITEMS:
        raise TooMuch("a range is too long to be judged")
    return made


def _text_of(value: Any) -> str:
    if isinstance(value, str | NumberValue):
        return value if isinstance(value, str) else value.text
    return repr(native(value))


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, tuple(kinds) if isinstance(kinds, tuple) else (kinds,))


TYPES: dict[str, type] = {
    "int": int,
    "float": float,
    "complex": complex,
    "str": str,
    "bool": bool,
    "bytes": bytes,
    "list": list,
    "tuple": tuple,
    "set": Set,
    "frozenset": Set,
    "dict": Dict,
}
_CONSTRUCTORS: dict[Any, Callable[..., Any]] = {
    str: _text_of,
    bytes: lambda value=b"": value if isinstance(value, bytes) else bytes(list(_items(value))),
    list: lambda value=(): list(_items(value)),
    tuple: lambda value=(): tuple(_items(value)),
    Set: _unique,
    Dict: lambda value=(), **more: (
        value
        if isinstance(value, Dict) and not more
        else wrap(dict(native(value), **native(wrap(more))))
    ),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "len": len,
    "round": _round,
    "sum": _sum,
    "sorted": _sorted,
    "repr": _text_of,
    "range": _range,
    "min": partial(_extreme, min),
    "max": partial(_extreme, max),
    "any": lambda value: any(map(bool, _items(value))),
    "all": lambda value: all(map(bool, _items(value))),
    "zip": lambda *args: list(zip(*map(_items, args), strict=False)),
    "enumerate": lambda value, start=0: list(enumerate(_items(value), start)),
    "reversed": lambda value: list(_items(value))[::-1],
    "map": lambda function, *args: list(map(_function(function), *map(_items, args))),
    "isinstance": _is_instance,
    "type": type,
    "ord": ord,
    "chr": chr,
    "callable": lambda value: isinstance(value, Opaque) and value.kind in _CALLABLE,
    "math.isclose": math.isclose,
    "isclose": math.isclose,
    "cmath.isclose": lambda a, b, **how: (
        abs(a - b) <= max(how.get("rel_tol", 1e-9) * max(abs(a), abs(b)), how.get("abs_tol", 0.0))
    ),
    **{
        f"math.{name}": getattr(math, name)
        for name in (
            "fabs",
            "sqrt",
            "floor",
            "ceil",
            "trunc",
            "isnan",
            "isinf",
            "isfinite",
            "log",
            "log2",
            "log10",
            "exp",
            "sin",
            "cos",
            "tan",
            "atan",
            "radians",
            "degrees",
            "hypot",
        )
    },
}
CONSTANTS: dict[str, float] = {
    f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")
}


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    if len(text) * max(len(new), 1) > 50 * _MOST_ITEMS or (not old and len(text) > 10_000):
        raise TooMuch("a replacement is too long to be judged")
    return text.replace(old, new, count)


def _join(glue: str, value: Any) -> str:
    parts = _items(value)
    if len(glue) * len(parts) > _MOST_ITEMS:
        raise TooMuch("a joined text is too long to be judged")
    return glue.join(parts)


_PLAIN_TEXT = (
    "lower",
    "upper",
    "strip",
    "lstrip",
    "rstrip",
    "startswith",
    "endswith",
    "split",
    "splitlines",
    "title",
    "capitalize",
    "isdigit",
    "isalpha",
    "isalnum",
    "isupper",
    "islower",
    "find",
    "swapcase",
)
_KIND_METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    str: {name: getattr(str, name) for name in (*_PLAIN_TEXT, "count", "index")}
    | {"replace": _replace, "join": _join},
    list: {"count": list.count, "index": list.index},
    tuple: {"count": tuple.count, "index": tuple.index},
    Dict: {
        "keys": lambda each: Set(list(each)),
        "values": lambda each: [item for _, item in each.pairs],
        "items": lambda each: list(each.pairs),
        "get": lambda each, key, default=None: _look_up(each, key, default),
    },
}
METHODS = frozenset(name for methods in _KIND_METHODS.values() for name in methods)


def _look_up(mapping: Dict, key: Any, default: Any) -> Any:
    return next((item for found, item in mapping.pairs if same(found, key)), default)


# ---- operators


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 2 * MOST_INT_BITS:
        raise TooMuch("a whole number is too large to be judged")
    return value


def _multiply(a: Any, b: Any) -> Any:
    for items, times in ((a, b), (b, a)):
        if isinstance(items, str | bytes | list | tuple) and isinstance(times, int):
            if len(items) * times > _MOST_ITEMS:
                raise TooMuch("a repeated list or text is too long to be judged")
            return items * times
    return a * b


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() * abs(b) > 2 * MOST_INT_BITS:
        raise TooMuch("a power is too large to be judged")
    return a**b


def _modulo(a: Any, b: Any) -> Any:
    if isinstance(a, str | bytes):
        raise TypeError("text is not formatted outside the sandbox")
    return a % b


def _of_sets(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the operation, with Python's own sets or dicts where both sides are."""

    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, Set | Dict) and type(a) is type(b):
            return wrap(operation(native(a), native(b)))
        return operation(a, b)

    return apply


BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: _of_sets(operator.sub),
    ast.Mult: _multiply,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _modulo,
    ast.Pow: _power,
    ast.BitAnd: _of_sets(operator.and_),
    ast.BitOr: _of_sets(operator.or_),
    ast.BitXor: _of_sets(operator.xor),
}
UNARY: dict[type, Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_ORDERS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: _of_sets(operator.lt), ast.LtE: _of_sets(operator.le), ast.Gt: _of_sets(operator.gt),
    ast.GtE: _of_sets(operator.ge),
}  # fmt: skip


def _size(value: Any) -> int:
    """Compute what one pass over a value costs, in units of the budget. Its parts are charged where
    they are compared."""
    return 3 * len(value) if isinstance(value, list | tuple | Set | Dict | range) else 0


def _equal(a: Any, b: Any, scope: Scope, label: str = "") -> bool:
    """Equality within the tolerance of the label, which is on the "left", on the "right", or not
    known."""
    scope.meter.charge(_size(a) + _size(b))
    to_right = label == "left" or same(a, b, scope.tolerance)
    return to_right and (label == "right" or same(b, a, scope.tolerance))


def _side_of_label(left: ast.expr, right: ast.expr, scope: Scope) -> str:
    """Return the side that holds nothing of the program's."""
    for side, node in (("right", right), ("left", left)):
        if not any(
            isinstance(each, ast.Name) and each.id in scope.values for each in ast.walk(node)
        ):
            return side
    return ""


def _contains(item: Any, container: Any, scope: Scope, label: str = "") -> bool:
    if isinstance(container, str | bytes):
        scope.meter.charge(len(container) // 8)
        return item in container
    scope.meter.charge(_size(container))
    return any(_equal(item, each, scope, label) for each in _items(container))


def _identical(a: Any, b: Any) -> bool:
    """`is` with None, True, False, a type; with other literals it can only mean equality."""
    if any(each is None or isinstance(each, bool | type) for each in (a, b)):
        return a is b
    return type(a) is type(b) and same(a, b)


def _compare(sign: ast.cmpop, a: Any, b: Any, scope: Scope, label: str) -> bool:
    if isinstance(sign, ast.Eq):
        return _equal(a, b, scope, label)
    if isinstance(sign, ast.NotEq):
        scope.meter.charge(_size(a) + _size(b))
        return not same(a, b)
    if isinstance(sign, ast.In):
        return _contains(a, b, scope, label)
    if isinstance(sign, ast.NotIn):
        return not _contains(a, b, Scope(values={}, meter=scope.meter, tolerance=0.0))
    if isinstance(sign, ast.Is | ast.IsNot):
        return _identical(a, b) is isinstance(sign, ast.Is)
    scope.meter.charge(_size(a) + _size(b))
    return bool(_ORDERS[type(sign)](a, b))


# ---- objects


def needs_object(node: ast.expr, objects: set[str]) -> bool:
    """Check that an expression asks more of one of the objects (by name) than its truth and
    identity."""
    if isinstance(node, ast.Name):
        return False
    if isinstance(node, ast.BoolOp):
        return any(needs_object(each, objects) for each in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return needs_object(node.operand, objects)
    if isinstance(node, ast.Compare) and all(
        isinstance(sign, ast.Is | ast.IsNot) for sign in node.ops
    ):
        return any(needs_object(each, objects) for each in (node.left, *node.comparators))
    return any(isinstance(each, ast.Name) and each.id in objects for each in ast.walk(node))


def compares_two(tree: ast.expr, objects: set[str]) -> bool:
    """Check that an object is compared with another."""
    sides = [
        [each.left, *each.comparators] for each in ast.walk(tree) if isinstance(each, ast.Compare)
    ]
    return any(
        sum(isinstance(each, ast.Name) and each.id in objects for each in side) > 1
        for side in sides
    )


# ---- evaluation


def evaluate(node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression that rewards.code.asserts let pass. Raises FAULTS as Python
    does, CallFailed, TooMuch."""
    scope.meter.charge(2)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _named(node.id, scope)
    if isinstance(node, ast.Attribute):
        return CONSTANTS[ast.unparse(node)]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        items = [evaluate(item, scope) for item in node.elts]
        return (
            items
            if isinstance(node, ast.List)
            else tuple(items)
            if isinstance(node, ast.Tuple)
            else _unique(items)
        )
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        made = Dict(
            [
                (evaluate(key, scope), evaluate(value, scope))
                for key, value in pairs
                if key is not None
            ]
        )
        return wrap(native(made)) if len(made) <= 1000 else made  # of one key twice the last counts
    if isinstance(node, ast.UnaryOp):
        return UNARY[type(node.op)](evaluate(node.operand, scope))
    if isinstance(node, ast.BoolOp):
        return _either(node, scope)
    if isinstance(node, ast.Compare):
        return _chain(node, scope)
    if isinstance(node, ast.IfExp):
        return evaluate(node.body if evaluate(node.test, scope) else node.orelse, scope)
    if isinstance(node, ast.BinOp):
        return _bounded(
            BINARY[type(node.op)](evaluate(node.left, scope), evaluate(node.right, scope))
        )
    if isinstance(node, ast.Subscript):
        return _subscript(evaluate(node.value, scope), node.slice, scope)
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return _comprehension(node, scope)
    assert isinstance(node, ast.Call), "rewards.asserts lets nothing else pass"
    return _call(node, scope)


def _named(name: str, scope: Scope) -> Any:
    if name in scope.values:
        value = scope.values[name]
        if isinstance(value, Failed):
            raise CallFailed(value.why)
        return value
    return TYPES[name] if name in TYPES else FUNCTIONS[name]


def _either(node: ast.BoolOp, scope: Scope) -> Any:
    value: Any = None
    for each in node.values:
        value = evaluate(each, scope)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


def _chain(node: ast.Compare, scope: Scope) -> bool:
    left, left_node = evaluate(node.left, scope), node.left
    for sign, each in zip(node.ops, node.comparators, strict=True):
        right = evaluate(each, scope)
        if not _compare(sign, left, right, scope, _side_of_label(left_node, each, scope)):
            return False
        left, left_node = right, each
    return True


def _subscript(value: Any, place: ast.expr, scope: Scope) -> Any:
    if isinstance(place, ast.Slice):
        bounds = [
            None if each is None else evaluate(each, scope)
            for each in (place.lower, place.upper, place.step)
        ]
        scope.meter.charge(_size(value))
        return _items(value)[slice(*bounds)]
    index = evaluate(place, scope)
    if isinstance(value, Dict):
        scope.meter.charge(_size(value))
        missing = object()
        found = _look_up(value, index, missing)
        if found is missing and not value.has_default:
            raise KeyError(index)
        return value.default if found is missing else found
    return value[index]


def _comprehension(node: ast.GeneratorExp | ast.ListComp | ast.SetComp, scope: Scope) -> Any:
    (loop,) = node.generators
    target: Any = loop.target
    names = [target] if isinstance(target, ast.Name) else list(target.elts)
    made = []
    for item in _items(evaluate(loop.iter, scope)):
        parts = [item] if isinstance(loop.target, ast.Name) else list(_items(item))
        if len(parts) != len(names):
            raise ValueError("a loop with another number of names than values")
        bound = {name.id: part for name, part in zip(names, parts, strict=True)}
        inner = Scope(
            values={**scope.values, **bound}, meter=scope.meter, tolerance=scope.tolerance
        )
        if all(evaluate(test, inner) for test in loop.ifs):
            made.append(evaluate(node.elt, inner))
    return _unique(made) if isinstance(node, ast.SetComp) else made


def _call(node: ast.Call, scope: Scope) -> Any:
    args = [evaluate(arg, scope) for arg in node.args]
    named = {str(each.arg): evaluate(each.value, scope) for each in node.keywords}
    scope.meter.charge(sum(map(_size, args)))
    if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) not in FUNCTIONS:
        value = evaluate(node.func.value, scope)
        scope.meter.charge(len(value) // 8 if isinstance(value, str) else _size(value))
        methods = _KIND_METHODS.get(type(value), {})
        if node.func.attr not in methods:
            raise AttributeError(f"{type(value).__name__} has no {node.func.attr}")
        return methods[node.func.attr](value, *args, **named)
    function = FUNCTIONS.get(ast.unparse(node.func)) or TYPES[ast.unparse(node.func)]
    return _bounded(_CONSTRUCTORS.get(function, function)(*args, **named))
