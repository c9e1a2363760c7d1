"""Attention kernels over KV pages on one GPU, against what the chip can do. In: a CUDA device. Out:
decode in bytes per second, prefill in operations per second. Run: python bench/attention_gpu.py
[--record].

Decode: 256 sequences of 1,024 to 8,192 tokens, against the speed of a copy in the same run.
Prefill: one prompt of 8,192 tokens, the causal half counted, against the speed of an 8,192³ product
in the same run; with FlashAttention-4 too where it is installed (pages of 128 tokens). 32 heads
over 8 kv heads of 128, bfloat16, pages in random order.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gyre.engine.runners.gpu_work import cut_tiles, plan_piece
from gyre.kernels.gpu import decode_attention as decode
from gyre.kernels.gpu import prefill_attention as prefill
from gyre.kernels.gpu.flash4 import find_flash4
from gyre.kernels.gpu.work_list import cut_pieces
from record import parser, say

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SEQUENCES, SHORTEST, LONGEST, PROMPT = 256, 1024, 8192, 8192
DEVICE, DTYPE = "cuda", torch.bfloat16


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    copy_tb_s, product_tflop_s = measure_copy(), measure_product()
    lengths = np.random.default_rng(1).integers(SHORTEST, LONGEST + 1, SEQUENCES)
    decoded = {page: decode_tb_s(lengths, page) for page in (64, 128)}
    prefilled: dict[str, float] = {
        f"triton, page {page}": prefill_tflop_s(page) for page in (64, 128)
    }
    flash4 = find_flash4()
    if flash4 is not None:
        prefilled["flash-attn-4, page 128"] = flash4_tflop_s(flash4)
    say(
        args,
        name="attention_gpu",
        unit="of copy speed, decode",
        ours=max(decoded.values()) / copy_tb_s,
        peer=None,
        limit=1.0,
        settings={
            "heads": [HEADS, KV_HEADS, HEAD_DIM],
            "sequences": SEQUENCES,
            "context": [SHORTEST, LONGEST],
            "prompt": PROMPT,
            "device": torch.cuda.get_device_name(),
            "limits_from": "a copy and a product in the same run",
            "flash_attn_4": None if flash4 is None else importlib.metadata.version("flash-attn-4"),
        },
        detail={
            "copy_tb_s": copy_tb_s,
            "product_tflop_s": product_tflop_s,
            "decode_tb_s_by_page": decoded,
            "prefill_tflop_s": prefilled,
            "prefill_of_product": {
                name: rate / product_tflop_s for name, rate in prefilled.items()
            },
        },
    )


def seconds(work: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for begun, ended in pairs:
        begun.record()
        work()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(begun.elapsed_time(ended) for begun, ended in pairs) / 1e3


def measure_copy() -> float:
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source)) / 1e12


def measure_product() -> float:
    square = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    return 2 * 8192**3 / seconds(lambda: square @ square) / 1e12


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def make_pages(lengths: np.ndarray, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = -(-lengths // page)
    pages = torch.randn(
        int(counts.sum()) + 1, 2, KV_HEADS, page, HEAD_DIM, device=DEVICE, dtype=DTYPE
    )
    table = np.zeros((len(lengths), int(counts.max())), np.int32)
    order = np.random.default_rng(0).permutation(int(counts.sum())) + 1
    for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        table[row, :count] = order[end - count : end]
    return pages, int32(table)


def decode_tb_s(lengths: np.ndarray, page: int) -> float:
    pages, table = make_pages(lengths, page)
    piece = plan_piece(int(lengths.sum()), KV_HEADS, page, pool_tokens=int(lengths.sum()))
    first, items = cut_pieces(lengths, piece)
    work = decode.DecodeWork(
        row_B=int32(range(len(lengths))),
        position_B=int32(lengths - 1),
        first_B=int32(first),
        item_I=int32(items),
        size_2=int32([len(items), piece]),
    )
    q = torch.randn(len(lengths), HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    out, scratch = (
        torch.empty_like(q),
        decode.DecodeScratch.make(len(items), HEADS, HEAD_DIM, q.device),
    )
    programs = decode.PROGRAMS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
    taken = seconds(
        lambda: decode.decode_attention(q, pages, table, work, scratch, out, num_programs=programs)
    )
    return int(lengths.sum()) * 2 * KV_HEADS * HEAD_DIM * 2 / taken / 1e12


FLOPS = 2 * PROMPT * PROMPT * HEADS * HEAD_DIM  # two products, half of each


def prefill_tflop_s(page: int) -> float:
    lengths = np.array([PROMPT])
    pages, table = make_pages(lengths, page)
    zero, count = np.array([0]), np.array([PROMPT])
    work = prefill.PrefillWork(
        row_C=int32([0]), first_C=int32([0]), start_C=int32([0]), count_C=int32([PROMPT]),
        item_I=int32(cut_tiles(zero, count, prefill.TILE_QUERIES)),
    )  # fmt: skip
    q = torch.randn(PROMPT, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    out, described = torch.empty_like(q), prefill.describe_pages(pages)
    return FLOPS / seconds(
        lambda: prefill.prefill_attention(q, described, table, work, out, num_kv_heads=KV_HEADS)
    ) / 1e12  # fmt: skip


def flash4_tflop_s(flash4: Any) -> float:
    pages, table = make_pages(np.array([PROMPT]), 128)
    q = torch.randn(PROMPT, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    bounds, length = int32([0, PROMPT]), int32([PROMPT])
    return FLOPS / seconds(
        lambda: flash4(q, pages, table, bounds, length, PROMPT)
    ) / 1e12  # fmt: skip


if __name__ == "__main__":
    main()
