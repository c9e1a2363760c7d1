"""KVStore: short texts that ranks exchange outside collectives. In: a store that all ranks reach.
Out: texts of other ranks, or None. Thread-safe, and never waits for another rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torch.distributed import Store

from gyre.core.errors import RankError


class KVStore(Protocol):
    def put(self, key: str, text: str) -> None: ...

    def get(self, key: str) -> str | None: ...

    def drop(self, keys: Sequence[str]) -> None:
        """Delete keys that are no longer needed."""
        ...


class SharedKVStore:
    """A key-value store over a separate store connection."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        try:
            with self._lock:
                self._store.set(key, text)
        except RuntimeError as error:
            raise _lost(error) from error

    def get(self, key: str) -> str | None:
        try:
            with self._lock:
                return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise _lost(error) from error

    def drop(self, keys: Sequence[str]) -> None:
        try:
            with self._lock:
                for key in keys:
                    self._store.delete_key(key)
        except RuntimeError as error:
            raise _lost(error) from error


class LocalKVStore:
    """The key-value store of a single process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text

    def get(self, key: str) -> str | None:
        return self._texts.get(key)

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._texts.pop(key, None)


def _lost(error: RuntimeError) -> RankError:
    return RankError(
        f"the process that holds the ranks' store is gone ({str(error).splitlines()[0][:120]})",
        hint="start the ranks again from the last snapshot",
    )
