"""Small decisions that the runs of every objective rest on: where a model comes from, ties, which
pairs lack working."""

from __future__ import annotations

import numpy as np
import pytest

from gyre.data.pairs import load_pairs
from gyre.loop.evaluate import preferred
from gyre.runconfig.toml_tree import apply_overrides
from unit.data.test_examples import CHAIN, TOKENIZER
from unit.data.test_sources import Events


def test_a_model_is_a_path_or_a_shape_whichever_is_set_last() -> None:
    tree = {"model": {"shape": {"hidden_size": 8}}}
    assert apply_overrides(tree, ["model.path=a"])["model"] == {"path": "a"}
    assert apply_overrides(tree, ["model.path=a", "model.shape.num_layers=2"])["model"] == {
        "shape": {"num_layers": 2}
    }
    assert apply_overrides(tree, ["model.init_seed=3"])["model"] == {
        "shape": {"hidden_size": 8},
        "init_seed": 3,
    }
    assert tree == {"model": {"shape": {"hidden_size": 8}}}


@pytest.mark.parametrize(
    ("margins", "share"), [([1.0, -1.0, 0.0], 0.5), ([0.0, 0.0], 0.5), ([2.0, 0.0], 0.75)]
)
def test_a_tie_is_half_a_right_choice(margins: list[float], share: float) -> None:
    assert np.mean(preferred(np.array(margins, dtype=np.float32))) == share


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_that_share_of_rejected_responses_has_no_working(share: float) -> None:
    found = load_pairs(
        CHAIN.model_copy(update={"answer_only_share": share}), TOKENIZER, emit=Events()
    )
    texts = [[TOKENIZER.decode(sequence.tokens) for sequence in pair] for pair in found.train]
    assert not any("<think></think>" in chosen for chosen, _ in texts), (
        "the chosen one always shows its working"
    )
    assert np.mean(["<think></think>" in rejected for _, rejected in texts]) == pytest.approx(
        share, abs=0.08
    )
