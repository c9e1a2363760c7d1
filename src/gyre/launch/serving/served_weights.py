"""Served weights: which folder a server answers from, and how another takes its place. In: a
checkpoint's folder, what becomes of the requests under way. Out: the next version's number, on
every engine; after an error the last one answers as before.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre.cluster.engine_pool.pool import EnginePool
from gyre.cluster.engine_pool.weight_change import ChangePolicy, change_weights
from gyre.core.errors import GyreError, InputError
from gyre.core.events import Emit
from gyre.core.offers import FolderTensors, Offer
from gyre.core.records import Manifest
from gyre.models.hub.folders import CHECKSUMS_FILE, CONFIG_FILE
from gyre.runconfig.run_config import RunConfig
from gyre.server.admin import ChangeRunning
from gyre.text.hub_child import load_apart
from gyre.text.tokenizer import Tokenizer, load_tokenizer

Signature = tuple[tuple[str, int, int, int], ...]  # name, inode, bytes, ns of each file


def find_signature(folder: Path) -> Signature:
    """Return what identifies the contents of a folder; empty where it has none.
    A file that goes away meanwhile is not part of it."""
    found: list[tuple[str, int, int, int]] = []
    for path in [folder / CONFIG_FILE, folder / CHECKSUMS_FILE, *folder.glob("*.safetensors*")]:
        try:
            told = path.stat()
        except FileNotFoundError:
            continue
        found.append((path.name, told.st_ino, told.st_size, told.st_mtime_ns))
    return tuple(sorted(found))


class ServedFolder:
    """Where the weights of the version that answers are. Workers start from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.version = 0
        self.signature = find_signature(self.folder)

    def move_to(self, folder: Path, version: int, signature: Signature) -> None:
        self.folder, self.version, self.signature = folder, version, signature

    def refuse_changed(self) -> None:
        """InputError where the files are not those that the running engines have read."""
        if find_signature(self.folder) != self.signature:
            raise InputError(
                f"{self.folder} has other files than when version {self.version} was read from it",
                hint="put the files back, or start the server again",
            )


class ServedWeights:
    """Changes the weights of a pool, one change at a time."""

    def __init__(
        self,
        pool: EnginePool,
        served: ServedFolder,
        config: RunConfig,
        *,
        tokenizer: Tokenizer,
        emit: Emit,
    ) -> None:
        self._pool = pool
        self._config = config
        self._emit = emit
        self.served = served
        self._tokenizer = tokenizer.fingerprint
        self._change: asyncio.Task[int] | None = None

    @property
    def is_changing(self) -> bool:
        return self._change is not None and not self._change.done()

    async def change(self, folder: Path, policy: ChangePolicy) -> int:
        """Serve another checkpoint, and return its version. A caller that is cancelled does not end
        the change. ChangeRunning while another one is under way."""
        if self.is_changing:
            raise ChangeRunning("another change of the weights is under way")
        self._change = asyncio.create_task(self._run(folder, policy))
        # its caller may be gone by then; the event was written
        self._change.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._change)

    async def aclose(self) -> None:
        """End a change that is under way, at once; the server is ending."""
        if self._change is not None:
            self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)

    async def _run(self, folder: Path, policy: ChangePolicy) -> int:
        version, deadline_s = self._pool.version + 1, self._config.cluster.call_deadline_s
        try:
            folder, signature = await asyncio.to_thread(self._look_at, folder)
            manifest = Manifest(version=version, entries=(), shared=False)
            await change_weights(
                self._pool,
                Offer(manifest=manifest, source=FolderTensors(folder=str(folder))),
                policy=policy,
                drain_deadline_s=self._config.engine.drain_deadline_s,
                rollback_deadline_s=deadline_s,
            )
        except Exception as error:
            reason = error.message if isinstance(error, GyreError) else str(error)
            serving = self._pool.version
            self._emit("serve.weights_refused", folder=str(folder), serving=serving, reason=reason)
            raise
        self.served.move_to(folder, version, signature)
        self._emit("serve.weights_updated", folder=str(folder), version=version, policy=policy)
        return version

    def _look_at(self, folder: Path) -> tuple[Path, Signature]:
        """Return the folder without links, and its signature before its weights are read.
        InputError for another tokenizer: prompts would be other ids."""
        if not folder.is_absolute() or not folder.is_dir():
            raise InputError(
                f"{folder} is no folder on the server's host",
                hint="give a checkpoint's folder by its absolute path",
            )
        folder = folder.resolve()
        signature, end_token = find_signature(folder), self._config.tokenizer.end_token
        tokenizer = load_tokenizer(folder, end_token=end_token, read=load_apart)
        if tokenizer.fingerprint != self._tokenizer:
            raise InputError(
                f"{folder} has another tokenizer or chat template than the model that is served",
                hint="start a server of its own for it",
            )
        return folder, signature
