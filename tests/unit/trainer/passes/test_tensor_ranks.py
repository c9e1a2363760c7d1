"""A trainer's passes where each rank holds a part of every layer and of the vocabulary, real
processes over gloo: the gradients of each objective are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.distributed.process_group import alone
from rank_pool import RankPool
from tensor_cases import close, joined, trained
from trainer_cases import OBJECTIVES, SPEC

UNTIED = replace(SPEC, vocab_size=49, tied=False, qkv_bias=True)  # padded; each rank has the head


@pytest.mark.parametrize("spec", [SPEC, UNTIED], ids=["tied", "padded"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_gradients_are_those_of_one_process(pair: RankPool, kind: str, spec) -> None:
    """Of the norms around the products and of the scalar head each rank has the whole gradient;
    all other parts add up."""
    expected, results = trained(alone(), kind, spec), pair.run(trained, kind, spec)
    for model, gradients in expected.items():
        for name, whole in gradients.items():
            parts = [found[model][name] for found in results]
            what, loose = f"{model}.{name}", {"relative": 1e-4}
            if name.startswith("scalar_head") or name.endswith(
                ("attn_norm.weight", "mlp_norm.weight", "final_norm.weight")
            ):
                for part in parts:
                    close(part, whole, what, **loose)
            else:
                close(joined(spec, "", name, parts), whole, what, **loose)
        assert any(whole.any() for whole in gradients.values())
