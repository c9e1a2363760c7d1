"""A snapshot's parts leave a CUDA device in a thread, behind what was launched before and beside
what comes after."""

from __future__ import annotations

import threading

import pytest
import torch

from gyre.trainer.checkpoint.shards import Part
from gyre.trainer.checkpoint.staging import BATCH_BYTES, StagingBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
# of float32: one is three batches and a bit
SIZES = (1, 4096, 3 * BATCH_BYTES // 4 + 5, 7, 100_003)
CYCLES = 200_000_000  # about a tenth of a second


def parts_of(tensors: list[torch.Tensor]) -> list[Part]:
    return [
        Part(name=f"t{at}", shape=tuple(tensor.shape), start=0, values_N=tensor)
        for at, tensor in enumerate(tensors)
    ]


def test_what_is_copied_is_what_was_launched_before_the_call() -> None:
    tensors = [torch.zeros(size, device=GPU) for size in SIZES] + [
        torch.arange(1000),
        torch.ones(5).bfloat16(),
    ]
    staging, other = StagingBuffer(GPU, deadline_s=60.0), torch.empty(1 << 20, device=GPU)
    staging.place(parts_of(tensors))  # the buffer is made and pinned
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    for at, tensor in enumerate(tensors):
        if tensor.is_cuda:
            tensor.copy_(torch.arange(len(tensor), device=GPU) + at)
    placed = staging.place(parts_of(tensors))
    copying = threading.Thread(target=staging.fill, args=(placed,))
    copying.start()
    for _ in range(100):
        other.normal_()  # what comes after goes on
    copying.join(60)
    assert not copying.is_alive()
    for part, tensor in zip(placed.staged, tensors, strict=True):
        assert part.values_N.device.type == "cpu" and torch.equal(part.values_N, tensor.cpu()), (
            part.name
        )
        assert part.values_N.is_pinned()


def test_memory_is_pinned_in_a_thread_for_the_device_that_uses_it() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    staging = StagingBuffer(device, deadline_s=60.0)
    staging.prepare(1 << 20)
    placed = staging.place(parts_of([torch.ones(1 << 10, device=device)]))
    staging.fill(placed)
    assert staging.size_bytes == 1 << 20 and placed.staged[0].values_N.is_pinned()
    assert placed.staged[0].values_N.eq(1.0).all()
