"""Tensor sources: weights that a rank reads a run at a time. In: a TensorSource, and the places of
this rank's runs. Out: this rank's tensors, filled. A start reads only its own numbers, and holds
one run beside them.

The sources that read files and draw numbers are in `models`; they match the Protocol by structure.
"""

# N numbers of a run

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from gyre.weights.shards import Place, Shape


class TensorSource(Protocol):
    """Named tensors somewhere: in files, in a generator of random numbers, in another model."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shape of every tensor, by name."""
        ...

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write numbers [start, stop) of the row-major tensor into `out_N`, which is flat, of any
        dtype, on any device. Ranks may read different runs, in any order. InputError if the source
        is damaged."""
        ...


class LiveTensors:
    """A TensorSource over whole tensors of this process, such as another model's. They must not
    change meanwhile."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        out_N.copy_(self._tensors[name].reshape(-1)[start:stop])


def whole_places(shapes: Mapping[str, Shape]) -> dict[str, Place]:
    """Place every tensor whole, for a rank without shards."""
    return {name: Place(start=0, stop=math.prod(shape), at=0) for name, shape in shapes.items()}


@torch.no_grad()
def fill(
    own: Mapping[str, Tensor],
    places: Mapping[str, Place],
    source: TensorSource,
    *,
    dtype: torch.dtype,
) -> None:
    """Write this rank's runs from the source, tensor by tensor. Numbers are rounded to `dtype`, the
    one that a forward pass computes in, also where `own` keeps more digits: master weights begin as
    the weights that are computed with."""
    for name, tensor in own.items():
        place = places[name]
        count = place.stop - place.start
        if not count:
            continue  # the last ranks may have no row of a small tensor
        flat_N = tensor.view(-1)
        assert len(flat_N) == count, f"{name}: {len(flat_N)} numbers for a run of {count}"
        if tensor.dtype == dtype:
            source.read(name, place.start, place.stop, flat_N)
            continue
        rounded_N = torch.empty(count, dtype=dtype, device=tensor.device)
        source.read(name, place.start, place.stop, rounded_N)
        flat_N.copy_(rounded_N)
