"""Gate: a vLLM that was started early waits here before it takes memory for weights. In: a file.
Out: whether it may go on. Imports neither torch nor vLLM.

The file is missing while the gate is closed. Each of vLLM's workers leaves a file beside it when it
has come that far.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

LOOK_S = 0.005  # between two looks at the gate


class StartGate:
    """The sidecar's side."""

    def __init__(self, folder: Path) -> None:
        """Make a closed gate in `folder`, which may have others."""
        self._folder = Path(tempfile.mkdtemp(prefix="gate-", dir=folder))
        self.path = self._folder / "open"

    @property
    def is_reached(self) -> bool:
        """Return whether a worker waits, or has passed."""
        return any(self._folder.glob("reached-*"))

    def open(self) -> None:
        self.path.touch()

    def remove(self) -> None:
        """Remove its files, unless they went with the run's folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def wait_until_open(path: Path) -> None:
    """Block a worker until its gate is open. SystemExit when the process that started it has
    ended: the gate would stay closed."""
    parent = os.getppid()
    (path.parent / f"reached-{os.getpid()}").touch()
    while not path.exists():
        if os.getppid() != parent or not path.parent.exists():
            raise SystemExit("vLLM's sidecar has gone")
        time.sleep(LOOK_S)
