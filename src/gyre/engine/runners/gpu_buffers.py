"""The GPU runner's device state between steps, and the copy of a step's numbers to it. In: host
arrays. Out: device views with fixed addresses.

A step's numbers are written to one pinned buffer and sent in one copy, in stream order. A captured
graph finds them at the addresses that it expects. Buffers take turns; one is written again only
when its copy is done.
"""

# R rows, P pages per row

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gyre.core.rounding import round_up
from gyre.engine.runners.device_events import wait_for
from gyre.engine.scheduler.slots import InputBatch

ALIGN_BYTES = 16
TORCH_OF = {"int32": torch.int32, "float32": torch.float32, "float64": torch.float64}


class MirroredBuffer:
    """Named arrays in one device buffer, with pinned mirrors. The last array may be sent in
    part."""

    def __init__(
        self,
        sections: Mapping[str, tuple[str, int]],
        device: torch.device,
        *,
        deadline_s: float,
        mirrors: int = 3,
    ) -> None:
        offset = 0
        spans = {}
        for name, (dtype, length) in sections.items():
            size_bytes = np.dtype(dtype).itemsize * length
            spans[name] = (dtype, offset, size_bytes)
            offset += round_up(size_bytes, ALIGN_BYTES)
        self._last, (self._last_dtype, self._last_offset, _) = list(spans.items())[-1]
        self._buffer = torch.zeros(offset, dtype=torch.uint8, device=device)
        self.on_device: dict[str, Tensor] = {
            name: self._buffer[first : first + size].view(TORCH_OF[dtype])
            for name, (dtype, first, size) in spans.items()
        }
        self._mirrors = [
            torch.zeros(offset, dtype=torch.uint8, pin_memory=True) for _ in range(mirrors)
        ]
        self._views = [
            {
                name: mirror.numpy()[first : first + size].view(dtype)
                for name, (dtype, first, size) in spans.items()
            }
            for mirror in self._mirrors
        ]
        self._sent = [torch.cuda.Event() for _ in range(mirrors)]
        self._turn = 0
        self._deadline_s = deadline_s

    def begin(self) -> dict[str, np.ndarray]:
        """Return a mirror to write, once the copy that last read it is done."""
        self._turn = (self._turn + 1) % len(self._mirrors)
        wait_for(
            self._sent[self._turn],
            lambda: "the copy of an earlier step's numbers",
            self._deadline_s,
        )
        return self._views[self._turn]

    def send(self, last_count: int) -> None:
        """Copy the mirror to the device; of the last array its first `last_count` entries."""
        used = self._last_offset + last_count * np.dtype(self._last_dtype).itemsize
        self._buffer[:used].copy_(self._mirrors[self._turn][:used], non_blocking=True)
        self._sent[self._turn].record()


class DeviceRows:
    """The block table and each row's last token, on the device. Row R is unused: padding points at
    it."""

    def __init__(self, *, max_running: int, pages_per_row: int, device: torch.device) -> None:
        self.max_running = max_running
        self.pages_per_row = pages_per_row
        self.table_RP = torch.zeros(
            max_running + 1, pages_per_row, dtype=torch.int32, device=device
        )
        self.last_R = torch.zeros(max_running + 1, dtype=torch.int32, device=device)
        self._generation_R = np.full(max_running, -1, dtype=np.int64)  # whose pages are entered
        self._entered_R = np.zeros(max_running, dtype=np.int64)  # how many

    def new_entries(self, rows: InputBatch, row_S: np.ndarray) -> np.ndarray:
        """Return int32 [3, N]: (row, column, page) of the table that these distinct rows need and
        the device lacks. They count as entered from now on."""
        changed_S = rows.generation_R[row_S] != self._generation_R[row_S]
        entered_S = np.where(changed_S, 0, self._entered_R[row_S])
        missing_S = rows.pages_R[row_S] - entered_S
        self._generation_R[row_S], self._entered_R[row_S] = (
            rows.generation_R[row_S],
            rows.pages_R[row_S],
        )
        if not missing_S.any():
            return np.empty((3, 0), dtype=np.int32)
        row_N = np.repeat(row_S, missing_S)
        within_N = np.arange(len(row_N)) - np.repeat(np.cumsum(missing_S) - missing_S, missing_S)
        column_N = np.repeat(entered_S, missing_S) + within_N
        return np.stack([row_N, column_N, rows.table_RP[row_N, column_N]]).astype(np.int32)
