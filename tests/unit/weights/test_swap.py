"""Swaps: whatever step of one fails, the last version is there to the bit, and a second try ends
well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gyre.distributed.process_group import alone
from gyre.weights.gather import ShardSource
from gyre.weights.shards import whole_layout
from gyre.weights.swap import Exchange, GatherOver, Swap
from offers import FailAt, Fault


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in {"a": (5, 3), "b": (7,), "c": (2, 2, 2)}.items()
    }


def exchange(new: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> Swap:
    return Exchange({name: tensor.clone() for name, tensor in new.items()}, own, bucket_bytes=24)


def gather(new: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> Swap:
    shapes = {name: tuple(tensor.shape) for name, tensor in new.items()}
    layout = whole_layout(shapes, {"a": 0, "b": 16, "c": 32}, 48)
    shards = ShardSource(layout, new, group=alone(), dtype=torch.float32)
    return GatherOver(1, shards, own, emit=lambda kind, **fields: None)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("make", [exchange, gather])
def test_a_swap_that_fails_at_any_step_is_undone_to_the_bit(
    make: Callable[..., Swap], torn: bool
) -> None:
    before, after, number, failed = tensors(1), tensors(2), 0, True
    while failed:
        number, failed = number + 1, False
        own = tensors(1)
        swap = make(after, own)
        try:
            with FailAt(number, torn=torn):
                swap.run()
        except Fault:
            failed = True
            swap.undo()
            assert all(torch.equal(own[name], before[name]) for name in own), number
            swap.run()
        assert all(torch.equal(own[name], after[name]) for name in own), number
        swap.settle()
    assert number > 10, "the steps of a swap were not found"


@pytest.mark.parametrize("make", [exchange, gather])
def test_a_swap_that_ran_can_be_undone_until_it_is_settled(make: Callable[..., Swap]) -> None:
    own = tensors(1)
    swap = make(tensors(2), own)
    for _ in range(2):
        swap.run()
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors(2).items())
        swap.undo()
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors(1).items())
