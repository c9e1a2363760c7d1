"""Tensor parallel: what the ranks that compute one layer together exchange around its products. In:
a group, rows of the residual stream. Out: the rows that a rank's products read; the sum of partial
products.

Each rank holds some heads and MLP columns. A product that reads the residual stream (q|k|v, gate
and up) is cut by its outputs. One that writes to it (output, down) is cut by its inputs. The
backward pass of either exchange is the other one. A started exchange runs beside the products that
do not need it.
"""

# T tokens of the micro-batch, E hidden size, N rows of it that are wanted, O output features, S
# ranks

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.distributed.process_group import RankGroup
from gyre.kernels.linear import OutputGradient, Reduce, Share
from gyre.kernels.sums import add_up

if TYPE_CHECKING:  # Triton is there on GPUs only
    from gyre.kernels.gpu.peer_sums import PeerBuffers

ALIGNED = 128  # rows of a weight: where products are cut, they stay fast
Rows = Callable[[], Tensor]  # waits for rows that are on their way; to be called once


class TensorParallel(Protocol):
    """The layout of the residual stream over the ranks of one layer."""

    @property
    def group(self) -> RankGroup: ...

    @property
    def splits_rows(self) -> bool:
        """Return whether each rank holds some rows only."""
        ...

    def begin_gather_rows(self, x_TE: Tensor) -> Rows:
        """Start to gather all rows, of this rank's own; `x_TE` itself if it holds them all."""
        ...

    def begin_reduce_rows(self, partial_TE: Tensor) -> Rows:
        """Start to sum over the ranks, for this rank's rows of it. `partial_TE` becomes scratch."""
        ...

    def gather_ahead(self, x_TE: Tensor) -> None:
        """Start to gather rows that the next `begin_gather_rows` of the same ones returns."""
        ...

    def gather_rows(self, x_TE: Tensor) -> Tensor: ...

    def reduce_rows(self, partial_TE: Tensor) -> Tensor: ...


class ReplicatedRows:
    """Every rank holds the whole residual stream and computes the norms of all tokens: for steps of
    few rows, in any number. `peers`: by which the fused pass sums few rows; None: by the group's
    collective, as all others do."""

    splits_rows = False

    def __init__(self, group: RankGroup, peers: PeerBuffers | None = None) -> None:
        self.group = group
        self.peers = peers

    def begin_gather_rows(self, x_TE: Tensor) -> Rows:
        return lambda: x_TE

    def begin_reduce_rows(self, partial_TE: Tensor) -> Rows:
        self.group.all_reduce(partial_TE)
        return lambda: partial_TE

    def gather_ahead(self, x_TE: Tensor) -> None:
        pass

    def gather_rows(self, x_TE: Tensor) -> Tensor:
        return x_TE

    def reduce_rows(self, partial_TE: Tensor) -> Tensor:
        return self.begin_reduce_rows(partial_TE)()


class SequenceParallel:
    """Each rank holds an equal run of the residual stream's rows and computes their norms. The
    gradients of norm weights are partial sums then."""

    splits_rows = True

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        # rows that are not to be modified until they are asked for, and the wait for all ranks'
        self._ahead: tuple[Tensor, Rows] | None = None

    def begin_gather_rows(self, x_TE: Tensor) -> Rows:
        if self._ahead is not None and _are_same(self._ahead[0], x_TE):
            (_, rows), self._ahead = self._ahead, None
            return rows
        return self._begin_gather(x_TE)

    def gather_ahead(self, x_TE: Tensor) -> None:
        if self._ahead is not None:  # of a backward pass that was broken off
            self._ahead[1]()
        self._ahead = x_TE, self._begin_gather(x_TE)

    def _begin_gather(self, x_TE: Tensor) -> Rows:
        whole_TE = x_TE.new_empty(len(x_TE) * self.group.size, *x_TE.shape[1:])
        wait = self.group.begin_all_gather(whole_TE, x_TE.contiguous())

        def gathered_rows() -> Tensor:
            wait()
            return whole_TE

        return gathered_rows

    def begin_reduce_rows(self, partial_TE: Tensor) -> Rows:
        ranks = self.group.size
        assert len(partial_TE) % ranks == 0, f"{len(partial_TE)} rows do not divide over {ranks}"
        return self.group.begin_reduce_scatter(partial_TE)

    def gather_rows(self, x_TE: Tensor) -> Tensor:
        return self.begin_gather_rows(x_TE)()

    def reduce_rows(self, partial_TE: Tensor) -> Tensor:
        return self.begin_reduce_rows(partial_TE)()


def _are_same(a_TE: Tensor, b_TE: Tensor) -> bool:
    return a_TE.data_ptr() == b_TE.data_ptr() and a_TE.shape == b_TE.shape


def gathered(x_TE: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return the rows that products cut by their outputs read."""
    return x_TE if tensor is None else tensor.gather_rows(x_TE)


def begin_gathered(x_TE: Tensor, tensor: TensorParallel | None) -> Rows:
    """Start `gathered`."""
    return (lambda: x_TE) if tensor is None else tensor.begin_gather_rows(x_TE)


def backward_to_stream(
    through: OutputGradient,
    weight_OE: Tensor,
    rows_of_all: Rows,
    norm: Callable[[Tensor], tuple[Tensor, Tensor]],
    tensor: TensorParallel | None,
    *,
    ahead: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the stream, the norm and the weight, of a product that read the
    norm's rows. `norm` is the norm's backward pass. `ahead`: the first one is gathered next."""
    if tensor is None or not tensor.splits_rows:
        grad_normed_TE = reduced(through.of_input(weight_OE), tensor)
        grad_weight_OE = through.of_weight(rows_of_all())
        return *norm(grad_normed_TE), grad_weight_OE
    summed_rows, x_TE = tensor.begin_reduce_rows(through.of_input(weight_OE)), rows_of_all()
    # beside the sum one half of the weight's gradient, beside the gather the other
    half = max(1, len(weight_OE) // 2 // ALIGNED * ALIGNED)
    grad_weight_OE = x_TE.new_empty(weight_OE.shape)
    through.of_weight_rows(x_TE, 0, half, grad_weight_OE)
    grad_TE, grad_norm_E = norm(summed_rows())
    del summed_rows
    if ahead:
        tensor.gather_ahead(grad_TE)
    through.of_weight_rows(x_TE, half, len(weight_OE), grad_weight_OE)
    return grad_TE, grad_norm_E, grad_weight_OE


def reduced(partial_TE: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return this rank's rows of the sum of partial products."""
    return partial_TE if tensor is None else tensor.reduce_rows(partial_TE)


def reducer_of(tensor: TensorParallel | None) -> Reduce | None:
    return None if tensor is None else tensor.reduce_rows


def sharer_of(tensor: TensorParallel | None) -> Share | None:
    """Return what finds the largest magnitudes of operands of which each rank has a part."""
    return None if tensor is None else partial(tensor.group.all_reduce, op="max")


def summed_in_rank_order(partial_TE: Tensor, tensor: TensorParallel) -> Tensor:
    """Return what `tensor.reduce_rows` does, to the same bits however ranks hold the rows and
    whatever the other rows are: parts are added in float32 in rank order, and rounded once. A sum
    of two is that in any order, so two ranks sum by their collective."""
    group = tensor.group
    if group.size == 2:
        return tensor.reduce_rows(partial_TE)
    if tensor.splits_rows:
        parts_SN = group.exchange(partial_TE).view(group.size, -1)
    else:
        parts_SN = partial_TE.new_empty(group.size, partial_TE.numel())
        group.all_gather(parts_SN.view(-1), partial_TE.contiguous().view(-1))
    sum_N = torch.empty_like(parts_SN[0], dtype=torch.float32)
    add_up(parts_SN, sum_N)
    return sum_N.to(partial_TE.dtype).view(-1, *partial_TE.shape[1:])


def reduced_rows(partial_TE: Tensor, tensor: TensorParallel) -> Tensor:
    """Return what `tensor.reduce_rows` does, as a differentiable operation."""
    return ReduceRows.apply(tensor, partial_TE)


def padded_rows(rows_N: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return the indices of rows, with row 0 again until the ranks have equal runs of them."""
    if tensor is None or not tensor.splits_rows:
        return rows_N
    return F.pad(rows_N, (0, -len(rows_N) % tensor.group.size))


def selected_rows(x_TE: Tensor, rows_N: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return these of all rows, over the ranks like `x_TE`: of split ones an equal run each."""
    if tensor is None or not tensor.splits_rows:
        return x_TE.index_select(0, rows_N)
    return SelectRows.apply(tensor, x_TE, rows_N)


def whole_rows(x_TE: Tensor, num_rows: int, tensor: TensorParallel | None) -> Tensor:
    """Return all rows on every rank, without padding behind the first `num_rows`. Every rank must
    give them the same gradient."""
    if tensor is None or not tensor.splits_rows:
        return x_TE
    return WholeRows.apply(tensor, num_rows, x_TE)


class ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: TensorParallel, partial_TE: Tensor) -> Tensor:
        ctx.tensor = tensor
        own_TE = tensor.reduce_rows(partial_TE.clone())
        # a run of rows would keep those of the others alive
        return own_TE.clone() if tensor.splits_rows else own_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.tensor.gather_rows(grads[0])


class SelectRows(torch.autograd.Function):
    """Rows of a rank may be wanted by another, so all are gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: TensorParallel, x_TE: Tensor, rows_N: Tensor) -> Tensor:
        ctx.tensor, ctx.num_rows, rows_N = tensor, len(x_TE), own_run(rows_N, tensor)
        ctx.save_for_backward(rows_N)
        return tensor.gather_rows(x_TE).index_select(0, rows_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows_N,), grad_NE = ctx.saved_tensors, grads[0]
        shape = ctx.num_rows * ctx.tensor.group.size, *grad_NE.shape[1:]
        grad_TE = grad_NE.new_zeros(shape).index_add_(0, rows_N, grad_NE)
        return None, ctx.tensor.reduce_rows(grad_TE), None


class WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: TensorParallel, num_rows: int, x_TE: Tensor) -> Tensor:
        ctx.tensor, ctx.num_padding = tensor, len(x_TE) * tensor.group.size - num_rows
        return tensor.gather_rows(x_TE)[:num_rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_TE = F.pad(grads[0], (0, 0, 0, ctx.num_padding)) if ctx.num_padding else grads[0]
        return None, None, own_run(grad_TE, ctx.tensor)


def own_run(x_T: Tensor, tensor: TensorParallel) -> Tensor:
    """Return this rank's run of rows that every rank has."""
    return x_T.chunk(tensor.group.size)[tensor.group.rank]
