"""What a refusal says would fit: each change of a setting is judged alone, and the cheapest comes
first."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gyre.core.errors import MemoryBudgetError
from gyre.planner.decide import make_plan
from gyre.planner.lighter import lighter
from gyre.planner.model_zoo import find_shape, model_numbers
from gyre.planner.plan import PlanInputs, Shards
from unit.planner.test_plan import GPU, ask

H200 = replace(
    GPU,
    device_name="an H200",
    device_total_bytes=150_110_011_392,
    device_free_bytes=148_000_000_000,
    host_total_bytes=1 << 40,
    host_available_bytes=200 << 30,
)


def trained(shape: str, **changes) -> PlanInputs:
    """One objective without an engine, in chunks of one sequence."""
    base = {
        "model": model_numbers(find_shape(shape)),
        "objective": "sft",
        "online": False,
        "reference": False,
        "prompts_per_step": 64,
        "completions_per_prompt": 1,
        "max_prompt_tokens": 8192,
        "max_completion_tokens": 0,
        "tokens_per_chunk": 8192,
    }
    return ask(**{**base, **changes})


def offers_of(inputs: PlanInputs) -> list[str]:
    """What a refusal says would fit; each is judged here by itself."""
    with pytest.raises(MemoryBudgetError) as caught:
        make_plan(inputs, H200)
    hint = caught.value.hint
    budgets = [int(size) for size in re.findall(r"device_budget_bytes\D+(\d+)", hint)]
    assert all(size <= H200.device_total_bytes for size in budgets), hint
    fits, _, _ = hint.rpartition("; else ")
    offers = fits.removeprefix("what fits: ").split("; or ") if fits else []
    kinds = [{way.words(None): way.asked for way in kind} for kind in lighter(inputs)]
    for kind in kinds:
        offered = [text for text in kind if text in offers]
        for text, changed in kind.items():
            if text in offered:
                make_plan(changed, H200)
                break
            with pytest.raises(MemoryBudgetError):
                make_plan(changed, H200)
        assert len(offered) <= 1, "the first of a kind"
    assert offers == [text for kind in kinds for text in kind if text in offers], (
        "the cheapest kind first"
    )
    return offers


def test_a_long_sequence_is_offered_checkpointing_and_never_more_than_the_gpu_has() -> None:
    asked = trained(
        "qwen3-4b", max_prompt_tokens=32_768, tokens_per_chunk=32_768, host_budget_bytes=40 << 30
    )
    assert offers_of(asked)[0] == 'trainer.checkpointing = "selective"'
    with pytest.raises(MemoryBudgetError) as caught:
        make_plan(asked, H200)
    assert "ask less of the device, which has 139.80 GiB in all" in caught.value.hint


def test_a_large_chunk_is_offered_the_largest_that_fits() -> None:
    asked = trained("qwen3-4b", tokens_per_chunk=65_536)
    assert offers_of(asked) == [
        'trainer.checkpointing = "full"',
        "trainer.tokens_per_chunk = 16384",
    ]
    uneven = trained("qwen3-4b", tokens_per_chunk=20_000, max_prompt_tokens=12_000)
    assert "trainer.tokens_per_chunk = 12000" in offers_of(uneven), (
        "no shorter than the longest sequence"
    )


def test_a_model_that_ranks_hold_whole_is_offered_shards() -> None:
    lain = {model: Shards(zero=1, ranks=8) for model in ("actor", "critic", "reference", "reward")}
    asked = trained("qwen3-14b", ranks=8, shards=lain, host_budget_bytes=8 << 30)
    assert offers_of(asked) == ['trainer.checkpointing = "selective"', "parallel.zero = 2"]
    full = replace(asked, checkpointing="full")
    for budget, zero in ((80 << 30, 2), (50 << 30, 3)):
        assert offers_of(replace(full, device_budget_bytes=budget)) == [f"parallel.zero = {zero}"]
    whole = replace(asked, shards={})
    assert offers_of(whole) == ["parallel.zero = 2 with parallel.shard_ranks = 8"]
    for own in (Shards(), Shards(zero=1, ranks=8)):  # also where it is set to what the actor has
        apart = replace(
            asked, shards=lain | {"reference": own}, reference=True, lie_apart=("reference",)
        )
        (zero3,) = [
            way.asked
            for kind in lighter(apart)
            for way in kind
            if way.words(None) == "parallel.zero = 3"
        ]
        assert zero3.shards["reference"] == own and zero3.shards["actor"] == Shards(zero=3, ranks=8)
    hybrid = replace(asked, shards=lain | {"reference": Shards(zero=1, ranks=2)})
    (zero3,) = [
        way.asked
        for kind in lighter(hybrid)
        for way in kind
        if way.words(None) == "parallel.zero = 3"
    ]
    assert zero3.shards["reference"] == Shards(zero=3, ranks=2)
    for keeps in (
        {"offload_parameters": ("actor",)},
        {"engines_alone": True},
        {"batch_invariant": True},
    ):
        texts = [way.words(None) for kind in lighter(replace(asked, **keeps)) for way in kind]
        assert not any("zero" in text for text in texts), "the config refuses it"
    assert not any("checkpointing" in text for text in texts), "it would change nothing"
