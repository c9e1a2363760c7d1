"""Log-probs over a vocabulary that two ranks share, real processes over gloo: they and their
gradients are those of the whole head on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gyre.distributed.process_group import alone
from rank_pool import RankPool
from tensor_cases import close, logprobs_of

ROWS, HIDDEN = 7, 6


@pytest.mark.parametrize("vocab_size", [12, 13, 1], ids=["even", "padded", "only padding"])
@pytest.mark.parametrize("chunk", [0, 4], ids=["one block", "blocks"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"truncated": True}, {"unused": "entropy"}, {"unused": "logprobs"}],
    ids=["both", "truncated", "no entropy", "entropy alone"],
)
def test_two_ranks_find_what_one_does(
    pair: RankPool, vocab_size: int, chunk: int, settings: dict[str, Any]
) -> None:
    expected, _ = logprobs_of(alone(), vocab_size, chunk=chunk, **settings)
    results = pair.run(logprobs_of, vocab_size, chunk=chunk, **settings)
    for found, _ in results:
        for name in ("logprobs", "entropy", "hidden"):
            close(found[name], expected[name], name, relative=1e-10)
            assert torch.equal(found[name], results[0][0][name]), "equal on every rank"
    head = torch.cat([found["head"] for found, _ in results])
    close(head[:vocab_size], expected["head"], "head", relative=1e-10)
    assert not head[vocab_size:].any(), "padding has no gradient"


def test_what_is_sent_does_not_grow_with_the_vocabulary(pair: RankPool) -> None:
    """Three numbers a row forward, the hidden rows backward: as docs/parallel.md says."""
    for vocab_size in (12, 120):
        for _, sent in pair.run(logprobs_of, vocab_size):
            assert sent == {"all_gather": 3 * ROWS * 8, "all_reduce": ROWS * HIDDEN * 8}


def test_bfloat16_stays_within_its_rounding(pair: RankPool) -> None:
    """Logits are rounded as on one rank; the sums are of float32."""
    expected, _ = logprobs_of(alone(), 50, dtype=torch.bfloat16)
    for found, _ in pair.run(logprobs_of, 50, dtype=torch.bfloat16):
        assert found["logprobs"].dtype == torch.float32
        close(found["logprobs"], expected["logprobs"], "logprobs", relative=1e-5)
        close(found["hidden"].float(), expected["hidden"].float(), "hidden", relative=2e-2)
