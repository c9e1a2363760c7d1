"""Step exports: the model in hub layout between the steps of a run, for a server that follows it.
In: what writes the model, which version it is. Out: folders exports/version-N, the newest few.

A folder has its name only once it was read back: it is written aside, verified and renamed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from gyre.core.errors import SnapshotError
from gyre.core.events import Emit
from gyre.core.files import sync
from gyre.launch.run_folder.run_folder import EXPORTS, export_paths
from gyre.runconfig.run_config import RunConfig

# writes the current weights to a folder with the tokenizer's files, and reads them back
Write = Callable[[Path, Path], Awaitable[None]]


def make_exports(
    config: RunConfig, folder: Path, write: Write, find_version: Callable[[], int], emit: Emit
) -> StepExports | None:
    """Return the writer of a run's exports between its steps; None where none is asked for."""
    if not config.snapshot.export_every_steps:
        return None
    keep = config.snapshot.keep_exports
    return StepExports(folder, write, find_version, keep=keep, emit=emit)


class StepExports:
    """ExportPort over a run folder."""

    def __init__(
        self, folder: Path, write: Write, find_version: Callable[[], int], *, keep: int, emit: Emit
    ) -> None:
        self._folder = folder
        self._write = write
        self._emit = emit
        self._find_version = find_version
        self._keep = keep

    async def export(self) -> None:
        name = f"version-{self._find_version():08d}"
        target, aside = (self._folder / EXPORTS / part for part in (name, f".{name}.unverified"))
        shutil.rmtree(aside, ignore_errors=True)  # of an attempt that was killed
        await self._write(aside, self._folder / "tokenizer")
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._publish, aside, target)
        except OSError as error:
            raise SnapshotError(
                f"export to {target} failed: {error}",
                hint="free disk space, or set snapshot.export_every_steps = 0",
            ) from error
        self._emit("export.verified", folder=f"{EXPORTS}/{name}")

    def _publish(self, aside: Path, target: Path) -> None:
        """Give the export its name, durably, and remove those past the newest few."""
        if target.exists():  # of steps that a resume does again
            shutil.rmtree(target)
        os.rename(aside, target)
        sync(target.parent)
        for path in export_paths(self._folder)[: -self._keep]:
            shutil.rmtree(path)
