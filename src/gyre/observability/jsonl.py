"""Lines of JSON that survive kill -9. In: rows (mappings). Out: a file of one JSON object per line,
and its rows back.

Each row reaches the kernel in one unbuffered append, so a killed process loses at most the line
that it was writing. Such a torn line stays in the file, is closed by a newline when the file is
next opened, and is counted by readers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre.core.errors import SnapshotError


class LineWriter:
    """Appends whole lines to one file. Not thread-safe: the owner holds a lock."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = ends_torn(path)
        self._fd: int | None = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row. Raises SnapshotError when the disk refuses; the file stays readable."""
        assert self._fd is not None, f"{self.path} is closed"
        data = encode_row(row).encode() + b"\n"
        if self._torn:
            data = b"\n" + data
        try:
            while data:
                data = data[os.write(self._fd, data) :]
                self._torn = bool(data)
        except OSError as error:
            self._torn = True
            raise SnapshotError(
                f"cannot write {self.path}: {error.strerror}",
                hint="free space on that disk or make the run folder writable, then go on with "
                "--resume",
            ) from error

    def sync(self) -> None:
        """Block until all rows so far would survive a power loss."""
        assert self._fd is not None, f"{self.path} is closed"
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def ends_torn(path: Path) -> bool:
    """Return whether the file ends in the middle of a line."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield (byte offset, row) per line. The row is None for a line that cannot be decoded, such as
    a torn one."""
    if not path.exists():
        return
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield offset, decode_row(line)
            offset += len(line)


def decode_row(line: bytes) -> dict[str, Any] | None:
    """Parse one line, or return None. A proper prefix of a JSON object is never valid, so a torn
    line cannot parse."""
    try:
        row = json.loads(line)
    except ValueError:  # not JSON, or cut inside a UTF-8 sequence
        return None
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("seq"), int)
        or not isinstance(row.get("attempt"), int)
    ):
        return None
    return row


def encode_row(row: Mapping[str, Any]) -> str:
    """Return strict JSON on one line. NaN and infinities become the strings that `as_number` reads
    back."""
    try:
        return json.dumps(row, allow_nan=False, default=_plain, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(row), allow_nan=False, separators=(",", ":"))


def as_number(value: Any) -> float | None:
    """Read a number written by `encode_row`, NaN and infinities included. None for anything
    else."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else None


def _plain(value: Any) -> Any:
    """Convert numpy scalars, arrays, paths and mappings to JSON types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return _finite(_plain(value))
