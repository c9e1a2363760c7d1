"""The C kernels of a step against the decoder in float64 with plain attention, and against
themselves: what shares a step must not change a bit. Work area, pages and outputs are poisoned
before every step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_kernels
from gyre.engine.frontend.sampling_params import COLDEST
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.runners.cpu_step import CpuStep
from gyre.engine.sampling.sampler import choose, make_rules
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import PrefillChunk, Step
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec

CPU = torch.device("cpu")
WIDTH = 200  # tokens of the widest sequence
pytestmark = pytest.mark.usefixtures("instructions", "team")

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=70,
    tied=True,
    context_tokens=256,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    eos_ids=(1,),
)
SHAPES = {
    "plain": {},
    "one head, wide": {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 34},
    "large group": {"num_heads": 12, "num_kv_heads": 1, "head_dim": 32},
    "odd head dim": {"head_dim": 10, "num_layers": 1},
    "128": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 2, "num_layers": 1},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "qk_norm": False},
    "llama, untied": {"family": "llama", "qk_norm": False, "tied": False, "vocab_size": 131},
}


def make_step(decode: np.ndarray, chunks: list[PrefillChunk]) -> Step:
    """Decoding rows, and chunks that each end their prompt."""
    rows_N = np.concatenate([decode, np.asarray([chunk.row for chunk in chunks], np.int64)])
    none = np.empty(0, np.int64)
    return Step(
        decode_rows=decode,
        chunks=tuple(chunks),
        sample_rows=rows_N,
        sample_chunks=np.arange(len(chunks)),
        sample_positions=none,
        sample_generations=none,
        restored_rows=none,
        version=0,
        swap_out=None,
        swap_in=None,
        copies=(),
    )


class Case:
    """A decoder, its C step, and sequences that a test moves forward by hand. Pages are dealt in a
    shuffled order."""

    def __init__(
        self,
        spec: ModelSpec,
        lengths: list[int],
        *,
        page_tokens: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.spec, self.rng = spec, np.random.default_rng(seed)
        self.decoder = Decoder(spec, device=CPU, dtype=dtype)
        init_weights(self.decoder, seed)
        with torch.no_grad():
            # norm weights and biases that differ, larger matrices
            for parameter in self.decoder.parameters():
                noise = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
                )
                parameter.copy_(parameter * 3 + 0.1 * noise)
        pages_each = -(-WIDTH // page_tokens)
        self.pool = KvPool(
            num_layers=spec.num_layers,
            num_pages=pages_each * len(lengths),
            num_kv_heads=spec.num_kv_heads,
            page_tokens=page_tokens,
            head_dim=spec.head_dim,
            device=CPU,
            dtype=dtype,
        )
        self.pool.tensor.fill_(float("nan"))
        self.rows = InputBatch(len(lengths), page_tokens)
        self.rows.tokens_RW = self.rng.integers(0, spec.vocab_size, (len(lengths), WIDTH)).astype(
            np.int32
        )
        shuffled = 1 + self.rng.permutation(pages_each * len(lengths)).astype(np.int32)
        self.rows.table_RP = shuffled.reshape(len(lengths), -1).copy()
        self.lengths = lengths
        self.step = CpuStep(self.decoder, self.pool)

    def run(self, pieces: list[tuple[int, int]]) -> Tensor:
        """Compute (row, count) pieces in one step; return the logits after each piece's last
        token."""
        # 0 marks a decoding row
        decode = np.asarray([row for row, count in pieces if count == 0], np.int64)
        chunks = [
            PrefillChunk(row=row, start=int(self.rows.computed_R[row]), count=count)
            for row, count in pieces
            if count
        ]
        step = make_step(decode, chunks)
        self.step.scratch.fill_(255)  # NaN in either dtype
        self.step.logits_buffer.fill_(float("nan"))
        logits_NV = self.step.logits(self.rows, step).clone()
        self.rows.computed_R[decode] += 1
        for chunk in chunks:
            self.rows.computed_R[chunk.row] += chunk.count
        return logits_NV

    def expected(self, row: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Logits after the row's computed tokens, all at once, by torch."""
        wide = Decoder(self.spec, device=CPU, dtype=dtype)
        wide.load_state_dict(
            {name: tensor.to(dtype) for name, tensor in self.decoder.state_dict().items()}
        )
        count = int(self.rows.computed_R[row])
        tokens_T = torch.from_numpy(self.rows.tokens_RW[row, :count].astype(np.int64))

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            return reference_kernels.varlen_attention(q_THD, k_TKD, v_TKD, [count])

        with torch.inference_mode():
            return wide.logits(wide.hidden(tokens_T, torch.arange(count), attend))[-1]


def check_case(
    spec: ModelSpec, lengths: list[int], page_tokens: int, dtype: torch.dtype, seed: int
) -> None:
    """Prompts in pieces that mix with decoding, then decoding of all."""
    case = Case(spec, lengths, page_tokens=page_tokens, dtype=dtype, seed=seed)

    def check(rows: list[int], logits_NV: Tensor) -> None:
        wanted_NV = torch.stack([case.expected(row) for row in rows])
        size = wanted_NV.abs().max()
        error_NV = (logits_NV.double() - wanted_NV).abs()
        if dtype == torch.float32:
            assert error_NV.max() < 2e-4 * size
            return
        # Rounding alone moves some rows far here; no farther, on the whole, than it moves torch's.
        rounded_NV = torch.stack([case.expected(row, dtype) for row in rows])
        allowed = 2.5 * (rounded_NV.double() - wanted_NV).pow(2).mean().sqrt() + 0.02 * size
        assert error_NV.pow(2).mean().sqrt() < allowed

    first = [max(1, length // 3) for length in lengths]
    check(list(range(len(lengths))), case.run(list(enumerate(first))))
    # the rest of one prompt beside a decoding step of those before it
    for row, length in enumerate(lengths):
        pieces = [(done, 0) for done in range(row)] + (
            [(row, length - first[row])] if length > first[row] else []
        )
        if pieces:
            check([row for row, _ in pieces], case.run(pieces))
    for _ in range(2):
        check(list(range(len(lengths))), case.run([(row, 0) for row in range(len(lengths))]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_agree_with_the_oracle(shape: str, dtype: torch.dtype) -> None:
    check_case(replace(SPEC, **SHAPES[shape]), [1, 7, 90, 33], page_tokens=16, dtype=dtype, seed=1)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    page_tokens=st.sampled_from([1, 3, 8, 16, 32, 48]),
    head_dim=st.sampled_from([2, 16, 32, 34]),
    seed=st.integers(0, 99),
)
def test_any_lengths_and_pages(
    lengths: list[int], page_tokens: int, head_dim: int, seed: int
) -> None:
    spec = replace(SPEC, head_dim=head_dim, num_layers=1)
    check_case(spec, lengths, page_tokens=page_tokens, dtype=torch.float32, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_company_changes_no_bit(dtype: torch.dtype) -> None:
    """A row alone, in pieces, gives the bits that it gives beside others, whole, and on two
    threads."""
    lengths = [90, 17, 64, 3, 40, 81, 5]

    def run(together: bool, cut: int) -> Tensor:
        case = Case(SPEC, lengths, page_tokens=16, dtype=dtype, seed=3)
        rows = list(range(len(lengths)))
        for group in [rows] if together else [[row] for row in rows]:
            for begin in range(0, max(lengths), cut):
                pieces = [
                    (row, min(cut, lengths[row] - begin)) for row in group if lengths[row] > begin
                ]
                if pieces:
                    case.run(pieces)
        groups = [rows] if together else [[row] for row in rows]
        return torch.cat([case.run([(row, 0) for row in group]) for group in groups])

    whole = run(True, 200)
    assert torch.equal(whole, run(False, 200))
    assert torch.equal(whole, run(False, 11))
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(2,)) as pool:
        assert torch.equal(whole, pool.submit(run, True, 30).result())


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 20), seed=st.integers(0, 999), scale=st.sampled_from([0.0, 0.3, 4.0, 60.0])
)
def test_choice_is_the_samplers(count: int, seed: int, scale: float) -> None:
    """Chosen by the kernels as by torch from the same logits: tokens, log-probs, plain
    log-probs."""
    rng = np.random.default_rng(seed)
    case = Case(replace(SPEC, vocab_size=int(rng.integers(2, 900)), num_layers=1), [1] * count,
                page_tokens=16, dtype=torch.float32, seed=seed)  # fmt: skip
    with torch.no_grad():
        case.decoder.final_norm.weight.mul_(scale)
    temperature_N = rng.choice(np.float32([0.0, 0.5, 1.0, 1.7]), count)
    rules = make_rules(
        temperature_N, np.zeros(count, int), np.ones(count), np.zeros(count), np.zeros(count, bool),
        vocab_size=case.spec.vocab_size, device=CPU,
    )  # fmt: skip
    step = make_step(np.arange(count), [])
    inverse_N = np.divide(
        np.float32(1.0), temperature_N, out=np.zeros_like(temperature_N), where=temperature_N > 0
    )
    uniform_N = rng.random(count)
    got = case.step.choose(case.rows, step, inverse_N, uniform_N).sampled
    logits_NV = case.step.logits(case.rows, step).clone()
    wanted = choose(logits_NV, rules, torch.from_numpy(uniform_N))
    raw_N = logits_NV.double().log_softmax(-1).gather(1, wanted.tokens_N[:, None])[:, 0]
    np.testing.assert_array_equal(got.tokens, wanted.tokens_N.numpy())
    near = 2e-5 + 1e-6 * float(logits_NV.abs().max())  # a float32 logit is known to so much
    np.testing.assert_allclose(got.logprobs, wanted.logprobs_N.numpy(), atol=near, rtol=1e-5)
    np.testing.assert_allclose(got.raw_logprobs, raw_N.numpy(), atol=near, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unsound_logits_are_told_and_stay_alone(bad: float) -> None:
    case = Case(replace(SPEC, tied=False), [1, 1, 1], page_tokens=16, dtype=torch.float32, seed=0)
    case.rows.tokens_RW[:, 0] = [4, 5, 6]
    with torch.no_grad():
        case.decoder.embed.weight[5, 7] = bad
    step = make_step(np.arange(3), [])
    for inverse in (0.0, 1.0):
        got = case.step.choose(
            case.rows, step, np.full(3, inverse, np.float32), np.full(3, 0.5)
        ).sampled
        assert np.isfinite(got.raw_logprobs).tolist() == [True, False, True]


@pytest.mark.parametrize("place", [0, 7, 8, 95, 96])
def test_one_unsound_logit_is_told_wherever_it_lies(place: int) -> None:
    """Within the first vector and the last, and in the tail that fills none: 97 tokens are no
    multiple of any width."""
    case = Case(replace(SPEC, tied=False), [1, 1], page_tokens=16, dtype=torch.float32, seed=0)
    with torch.no_grad():
        case.decoder.head_weight[place, 3] = float("inf")
    step = make_step(np.arange(2), [])
    for inverse in (0.0, 1.0):
        got = case.step.choose(
            case.rows, step, np.full(2, inverse, np.float32), np.full(2, 0.5)
        ).sampled
        assert np.isnan(got.raw_logprobs).all() and np.isnan(got.logprobs).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), scale=st.sampled_from([0.3, 4.0, 60.0]), coldest=st.booleans())
def test_draws_at_both_ends_take_tokens_with_weight(seed: int, scale: float, coldest: bool) -> None:
    """Where most tokens weigh nothing, the least and the largest uniform number still find one that
    does."""
    vocab = int(np.random.default_rng(seed).integers(2, 900))
    case = Case(
        replace(SPEC, vocab_size=vocab, num_layers=1),
        [1] * 4,
        page_tokens=16,
        dtype=torch.float32,
        seed=seed,
    )
    with torch.no_grad():
        case.decoder.final_norm.weight.mul_(scale)
    uniform_N = np.array([0.0, np.nextafter(1.0, 0.0), 0.0, np.nextafter(1.0, 0.0)])
    temperature_N = np.full(4, COLDEST if coldest else 1.0, np.float32)
    step = make_step(np.arange(4), [])
    got = case.step.choose(case.rows, step, np.float32(1.0) / temperature_N, uniform_N).sampled
    logits_NV = case.step.logits(case.rows, step).double().numpy()
    assert np.isfinite(got.logprobs).all() and (got.logprobs <= 0).all()
    below_N = (logits_NV.max(1) - logits_NV[np.arange(4), got.tokens]) / temperature_N
    np.testing.assert_array_less(below_N, 88.0)  # e^-88: what float32 takes for more than nothing
