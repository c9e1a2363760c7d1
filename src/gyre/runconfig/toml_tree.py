"""TOML tree: what a run's file and its --set overrides say, not checked. In: a path, texts. Out:
plain tables, or a ConfigError that names the place.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.core.errors import ConfigError

MOST_LEVELS = 64  # of tables and lists in each other, in a file and by --set
# tomllib takes quadratic time for a key of many parts, so one with more than MOST_LEVELS is found
# before it: in the text without its strings and comments, whose dots part no keys.
QUOTED = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*""", re.DOTALL
)
LONG_KEY = re.compile(rf"(?:\.[ \t]*+[\w-]++[ \t]*+){{{MOST_LEVELS}}}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the file's tables. ConfigError: no file, no TOML, or tables more than MOST_LEVELS deep
    in each other."""
    try:
        text = path.read_text(encoding="utf-8")
        if LONG_KEY.search(QUOTED.sub("q", text)):
            raise _too_deep(str(path))
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="give the path of a run's TOML file"
        ) from error
    # ValueError: of UTF-8, of TOML, of a number with too many digits
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no TOML: {_first(error)}", hint="gyre init writes an example"
        ) from error
    _check_depth(tree, str(path))
    return tree


def _check_depth(tree: Mapping[str, Any], where: str) -> None:
    """Measure the depth without recursion: what reads the tree later recurses."""
    level: list[Any] = [tree]
    for _ in range(MOST_LEVELS):
        inside = (
            value
            for node in level
            for value in (node.values() if isinstance(node, Mapping) else node)
        )
        level = [value for value in inside if isinstance(value, Mapping | list)]
    if level:
        raise _too_deep(where)


def _too_deep(where: str) -> ConfigError:
    return ConfigError(
        f"{where}: tables and lists lie more than {MOST_LEVELS} deep in each other",
        hint="shorten the key's path",
    )


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tree with each "a.b=c" set; c is read as TOML, or as a plain text, line breaks and
    all, where that fails. A number in the path counts the tables of a list from 0, as in
    "rewards.parts.1.weight=0.2". Of model.path and model.shape, which exclude each other, the one
    that is set drops the one that the file has."""
    changed = copy.deepcopy(dict(tree))
    for override in overrides:
        key, equals, text = override.partition("=")
        path = [name.strip() for name in key.split(".")]
        if not equals or not all(path):
            raise ConfigError(
                f"--set {override}: need KEY=VALUE", hint="for example --set trainer.steps=10"
            )
        node: Any = changed
        for name in path[:-1]:
            node = _step_into(node, name, override)
        last = path[-1]
        if not isinstance(node, dict):
            _step_into(node, last, override)
            node[int(last)] = _read_value(text.strip(" \t"))
        else:
            node[last] = _read_value(text.strip(" \t"))
        for kept, dropped in (("path", "shape"), ("shape", "path")):
            if path[:2] == ["model", kept]:
                changed["model"].pop(dropped, None)
    _check_depth(changed, "--set")
    return changed


def _step_into(node: Any, name: str, override: str) -> Any:
    """Return the table or list entry that `name` means; a table that is not there yet is made."""
    if isinstance(node, dict):
        return node.setdefault(name, {})
    if not isinstance(node, list):
        raise ConfigError(
            f"--set {override}: no table there to hold '{name}'", hint="check the key's path"
        )
    if not name.isdecimal() or len(name) > 9 or int(name) >= len(node):
        raise ConfigError(
            f"--set {override}: '{name}' is no place in a list of {len(node)}",
            hint=f"count from 0 to {len(node) - 1}"
            if node
            else "the list is empty: name its parts in the file",
        )
    return node[int(name)]


def _read_value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # a number with too many digits, lists too deep in each other
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--set with a value that begins {text[:40]!r}: {_first(error)}",
            hint="give a value that the key takes",
        ) from error
    return read["value"] if len(read) == 1 else text


def _first(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)[:300]
