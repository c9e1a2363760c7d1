"""Attempts: what a resumed run keeps, and what it may change. In: a run folder, the command line's
settings. Out: the config of the next attempt, and files in the folder. Torch-free.

    config.toml, overrides.json   of the first attempt; resolved.json holds their digest and the
                                  config they made
    attempts/3.json               what attempt 3 changed with --resume RUN --set KEY=VALUE; it holds
                                  for those after it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.core.errors import ConfigError, SnapshotError
from gyre.core.files import write_text
from gyre.runconfig.run_config import RunConfig

RESOLVED, ATTEMPTS, OVERRIDES = "resolved.json", "attempts", "overrides.json"
# Nothing that was computed so far would have been another number with another value of these. "*":
# all of a table.
CHANGEABLE = (
    "trainer.steps",
    "trainer.trace_steps",
    "trainer.offload_deadline_s",
    "rollout.deadline_s",
    "rollout.reward_deadline_s",
    "eval.every_steps",
    "snapshot.every_steps",
    "snapshot.keep",
    "snapshot.export_every_steps",
    "snapshot.keep_exports",
    "snapshot.deadline_s",
    "run.stop_deadline_s",
    "cluster.max_restarts",
    "cluster.start_deadline_s",
    "cluster.call_deadline_s",
    "cluster.hang_s",
    "observe.*",
)
MOST_TOLD = 5  # keys in one sentence


def resolved_text(config: RunConfig, config_text: bytes, overrides_text: bytes) -> str:
    """Return the contents of resolved.json for a new run."""
    digest = _digest(config_text, overrides_text)
    return json.dumps({"sha256": digest, "config": config.model_dump(mode="json")}, indent=1) + "\n"


def read_changes(folder: Path) -> list[str]:
    """Return the settings of earlier attempts, in order. SnapshotError for a file in another
    format."""
    place = folder / ATTEMPTS
    if not place.is_dir():
        if place.exists() or place.is_symlink():
            raise SnapshotError(
                f"{place} is no folder", hint="put back the folder of what earlier attempts changed"
            )
        return []
    files = sorted(
        (path for path in place.glob("*.json") if path.stem.isdecimal()),
        key=lambda path: int(path.stem),
    )
    return [override for path in files for override in texts_of(read_json(path), path, "set")]


def read_json(path: Path) -> Any:
    """SnapshotError where a file of the run folder cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = (
            error.strerror if isinstance(error, OSError) else f"it is no JSON ({str(error)[:100]})"
        )
        raise SnapshotError(
            f"cannot read {path}: {reason}", hint="put the file back as the run wrote it"
        ) from error


def texts_of(value: Any, path: Path, key: str = "") -> list[str]:
    found = value.get(key) if key and isinstance(value, dict) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise SnapshotError(
            f"{path} holds no list of texts", hint="put the file back as the run wrote it"
        )
    return found


def write_changes(
    folder: Path, attempt: int, given: Sequence[str], changed: Mapping[str, Any], config: RunConfig
) -> None:
    """Record an attempt's own config, whole or not at all."""
    place = folder / ATTEMPTS
    place.mkdir(exist_ok=True)
    row = {"set": list(given), "changed": dict(changed), "config": config.model_dump(mode="json")}
    write_text(place / f"{attempt}.json", json.dumps(row, indent=1) + "\n", durable=False)


def find_changes(before: RunConfig, after: RunConfig, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Keys whose value another attempt changes: (before, after). ConfigError for one that it may
    not change."""
    changed = differing_keys(before.model_dump(mode="json"), after.model_dump(mode="json"))
    refused = [key for key in changed if not is_changeable(key)]
    if refused:
        named = "; ".join(
            f"{key} = {changed[key][0]!r}, given {changed[key][1]!r}" for key in refused[:MOST_TOLD]
        )
        raise ConfigError(
            f"--resume goes on with the run as it was: {named}. What was computed so far follows "
            "from "
            f"{'it' if len(refused) == 1 else 'them'}; a run that goes on may change "
            f"{', '.join(CHANGEABLE)}",
            hint="leave it out; to change it, begin a new run: "
            f"gyre train {folder / 'config.toml'} --set KEY=VALUE (with "
            f"model.path={folder / 'export'}, once it is "
            "there, from the weights that this one came to)",
        )
    return changed


def refuse_edited(folder: Path, config: RunConfig) -> None:
    """ConfigError when config.toml or overrides.json are not what the run began with, and it shows
    in `config`, which was read from them. A run folder that is older than resolved.json has nothing
    to compare with."""
    path = folder / RESOLVED
    if not path.exists():
        return
    kept = read_json(path)
    if not isinstance(kept, dict) or not isinstance(kept.get("config"), dict):
        raise SnapshotError(f"{path} holds no config", hint="put the file back as the run wrote it")
    if kept.get("sha256") == _digest(
        (folder / "config.toml").read_bytes(), (folder / OVERRIDES).read_bytes()
    ):
        return
    changed = differing_keys(kept["config"], config.model_dump(mode="json"))
    if not changed:
        return
    named = "; ".join(
        f"{key} was {old!r} and is {new!r}" for key, (old, new) in list(changed.items())[:MOST_TOLD]
    )
    raise ConfigError(
        f"{folder / 'config.toml'} was edited after the run began: {named}",
        hint=f"put it back; --resume {folder} --set KEY=VALUE changes {', '.join(CHANGEABLE)}, "
        "and any other key "
        "begins a new run",
    )


def is_changeable(key: str) -> bool:
    return any(
        key == known or (known.endswith("*") and key.startswith(known[:-1])) for known in CHANGEABLE
    )


def differing_keys(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return keys "a.b" of two trees with different values; None where one has none. A key that
    only the newer of two versions of gyre knows is left out: its default is unknown here."""
    old, new = dict(_flatten(before, "")), dict(_flatten(after, ""))
    return {key: (old[key], new.get(key)) for key in old if old[key] != new.get(key)} | {
        key: (None, new[key]) for key in new if key not in old and _parent_changed(key, old)
    }


def _parent_changed(key: str, old: Mapping[str, Any]) -> bool:
    """Return whether a table replaced a value, such as a [goal] where there was none."""
    names = key.split(".")
    return any(".".join(names[:count]) in old for count in range(1, len(names)))


def _flatten(tree: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, path)
        else:
            yield path, value


def _digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()
