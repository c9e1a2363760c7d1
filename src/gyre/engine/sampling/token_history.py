"""History: the token ids of rows whose penalties look back, kept on the device. In: the rows'
arrays when a row first chooses, then each chosen token as it is chosen, without the host. Out: ids
for the penalties. Rows without penalties have no place here.
"""

# R rows, M rows that look back, S slots, W widest sequence

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gyre.engine.scheduler.slots import InputBatch


class History:
    """One slot per row that looks back. A row taken by another sequence is loaded again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slot_of: dict[int, tuple[int, int]] = {}  # row → slot, and the row's generation
        self._free: list[int] = []
        self._ids_SW = torch.zeros((0, 0), dtype=torch.int32, device=device)

    def slots(self, rows: InputBatch, rows_M: np.ndarray) -> Tensor:
        """Return slots_M; rows that were taken since they were last here are loaded with what they
        know."""
        for row in [
            row for row, (_, number) in self._slot_of.items() if rows.generation_R[row] != number
        ]:
            self._free.append(self._slot_of.pop(row)[0])
        missing = [row for row in rows_M.tolist() if row not in self._slot_of]
        if missing:
            self._grow(len(missing) - len(self._free), int(rows.limit_R[rows_M].max()))
            for row in missing:
                self._slot_of[row] = (self._free.pop(), int(rows.generation_R[row]))
                assert rows.known_R[row] == rows.length_R[row], (
                    "a row starts with what the host knows"
                )
                known = torch.from_numpy(rows.tokens_RW[row, : rows.length_R[row]].copy())
                self._ids_SW[self._slot_of[row][0], : len(known)] = known.to(self._device)
        return torch.tensor([self._slot_of[row][0] for row in rows_M.tolist()], device=self._device)

    def ids(self, slots_M: Tensor, width: int) -> Tensor:
        """Return ids_MW, the first `width` tokens of each row; columns past a row's length are
        undefined."""
        return self._ids_SW[:, :width].index_select(0, slots_M)

    def append(self, slots_M: Tensor, at_M: Tensor, tokens_M: Tensor) -> None:
        """Write each row's next token."""
        self._ids_SW[slots_M, at_M] = tokens_M.to(torch.int32)

    def _grow(self, slots: int, width: int) -> None:
        held, wide = self._ids_SW.shape
        more, wider = max(0, slots), max(0, width - wide)
        if more or wider:
            more, wider = (max(more, held) if more else 0), (max(wider, wide) if wider else 0)
            self._ids_SW = torch.nn.functional.pad(self._ids_SW, (0, wider, 0, more))
            self._free += range(held + more - 1, held - 1, -1)
