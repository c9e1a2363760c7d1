"""The engine's fused pass against the composition that it optimizes, to the bit. That is the decoder's
layers as the trainer runs them, with the same attention. Both take their products from the library.

With few rows of a wide model the next norm adds a product to the residual stream. The composition
does that where a reduction is injected, here the identity. With many rows the product adds it
itself, as at one rank. (On an H200 the library rounds a product before it adds, so that all of these
have the same bits there.) Norms per head are those of the engine's kernel in both: the trainer's sums a
head's squares in another order.

Left out are numbers of rows for which the fused pass asks the library in another way, for speed: one,
and those of `BIAS_ROWS`. Their sums have another order, too.
"""

# T tokens, H heads, K kv heads, J = H + 2K, D head dim, R = J·D

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gyre.distributed.process_group import alone
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.layers import blocks
from gyre.models.layers.layer import Layer
from gyre.models.layers.tensor_parallel import ReplicatedRows, Rows
from gyre.models.spec import spec_from_shape
from reference_kernels import varlen_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE_TOKENS, VOCAB = 64, 1000
FAMILIES = ("qwen3", "llama", "qwen2")  # norms per head, neither, biases


class Identity(ReplicatedRows):
    """The injected reduction of one rank."""

    def __init__(self) -> None:
        super().__init__(alone(torch.device("cuda")))

    def begin_reduce_rows(self, partial_TE: Tensor) -> Rows:
        return lambda: partial_TE


def make_decoder(family: str, hidden_size: int, *, injects: bool) -> Decoder:
    shape = ShapeConfig.model_validate(
        {
            "family": family,
            "hidden_size": hidden_size,
            "num_layers": 3,
            "num_heads": 16,
            "num_kv_heads": 4,
            "head_dim": 128,
            "mlp_size": 4096,
            "tied": False,
            "context_tokens": 1024,
        }
    )
    spec = spec_from_shape(shape, vocab_size=VOCAB, bos_id=None, eos_ids=())
    decoder = Decoder(spec, device=torch.device("cuda"), dtype=torch.bfloat16)
    init_weights(decoder, 0)
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():  # norms and biases that scale and shift
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, device="cuda")
                parameter.add_(noise.mul_(0.1))
            else:
                parameter.mul_(4.0)
    if injects:
        for layer in decoder.layers:
            assert isinstance(layer, Layer)
            layer.tensor = Identity()
    return decoder


def pages_for(num_tokens: int, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """A layer's pages for one row, and its table."""
    num_pages = -(-num_tokens // PAGE_TOKENS)
    shape = num_pages, 2, num_kv_heads, PAGE_TOKENS, head_dim
    table_RP = torch.arange(num_pages, dtype=torch.int32, device="cuda")[None]
    return torch.zeros(shape, device="cuda", dtype=torch.bfloat16), table_RP


def in_pages(pages: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The keys and values in a layer's pages."""
    k_TKD, v_TKD = (pages[:, which].transpose(1, 2).flatten(0, 1)[:num_tokens] for which in (0, 1))
    return k_TKD, v_TKD


def turned_by_the_engine(
    qkv_TR: Tensor, q_norm_D: Tensor | None, k_norm_D: Tensor | None, cos_T1D: Tensor,
    sin_T1D: Tensor, *, heads: tuple[int, int], eps: float,
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    """In place of `turn_heads`, of tokens at positions 0, 1, …"""
    from gyre.kernels.gpu.pointwise import turn_and_write

    num_tokens, head_dim, (num_heads, num_kv_heads) = len(qkv_TR), cos_T1D.shape[-1], heads
    pages, table_RP = pages_for(num_tokens, num_kv_heads, head_dim)
    qkv_TJD = qkv_TR.view(num_tokens, -1, head_dim).clone()
    position_T = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    half = head_dim // 2
    turn_and_write(
        qkv_TJD,
        q_norm_D,
        k_norm_D,
        cos_T1D[:, 0, :half].contiguous(),
        sin_T1D[:, 0, half:].contiguous(),
        torch.zeros_like(position_T),
        position_T,
        table_RP,
        pages,
        num_heads=num_heads,
        eps=eps,
    )
    return qkv_TJD[:, :num_heads], *in_pages(pages, num_tokens), None


def composed(decoder: Decoder, token_T: Tensor, position_T: Tensor) -> Tensor:
    """Return logits by the layers that the trainer runs."""

    def attend(index: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return varlen_attention(q_THD, k_TKD, v_TKD, [len(q_THD)])

    return decoder.logits(decoder.hidden(token_T, position_T, attend))


def fused(decoder: Decoder, token_T: Tensor, position_T: Tensor) -> Tensor:
    """Return logits by the fused pass. Attention reads keys and values from their pages."""
    from gyre.models.fused_forward import FusedForward

    spec, num_tokens = decoder.spec, len(token_T)
    made = [pages_for(num_tokens, spec.num_kv_heads, spec.head_dim) for _ in decoder.layers]
    pages, table_RP = [each for each, _ in made], made[0][1]

    def attend(index: int, q_THD: Tensor, out_THD: Tensor) -> None:
        out_THD.copy_(varlen_attention(q_THD, *in_pages(pages[index], num_tokens), [num_tokens]))

    forward = FusedForward(decoder, pages.__getitem__, table_RP, invariant=False)
    row_T = torch.zeros_like(token_T)
    return forward.logits(forward.residual(token_T, position_T, row_T, attend))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("hidden_size", "rows", "injects"),
    [(2048, 8, True), (2048, 120, True), (2048, 256, True), (2048, 300, False),
     (2048, 1000, False), (4096, 120, True), (4096, 300, False)],
)  # fmt: skip
@torch.inference_mode()
def test_the_fused_pass_is_its_composition_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, family: str, hidden_size: int, rows: int, injects: bool
) -> None:
    decoder = make_decoder(family, hidden_size, injects=injects)
    if family == "qwen3":
        monkeypatch.setattr(blocks, "turn_heads", turned_by_the_engine)
    token_T = torch.arange(rows, dtype=torch.int32, device="cuda") * 7 % VOCAB
    position_T = torch.arange(rows, dtype=torch.int32, device="cuda")
    found, expected = (run(decoder, token_T, position_T) for run in (fused, composed))
    assert expected.float().std() > 0.1, "numbers that differ"
    assert torch.equal(found, expected), difference(found, expected)


@torch.inference_mode()
def test_another_epsilon_has_other_bits() -> None:
    """The equality sees what no tolerance would."""
    decoder = make_decoder("llama", 2048, injects=True)
    token_T = torch.arange(120, dtype=torch.int32, device="cuda") * 7 % VOCAB
    expected = composed(decoder, token_T, token_T)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        layer.spec = replace(decoder.spec, norm_eps=decoder.spec.norm_eps * 2)
    found = composed(decoder, token_T, token_T)
    assert not torch.equal(found, expected)


def difference(found: Tensor, expected: Tensor) -> str:
    share = float((found != expected).float().mean())
    return f"{share:.4f} of them, by {float((found.float() - expected.float()).abs().max())}"
