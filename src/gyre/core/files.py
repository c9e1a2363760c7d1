"""Files: written whole or not at all, synced, and locked; JSON of others read within bounds. In: a
path, and what writes it. Out: the new file or folder under its name, or the old one as it was; a
mapping. Torch-free.

A file is written beside its place as `NAME.partial` until it is whole. `durable` ones are synced
before they get their name, and so is the name: they outlast a power loss. Reports and caches, which
can be made again, need not be.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre.core.errors import InputError

MAX_JSON_BYTES = 256 << 20  # the largest index.json of a published model is below 16 MiB


def partial_path(path: Path) -> Path:
    """Return where `path` is written before it is whole."""
    return path.with_name(f"{path.name}.partial")


def sync(path: Path) -> None:
    """Block until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, *, durable: bool) -> Iterator[Path]:
    """Yield the path to write; when the block ends well, it replaces the file at `path`. After an
    error nothing of it is left. One process writes a path at a time."""
    aside = partial_path(path)
    try:
        yield aside
        if durable:
            sync(aside)
        os.replace(aside, path)
        if durable:
            sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)  # there only after a failure


def write_text(path: Path, text: str, *, durable: bool, errors: str = "strict") -> None:
    """Replace the file at `path`. OSError, with the old file as it was, where the disk refuses."""
    with replacing(path, durable=durable) as aside:
        aside.write_text(text, encoding="utf-8", errors=errors)


@contextmanager
def replacing_folder(path: Path, *, durable: bool) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends well, it replaces the folder at `path`.
    That one is deleted only after the new one has its name."""
    aside, old = (path.with_name(f".{path.name}.{part}") for part in ("partial", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if durable:
            for inner in (*aside.iterdir(), aside):
                sync(inner)
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        try:
            aside.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        if durable:
            sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def try_lock(handle: int) -> bool:
    """Lock an open file for this process, until the handle is closed. False while another process
    has it; OSError where the file system knows no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return a file's mapping. Raises InputError unless it is a regular, bounded UTF-8 file with
    JSON of bounded nesting and integer sizes."""
    again = "restore the file, or copy it again from its source"
    try:
        if not path.is_file():
            raise InputError(f"{path} is not there, or is no regular file", hint=again)
        if (size := path.stat().st_size) > max_bytes:
            raise InputError(f"{path} has {size} bytes; at most {max_bytes} are read", hint=again)
        content = json.loads(path.read_bytes().decode("utf-8"))
    except RecursionError as fault:
        raise InputError(f"{path} is not readable JSON: nested too deep", hint=again) from fault
    # ValueError: of UTF-8, of JSON, of an integer with too many digits
    except (OSError, ValueError) as fault:
        raise InputError(f"{path} is not readable JSON: {fault}", hint=again) from fault
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}, not a mapping", hint=again)
    return content
