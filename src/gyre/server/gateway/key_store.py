"""Key store: the keys of a running server. In: the key file, secrets of clients. Out: the key of a
secret; events. The file is looked at once a second at most, so a new or revoked key counts after a
second, without a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.server.gateway.keys import ApiKey, as_time, digest, read_keys, utc_now

LOOK_S = 1.0  # between two looks at the file
Stamp = tuple[int, int, int]


class KeyStore:
    """The keys as the file last had them whole."""

    def __init__(
        self,
        path: Path,
        *,
        emit: Emit,
        clock_s: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Read the file. ConfigError where it is not whole. `clock_s` decides when to look at it
        again, `now` whether a key has expired."""
        self._path = path
        self._emit = emit
        self._clock_s = clock_s
        self._now = now
        self._stamp = stamp(path)  # before the file is read: a change in between is seen later
        self._by_digest = {key.sha256: key for key in read_keys(path)}
        self._looked_s = clock_s()
        self._fault = ""

    def find(self, secret: str) -> ApiKey | None:
        """Return the key, None where it is unknown, revoked or expired. How long it takes says
        nothing of any key: the digest is looked up, and a client cannot choose a digest."""
        self._look()
        key = self._by_digest.get(digest(secret))
        return key if key is not None and key.is_valid(as_time(self._now())) else None

    def _look(self) -> None:
        """Take a changed file. One that is not whole leaves the keys as they are, with an event."""
        now_s = self._clock_s()
        if now_s < self._looked_s + LOOK_S:
            return
        self._looked_s = now_s
        found = stamp(self._path)
        if found is not None and found == self._stamp and not self._fault:
            return
        try:
            keys = read_keys(self._path)
        except ConfigError as error:
            if error.message != self._fault:  # said once, and not every second
                self._emit("serve.keys_unreadable", path=str(self._path), error=error.message)
            self._fault = error.message
            return
        self._stamp, self._fault = found, ""
        self._by_digest = {key.sha256: key for key in keys}
        usable = sum(key.is_valid(as_time(self._now())) for key in keys)
        self._emit("serve.keys_loaded", path=str(self._path), keys=len(keys), usable=usable)


def stamp(path: Path) -> Stamp | None:
    """Return what differs after each change of a file; None where it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
