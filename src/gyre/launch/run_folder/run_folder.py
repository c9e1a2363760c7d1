"""Folders: the files of a run folder, and which model a command means. In: paths. Out: paths and
the config of a run.

config.toml is as given. overrides.json holds the command line's changes, a list of texts (a value
may hold line breaks). stage.txt holds the stages that were asked for. Torch-free.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from gyre.core.errors import InputError, SnapshotError, is_disk_full
from gyre.core.files import try_lock
from gyre.core.hub import is_hub_name, near_folders
from gyre.launch.run_folder.attempts import (
    OVERRIDES,
    RESOLVED,
    read_changes,
    read_json,
    resolved_text,
    texts_of,
)
from gyre.models.hub.folders import find_folder
from gyre.runconfig.run_config import RunConfig, load_run_config

EXPORT, EXPORTS = "export", "exports"  # the one at the end; those between the steps
EXPORT_NAME = re.compile(r"version-(\d{8,})")
# what renaming a folder onto something meets
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def make_run_folder(config: RunConfig, config_path: Path, overrides: list[str], stage: str) -> Path:
    """runs/NAME, or NAME-2, …; holds the config as given and what the command line changed. It is
    there whole, or not at all; of several that are made at once each gets a name of its own."""
    base = Path(config.run.folder) / config.run.name
    aside = base.with_name(f".{base.name}.{uuid.uuid4().hex}")
    aside.mkdir(parents=True)
    try:
        shutil.copyfile(config_path, aside / "config.toml")
        (aside / OVERRIDES).write_text(json.dumps(overrides, indent=1) + "\n", encoding="utf-8")
        given = (aside / "config.toml").read_bytes(), (aside / OVERRIDES).read_bytes()
        (aside / RESOLVED).write_text(resolved_text(config, *given), encoding="utf-8")
        (aside / "stage.txt").write_text(stage, encoding="utf-8")
        return _give_name(aside, base)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # still there only when something went wrong


def _give_name(aside: Path, base: Path) -> Path:
    for number in itertools.count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if folder.exists():
            continue
        try:
            return aside.rename(folder)
        except OSError as error:
            if error.errno not in TAKEN:  # else another process was faster
                raise
    raise AssertionError("numbers do not end")


def refuse_damaged(folder: Path) -> None:
    """Raise SnapshotError for a run that cannot be resumed, before anything in it is written."""
    store, log = folder / "snapshots", folder / "events.jsonl"
    for place in (store, *(store.iterdir() if store.is_dir() else ())):
        if (place.exists() or place.is_symlink()) and not place.is_dir():
            raise SnapshotError(
                f"{place} is no folder, and snapshots would be there",
                hint="put the folder back, or remove what is there to begin the run anew",
            )
    if not log.is_file() and (log.exists() or log.is_symlink()):
        raise SnapshotError(f"{log} is no file", hint="put the run's log back")
    if not log.exists() and any(store.glob("*/step-*")):
        raise SnapshotError(
            f"{folder} has snapshots, and no events.jsonl: they go on from rows of it",
            hint=f"put the file back, or remove {store} to begin the run anew",
        )


def refuse_unusable(error: OSError, folder: Path | None) -> None:
    """Raise SnapshotError for what the disk or the permissions of a run folder refuse. Other errors
    pass unchanged."""
    place = error.filename2 or error.filename
    named = Path(os.fsdecode(place)).absolute() if isinstance(place, str | bytes) else None
    ours = folder is not None and named is not None and named.is_relative_to(folder.absolute())
    if not (ours or is_disk_full(error) or error.errno == errno.EROFS):
        return
    hint = "free space there" if is_disk_full(error) else "make the run folder whole and writable"
    raise SnapshotError(
        f"cannot use {named or folder}: {error.strerror or error}",
        hint=f"{hint}, then go on with: gyre train --resume {folder}",
    ) from error


def hold(folder: Path) -> int | None:
    """Keep other processes from writing this run, until the handle is closed or the process ends.
    None where the file system knows no locks."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        is_ours = try_lock(handle)
    except OSError:
        os.close(handle)
        return None
    if is_ours:
        return handle
    os.close(handle)
    raise SnapshotError(
        f"{folder} is still running, in another process",
        hint="wait until it ends, or stop it with Ctrl-C first",
    )


def read_overrides(folder: Path) -> list[str]:
    """Return the command line's settings at the start of the run. SnapshotError if the folder is no
    run folder, or is damaged."""
    for name in ("config.toml", OVERRIDES, "stage.txt"):
        if not (folder / name).is_file():
            why = why_missing(folder) or f": it has no {name}"
            raise SnapshotError(
                f"{folder} is not a run folder{why}", hint="give a folder under runs/"
            )
    return texts_of(read_json(folder / OVERRIDES), folder / OVERRIDES)


def read_all_overrides(folder: Path) -> list[str]:
    """Those of the first attempt, and what later ones changed."""
    return [*read_overrides(folder), *read_changes(folder)]


def read_stage(folder: Path, accepted: Sequence[str]) -> str:
    """Return which stages the run was asked for."""
    path = folder / "stage.txt"
    try:
        stage = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SnapshotError(
            f"cannot read {path}: {error}", hint="put the file back as the run wrote it"
        ) from error
    if stage not in accepted:
        raise SnapshotError(
            f"{path} holds {stage[:40]!r}, and must hold {' or '.join(accepted)}",
            hint="put back what the run was begun with; without --stage that is all",
        )
    return stage


def why_missing(folder: Path) -> str:
    """Return ": it does not exist", with the nearest names; "" for a folder that is there."""
    if folder.is_dir():
        return ""
    near = near_folders(folder)
    if not near and len(folder.parts) == 1:
        near = near_folders(Path("runs") / folder.name)  # a run's name without its folder
    return f": {'it is a file' if folder.exists() else 'it does not exist'}{near}"


def export_paths(folder: Path) -> list[Path]:
    """Return the exports between a run's steps, by their versions."""
    named = [(EXPORT_NAME.fullmatch(path.name), path) for path in (folder / EXPORTS).glob("*")]
    return [path for _, path in sorted((int(name[1]), path) for name, path in named if name)]


def is_model_name(target: Path) -> bool:
    """Return whether it may be a hub's: "owner/model". In a folder that is there, it is a path that
    was mistyped."""
    return len(target.parts) == 2 and is_hub_name(str(target)) and not target.parent.is_dir()


def find_model(
    target: Path,
    config_path: Path | None,
    overrides: list[str],
    *,
    revision: str | None = None,
    served: bool = False,
) -> tuple[Path, RunConfig]:
    """(hub-layout folder, config) of a run folder, a model folder or a hub name, which is fetched
    at `revision`. `served`: by `gyre serve`, whose engines may be cut over ranks."""
    if is_model_name(target) or revision is not None:
        target = find_folder(target, revision=revision)
    if (target / "events.jsonl").is_file():
        model = target / EXPORT
        if not model.is_dir() and (between := export_paths(target)):
            model = between[-1]
        if not model.is_dir():
            raise InputError(
                f"{target} has no export yet", hint=f"finish it: gyre train --resume {target}"
            )
        # they were made for the run's own config
        own = read_all_overrides(target) if config_path is None else []
        path = config_path or target / "config.toml"
        return model, load_run_config(path, [*own, *overrides], served=served)
    if not (target / "config.json").is_file():
        raise InputError(
            f"{target} is neither a run folder nor a model folder{why_missing(target)}",
            hint="runs are under runs/",
        )
    if config_path is not None:
        return target, load_run_config(config_path, overrides, served=served)
    with tempfile.TemporaryDirectory() as bare:
        minimal = Path(bare) / "chat.toml"
        minimal.write_text(
            f'[model]\npath = {json.dumps(str(target))}\n[objective]\nkind = "sft"\n',
            encoding="utf-8",
        )
        return target, load_run_config(minimal, overrides, served=served)
