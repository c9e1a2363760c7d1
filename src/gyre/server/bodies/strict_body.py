"""Strict body: what all bodies of requests have in common. In: JSON. Out: a model without unknown
fields, whose values keep their JSON types. Null stands for a field that is left out.
"""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def _add_null(schema: dict[str, Any]) -> None:
    """Say in a JSON schema that optional fields take null."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if name not in required and not _takes_null(field):
            told = {
                key: field.pop(key) for key in ("title", "default", "description") if key in field
            }
            kind = dict(field)
            field.clear()
            field |= {"anyOf": [kind, {"type": "null"}], **told}


def _takes_null(field: dict[str, Any]) -> bool:
    return {"type": "null"} in [field, *field.get("anyOf", ())]


class StrictBody(BaseModel):
    """A body without unknown fields; values keep their JSON types."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, json_schema_extra=_add_null
    )

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, value: Any) -> Any:
        """Leave out the fields that are null and have another default."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        defaults = _find_defaults(cls)
        return {key: one for key, one in value.items() if one is not None or key not in defaults}


@functools.cache
def _find_defaults(kind: type[BaseModel]) -> frozenset[str]:
    """Return the optional fields that have no null among their values."""
    return frozenset(
        name
        for name, field in kind.model_fields.items()
        if not field.is_required() and not _has_none(field.annotation)
    )


def _has_none(annotation: Any) -> bool:
    if annotation is None or annotation is types.NoneType:
        return True
    return any(_has_none(one) for one in typing.get_args(annotation))
