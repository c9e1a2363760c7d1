"""Faults: what pydantic refuses, in the words of the TOML. In: its error, the tree that was read.
Out: one sentence for each key at fault.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from gyre.core.config import UNKNOWN_KEY, Section

MOST_PLACES = 3  # that an error names for a key in the wrong table

KINDS: Mapping[type, str] = MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}
)

# What pydantic's refusals mean, in the words of the TOML; values in braces come with the refusal.
ACCEPTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("int_type", "int_parsing", "int_from_float", "int_parsing_size"), KINDS[int]
        ),
        **dict.fromkeys(("float_type", "float_parsing"), KINDS[float]),
        **dict.fromkeys(("bool_type", "bool_parsing"), KINDS[bool]),
        **dict.fromkeys(("tuple_type", "list_type"), "a list"),
        **dict.fromkeys(
            ("model_type", "model_attributes_type", "dict_type", "dict_attributes_type"), "a table"
        ),
        "string_type": KINDS[str],
        "finite_number": "a finite number",
        "greater_than": "more than {gt}",
        "greater_than_equal": "{ge} or more",
        "less_than": "less than {lt}",
        "less_than_equal": "{le} or less",
        "multiple_of": "a multiple of {multiple_of}",
        "too_long": "a list of {max_length} at most",
        "too_short": "a list of {min_length} at least",
    }
)


def describe_faults(
    error: ValidationError, tree: Mapping[str, Any], root: type[Section]
) -> list[str]:
    """Return one sentence per key of `root`: what it holds and what is accepted. Members of a union
    that refuse the same value ("a whole number", "'auto'") become one sentence."""
    sentences: list[str] = []
    refused: dict[str, tuple[Any, list[str]]] = {}
    for fault in error.errors():
        context: Mapping[str, Any] = fault.get("ctx", {})
        key = _find_key(fault["loc"], tree, missing=fault["type"] == "missing")
        if fault["type"] == "value_error":
            message = fault["msg"].removeprefix("Value error, ")
            sentences.append(f"{key}: {message}" if key else message)
        elif fault["type"] == UNKNOWN_KEY:
            sentences.append((f"{key}: " if key else "") + _unknown(key, context, root))
        elif fault["type"] == "missing":
            sentences.append(f"{key} is missing")
        elif fault["type"] == "union_tag_not_found":
            sentences.append(f"{key}.kind is missing: it says which keys '{key}' takes")
        elif fault["type"] == "union_tag_invalid":
            tag, tags = context["tag"], context["expected_tags"]
            refused[f"{key}.kind"] = (tag, [tags + _nearest(tag, tags)])
        else:
            refused.setdefault(key, (fault["input"], []))[1].append(_accepted(fault))
    for key, (value, accepted) in refused.items():
        got = "" if isinstance(value, dict | list) else f" = {_show(value)}"
        sentences.append(f"{key}{got}: need {' or '.join(dict.fromkeys(accepted))}")
    return sentences


def _unknown(table: str, context: Mapping[str, Any], root: type[Section]) -> str:
    """Return what an unknown key of a table may have been meant for: the same name in other tables,
    or a name like it here."""
    other = [
        f"{place}.{context['key']}"
        for place in _places_of(context["key"], root, "")
        if place != table
    ]
    meant = other if 0 < len(other) <= MOST_PLACES else context["near"]
    did_you_mean = f"; did you mean {' or '.join(repr(name) for name in meant)}?" if meant else ""
    return f"unknown key '{context['key']}'{did_you_mean} (accepted: {context['accepted']})"


def _places_of(key: str, annotation: Any, place: str) -> Iterator[str]:
    """Return the tables that take a key, each once; those in lists, whose place has a number, left
    out."""
    if get_origin(annotation) in (list, tuple, dict):
        return
    if not (isinstance(annotation, type) and issubclass(annotation, Section)):
        yield from dict.fromkeys(
            found for part in get_args(annotation) for found in _places_of(key, part, place)
        )
        return
    if place and key in annotation.model_fields:
        yield place
    for name, field in annotation.model_fields.items():
        yield from _places_of(key, field.annotation, f"{place}.{name}" if place else name)


def _find_key(place: Sequence[int | str], tree: Any, *, missing: bool) -> str:
    """Return the key in the file. A place also names members of unions, which no file holds."""
    names: list[str] = []
    for part in place:
        inside = _look_inside(tree, part)
        if inside is None and not (missing and part == place[-1]):
            continue
        tree = inside
        names.append(str(part))
    return ".".join(names)


def _look_inside(tree: Any, part: int | str) -> Any:
    """Return what a table holds under a name or a list at an index; None for neither (TOML knows no
    None)."""
    if isinstance(tree, Mapping):
        return tree.get(part)
    return (
        tree[part]
        if isinstance(tree, list) and isinstance(part, int) and part < len(tree)
        else None
    )


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _accepted(fault: Any) -> str:
    """Return what a key accepts, in the words of the TOML."""
    context = fault.get("ctx", {})
    if fault["type"] == "literal_error":
        return context["expected"] + _nearest(fault["input"], context["expected"])
    words = ACCEPTED.get(fault["type"])
    if words is None:
        return fault["msg"].removeprefix("Input should be ")
    return words.format(**context)


def _nearest(given: Any, expected: str) -> str:
    """Return "; did you mean …" for a text that is close to one of the quoted ones."""
    near = difflib.get_close_matches(
        str(given), re.findall(r"'([^']*)'", expected), n=1, cutoff=0.5
    )
    return f"; did you mean '{near[0]}'?" if near else ""


def find_conversions(given: Any, made: Any, key: str) -> Iterator[str]:
    """Values that were taken for something else than they are, such as "10" or true for a
    number."""
    if isinstance(given, Mapping):
        for name, value in given.items():
            inside = made[name] if isinstance(made, Mapping) else getattr(made, name)
            yield from find_conversions(value, inside, f"{key}.{name}" if key else name)
    elif isinstance(given, list):
        for index, (value, inside) in enumerate(zip(given, made, strict=True)):
            yield from find_conversions(value, inside, f"{key}.{index}")
    elif type(given) is not type(made) and not (type(given) is int and type(made) is float):
        yield f"{key} = {_show(given)}: need {KINDS.get(type(made), type(made).__name__)}"
