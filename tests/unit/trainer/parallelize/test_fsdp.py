"""FSDP2 beneath the trainer, over gloo: what it gathers, sums and frees, when, and in which dtype."""

from __future__ import annotations

import numpy as np
import pytest

from fsdp_cases import freed_between_passes, gathered_dtypes, order_of_collectives, waits
from trainer_cases import assert_close
from zero_cases import gradients, measures


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_8_bit_weights_are_gathered_again_for_what_is_made_again(pair, mode):
    settings = {"matmul": "fp8", "layout": "zero3"}
    expected = pair.run(gradients, "grpo", **settings)[0][0]
    assert_close(
        pair.run(gradients, "grpo", checkpointing=mode, **settings)[0][0], expected, relative=1e-6
    )


def test_layers_are_gathered_in_8_bits(pair):
    """Half the bytes, but for the norms; also after the weights and their scales have changed."""
    (wide, _, wide_bytes), (before, after, narrow_bytes) = (
        pair.run(gathered_dtypes, m)[0] for m in ("same", "fp8")
    )
    assert set(wide) == {"bfloat16"} and before == after
    assert before.count("float8_e4m3fn") == 4 and set(before) == {"float8_e4m3fn", "bfloat16"}
    assert 0.5 < narrow_bytes / wide_bytes < 0.52


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_travel_as_computed_and_are_summed_in_float32(pair, dtype):
    """To the bit what a reduce-scatter in float32 gives, which "update" takes: of one chunk, and
    two ranks' numbers have one sum. Half the bytes."""
    settings = {"dtype": dtype, "tokens_per_chunk": 1000}
    wide, narrow = (
        pair.run(gradients, "sft", layout=layout, **settings)[0]
        for layout in ("zero3_once", "zero3")
    )
    assert narrow[1] == wide[1] and narrow[0].keys() == wide[0].keys()
    for name, tensor in wide[0].items():
        assert tensor.any(), name
        np.testing.assert_array_equal(narrow[0][name], tensor, err_msg=name)
    told = [
        pair.run(measures, "sft", layout=layout, **settings)[0]["measured"]
        for layout in ("zero3_once", "zero3")
    ]
    whole, half = (counted["sent_bytes/reduce_scatter"] for counted in told)
    assert half == whole / 2 > 0


def test_layers_are_freed_between_forward_and_backward(pair):
    """So that equal gradients (tests of the trainer's ranks) show that the saved weights of a hand-written backward pass
    are gathered anew."""
    for during, after, has_gradient in pair.run(freed_between_passes):
        assert all(size > 0 for size in during) and after == [0, 0] and has_gradient


def test_a_head_of_its_own_is_summed_before_the_layers(pair):
    """And it stays gathered from the loss to its backward pass; a tied one is the embedding, which
    comes last."""
    layers = [f"layers.{index}" for index in range(3)]
    forward = [f"gather {name}" for name in ("root", *layers, "head")]
    backward = [f"{what} {name}" for name in layers[::-1] for what in ("gather", "sum")]
    for told in pair.run(order_of_collectives, "odd"):
        at = told.index("loss")
        assert told[:at] == forward
        assert sorted(told[at + 1 :]) == sorted(["sum head", *backward, "sum root"])
        sums = [name for name in told if name.startswith("sum")]
        assert sums == ["sum head", *(f"sum {name}" for name in layers[::-1]), "sum root"]
    for told in pair.run(order_of_collectives, "tied"):
        assert not any("head" in name for name in told) and told[-1] == "sum root"


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
def test_each_wait_beside_the_computation_has_two_ends(pair, layout):
    """As on a GPU: the computation comes to what it needs before it is gathered, or later where it
    is gathered ahead; to the sum of a layer's gradient when that of the next layer is there."""
    for told, pairs in pair.run(waits, layout, "odd"):
        collectives = [name for name in told if name.startswith(("gather", "sum"))]
        ends = [told[done - 1] for _, done in pairs]
        assert all(
            told[reached] == "computing" and told[done] == "beside" for reached, done in pairs
        )
        assert sorted([*ends, "sum layers.0"]) == sorted(collectives), "one wait is not seen"
        for reached, done in pairs:
            kind, name = told[done - 1].split()
            waits_after = [
                at
                for at, what in enumerate(told)
                if what == f"wait {name}" and at > max(reached, done)
            ]
            others = [mark for mark, _ in pairs if told[mark] == "computing" and mark > reached]
            assert kind == "sum" or waits_after, f"{name}: the mark is not before FSDP2's own wait"
            assert kind == "sum" or not any(reached < mark < waits_after[0] for mark in others), (
                name
            )
        later = sorted(told[done - 1] for reached, done in pairs if reached > done)
        ahead = (
            ["gather layers.0", "gather layers.1", "gather layers.2"] if layout == "zero3" else []
        )
        assert later == [*ahead, "sum head", "sum layers.1", "sum layers.2"]
