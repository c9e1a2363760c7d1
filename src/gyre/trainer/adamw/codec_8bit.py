"""Codec: numbers as 8-bit codes with a scale per block, by torch operations. In: a map of 256
ascending values from −1 or 0 to 1, float32 numbers. Out: codes of the nearest values and scales,
and the reverse."""

# N numbers, B blocks of them, K numbers of a block, P patterns of a float's first 16 bits

from __future__ import annotations

import torch
from torch import Tensor

from gyre.trainer.adamw.blocks import BLOCK

SMALLEST_SCALE = 1e-38  # that is divided by: a block of zeros is coded as zeros
HALF = 1 << 15


class Codec:
    """Finds the nearest value without a search.

    All floats with the same first 16 bits are so close that at most one boundary between two values
    separates them. A table holds the code of the lowest; one comparison decides the side of the
    boundary.
    """

    def __init__(self, map_256: Tensor) -> None:
        middles = (map_256[1:] + map_256[:-1]) * 0.5
        heads_P = torch.arange(-HALF, HALF, dtype=torch.int32, device=map_256.device) << 16
        ends_P2 = torch.stack([heads_P, heads_P | 0xFFFF], 1).view(torch.float32)
        # of negative floats the highest pattern is the lowest number
        ends_P2[:HALF] = ends_P2[:HALF].flip(1)
        codes_P2 = torch.bucketize(ends_P2, middles, out_int32=True, right=True).clamp(max=255)
        inside_P = (ends_P2.abs() <= 1.0).all(1)
        assert int((codes_P2[:, 1] - codes_P2[:, 0])[inside_P].max()) <= 1, (
            "two borders between floats of one pattern"
        )
        self._map = map_256
        self._lowest_P = codes_P2[:, 0].contiguous()
        self._borders = torch.cat([middles, middles.new_full((1,), torch.inf)])

    def decode(self, codes_N: Tensor, scale_B: Tensor) -> Tensor:
        """Decode to float32."""
        values_BK = torch.index_select(self._map, 0, codes_N.int()).view(-1, BLOCK)
        return values_BK.mul_(scale_B.unsqueeze(1)).view(-1)

    def encode(self, values_N: Tensor, codes_N: Tensor, scale_B: Tensor) -> None:
        """Encode into codes and scales, in place. Overwrites `values_N` as scratch."""
        values_BK = values_N.view(-1, BLOCK)
        torch.amax(values_BK.abs(), 1, out=scale_B)
        values_BK.div_(scale_B.clamp_min(SMALLEST_SCALE).unsqueeze(1))
        found_N = torch.index_select(self._lowest_P, 0, (values_N.view(torch.int32) >> 16) + HALF)
        found_N += values_N >= torch.index_select(self._borders, 0, found_N)
        codes_N.copy_(found_N)
