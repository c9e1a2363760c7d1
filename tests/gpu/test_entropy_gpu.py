"""The entropy's gradient on a GPU, against float64: Triton's kernels with logits kept and made
again, torch's operations under truncation, and a whole model in every mode of checkpointing and
batch-invariant."""

# N rows, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import reference_kernels
from gyre.core.records import Checkpointing, TrainSequence
from gyre.kernels.dispatch import kernels_for
from gyre.kernels.logprobs import token_logprobs
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape
from gyre.trainer.batching.microbatch import build_chunk
from gyre.trainer.passes.forward import ChunkLogprobs, chunk_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 5e-3}
by_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bfloat16", "float16", "float32"])


def head_case(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden rows, head weight, targets, temperatures; from 1 row in 3 almost certain of its token
    to almost uniform."""
    generator = torch.Generator().manual_seed(rows + vocab)
    hidden = (
        torch.randn(rows, 64, generator=generator)
        * torch.tensor([0.1, 1.0, 4.0]).repeat(rows)[:rows, None]
    )
    weight = 0.3 * torch.randn(vocab, 64, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    moved = [part.to(GPU, dtype).requires_grad_() for part in (hidden, weight)]
    return moved[0], moved[1], targets.to(GPU), torch.linspace(0.5, 1.5, rows, device=GPU)


def off(got: Tensor, want: Tensor) -> float:
    """Size of the difference over that of the answer."""
    assert got.isfinite().all() and got.shape == want.shape
    return float(
        (got.double().cpu() - want.double().cpu()).norm()
        / want.double().cpu().norm().clamp_min(1e-30)
    )


@by_dtype
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "again"])
@pytest.mark.parametrize(
    ("rows", "vocab", "chunk"), [(1, 512, 0), (33, 5003, 0), (257, 32000, 9000)]
)
def test_gradients_of_both_outputs(
    dtype: torch.dtype, rows: int, vocab: int, chunk: int, keep: bool
) -> None:
    hidden, weight, targets, temperature = head_case(rows, vocab, dtype)
    assert (kernels_for(hidden) is not None) == (dtype != torch.float32), (
        "float32 is torch's operations"
    )
    upstream, bonus = (
        torch.linspace(-1, 1.3, rows, device=GPU),
        torch.linspace(1, -0.7, rows, device=GPU),
    )
    # From the product as rounded: what the rounding of a logit does to its gradient is not asked
    # here.
    logits = (hidden @ weight.t()).detach().double().requires_grad_()
    eye = torch.eye(vocab, device=GPU, dtype=torch.float64) if vocab < 10_000 else None
    wide = temperature.double()
    if eye is not None:
        want = reference_kernels.token_logprobs(logits, eye, targets, wide)
    else:
        log_p = (logits / wide[:, None]).log_softmax(-1)
        want = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    for weights in ((upstream, None), (None, bonus), (upstream, bonus)):
        got = token_logprobs(hidden, weight, targets, temperature, chunk=chunk, keep_logits=keep)
        used = [index for index, part in enumerate(weights) if part is not None]
        grads = torch.autograd.grad(
            [got[i] for i in used], (hidden, weight), [weights[i] for i in used]
        )
        given = [weights[i].double() for i in used]  # type: ignore[union-attr]
        (grad_NV,) = torch.autograd.grad([want[i] for i in used], logits, given, retain_graph=True)
        assert off(grads[0], grad_NV @ weight.detach().double()) < TOLERANCE[dtype]
        assert off(grads[1], grad_NV.t() @ hidden.detach().double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("chunk", [0, 300])
def test_under_truncation(chunk: int) -> None:
    hidden, weight, targets, temperature = head_case(40, 1000, torch.bfloat16)
    allowed = torch.rand(40, 1000, generator=torch.Generator().manual_seed(0)) < 0.05
    allowed[torch.arange(40), targets.cpu()] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), allowed.sum(1).cumsum(0)])
    ids = allowed.nonzero()[:, 1].int()
    _, entropy = token_logprobs(
        hidden, weight, targets, temperature, (offsets.to(GPU), ids.to(GPU)), chunk=chunk
    )
    grads = torch.autograd.grad(entropy.sum(), (hidden, weight))
    logits, eye = (
        (hidden @ weight.t()).detach().double().cpu().requires_grad_(),
        torch.eye(1000, dtype=torch.float64),
    )
    _, want = reference_kernels.token_logprobs(
        logits, eye, targets.cpu(), temperature.cpu().double(), (offsets, ids)
    )
    (grad_NV,) = torch.autograd.grad(want.sum(), logits)
    assert off(grads[0], grad_NV @ weight.detach().double().cpu()) < TOLERANCE[torch.bfloat16]
    assert off(grads[1], grad_NV.t() @ hidden.detach().double().cpu()) < TOLERANCE[torch.bfloat16]


def test_an_entropy_that_nobody_uses_changes_no_bit_and_is_no_gradient() -> None:
    hidden, weight, targets, temperature = head_case(33, 5003, torch.bfloat16)
    found = []
    for with_zeros in (False, True):
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, keep_logits=True)
        loss = logprobs.sum() + (0.0 * entropy.sum() if with_zeros else 0.0)
        found.append(torch.autograd.grad(loss, (hidden, weight)))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def small_decoder(device: torch.device, dtype: torch.dtype) -> Decoder:
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_size=512,
        tied=True,
        context_tokens=1024,
    )
    decoder = Decoder(
        spec_from_shape(shape, vocab_size=1000, bos_id=None, eos_ids=(1,)),
        device=device,
        dtype=dtype,
    )
    init_weights(decoder, 3)
    with torch.no_grad():
        # away from uniform distributions, whose entropy has no gradient
        decoder.embed.weight.mul_(6.0)
    return decoder


def entropy_gradients(decoder: Decoder, compute: ChunkLogprobs) -> dict[str, Tensor]:
    rng = np.random.default_rng(1)
    sequences = []
    for length in (90, 3, 41):
        mask = np.arange(length) > 0
        sequence = TrainSequence(
            tokens=rng.integers(0, 1000, length).astype(np.int32),
            columns={"loss_mask": mask},
            temperature=0.8,
        )
        sequences.append(replace(sequence, temperature=0.7 + length / 100))
    chunk = build_chunk(sequences, range(3), pairwise=False, vocab_size=1000, device=decoder.device)
    _, entropy_N = compute(decoder, chunk)
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(entropy_N.mean(), parameters), strict=True))


def test_a_whole_model_in_every_mode() -> None:
    from gyre.trainer.passes.batch_invariant import InvariantLogprobs  # imports Triton

    decoder, wide = small_decoder(GPU, torch.bfloat16), small_decoder(CPU, torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters(), decoder.parameters(), strict=True):
            mine.copy_(theirs)
    want = entropy_gradients(wide, chunk_logprobs)

    def checkpointed(mode: Checkpointing) -> ChunkLogprobs:
        return lambda decoder, chunk: chunk_logprobs(decoder, chunk, mode)

    modes = {mode: checkpointed(mode) for mode in get_args(Checkpointing)}
    for mode, compute in {**modes, "invariant": InvariantLogprobs(page_tokens=16)}.items():
        for name, grad in entropy_gradients(decoder, compute).items():
            assert off(grad, want[name]) < 0.1, (mode, name)
