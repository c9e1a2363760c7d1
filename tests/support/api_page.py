"""docs/api.md: the API's reference page, made of its OpenAPI document."""

from __future__ import annotations

from typing import Any

from gyre.server.openapi import make_document


def api_page() -> str:
    """Return docs/api.md."""
    document = make_document()
    schemas = document["components"]["schemas"]
    lines = [
        "# API",
        "",
        "<!-- Made by `make docs` from src/gyre/server/openapi.py and the models it names. -->",
        "",
        "The routes of `gyre serve`; [serving](serving.md) says how they behave. `GET /openapi.json`",
        "answers this page as an OpenAPI 3.1 document.",
        "",
        "| route | |",
        "|---|---|",
    ]
    operations = [
        (f"{method.upper()} {path}", found)
        for path, methods in document["paths"].items()
        for method, found in methods.items()
    ]
    lines += [
        f"| [`{route}`](#{_anchor(route)}) | {found['summary']} |" for route, found in operations
    ]
    for route, found in operations:
        lines += ["", f"## {route}", "", found["summary"], *_operation_lines(found, schemas)]
    asked = {_body_of(found) for _, found in operations}
    lines += ["", "## Objects"]
    for name in schemas:
        if name not in asked:
            lines += ["", f"### {name}", "", *_object_lines(schemas[name])]
    return "\n".join([*lines, ""])


def _operation_lines(found: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    lines = []
    if body := _body_of(found):
        lines += ["", *_field_lines(schemas[body])]
    lines += ["", "| status | answer | |", "|---|---|---|"]
    for status, answer in found["responses"].items():
        kinds = dict.fromkeys(_type_of(one["schema"]) for one in answer["content"].values())
        lines.append(f"| {status} | {' or '.join(kinds)} | {answer['description']} |")
    return lines


def _body_of(found: dict[str, Any]) -> str:
    if "requestBody" not in found:
        return ""
    return _name(found["requestBody"]["content"]["application/json"]["schema"])


def _object_lines(schema: dict[str, Any]) -> list[str]:
    told = [schema["description"], ""] if "description" in schema else []
    return [*told, *_field_lines(schema)]


def _field_lines(schema: dict[str, Any]) -> list[str]:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for name, field in sorted(schema["properties"].items(), key=lambda one: one[0] not in required):
        default = "required" if name in required else _default_of(field)
        lines.append(
            f"| `{name}` | {_type_of(field)} | {default} | {field.get('description', '')} |"
        )
    return lines


def _default_of(field: dict[str, Any]) -> str:
    value = field.get("default")
    if value is None:
        return "left out"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type_of(schema: dict[str, Any]) -> str:
    """Return a schema in words."""
    if "$ref" in schema:
        name = _name(schema)
        return f"[{name}](#{_anchor(name)})"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(_type_of(one) for one in schema[word])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        return f"list of {_type_of(schema['items'])}{most}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type_of(schema['additionalProperties'])}"
    return {"integer": "whole number", "string": "text", "boolean": "`true`, `false`"}.get(
        kind, kind
    )


def _name(schema: dict[str, Any]) -> str:
    return schema["$ref"].rsplit("/", 1)[-1]


def _anchor(title: str) -> str:
    kept = "".join(char for char in title.lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")
