"""Recompute: tensors that a backward pass recomputes instead of keeping them. In: a function that
recomputes tensors. Out: hooks under which autograd saves an index in place of a tensor.

`RecomputeQK` covers q and k of a layer: attention's backward pass reads them, and they follow from
the projection, which is kept anyway. `RecomputeLayer` covers a whole layer: its forward pass runs
again, once, when the first of its tensors is needed. Both reproduce the exact bits: the same
kernels on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class RecomputeQK:
    """q and k of one layer. The op that first computes them sets `make`."""

    def __init__(self) -> None:
        self.make: Callable[[], Sequence[Tensor]] | None = None
        self._made: dict[int, Tensor] = {}

    def hooks(self, *tensors: Tensor) -> saved_tensors_hooks:
        """Return hooks that save the index of q or k instead of the tensor."""
        places = {_identity(tensor): place for place, tensor in enumerate(tensors)}

        def pack(tensor: Tensor) -> Any:
            place = places.get(_identity(tensor))
            return tensor.detach() if place is None else place

        return saved_tensors_hooks(
            pack, lambda kept: kept if isinstance(kept, Tensor) else self._again(kept)
        )

    def _again(self, place: int) -> Tensor:
        if place not in self._made:
            assert self.make is not None
            self._made = dict(enumerate(self.make()))
        return self._made.pop(place)


class RecomputeLayer:
    """The tensors that autograd saves of a pass under `hooks`; `run` repeats the pass."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._count = 0
        self._made: dict[int, Tensor] = {}

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, _: Tensor) -> int:
        self._count += 1
        return self._count - 1

    def _unpack(self, place: int) -> Tensor:
        if place not in self._made:
            self._made = self._again()
        return self._made.pop(place)

    def _again(self) -> dict[int, Tensor]:
        made: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> int:
            made[len(made)] = tensor.detach()
            return len(made) - 1

        with torch.enable_grad(), saved_tensors_hooks(pack, made.__getitem__):
            self._run()
        assert len(made) == self._count, (
            f"{self._count} tensors were kept at first and {len(made)} when run again"
        )
        return made


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
