"""Host staging: host memory that two processes open, in place of a GPU's. In: a size; or a handle.
Out: shared bytes. Callers: bench/pod_handover.py and bench/pod_engine.py on a CPU, where they show
only that they run.
"""

from __future__ import annotations

import os

import torch

from gyre.weights.transports.mapped import MappedFile


class HostStaging:
    """A Staging of anonymous memory."""

    def __init__(self, device: torch.device, size_bytes: int, handle: bytes = b"") -> None:
        """Allocate it; or open another process's by its handle."""
        if handle:
            self._file = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        else:
            self._file = os.memfd_create("staging")
            os.truncate(self._file, size_bytes)
        self._mapped = MappedFile(self._file, size_bytes, writable=True, pin=False)
        self.bytes_N = self._mapped.bytes_N

    @property
    def handle(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def close(self) -> None:
        self._mapped.close()
        os.close(self._file)
