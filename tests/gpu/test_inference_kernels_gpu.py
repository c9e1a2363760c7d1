"""The Triton kernels of an inference pass against their oracles: fuzzed shapes, poisoned outputs,
fresh random inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    import reference_kernels
    from gyre.engine.runners.gpu_work import cut_tiles
    from gyre.engine.sampling.sampler import choose, make_rules
    from gyre.engine.scheduler.random import uniforms
    from gyre.kernels.gpu import decode_attention as decode
    from gyre.kernels.gpu import pointwise
    from gyre.kernels.gpu import prefill_attention as prefill
    from gyre.kernels.gpu import sample as sampling
    from gyre.kernels.gpu.matmul import is_vector_product, vector_linear
    from gyre.kernels.gpu.work_list import cut_pieces
    from gyre.kernels.rope import rope_tables

DEVICE = torch.device("cuda")
PAGES = [16, 32, 64, 128]  # tokens
HEADS = [(16, 8, 128), (32, 8, 128), (28, 4, 128), (8, 8, 64), (14, 2, 64), (4, 1, 32)]  # H, K, D


def int32(values) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=DEVICE)


def make_pages(rng, lengths, num_kv, head_dim, page_tokens, dtype):
    """Pages in random order; what no sequence may read is NaN."""
    counts = [-(-length // page_tokens) for length in lengths]
    order = rng.permutation(sum(counts)) + 1
    table = np.zeros((len(lengths) + 1, max(counts)), np.int32)
    pages = torch.randn(
        sum(counts) + 1, 2, num_kv, page_tokens, head_dim, device=DEVICE, dtype=dtype
    )
    pages[0] = float("nan")
    at = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[at : at + count]
        at += count
        if length % page_tokens:
            # finite: a kernel loads and masks it
            pages[table[row, count - 1], 0, :, length % page_tokens :] = 50.0
            pages[table[row, count - 1], 1, :, length % page_tokens :] = 50.0
    return pages, int32(table)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_attention(heads, page_tokens, dtype) -> None:
    (num_heads, num_kv, head_dim), rng = heads, np.random.default_rng(page_tokens + heads[0])
    piece = 256
    lengths = [
        1,
        2,
        page_tokens,
        page_tokens + 1,
        piece - 1,
        piece,
        piece + 1,
        *rng.integers(1, 2000, 6).tolist(),
    ]
    pages, table = make_pages(rng, lengths, num_kv, head_dim, page_tokens, dtype)
    padded = np.array([*lengths, 0])  # the last place is padding
    first, items = cut_pieces(padded, piece)
    work = decode.DecodeWork(
        row_B=int32(range(len(padded))),
        position_B=int32(padded - 1),
        first_B=int32(first),
        item_I=int32(items),
        size_2=int32([len(items), piece]),
    )
    qkv = torch.randn(len(padded), num_heads + 3, head_dim, device=DEVICE, dtype=dtype)
    q, out = (
        qkv[:, :num_heads],
        torch.full((len(padded), num_heads, head_dim), float("nan"), device=DEVICE, dtype=dtype),
    )
    scratch = decode.DecodeScratch.make(len(items), num_heads, head_dim, DEVICE)
    scratch.out_IHD.fill_(float("nan"))
    decode.decode_attention(q, pages, table, work, scratch, out, num_programs=17)
    expected = reference_kernels.paged_attention(
        q[:-1].double(),
        pages.double(),
        table,
        range(len(lengths)),
        [n - 1 for n in lengths],
        [1] * len(lengths),
    )
    assert (out[:-1] - expected).abs().max() < 0.02
    assert (out[-1] == 0).all(), "padding is answered with zeros"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_tokens", PAGES)
def test_prefill_attention(heads, page_tokens) -> None:
    (num_heads, num_kv, head_dim), rng = heads, np.random.default_rng(page_tokens + heads[0])
    starts = np.array([0, 0, 1, 63, 64, 200, 500])
    counts = np.array([1, 333, 128, 129, 64, 7, 300])
    pages, table = make_pages(
        rng, (starts + counts).tolist(), num_kv, head_dim, page_tokens, torch.bfloat16
    )
    qkv = torch.randn(
        int(counts.sum()), num_heads + 2, head_dim, device=DEVICE, dtype=torch.bfloat16
    )
    q, out = (
        qkv[:, :num_heads],
        torch.full((len(qkv), num_heads, head_dim), float("nan"), device=DEVICE, dtype=qkv.dtype),
    )
    work = prefill.PrefillWork(
        row_C=int32(range(len(counts))),
        first_C=int32(np.cumsum(counts) - counts),
        start_C=int32(starts),
        count_C=int32(counts),
        item_I=int32(cut_tiles(starts, counts, prefill.TILE_QUERIES)),
    )
    prefill.prefill_attention(
        q, prefill.describe_pages(pages), table, work, out, num_kv_heads=num_kv
    )
    expected = reference_kernels.paged_attention(
        q.double(), pages.double(), table, range(len(counts)), starts.tolist(), counts.tolist()
    )
    assert (out - expected).abs().max() < 0.02


@pytest.mark.parametrize("width", [64, 1000, 1024, 4096])
def test_norm_and_gate_round_as_the_decoder_does(width) -> None:
    from gyre.kernels.norm import rms_norm_forward
    from gyre.kernels.silu import silu_mul_forward

    x = torch.randn(37, width, device=DEVICE, dtype=torch.bfloat16) * 3
    weight = torch.randn(width, device=DEVICE, dtype=torch.bfloat16)
    out = torch.full_like(x, float("nan"))
    pointwise.rms_norm(x, weight, 1e-6, out)
    expected = rms_norm_forward(x, weight, 1e-6)[0]
    assert (out != expected).float().mean() < 0.02, (
        "a different order of addition may move a rounding, no more"
    )
    assert torch.allclose(out.float(), expected.float(), rtol=0.01, atol=0.01)
    y, summed, out = torch.randn_like(x), x.clone(), torch.full_like(x, float("nan"))
    pointwise.add_rms_norm(summed, y, weight, 1e-6, out)
    expected = rms_norm_forward(x + y, weight, 1e-6)[0]
    assert torch.equal(summed, x + y) and (out != expected).float().mean() < 0.02
    assert torch.allclose(out.float(), expected.float(), rtol=0.01, atol=0.01)
    gate_up = torch.randn(37, 2 * width, device=DEVICE, dtype=torch.bfloat16) * 4
    out = torch.full((37, width), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    pointwise.silu_mul(gate_up, out)
    assert torch.allclose(out.float(), silu_mul_forward(gate_up)[0].float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("norms", [True, False])
def test_turn_and_write(heads, page_tokens, norms) -> None:
    from gyre.kernels.norm import rms_norm_forward
    from gyre.kernels.rope import rope_frequencies, turn

    num_heads, num_kv, head_dim = heads
    positions, rows = int32([0, page_tokens - 1, page_tokens, 500, -1]), int32([0, 1, 2, 3, 4])
    table = torch.arange(1, 161, dtype=torch.int32, device=DEVICE).view(5, 32)
    pages = torch.full(
        (161, 2, num_kv, page_tokens, head_dim), 7.0, device=DEVICE, dtype=torch.bfloat16
    )
    qkv = torch.randn(5, num_heads + 2 * num_kv, head_dim, device=DEVICE, dtype=torch.bfloat16)
    weights = (
        [torch.randn(head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        if norms
        else [None, None]
    )
    cos, sin = rope_tables(
        torch.arange(512, device=DEVICE), rope_frequencies(head_dim, 1e4, None, DEVICE), qkv.dtype
    )
    before, half = qkv.clone(), head_dim // 2
    pointwise.turn_and_write(
        qkv,
        *weights,
        cos[:, 0, :half].contiguous(),
        sin[:, 0, half:].contiguous(),
        rows,
        positions,
        table,
        pages,
        num_heads=num_heads,
        eps=1e-6,
    )
    real = positions[:4].long()
    heads_q, heads_k = before[:4, :num_heads], before[:4, num_heads:-num_kv]
    if norms:
        heads_q, heads_k = (
            rms_norm_forward(heads_q, weights[0], 1e-6)[0],
            rms_norm_forward(heads_k, weights[1], 1e-6)[0],
        )
    expected_q, expected_k = (turn(x, cos[real], sin[real]) for x in (heads_q, heads_k))
    assert torch.allclose(qkv[:4, :num_heads].float(), expected_q.float(), rtol=0.02, atol=0.02)
    assert torch.equal(qkv[:, num_heads:], before[:, num_heads:]) and torch.equal(qkv[4], before[4])
    page, slot = table[torch.arange(4), real // page_tokens].long(), real % page_tokens
    assert torch.allclose(pages[page, 0, :, slot].float(), expected_k.float(), rtol=0.02, atol=0.02)
    assert torch.equal(pages[page, 1, :, slot], before[:4, -num_kv:])
    assert (pages != 7.0).any(-1).sum() == 4 * 2 * num_kv, "nothing else was written"


def test_arrays_that_are_sent_begin_on_16_bytes() -> None:
    """Triton compiles a kernel anew for a pointer that is aligned otherwise."""
    from gyre.kernels.gpu.decode_attention import cut_slabs, send

    arrays = [np.arange(count) for count in (1, 3, 0, 4, 5, 17)]
    for sent, array in zip(send(DEVICE, *arrays), arrays, strict=True):
        assert (
            sent.data_ptr() % 16 == 0
            and sent.dtype == torch.int32
            and sent.tolist() == array.tolist()
        )
    (slab,) = cut_slabs(np.arange(5) % 3, np.arange(5) * 300, longest_tokens=1500, device=DEVICE)
    work = slab.work
    for sent in (work.row_B, work.position_B, work.first_B, work.item_I, work.size_2):
        assert sent.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(5120, 4096), (2048, 12_800), (1001, 512), (7, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_with_one_row(outputs, inputs, dtype) -> None:
    """Against float64; the library's may be as far from it."""
    given = {"device": DEVICE, "dtype": dtype}
    x_1K, weight_NK = torch.randn(1, inputs, **given), torch.randn(outputs, inputs, **given)
    assert is_vector_product(x_1K, weight_NK)
    exact_1N = x_1K.double() @ weight_NK.double().t()
    found_1N = vector_linear(x_1K, weight_NK)
    assert found_1N.dtype == dtype and torch.equal(found_1N, vector_linear(x_1K, weight_NK))
    error = (found_1N.double() - exact_1N).abs()
    assert bool((error <= exact_1N.abs() * torch.finfo(dtype).eps + 1e-3 * inputs**0.5).all())
    two_2K, odd_NK = torch.randn(2, inputs, **given), torch.randn(outputs, inputs + 8, **given)
    assert not is_vector_product(two_2K, weight_NK)
    assert not is_vector_product(two_2K[:1], odd_NK)


def test_enter_pages() -> None:
    table = torch.zeros(4, 9, dtype=torch.int32, device=DEVICE)
    rng = np.random.default_rng(0)
    places = rng.permutation(36)[:20]
    pointwise.enter_pages(table, int32(np.stack([places // 9, places % 9, places + 1])))
    assert (
        torch.equal(table.view(-1)[int32(places).long()], int32(places + 1))
        and (table != 0).sum() == 20
    )


@pytest.mark.parametrize("vocab_size", [50, 2048, 5000, 151_936])
def test_sample_chooses_as_the_sampler_does(vocab_size) -> None:
    rng, count = np.random.default_rng(vocab_size), 33
    logits = (torch.randn(count, vocab_size, device=DEVICE) * 2).to(torch.bfloat16)
    temperature = rng.choice([0.0, 0.5, 0.6, 1.0, 1.7], count).astype(np.float32)
    uniform = uniforms(np.arange(count, dtype=np.uint64) * 77, np.arange(count))
    rules = make_rules(
        temperature, np.zeros(count, int), np.ones(count), np.zeros(count), np.zeros(count, bool),
        vocab_size=vocab_size, device=DEVICE,
    )  # fmt: skip
    expected = choose(logits.float(), rules, torch.tensor(uniform, device=DEVICE))
    inverse = np.divide(1.0, temperature, out=np.zeros_like(temperature), where=temperature > 0)
    tokens, logprobs = (
        torch.full((count,), -1, dtype=torch.int32, device=DEVICE),
        torch.full((2, count), 9.0, device=DEVICE),
    )
    last, rows = (
        torch.full((99,), -1, dtype=torch.int32, device=DEVICE),
        rng.permutation(99)[:count],
    )
    sampling.sample(
        logits, torch.tensor(inverse, device=DEVICE), torch.tensor(uniform, device=DEVICE),
        sampling.SampleScratch.make(count, vocab_size, DEVICE), int32(rows), last, tokens, logprobs,
    )  # fmt: skip
    same = tokens == expected.tokens_N
    assert same.float().mean() > 0.9, (
        "only a uniform at the very edge of a token may fall to its neighbor"
    )
    assert torch.equal(last[int32(rows).long()], tokens) and (last != -1).sum() == count
    assert torch.allclose(logprobs[0][same], expected.logprobs_N[same].float(), atol=2e-4)
    assert torch.allclose(logprobs[1][same], expected.raw_logprobs_N[same], atol=2e-4)


def test_sample_marks_rows_that_are_not_finite() -> None:
    logits = torch.zeros(4, 3000, device=DEVICE, dtype=torch.bfloat16)
    logits[0, 5], logits[1, 2500], logits[2, 7] = float("nan"), float("inf"), float("-inf")
    tokens, logprobs = (
        torch.zeros(4, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, 4, device=DEVICE),
    )
    sampling.sample(
        logits,
        torch.ones(4, device=DEVICE),
        torch.full((4,), 0.999, device=DEVICE, dtype=torch.float64),
        sampling.SampleScratch.make(4, 3000, DEVICE),
        int32(range(4)),
        torch.zeros(4, dtype=torch.int32, device=DEVICE),
        tokens,
        logprobs,
    )
    finite = torch.isfinite(logprobs[1]).tolist()
    assert finite == [False, False, True, True] and ((tokens >= 0) & (tokens < 3000)).all()


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (14, 2, 64)])
def test_flash4_reads_our_pages(heads) -> None:
    from gyre.kernels.gpu.flash4 import PAGE_TOKENS, find_flash4

    flash4 = find_flash4()
    if flash4 is None:
        pytest.skip("flash-attn-4 is not installed")
    (num_heads, num_kv, head_dim), rng = heads, np.random.default_rng(heads[0])
    starts, counts = np.array([0, 0, 1, 127, 128, 500]), np.array([1, 333, 128, 129, 64, 300])
    pages, table = make_pages(
        rng, (starts + counts).tolist(), num_kv, head_dim, PAGE_TOKENS, torch.bfloat16
    )
    qkv = torch.randn(
        int(counts.sum()), num_heads + 2, head_dim, device=DEVICE, dtype=torch.bfloat16
    )
    bounds = int32(np.concatenate([[0], np.cumsum(counts)]))
    q = qkv[:, :num_heads]
    out = flash4(q, pages, table[: len(counts)], bounds, int32(starts + counts), int(counts.max()))
    expected = reference_kernels.paged_attention(
        q.double(), pages.double(), table, range(len(counts)), starts.tolist(), counts.tolist()
    )
    assert (out - expected).abs().max() < 0.02
