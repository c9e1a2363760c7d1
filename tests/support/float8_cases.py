"""Cases for 8-bit products of matrices of which each rank has a part; functions here run in rank
processes (rank_pool)."""

from __future__ import annotations

import torch
from torch import Tensor

from gyre.distributed.process_group import RankGroup
from gyre.kernels.linear import OutputGradient, linear
from gyre.models.layers.tensor_parallel import ReplicatedRows, sharer_of

TOKENS, INPUTS, OUTPUTS = 24, 64, 128


def operands(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, residual and gradient. The last rank's parts have the largest numbers."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * torch.linspace(0.5, 2.0, shape[-1])

    shapes = (TOKENS, INPUTS), (OUTPUTS, INPUTS), (TOKENS, OUTPUTS), (TOKENS, OUTPUTS)
    x_TI, weight_OI, onto_TO, grad_TO = (random(*shape).to(device, dtype) for shape in shapes)
    weight_OI[-1, -1] *= 7.0
    return x_TI, weight_OI, onto_TO, grad_TO


def products(group: RankGroup, cut: str, dtype: str, *, shares: bool = True) -> dict[str, Tensor]:
    """Products of a weight cut by its outputs (columns) or its inputs (rows), and of the gradient;
    `shares`: whether ranks tell each other their largest numbers."""
    x_TI, weight_OI, onto_TO, grad_TO = operands(group.device, getattr(torch, dtype))
    tensor = None if group.size == 1 else ReplicatedRows(group)
    share, rank, ranks = sharer_of(tensor) if shares else None, group.rank, group.size
    if cut == "columns":
        weight_OI, grad_TO = weight_OI.chunk(ranks)[rank], grad_TO.chunk(ranks, 1)[rank]
        y_TO, amaxes = linear(x_TI, weight_OI.contiguous(), float8=True, share=share)
    else:
        x_TI, weight_OI = (part.chunk(ranks, 1)[rank].contiguous() for part in (x_TI, weight_OI))
        reduce = None if tensor is None else tensor.reduce_rows
        given = {"onto_TO": onto_TO, "reduce": reduce, "share": share}
        y_TO, amaxes = linear(x_TI, weight_OI, float8=True, **given)
    through = OutputGradient(grad_TO.contiguous(), amaxes, share=share)
    halves = torch.zeros_like(weight_OI)
    for start, stop in ((0, 1), (1, len(weight_OI))):
        through.of_weight_rows(x_TI, start, stop, halves)
    of_input_TI = through.of_input(weight_OI.contiguous())
    if cut == "columns" and tensor is not None:
        of_input_TI = tensor.reduce_rows(of_input_TI)
    assert amaxes[0] is not None and amaxes[1] is not None
    found = {
        "y": y_TO,
        "amaxes": torch.stack([amaxes[0], amaxes[1]]),
        "input": of_input_TI,
        "weight": through.of_weight(x_TI),
        "halves": halves,
    }
    return {name: tensor.cpu() for name, tensor in found.items()}
