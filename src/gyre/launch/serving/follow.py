"""Follow: a server takes each new export of a run, or each new content of a model folder. In: the
folders, looked at every few seconds. Out: changes of the served weights; an event for each.

A folder is tried once it was the same at two looks, so that one that is being copied is left alone.
What is refused is not tried again until its files change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gyre.cluster.worker.server import WorkerFault
from gyre.core.errors import DeadlineError, GyreError, RankError
from gyre.launch.run_folder.run_folder import EXPORT, export_paths
from gyre.launch.serving.served_weights import ServedWeights, Signature, find_signature
from gyre.models.hub.folders import CHECKSUMS_FILE
from gyre.server.admin import ChangeRunning

Seen = Mapping[Path, Signature]
# no fault of the checkpoint: it is tried again at the next look
PASSING = (ChangeRunning, DeadlineError, RankError)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowState:
    """What the looks so far have found."""

    known: frozenset[Signature]  # were served, or refused
    served: Signature  # answers now
    last: Seen = field(default_factory=dict)  # at the look before

    def after(self, seen: Seen, *, served: Signature) -> FollowState:
        """Return the state after a look, without what is there no more. Pure."""
        known = (self.known & set(seen.values())) | {served}
        return FollowState(known=known, served=served, last=seen)

    def refuse(self, signature: Signature) -> FollowState:
        """Return the state in which these files are not tried again. Pure."""
        return replace(self, known=self.known | {signature})


def choose(state: FollowState, seen: Seen, *, in_order: bool) -> Path | None:
    """Return the newest folder that is complete, did not change between two looks and is not known.
    `in_order`: what was written before the served one is passed over. Pure."""
    ready = [
        path
        for path, signature in seen.items()
        if is_complete(signature)
        and signature == state.last.get(path)
        and signature not in state.known
        and (not in_order or written_ns(signature) >= written_ns(state.served))
    ]
    return max(ready, key=lambda path: written_ns(seen[path]), default=None)


def is_complete(signature: Signature) -> bool:
    """Return whether it has weights. A checkpoint without checksums is one of others. Pure."""
    return any(name.endswith(".safetensors") for name, *_ in signature)


def written_ns(signature: Signature) -> int:
    """Return when the newest file was written; that of the checksums, the last one written, where
    it is there. Pure."""
    times = {name: ns for name, _, _, ns in signature}
    return times.get(CHECKSUMS_FILE) or max(times.values(), default=0)


class Follower:
    """Looks every `poll_s` seconds until it is cancelled."""

    def __init__(self, weights: ServedWeights, target: Path, *, poll_s: float) -> None:
        """`target` is a run folder or a model folder."""
        self._weights = weights
        self._target = target.absolute()
        self._poll_s = poll_s
        self._is_run = (target / "events.jsonl").is_file()
        served = weights.served.signature
        self._state = FollowState(known=frozenset({served}), served=served)

    async def run(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> None:
        seen = await asyncio.to_thread(self._find)
        folder = choose(self._state, seen, in_order=self._is_run)
        self._state = self._state.after(seen, served=self._weights.served.signature)
        if folder is None:
            return
        try:
            await self._weights.change(folder, "drain")
        except PASSING:
            return
        except (GyreError, WorkerFault):  # its event was written where it was refused
            self._state = self._state.refuse(seen[folder])
        else:
            self._state = self._state.after(seen, served=self._weights.served.signature)

    def _find(self) -> Seen:
        if not self._is_run:
            folders = [self._target]
        else:
            folders = [*export_paths(self._target), self._target / EXPORT]
        return {folder: find_signature(folder) for folder in folders}
