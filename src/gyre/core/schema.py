"""Schemas of external files. In: a mapping and its schema. Out: the mapping unchanged, or an
InputError that names the file and the key. Unknown keys are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gyre.core.errors import InputError

SHOWN_CHARS = 60  # of a value in a message


class Foreign(BaseModel):
    """Base of a schema: no conversion (true is not a number, nor "1"; 2.0 is not an integer), no
    NaN."""

    model_config = ConfigDict(
        strict=True, extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


S = TypeVar("S", bound=Foreign)


def check(content: Mapping[str, Any], schema: type[S], where: str) -> S:
    """Return the fields of `content` that the schema names. InputError names the first faulty key,
    its value and the rule."""
    try:
        return schema.model_validate(dict(content))
    except ValidationError as error:
        first = error.errors()[0]["loc"][:1]
        placed = [
            (_in_file(fault["loc"], content), fault)
            for fault in error.errors()
            if fault["loc"][:1] == first
        ]
        # members of a union are refused at different depths
        key = max((place for place, _ in placed), key=len)
        faults = [fault for place, fault in placed if place == key]
        rules = " or ".join(dict.fromkeys(_rule(fault["msg"]) for fault in faults))
        got = "is missing" if faults[0]["type"] == "missing" else f"= {_show(faults[0]['input'])}"
        key = ".".join(str(part) for part in key)
        raise InputError(
            f"{where}: {key} {got}; need {rules}",
            hint="copy the file again from its source, or correct the key",
        ) from error


def _in_file(place: tuple[int | str, ...], content: Any) -> list[int | str]:
    """Return the part of a location that exists in the file: a location also names members of
    unions."""
    names: list[int | str] = [place[0]]
    inside: Any = content.get(place[0])
    for part in place[1:]:
        in_table = isinstance(inside, Mapping) and part in inside
        if in_table or (isinstance(inside, list) and isinstance(part, int) and part < len(inside)):
            key: Any = part
            inside = inside[key]
            names.append(part)
    return names


def _rule(message: str) -> str:
    return (
        message.removeprefix("Input should be ")
        .removeprefix("Value error, ")
        .lower()
        .replace("field required", "it")
    )


def _show(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = (
        repr(value)
        if not isinstance(value, (dict, list))
        else f"a {type(value).__name__} of {len(value)}"
    )
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
