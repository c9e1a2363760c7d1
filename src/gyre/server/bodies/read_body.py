"""Read body: a request's JSON to the model of its route. In: the body as it arrives. Out: the
parsed body, or an ApiError that names the field, what is accepted and the nearest name.
"""

from __future__ import annotations

import difflib
import json
import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest

from gyre.server.bodies.refused_fields import drop_harmless, find_refused
from gyre.server.bodies.schema import ApiError

MOST_BODY_BYTES = 8 << 20
MOST_SHOWN = 80  # characters of an unknown field's name

Body = TypeVar("Body", bound=BaseModel)


async def read_body(http: HttpRequest, kind: type[Body]) -> Body:
    """Return the parsed body. ApiError for one that is too large, no JSON, or does not fit.
    Starlette's ClientDisconnect where the client hangs up before its end."""
    data = bytearray()
    async for part in http.stream():
        data += part
        if len(data) > MOST_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MOST_BODY_BYTES} bytes")
    value = parse_json(bytes(data))
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}: need an object")
    if (found := find_refused(value)) is not None:
        name, what_to_do = found
        raise ApiError(400, f"{name}: {what_to_do}", param=name)
    try:
        return kind.model_validate(drop_harmless(value))
    except ValidationError as error:
        raise fault_error(error, kind) from None


def parse_json(data: bytes) -> Any:
    """Return the value. ApiError for what is no JSON, or beyond what is read."""
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON: {str(error)[:200]}") from None
    except ValueError:  # Python's own limit, in its own words
        reason = "a number has too many digits; send it as text, or a shorter one"
        raise ApiError(400, f"the body cannot be read: {reason}") from None
    except RecursionError:
        reason = "it is nested too deep; send it with fewer levels"
        raise ApiError(400, f"the body cannot be read: {reason}") from None


def fault_error(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """Return the refusal that names the first fault. Values are not repeated: they may be
    private."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"]
    if first["type"] == "extra_forbidden":
        message = f"unknown field{nearest(str(first['loc'][-1]), fields_at(kind, first['loc']))}"
    return ApiError(400, f"{place}: {message}", param=place or None)


def nearest(name: str, accepted: list[str]) -> str:
    """Return the end of a sentence that names the nearest accepted name, or all of a few. Pure."""
    near = difflib.get_close_matches(name[:MOST_SHOWN], accepted, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; leave it out (docs/api.md lists the {len(accepted)} fields that are accepted)"


def fields_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """Return the names accepted beside the last part of a place in a body. Pure."""
    for part in place[:-1]:
        field = kind.model_fields.get(str(part))
        if field is not None and (found := _find_model(field.annotation)) is not None:
            kind = found
    return list(kind.model_fields)


def _find_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_find_model(one) for one in typing.get_args(annotation))
    return next((one for one in found if one is not None), None)
