"""List source: records in a reproducible order. In: records, a seed. Out: a PromptSource. Callers:
wire, tests."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.core.errors import SnapshotError
from gyre.core.seeds import derive_seed


class ListSource:
    """Implements PromptSource over any records: each epoch is a new shuffle, a pure function of
    seed and epoch."""

    def __init__(self, records: Sequence[Any], *, seed: int = 0) -> None:
        assert records, "a source needs at least one record"
        self._records, self._seed = tuple(records), seed
        self._fingerprint = hashlib.blake2b(repr(self._records).encode(), digest_size=8).hexdigest()
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()

    def take(self, n: int) -> Sequence[Any]:
        assert n > 0, f"take({n}): need at least 1"
        taken = []
        while len(taken) < n:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
            taken.append(self._records[self._order[self._position]])
            self._position += 1
        return taken

    def state(self) -> Mapping[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "data": self._fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        hint = "resume with the data that the run was started with"
        try:
            owner = (state["data"], int(state["seed"]))
            epoch, position = int(state["epoch"]), int(state["position"])
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(
                f"not the cursor of a source: {dict(state)} ({error!r})", hint=hint
            ) from error
        if owner != (self._fingerprint, self._seed):
            raise SnapshotError("the cursor belongs to other records or another seed", hint=hint)
        self._epoch, self._position = epoch, position
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._records)))
        random.Random(derive_seed(self._seed, "epoch", self._epoch)).shuffle(order)
        return order
