"""Fields: the flat buffers of a rank's optimizer state. In: the size of the state, and the length
of its prefix with coded moments. Out: the StateFields with their ranges. Pure.

    numbers of the state   0 …………………… num_coded …………………… size
    master                 float32 ————————————————————————
    moments                codes, scales ———|float32 ——————
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gyre.trainer.adamw.blocks import BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class StateField:
    """One flat buffer with one item per `block` numbers of [first, last) of the state."""

    name: str
    serves: str  # as which tensor of a Span
    dtype: torch.dtype
    first: int
    last: int
    block: int = 1
    coded: bool = False  # belongs to moments in 8 bits

    @property
    def size(self) -> int:
        """Number of items."""
        return (self.last - self.first) // self.block

    def covers(self, first: int, last: int) -> bool:
        return self.first <= first and last <= self.last

    def meets(self, first: int, last: int) -> tuple[int, int]:
        """Return the intersection with [first, last) as (first, last), where last >= first."""
        low = max(first, self.first)
        return low, max(low, min(last, self.last))

    def at(self, first: int, last: int) -> slice:
        """Return the item range of numbers [first, last), which the field contains, in its
        buffer."""
        return self.within(self.first, first, last)

    def within(self, start: int, first: int, last: int) -> slice:
        """Return their item range in a buffer that starts at number `start`."""
        return slice((first - start) // self.block, (last - start) // self.block)


def state_fields(size: int, *, num_coded: int | None, keeps_master: bool) -> tuple[StateField, ...]:
    """Return the fields of a state of `size` numbers. `num_coded` is None where no rank has codes.
    A rank without any, among ranks that have some, gets empty fields."""
    moments, wide = ("exp_avg", "exp_avg_sq"), torch.float32
    rows = [("master", "weight_N", 0)] if keeps_master else []
    rows += [(moment, f"{moment}_N", num_coded or 0) for moment in moments]
    fields = [
        StateField(name=name, serves=serves, dtype=wide, first=first, last=size)
        for name, serves, first in rows
    ]
    if num_coded is None:
        return tuple(fields)
    for moment in moments:
        for kind, serves, dtype, block in (
            ("codes", f"{moment}_N", torch.uint8, 1),
            ("scale", f"{moment}_scale_B", wide, BLOCK),
        ):
            fields.append(
                StateField(
                    name=f"{moment}_{kind}",
                    serves=serves,
                    dtype=dtype,
                    first=0,
                    last=num_coded,
                    block=block,
                    coded=True,
                )
            )
    return tuple(fields)


def gradient_field(size: int) -> StateField:
    return StateField(name="grad", serves="grad_N", dtype=torch.float32, first=0, last=size)
