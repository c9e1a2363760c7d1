"""Copies over tensor ranks: what is summed and what a norm counts, for any model and layout."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.distributed.layout import whole_model
from gyre.models.layout import model_layout
from gyre.trainer.optim.copies import Copies, counted_runs, plan_copies
from gyre.weights.shards import ShardLayout, row_layout
from layout_cases import numbered, spec_of

SPECS = [
    spec_of(family, num_heads=8, num_kv_heads=kv_heads, vocab_size=13)
    for family in ("qwen2", "qwen3")
    for kv_heads in (1, 2, 4, 8)
]
CASES = st.tuples(
    st.sampled_from(SPECS), st.sampled_from([2, 4, 8]), st.integers(1, 3), st.booleans()
)


def layout_for(case) -> ShardLayout:
    spec, tensor_ranks, num_shards, sequence_parallel = case
    table = model_layout(spec, tensor_ranks, sequence_parallel=sequence_parallel)
    table = table.with_whole({"scalar_head.weight": (1, spec.hidden_size)})
    return replace(row_layout(table.local_shapes, num_ranks=num_shards), table=table)


@given(CASES)
def test_every_number_is_counted_once(case):
    """In a norm: each of the whole model, by one rank of shard × tensor; padding may be counted by
    several, as it is zero."""
    layout = layout_for(case)
    table = layout.model
    seen = {name: torch.zeros(math.prod(shape)) for name, shape in table.shapes.items()}
    for shard, places in enumerate(layout.ranks):
        for tensor_rank in range(len(table.ranks)):
            copies = plan_copies(layout, shard=shard, tensor_rank=tensor_rank)
            starts = {name: place.at for name, place in places.items()}
            counted_N = torch.zeros(layout.size)
            for first, last in counted_runs(copies, starts, layout.size):
                counted_N[first:last] += 1.0
            for name, place in places.items():
                columns = math.prod(table.shapes[name][1:])
                for run, at, _ in table.runs(tensor_rank, name, place.start, place.stop):
                    for start, stop, offset in run.whole_runs(columns):
                        first = place.at + at - place.start + offset
                        seen[name][start:stop] += counted_N[first : first + stop - start]
    for name, counts_N in seen.items():
        assert torch.equal(counts_N, torch.ones_like(counts_N)), name


@given(CASES)
def test_sums_of_copies_are_the_whole_gradient_on_every_holder(case):
    """Each rank gives a part of what is partial, and all of the rest; what is copied then has the
    sum of the parts, or the number as it was."""
    layout = layout_for(case)
    table, tensor_ranks = layout.model, len(layout.model.ranks)
    whole = numbered(case[0]) | {"scalar_head.weight": torch.ones(1, case[0].hidden_size)}
    for shard, places in enumerate(layout.ranks):
        plans = [plan_copies(layout, shard=shard, tensor_rank=r) for r in range(tensor_ranks)]
        assert len({plan.size for plan in plans}) == 1
        sums_C = torch.zeros(plans[0].size)
        expected: list[dict[str, torch.Tensor]] = []
        for tensor_rank, plan in enumerate(plans):
            own = {}
            for name, place in places.items():
                own[name] = torch.zeros(place.stop - place.start)
                columns = math.prod(table.shapes[name][1:])
                for run, at, _ in table.runs(tensor_rank, name, place.start, place.stop):
                    for start, stop, offset in run.whole_runs(columns):
                        first = at - place.start + offset
                        own[name][first : first + stop - start] = whole[name].view(-1)[start:stop]
            expected.append(own)
            for run in plan.runs:
                of_heads = ".qkv." in run.name  # copied by those that have the same KV head
                copies = tensor_ranks // (case[0].num_kv_heads if of_heads else 1)
                values_N = own[run.name][run.start : run.stop]
                values_N = values_N / copies if run.name in table.partial else values_N
                if run.adds:
                    sums_C[run.at : run.at + len(values_N)] += values_N
        for plan, own in zip(plans, expected, strict=True):
            for run in plan.runs:
                got_N = sums_C[run.at : run.at + run.stop - run.start]
                torch.testing.assert_close(got_N, own[run.name][run.start : run.stop])


def test_one_tensor_rank_has_no_copies():
    shapes = SPECS[0].parameter_shapes()
    layout = row_layout(shapes, num_ranks=2)
    assert plan_copies(layout, shard=0, tensor_rank=0) == Copies()
    assert counted_runs(Copies(), {}, 5) == ((0, 5),)
    assert whole_model(shapes).partial == model_layout(SPECS[0], 1).partial == frozenset()
