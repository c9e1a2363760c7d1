"""The engine's fused pass against the composition that it optimizes, to the bit: the decoder's layers
as the trainer runs them, with the same attention, and the products of both from the library.

With few rows of a wide model the next norm adds a product to the residual stream. The composition
does that where a reduction is injected, here the identity. With many rows the product adds it
itself, as at one rank. Left out are numbers of rows for which the fused pass asks the library in
another way, for speed: one, and those of `BIAS_ROWS`. Their sums have another order.
"""

# T tokens, H heads, K kv heads, D head dim, P pages of a row

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.layers.layer import Layer
from gyre.models.layers.tensor_parallel import ReplicatedRows, Rows
from gyre.models.spec import spec_from_shape
from reference_kernels import varlen_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE_TOKENS, VOCAB = 64, 1000
NARROW = {"hidden_size": 512, "mlp_size": 1024, "num_heads": 4, "num_kv_heads": 2}
WIDE = {"hidden_size": 2048, "mlp_size": 4096, "num_heads": 16, "num_kv_heads": 4}
FAMILIES = {
    "qwen3": {"family": "qwen3"},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2"},
}


class Identity(ReplicatedRows):
    """The injected reduction of one rank."""

    def __init__(self) -> None:
        self.peers = None

    def begin_reduce_rows(self, partial_TE: Tensor) -> Rows:
        return lambda: partial_TE


def make_decoder(sizes: dict[str, Any], *, injects: bool) -> Decoder:
    shape = ShapeConfig(num_layers=3, head_dim=128, tied=False, context_tokens=1024, **sizes)
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


def composed(decoder: Decoder, token_T: Tensor, position_T: Tensor) -> Tensor:
    """Return logits by the layers that the trainer runs."""

    def attend(index: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return varlen_attention(q_THD, k_TKD, v_TKD, [len(q_THD)])

    return decoder.logits(decoder.hidden(token_T, position_T, attend))


def fused(decoder: Decoder, token_T: Tensor, position_T: Tensor) -> Tensor:
    """Return logits by the fused pass. Attention reads keys and values from their pages."""
    from gyre.models.fused_forward import FusedForward

    spec, num_tokens = decoder.spec, len(token_T)
    num_pages = -(-num_tokens // PAGE_TOKENS)
    table_RP = torch.arange(num_pages, dtype=torch.int32, device="cuda")[None]
    pages = torch.zeros(
        spec.num_layers, num_pages, 2, spec.num_kv_heads, PAGE_TOKENS, spec.head_dim,
        device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip

    def attend(index: int, q_THD: Tensor, out_THD: Tensor) -> None:
        k_TKD, v_TKD = (
            pages[index][:, which].transpose(1, 2).flatten(0, 1)[:num_tokens] for which in (0, 1)
        )
        out_THD.copy_(varlen_attention(q_THD, k_TKD, v_TKD, [num_tokens]))

    forward = FusedForward(decoder, pages.__getitem__, table_RP, invariant=False)
    row_T = torch.zeros_like(token_T)
    return forward.logits(forward.residual(token_T, position_T, row_T, attend))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "rows", "injects"),
    [(NARROW, 5, False), (NARROW, 200, False), (WIDE, 8, True), (WIDE, 120, True),
     (WIDE, 256, True), (WIDE, 300, False), (WIDE, 1000, False)],
    ids=lambda given: given["hidden_size"] if isinstance(given, dict) else given,
)  # fmt: skip
@torch.inference_mode()
def test_the_fused_pass_is_its_composition_to_the_bit(
    family: str, sizes: dict[str, int], rows: int, injects: bool
) -> None:
    decoder = make_decoder({**FAMILIES[family], **sizes}, injects=injects)
    token_T = torch.arange(rows, dtype=torch.int32, device="cuda") * 7 % VOCAB
    position_T = torch.arange(rows, dtype=torch.int32, device="cuda")
    found, expected = (run(decoder, token_T, position_T) for run in (fused, composed))
    assert expected.float().std() > 0.1, "numbers that differ"
    assert torch.equal(found, expected), difference(found, expected)


@torch.inference_mode()
def test_another_sum_of_the_residual_stream_has_other_bits() -> None:
    """What the equality sees: a product that adds to the stream itself rounds once."""
    token_T = torch.arange(120, dtype=torch.int32, device="cuda") * 7 % VOCAB
    made = [make_decoder({**FAMILIES["qwen3"], **WIDE}, injects=each) for each in (True, False)]
    injected, plain = (composed(decoder, token_T, token_T) for decoder in made)
    assert not torch.equal(injected, plain)


def difference(found: Tensor, expected: Tensor) -> str:
    share = float((found != expected).float().mean())
    return f"{share:.4f} of them, by {float((found.float() - expected.float()).abs().max())}"
