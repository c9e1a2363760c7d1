"""Reference pages made from the code: docs/api.md, docs/events.md, docs/config.md. Run by `make docs`.

A test compares the pages with the code.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

import gyre
from api_page import api_page
from gyre.core.config import Section
from gyre.core.events import ANYWHERE, EVENTS, FIELDS, Field
from gyre.objectives.config import VARIANTS, GrpoConfig
from gyre.observability.metric_catalog import MEASURED, PANELS
from gyre.runconfig.run_config import RunConfig

SOURCE = Path(gyre.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"
TYPE_NAMES = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true`, `false`",
    Any: "any",
}
EMITS = ("emit", "_emit", "_on_event")
GROUPS = (
    ("The run and its stages", ("attempt", "run", "stage", "plan", "phase", "export")),
    ("The loop", ("step", "eval", "rollouts", "handover")),
    ("Data", ("data",)),
    ("Engine", ("engine",)),
    ("Weights and memory", ("weights", "memory", "device", "policy")),
    ("Cluster", ("cluster", "member", "pod", "rank", "rendezvous")),
    ("Rewards and sandboxes", ("reward", "sandbox")),
    ("Snapshots", ("snapshot",)),
    ("Serving", ("serve",)),
    ("Trainer", ("trainer", "trace")),
    ("Drops, fallbacks, retries and warnings", ("drop", "fallback", "retry", "warn")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitCall:
    """One place that emits. `kind` is a pattern where an f-string makes it."""

    module: str
    line: int
    kind: str
    fields: frozenset[str]
    is_whole: bool  # no fields come from a mapping


def find_emits(tree: ast.Module, module: str, constants: dict[str, str]) -> Iterator[EmitCall]:
    """Yield every call that emits a kind which can be read from the source, and every pair of a
    kind and its fields."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Tuple)
            and len(node.elts) == 2
            and isinstance(node.elts[1], ast.Dict)
        ):
            kind, keys = kind_of(node.elts[0], constants), node.elts[1].keys
            if kind in EVENTS:
                names = frozenset(key.value for key in keys if isinstance(key, ast.Constant))
                yield EmitCall(
                    module=module, line=node.lineno, kind=kind, fields=names, is_whole=False
                )
        if not isinstance(node, ast.Call) or name_of(node.func) not in EMITS:
            continue
        kinds = [kind_of(argument, constants) for argument in node.args]
        kind = next((kind for kind in kinds if kind), "")
        if kind:
            yield EmitCall(
                module=module,
                line=node.lineno,
                kind=kind,
                fields=frozenset(word.arg for word in node.keywords if word.arg is not None),
                is_whole=all(word.arg is not None for word in node.keywords),
            )


def name_of(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def kind_of(node: ast.expr, constants: dict[str, str]) -> str:
    """Return the kind that an argument names; "" where it is passed on from elsewhere."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, "")
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "*"
        for part in parts
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


@cache
def all_emits() -> list[EmitCall]:
    """Return every place in the package that emits."""
    paths = sorted(SOURCE.rglob("*.py"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    constants = {
        target.id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [
        call
        for path, tree in trees.items()
        for call in find_emits(tree, str(path.relative_to(SOURCE)), constants)
    ]


def emitters(calls: list[EmitCall]) -> dict[str, list[str]]:
    """Return the modules that emit each kind of the schema."""
    named = {kind: [call.module for call in calls if call.kind == kind] for kind in EVENTS}
    patterns = [call for call in calls if "*" in call.kind]
    return {
        kind: sorted({*modules})
        or sorted({call.module for call in patterns if fnmatchcase(kind, call.kind)})
        for kind, modules in named.items()
    }


def events_page() -> str:
    """Return docs/events.md."""
    by_kind = emitters(all_emits())
    lines = [
        "# Events",
        "",
        "<!-- Made by `make docs` from src/gyre/core/events.py. Edit that file. -->",
        "",
        "A run appends what happens to `events.jsonl`, one JSON object a line. Every other view is",
        "made from it: the terminal, the report, TensorBoard and W&B. A row that does not fit this",
        "page is an assertion.",
        "",
        "Each row has `seq` (number of the row within its attempt), `t` (Unix time in seconds),",
        "`attempt` (1, and one more for each resume) and `kind`. It may also have:",
        "",
        *field_table({name: (FIELDS[name], False) for name in sorted(ANYWHERE)}),
        "",
        "*Counted* kinds are fallbacks, drops, retries and warnings: the report counts them. Not a",
        "number and infinities are written as the strings `NaN`, `Infinity` and `-Infinity`.",
    ]
    for title, prefixes in GROUPS:
        lines += ["", f"## {title}"]
        for kind in sorted(kind for kind in EVENTS if kind.split(".")[0] in prefixes):
            event = EVENTS[kind]
            counted = " Counted." if event.counted else ""
            modules = ", ".join(f"`{module}`" for module in by_kind[kind])
            lines += ["", f"### {kind}", "", f"{event.meaning}{counted} Emitted by {modules}."]
            if event.names:
                lines += ["", *field_table(event.fields())]
    return "\n".join([*lines, "", *metric_lines(), ""])


def field_table(fields: dict[str, tuple[Field, bool]]) -> list[str]:
    rows = [
        f"| `{name}`{'' if required else ' (optional)'} | {field.type.replace('|', 'or')} | "
        f"{field.unit} | {field.meaning} |"
        for name, (field, required) in fields.items()
    ]
    return ["| field | type | unit | meaning |", "|---|---|---|---|", *rows]


def metric_lines() -> list[str]:
    """Return the section on what `step.done` measures, from the metric catalog."""
    rows = [
        f"| {panel.title} | {', '.join(f'`{name}`' for name in panel.metrics)} | {panel.unit} | "
        f"{panel.help} |"
        for panel in PANELS
    ]
    return [
        "## Metrics",
        "",
        "`metrics` of `step.done` holds numbers by name. The report draws those that belong to a",
        "panel together, and every other one under its own name. `*` stands for any text. Two equal",
        f"runs may differ in {', '.join(f'`{name}`' for name in MEASURED)} alone.",
        "",
        "| panel | metrics | unit | meaning |",
        "|---|---|---|---|",
        *rows,
    ]


def config_page() -> str:
    """Return docs/config.md."""
    lines = [
        "# Config keys",
        "",
        "<!-- Made by `make docs` from RunConfig in src/gyre/runconfig/run_config.py. Edit the models there. -->",
        "",
        "A run is one TOML file. Each table below belongs to one room of the code. Any key can be",
        "set on the command line: `--set trainer.steps=10`. A key that does not exist is refused,",
        "with the nearest one that does. `gyre plan RUN.toml` checks a file without running it.",
        "",
        "| table | what it holds |",
        "|---|---|",
        *(
            f"| [`[{name}]`](#{name}) | {one_line(field.description)} |"
            for name, field in RunConfig.model_fields.items()
            if name != "cold_start_data"
        ),
        f"| `[cold_start_data]` | {one_line(RunConfig.model_fields['cold_start_data'].description)} |",
    ]
    for name, field in RunConfig.model_fields.items():
        if name == "cold_start_data":
            continue
        lines += ["", f"## {name}"]
        for section in sections_of(field.annotation):
            lines += section_lines(section, name, name)
    return "\n".join([*lines, ""])


def section_lines(section: type[Section], place: str, title: str) -> list[str]:
    """Return one table's keys, then the tables inside it."""
    kind = section.model_fields.get("kind")
    if kind is not None and get_origin(kind.annotation) is Literal and kind.default:
        title = (
            f'{place}, kind = "{kind.default}"' if len(get_args(kind.annotation)) == 1 else title
        )
    lines = [] if title == place and "." not in place else ["", f"### {title}"]
    lines += ["", one_line(section.__doc__), "", "| key | accepts | default | meaning |"]
    lines.append("|---|---|---|---|")
    inside: list[str] = []
    for name, field in section.model_fields.items():
        if name == "kind" and len(get_args(field.annotation)) == 1:
            continue
        below = sections_of(field.annotation)
        accepts = "table" if below else accepted(field.annotation, field.metadata)
        default = "see its keys" if below else default_of(field)
        if below and get_origin(field.annotation) is tuple:
            accepts = "list of tables"
        lines.append(f"| `{name}` | {accepts} | {default} | {one_line(field.description)} |")
        for part in below:
            inside += section_lines(part, f"{place}.{name}", f"{place}.{name}")
    if section is GrpoConfig:
        lines += variant_lines()
    return lines + inside


def variant_lines() -> list[str]:
    """Return what each GRPO variant fills in where the file does not."""
    keys = sorted({key for variant in VARIANTS.values() for key in variant})
    return [
        "",
        "What `variant` sets where the file does not:",
        "",
        f"| variant | {' | '.join(f'`{key}`' for key in keys)} |",
        f"|---|{'---|' * len(keys)}",
        *(
            f"| `{name}` | {' | '.join(toml(row[key]) if key in row else '' for key in keys)} |"
            for name, row in VARIANTS.items()
        ),
    ]


def sections_of(annotation: Any) -> list[type[Section]]:
    """Return the tables that a key takes; several where a `kind` decides."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def accepted(annotation: Any, metadata: Sequence[Any]) -> str:
    """Return the type and range of a value."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return accepted(parts[0], [part for extra in parts[1:] for part in flatten(extra)])
    if origin is Literal:
        return ", ".join(toml(value) for value in parts)
    if origin in (Union, UnionType):
        named = [accepted(part, metadata) for part in parts if part is not NoneType]
        return " or ".join(named)
    if origin is tuple:
        items = [part for part in parts if part is not Ellipsis]
        count = "list of " if Ellipsis in parts else f"list of {len(items)}: "
        return count + ", ".join(dict.fromkeys(accepted(part, metadata) for part in items))
    name = "table" if origin is dict else TYPE_NAMES[annotation]
    bounds = [word for extra in metadata for word in bounds_of(extra)]
    return f"{name}, {', '.join(bounds)}" if bounds and annotation in (int, float) else name


def flatten(extra: Any) -> Sequence[Any]:
    return extra.metadata if isinstance(extra, FieldInfo) else [extra]


def bounds_of(extra: Any) -> Iterator[str]:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if (bound := getattr(extra, name, None)) is not None:
            yield f"{sign} {bound:,}".replace(",", " ")
    if (factor := getattr(extra, "multiple_of", None)) is not None:
        yield f"a multiple of {factor}"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "left out" if value is None else toml(value)


def toml(value: Any) -> str:
    """Return a value as the file has it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, Mapping):
        return "`{}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def one_line(text: str | None) -> str:
    return " ".join((text or "").replace("|", "\\|").replace("<", "\\<").split())


PAGES = {"api.md": api_page, "config.md": config_page, "events.md": events_page}


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
