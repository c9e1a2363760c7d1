"""Our decoder against transformers, in float32, for every family: logits, loss, gradients, and
exports both ways."""

# T tokens, V vocabulary

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.models.decoder import Decoder
from gyre.models.hub.export import export_hub
from gyre.models.hub.load import load_hub, verify_export
from gyre.models.names import hub_entries

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    # far from the hub's 0.02, so that attention and norms have something to say
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-3.1": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "llama-all-heads": LlamaConfig(
        **SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=False, head_dim=10
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(
        **SIZES,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
    ),
    "qwen3-all-window": Qwen3Config(
        **SIZES,
        tie_word_embeddings=True,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=3,
        max_window_layers=0,
    ),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=16),
    "qwen3-untied": Qwen3Config(
        **SIZES | {"eos_token_id": [2, 3]}, tie_word_embeddings=False, head_dim=6
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    """A transformers model with every parameter random (norms and biases too), and its folder."""
    torch.manual_seed(0)
    config = CASES[request.param]
    theirs = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(
                    torch.randn_like(parameter) * 0.3 + (0.0 if name.endswith("bias") else 1.0)
                )
    folder = tmp_path_factory.mktemp("theirs") / request.param
    theirs.save_pretrained(folder)
    return theirs, folder


def hidden_of(decoder: Decoder, sequences: list[Tensor], rows_N: Tensor | None = None) -> Tensor:
    layout = PackedLayout.of([len(s) for s in sequences], CPU)
    attend = lambda i, q, k, v: varlen_attention(q, k, v, layout, decoder.spec.window_of(i))  # noqa: E731
    return decoder.hidden(torch.cat(sequences), layout.positions_T, attend, rows_N)


def some_tokens(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in lengths]


def test_logits_loss_and_gradients_are_theirs(case: tuple[PreTrainedModel, Path]) -> None:
    theirs, folder = case
    _, ours = load_hub(folder, device=CPU, dtype=torch.float32)
    (tokens_T,) = some_tokens(77)  # beyond the original context of the llama3 case
    hidden_TE = hidden_of(ours, [tokens_T])
    want_TV = theirs(tokens_T[None]).logits[0]
    torch.testing.assert_close(ours.logits(hidden_TE), want_TV, rtol=1e-4, atol=1e-4)
    want_loss = F.cross_entropy(want_TV[:-1], tokens_T[1:])
    logprobs, _ = token_logprobs(hidden_TE[:-1], ours.head_weight, tokens_T[1:], torch.ones(76))
    torch.testing.assert_close(-logprobs.mean(), want_loss, rtol=1e-5, atol=1e-5)
    theirs.zero_grad()
    want_loss.backward()
    (-logprobs.mean()).backward()
    their_parameters = dict(theirs.named_parameters())
    for entry in hub_entries(ours.spec):
        got = ours.get_parameter(entry.name).grad
        want = their_parameters[entry.hub_name].grad
        assert got is not None and want is not None and want.abs().max() > 1e-5
        got = got[entry.row_start : entry.row_stop]
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=1e-5 * max(1.0, want.abs().max().item())
        )


def test_packed_equals_separate(case: tuple[PreTrainedModel, Path]) -> None:
    _, ours = load_hub(case[1], device=CPU, dtype=torch.float32)
    sequences = some_tokens(9, 1, 30, 9, 17)
    packed = hidden_of(ours, sequences)
    separate = torch.cat([hidden_of(ours, [s]) for s in sequences])
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, packed.numel()).view_as(packed)
    packed_grads, separate_grads = (
        torch.autograd.grad((out * weights).sum(), list(ours.parameters()), allow_unused=True)
        for out in (packed, separate)
    )
    for got, want in zip(packed_grads, separate_grads, strict=True):
        if want is not None:  # an untied head takes no part in hidden states
            torch.testing.assert_close(
                got, want, rtol=1e-3, atol=1e-5 * max(1.0, want.abs().max().item())
            )


def test_chosen_rows_equal_all_rows(case: tuple[PreTrainedModel, Path]) -> None:
    _, ours = load_hub(case[1], device=CPU, dtype=torch.float32)
    sequences, rows_N = some_tokens(12, 5), torch.tensor([16, 0, 3, 3])
    some, every = hidden_of(ours, sequences, rows_N), hidden_of(ours, sequences)[rows_N]
    torch.testing.assert_close(some, every)
    parameters = [p for name, p in ours.named_parameters() if not name.startswith("head.")]
    grads = [torch.autograd.grad(out.pow(3).sum(), parameters) for out in (some, every)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_mode_gives_the_same_bits_as_autograd(
    case: tuple[PreTrainedModel, Path], dtype: torch.dtype
) -> None:
    _, ours = load_hub(case[1], device=CPU, dtype=dtype)
    sequences = some_tokens(8, 20)
    with torch.inference_mode():
        served = ours.logits(hidden_of(ours, sequences))
    assert torch.equal(ours.logits(hidden_of(ours, sequences)).detach(), served)


@pytest.mark.parametrize("shard_bytes", [10**9, 6_000])
def test_an_export_is_the_same_model_in_transformers(
    case: tuple[PreTrainedModel, Path], tmp_path: Path, shard_bytes: int
) -> None:
    theirs, folder = case
    spec, ours = load_hub(folder, device=CPU, dtype=torch.float32)
    export_hub(
        ours,
        tmp_path / "export",
        dtype=torch.float32,
        tokenizer_files=None,
        shard_bytes=shard_bytes,
    )
    verify_export(tmp_path / "export", ours)
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert again.dtype == torch.float32
    (tokens_T,) = some_tokens(77)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens_T[None]).logits, theirs(tokens_T[None]).logits)
    assert load_hub(tmp_path / "export", device=CPU, dtype=torch.float32)[0] == spec
    eos = again.config.eos_token_id
    assert tuple(eos if isinstance(eos, list) else [eos]) == spec.eos_ids


def test_a_bfloat16_export_loads_as_bfloat16(
    case: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    _, ours = load_hub(case[1], device=CPU, dtype=torch.float32)
    export_hub(ours, tmp_path / "export", dtype=torch.bfloat16, tokenizer_files=None)
    verify_export(tmp_path / "export", ours)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert again.dtype == torch.bfloat16
    entry = hub_entries(ours.spec)[1]
    want = ours.get_parameter(entry.name).detach()[entry.row_start : entry.row_stop].bfloat16()
    assert torch.equal(dict(again.named_parameters())[entry.hub_name].detach(), want)
