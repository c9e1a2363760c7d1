"""Products, attention and log-probs token by token: torch's own within rounding, and to the bit the
same whatever the other rows, the address and the number of threads are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gyre.engine.sampling.sampler import choose, make_rules
from gyre.kernels.tokenwise import attend_one, drawn_logprobs, linear_by_token

SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(SEEDS, DTYPES, st.integers(1, 9), st.integers(1, 70), st.integers(1, 40), st.data())
def test_a_row_does_not_depend_on_the_others(seed, dtype, rows, inputs, outputs, data):
    x_TI, weight_OI = (
        random(seed, rows, inputs, dtype=dtype),
        random(seed + 1, outputs, inputs, dtype=dtype),
    )
    bias_O = random(seed + 2, outputs, dtype=dtype) if data.draw(st.booleans()) else None
    whole_TO = linear_by_token(x_TI, weight_OI, bias_O)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    assert torch.equal(linear_by_token(x_TI[order], weight_OI, bias_O), whole_TO[order])
    moved_OI = torch.empty(outputs * inputs + 1, dtype=dtype)[1:].view(outputs, inputs)
    moved_OI.copy_(weight_OI)  # at an odd address
    first = data.draw(st.integers(0, rows - 1))
    assert torch.equal(linear_by_token(x_TI[first:], moved_OI, bias_O), whole_TO[first:])
    expected_TO = F.linear(
        x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double()
    )
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert torch.allclose(whole_TO.double(), expected_TO, rtol=limit, atol=20 * limit)


@pytest.mark.parametrize("inputs", [48, 5000])
def test_nor_on_the_number_of_threads(inputs: int) -> None:
    x_TI, weight_OI = random(0, 3, inputs), random(1, 200, inputs)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(linear_by_token(x_TI, weight_OI))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_no_rows_have_no_product() -> None:
    assert linear_by_token(random(0, 0, 4), random(1, 3, 4)).shape == (0, 3)


@given(SEEDS, DTYPES, st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(0, 5))
def test_a_token_sees_its_keys_alone(seed, dtype, kv_heads, group, keys, behind):
    """Wherever they lie, and whatever lies behind them."""
    q_HD = random(seed, kv_heads * group, 8, dtype=dtype)
    kv_2KLD = random(seed + 1, 2, kv_heads, keys + behind, 8, dtype=dtype)
    found_HD = attend_one(q_HD, *kv_2KLD[:, :, :keys])
    packed = [x_KLD.transpose(0, 1).contiguous().transpose(0, 1) for x_KLD in kv_2KLD[:, :, :keys]]
    assert torch.equal(attend_one(q_HD, *packed), found_HD)
    expected_1HD = F.scaled_dot_product_attention(
        q_HD.double()[:, None], *kv_2KLD[:, :, :keys].double(), enable_gqa=True
    )
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(found_HD.double(), expected_1HD[:, 0], atol=limit)


@given(SEEDS, st.integers(1, 12), st.integers(2, 300), st.data())
def test_given_tokens_have_the_logprobs_that_drawn_ones_had(seed, rows, vocab_size, data):
    """Those of the engine's sampler, which sees all rows at once."""
    logits_NV = 3.0 * random(seed, rows, vocab_size)
    choices = st.sampled_from([0.3, 0.7, 1.0, 1.9])
    drawn = torch.tensor([data.draw(choices) for _ in range(rows)])
    ones = torch.ones(rows)
    rules = make_rules(
        drawn.numpy(),
        ones.int().numpy() * 0,
        ones.numpy(),
        ones.numpy() * 0,
        ones.bool().numpy() & False,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
    )
    uniform_N = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    chosen = choose(logits_NV, rules, uniform_N)
    inverse_N = torch.from_numpy((1.0 / drawn.numpy()).astype("float32"))
    for row in range(rows):
        logprobs_1, total_1, entropy_1 = drawn_logprobs(
            logits_NV[row : row + 1].clone(),
            inverse_N[row : row + 1],
            chosen.tokens_N[row : row + 1],
        )
        assert torch.equal(logprobs_1, chosen.logprobs_N[row : row + 1].float())
        scaled_V = logits_NV[row].double() * inverse_N[row].double()
        spread = torch.distributions.Categorical(logits=scaled_V)
        assert torch.allclose(total_1.double(), scaled_V.logsumexp(0), atol=1e-5)
        assert torch.allclose(entropy_1.double(), spread.entropy(), atol=1e-5)
