"""Output: what rewards print, kept up to a bound. In: bytes. Out: a file, or stderr."""

from __future__ import annotations

import os


class BoundedLog:
    """Appends until the file has `most_bytes`; what comes after is counted and dropped. Without a
    path it writes that many bytes to stderr."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._owned = bool(path)
        self._fd = (
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if path
            else 2
        )
        self._left = max(0, most_bytes - (os.fstat(self._fd).st_size if path else 0))
        self.dropped_bytes = 0

    def write(self, data: bytes) -> bool:
        """Keep what fits. True when this is the first time that something was dropped."""
        kept, first = data[: self._left], not self.dropped_bytes
        written = 0
        try:
            while written < len(kept):
                written += os.write(self._fd, kept[written:])
        # a full disk, or a terminal that has gone: dropped and counted like the rest
        except OSError:
            self._left = written
        self._left -= written
        self.dropped_bytes += len(data) - written
        return first and self.dropped_bytes > 0

    def close(self) -> None:
        """Say at the end how much is missing."""
        if self.dropped_bytes:
            self._left = 200  # the bound is for what rewards print
            self.write(
                f"\n[gyre: {self.dropped_bytes} more bytes were printed and dropped]\n".encode()
            )
        if self._owned:
            os.close(self._fd)
