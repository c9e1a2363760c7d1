"""JSON files from outside: bounded reads. In: a path, or bytes and their origin. Out: a mapping, or
an InputError that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gyre.core.errors import InputError

MAX_FILE_BYTES = 256 << 20  # the largest index.json of a published model is below 16 MiB


def read_json(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
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
