"""XML values: the text of a parameter to the JSON that its tool's schema asks for. In: the schema
of one parameter, its text. Out: JSON. What does not convert stays a text. Pure.

The types and their short forms are those that vLLM's parser takes. Unlike there, a text that is no
boolean is not false.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NULLS = ("null", "none")
MOST_LITERAL_CHARS = 1 << 16  # of a Python literal that is read
Kind = Literal["text", "integer", "number", "boolean", "other"]
STARTS: Mapping[Kind, tuple[str, ...]] = {
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float"),
}
NAMES: Mapping[Kind, tuple[str, ...]] = {
    "text": ("string", "str", "text", "varchar", "char", "enum"),
    "boolean": ("boolean", "bool", "binary"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """What a parameter may be."""

    kind: Kind = "text"
    is_nullable: bool = False

    @property
    def is_plain_text(self) -> bool:
        """Return whether its text is its value, so that it can leave as it comes."""
        return self.kind == "text" and not self.is_nullable


TEXT = ValueType()


def find_type(schema: Any) -> ValueType:
    """Return the type of a parameter: of several the first that is not null. One without any, or
    without a schema, is a text."""
    if not isinstance(schema, dict):
        return TEXT
    given = schema.get("type")
    if given is None:
        options = schema.get("anyOf") or schema.get("oneOf")
        options = options if isinstance(options, list) else []
        given = [one.get("type") for one in options if isinstance(one, dict)]
    names = [str(name).strip().lower() for name in (given if isinstance(given, list) else [given])]
    kinds: list[Kind] = [_kind_of(name) for name in names if name not in NULLS]
    kind: Kind = kinds[0] if kinds else "text"
    return ValueType(kind=kind, is_nullable="null" in names)


def _kind_of(name: str) -> Kind:
    for kind, accepted in NAMES.items():
        if name in accepted:
            return kind
    for kind, starts in STARTS.items():
        if name.startswith(starts):
            return kind
    return "other"


def as_json(text: str, wanted: ValueType) -> str:
    """Return the JSON of a parameter's text."""
    if text.lower() in NULLS and (wanted.is_nullable or wanted.kind != "text"):
        return "null"
    try:
        return json.dumps(_convert(text, wanted.kind), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _convert(text: str, kind: Kind) -> Any:
    """Return the value. ValueError, or what reading a literal raises, for one that is none."""
    if kind == "text":
        return text
    if kind == "integer":
        return int(text)
    if kind == "number":
        number = float(text)
        return int(number) if number.is_integer() else number
    if kind == "boolean":
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    try:
        return json.loads(text)
    except ValueError:
        if len(text) > MOST_LITERAL_CHARS:
            raise
        return ast.literal_eval(text.strip())  # some templates show arguments as Python writes them
