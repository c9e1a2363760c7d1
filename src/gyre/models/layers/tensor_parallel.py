"""Tensor parallel: what the ranks that compute one layer together exchange around its products. In:
a group, rows of the residual stream. Out: the rows that a rank's products read; the sum of partial
products.

Each rank holds some heads and MLP columns. A product that reads the residual stream (q|k|v, gate
and up) is cut by its outputs. One that writes to it (output, down) is cut by its inputs. The
backward pass of either exchange is the other one.
"""

# T tokens of the micro-batch, E hidden size

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.distributed.process_group import RankGroup
from gyre.kernels.linear import Reduce

if TYPE_CHECKING:  # Triton is there on GPUs only
    from gyre.kernels.gpu.peer_sums import PeerBuffers


class TensorParallel(Protocol):
    """The layout of the residual stream over the ranks of one layer."""

    @property
    def group(self) -> RankGroup: ...

    def gather_rows(self, x_TE: Tensor) -> Tensor:
        """Return all rows, of this rank's own; `x_TE` itself if it holds them all."""
        ...

    def reduce_rows(self, partial_TE: Tensor) -> Tensor:
        """Return this rank's rows of the sum over the ranks. `partial_TE` becomes scratch."""
        ...


class ReplicatedRows:
    """Every rank holds the whole residual stream and computes the norms of all tokens. `peers`: by
    which the fused pass sums few rows; None: by the group's collective, as all others do."""

    def __init__(self, group: RankGroup, peers: PeerBuffers | None = None) -> None:
        self.group, self.peers = group, peers

    def gather_rows(self, x_TE: Tensor) -> Tensor:
        return x_TE

    def reduce_rows(self, partial_TE: Tensor) -> Tensor:
        self.group.all_reduce(partial_TE)
        return partial_TE


class SequenceParallel:
    """Each rank holds an equal run of the residual stream's rows and computes their norms. The
    gradients of norm weights are partial sums then."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def gather_rows(self, x_TE: Tensor) -> Tensor:
        whole_TE = x_TE.new_empty(len(x_TE) * self.group.size, *x_TE.shape[1:])
        self.group.all_gather(whole_TE, x_TE.contiguous())
        return whole_TE

    def reduce_rows(self, partial_TE: Tensor) -> Tensor:
        ranks = self.group.size
        assert len(partial_TE) % ranks == 0, f"{len(partial_TE)} rows do not divide over {ranks}"
        return self.group.reduce_scatter(partial_TE)


def gathered(x_TE: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return the rows that products cut by their outputs read."""
    return x_TE if tensor is None else tensor.gather_rows(x_TE)


def reduced(partial_TE: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return this rank's rows of the sum of partial products."""
    return partial_TE if tensor is None else tensor.reduce_rows(partial_TE)


def reducer_of(tensor: TensorParallel | None) -> Reduce | None:
    return None if tensor is None else tensor.reduce_rows


def reduced_rows(partial_TE: Tensor, tensor: TensorParallel) -> Tensor:
    """Return what `tensor.reduce_rows` does, as a differentiable operation."""
    return ReduceRows.apply(tensor, partial_TE)


class ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: TensorParallel, partial_TE: Tensor) -> Tensor:
        ctx.tensor = tensor
        return tensor.reduce_rows(partial_TE.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.tensor.gather_rows(grads[0])
