"""Layers over the ranks of the tensor axis, real processes over gloo: hidden states, logits and
gradients are those of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gyre.distributed.layout import ModelLayout
from gyre.distributed.process_group import RankGroup, alone
from gyre.models.decoder import Decoder
from gyre.models.layers.tensor_parallel import ReplicatedRows, SequenceParallel
from gyre.models.layout import model_layout
from gyre.models.spec import ModelSpec
from layout_cases import spec_of
from rank_pool import RankPool
from tensor_cases import close, gathered_ahead, gradients_of, joined, layer_over_ranks

SIZES = {"hidden_size": 8, "num_layers": 2, "vocab_size": 11}
SPECS = {
    "llama": replace(spec_of("llama", **SIZES), context_tokens=64),
    "qwen2": replace(spec_of("qwen2", **SIZES, tied=True), context_tokens=64),
    "qwen3": replace(spec_of("qwen3", **SIZES), context_tokens=64),
    # each rank has the only head
    "repeated": replace(spec_of("qwen3", **SIZES, num_kv_heads=1), context_tokens=64),
}


def has_whole_gradients(table: ModelLayout, name: str) -> bool:
    """Return whether the table says that each rank computes the whole gradient of a copy."""
    copied = any(len(holders) > 1 for holders in table.holders(name).values())
    return copied and name not in table.partial


@pytest.mark.parametrize("how", ["replicated", "sequence"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("which", SPECS)
def test_a_decoder_over_two_ranks_is_that_of_one(pair: RankPool, which, checkpointing, how) -> None:
    """Gradients are what the table says. With replicated rows norms around the products see the
    whole stream on every rank, so theirs are whole on each. With split ones they add up, as those
    of heads' norms and of repeated KV heads do, which are of the rank's own heads."""
    spec = SPECS[which]
    hidden_NE, logits_NV, expected, _ = gradients_of(alone(), spec, checkpointing)
    results = pair.run(gradients_of, spec, checkpointing, how=how)
    for found_NE, found_NV, gradients, sent in results:
        if how == "sequence":
            assert sent == sent_by_rows(spec, checkpointing)
        close(found_NE, hidden_NE, "hidden")
        close(found_NV, logits_NV, "logits")
        assert torch.equal(found_NV, results[0][1]), "ranks choose by the same numbers"
        assert gradients.keys() == expected.keys()
    for name, whole in expected.items():
        parts = [gradients[name] for _, _, gradients, _ in results]
        table = model_layout(spec, 2, sequence_parallel=how == "sequence")
        if has_whole_gradients(table, name):
            for part in parts:
                close(part, whole, name)
            continue
        close(joined(spec, "", name, parts), whole, name)


def test_rows_that_were_gathered_ahead_are_those_and_once(pair: RankPool) -> None:
    """Others are gathered by themselves, and so are the same ones when they are asked for again."""
    for found, sent in pair.run(gathered_ahead):
        assert found == [[n, n, n + 1, n + 1] for n in (30.0, 20.0, 20.0, 10.0)]
        assert sent == {"all_gather": 5 * 2 * 3 * 4}


def sent_by_rows(spec: ModelSpec, checkpointing: str) -> dict[str, int]:
    """What docs/parallel.md says that one of two ranks sends for 12 tokens, six of which the last
    layer goes on with (five, padded), in exchanges of 12 rows and of 6."""
    again = checkpointing == "full"
    whole = spec.num_layers - 1  # layers of 12 rows
    # of the last one: q|k|v forward, again and backward; then its rows are chosen
    gathers = (6 + 2 * again) * whole + (2 + again) + (1 + again)
    scatters = (4 + again) * whole + 1 + 1  # chosen rows' gradients
    scatters_few = 3 + again  # of the last layer: output, down; gate and up
    gathers_few = 4 + again  # of the last layer: gate and up, twice; gradients of output and down
    row = spec.hidden_size * 8
    return {
        # embedding's gradient; hidden states at the end
        "all_gather": row * (6 * (gathers + 1) + 3 * (gathers_few + 1)),
        "reduce_scatter": row * (6 * (scatters + 1) + 3 * scatters_few),
    }


@pytest.mark.parametrize("how", ["replicated", "sequence"])
@pytest.mark.parametrize("which", SPECS)
def test_a_layer_over_two_ranks_is_that_of_one(pair: RankPool, which, how) -> None:
    """Sequence parallel computes the norms of a rank's own rows, so their gradients add up, too.
    What ranks send is what docs/parallel.md says."""
    spec = SPECS[which]
    out_TE, grad_TE, expected, _ = layer_over_ranks(alone(), spec)
    results = pair.run(layer_over_ranks, spec, how)
    own = out_TE.chunk(2) if how == "sequence" else [out_TE] * 2
    own_grads = grad_TE.chunk(2) if how == "sequence" else [grad_TE] * 2
    half = out_TE.numel() * 8 // 2  # (t - 1) / t · TEb
    for rank, (rows_TE, grad_rows_TE, _, sent) in enumerate(results):
        close(rows_TE, own[rank], "rows")
        close(grad_rows_TE, own_grads[rank], "gradient of rows")
        by_rows = {"all_gather": 6 * half, "reduce_scatter": 4 * half}
        assert sent == (by_rows if how == "sequence" else {"all_reduce": 8 * half})
    for name, whole in expected.items():
        parts = [gradients[name] for _, _, gradients, _ in results]
        table = model_layout(spec, 2, sequence_parallel=how == "sequence")
        if has_whole_gradients(table, f"layers.0.{name}"):
            for part in parts:
                close(part, whole, name)
            continue
        close(joined(spec, "layers.0.", name, parts), whole, name)


@pytest.mark.parametrize("which", SPECS)
def test_a_decoder_over_ranks_shares_its_parameters(which: str) -> None:
    """The very same objects, so that whoever moves their storage moves it for both."""
    cpu = torch.device("cpu")
    group = RankGroup(name="two", rank=1, size=2, device=cpu)
    own = Decoder(SPECS[which], device=cpu, dtype=torch.float32, tensor=SequenceParallel(group))
    other = own.sharing(ReplicatedRows(group))
    parameters = dict(other.named_parameters())
    assert parameters.keys() == dict(own.named_parameters()).keys()
    assert all(parameters[name] is parameter for name, parameter in own.named_parameters())
    assert other.device == cpu and other.inv_freq_F is own.inv_freq_F
    assert [layer.tensor.splits_rows for layer in (*own.layers, *other.layers)] == [
        True, True, False, False,
    ]  # fmt: skip
