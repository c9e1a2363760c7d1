"""8-bit products over ranks that hold matrices in parts, real processes over gloo: scales are those
of the whole operands to the bit, and so is all that is not a sum over ranks."""

from __future__ import annotations

import pytest
import torch

from float8_cases import products
from gyre.distributed.process_group import alone
from rank_pool import RankPool
from tensor_cases import close

ROUNDING = {"float32": 1e-6, "bfloat16": 2e-2}  # of the sum of partial products


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("cut", ["columns", "rows"])
@pytest.mark.parametrize("size", [2, 4])
def test_scales_and_what_needs_no_sum_are_those_of_one_rank(
    request: pytest.FixtureRequest, size: int, cut: str, dtype: str
) -> None:
    pool: RankPool = request.getfixturevalue({2: "pair", 4: "ranks"}[size])
    whole, found = products(alone(), cut, dtype), pool.run(products, cut, dtype)
    axis = {"columns": 0, "rows": 1}[cut]
    for each in found:
        assert torch.equal(each["amaxes"], whole["amaxes"])
        # a library may add in another order for fewer rows
        close(each["halves"].float(), each["weight"].float(), "halves", relative=ROUNDING[dtype])
    joined = torch.cat([each["weight"] for each in found], dim=axis)
    assert torch.equal(joined, whole["weight"])
    # what ranks sum, and what they hold parts of
    summed, cut_up = ("input", "y") if cut == "columns" else ("y", "input")
    assert torch.equal(torch.cat([each[cut_up] for each in found], dim=1), whole[cut_up])
    for each in found:
        close(each[summed].float(), whole[summed].float(), summed, relative=ROUNDING[dtype])


def test_without_telling_each_other_they_are_others(pair: RankPool) -> None:
    for cut in ("columns", "rows"):
        whole = products(alone(), cut, "float32")
        first, last = pair.run(products, cut, "float32", shares=False)
        assert not torch.equal(first["amaxes"], whole["amaxes"])
        joined = torch.cat([first["weight"], last["weight"]], dim={"columns": 0, "rows": 1}[cut])
        assert not torch.equal(joined, whole["weight"])
