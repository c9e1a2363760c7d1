"""The device's block table follows the host's rows, though only what is new is ever sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre.engine.runners.gpu_buffers import DeviceRows
from gyre.engine.scheduler.slots import InputBatch

ROWS, PLACES = 5, 7


class TableMachine(RuleBasedStateMachine):
    """Rows are taken, grow and are left as the scheduler state does it; `step` touches some of them as a
    launch does."""

    def __init__(self) -> None:
        super().__init__()
        self.device = DeviceRows(max_running=ROWS, pages_per_row=PLACES, device=torch.device("cpu"))
        self.rows = SimpleNamespace(
            generation_R=np.zeros(ROWS, np.int64),
            pages_R=np.zeros(ROWS, np.int64),
            table_RP=np.zeros((ROWS, PLACES), np.int32),
        )
        self.model: dict[int, list[int]] = {}  # row → its pages
        self.stays = self.pages = 0

    def fresh_pages(self, count: int) -> list[int]:
        self.pages += count
        return list(range(self.pages - count + 1, self.pages + 1))

    def write(self, row: int) -> None:
        self.rows.table_RP[row, : len(self.model[row])] = self.model[row]
        self.rows.pages_R[row] = len(self.model[row])

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(0, PLACES))
    def take(self, row: int, count: int) -> None:
        if row in self.model:
            return
        self.stays += 1
        self.rows.generation_R[row], self.rows.table_RP[row] = self.stays, 0
        self.model[row] = self.fresh_pages(count)
        self.write(row)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, PLACES))
    def grow(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        self.model[row] += self.fresh_pages(min(count, PLACES - len(self.model[row])))
        self.write(row)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[row]
        self.rows.generation_R[row] = self.rows.pages_R[row] = 0

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        touched = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        before_RP = self.device.table_RP.clone()
        entries_3N = self.device.new_entries(
            cast(InputBatch, self.rows), np.asarray(touched, dtype=np.int64)
        )
        assert entries_3N.dtype == np.int32 and entries_3N.flags.c_contiguous
        row_N, column_N, page_N = entries_3N
        assert len(set(zip(row_N.tolist(), column_N.tolist(), strict=True))) == len(row_N), (
            "a place is sent once"
        )
        self.device.table_RP[torch.from_numpy(row_N).long(), torch.from_numpy(column_N).long()] = (
            torch.from_numpy(page_N)
        )
        for row in touched:
            assert self.device.table_RP[row, : len(self.model[row])].tolist() == self.model[row]
        others = [row for row in range(ROWS + 1) if row not in touched]
        assert torch.equal(self.device.table_RP[others], before_RP[others])
        again_3N = self.device.new_entries(
            cast(InputBatch, self.rows), np.asarray(touched, dtype=np.int64)
        )
        assert again_3N.shape == (3, 0), "what was sent is not sent again"

    @invariant()
    def nobody_has_the_spare_row(self) -> None:
        assert not self.device.table_RP[ROWS].any()


TestTable = TableMachine.TestCase
