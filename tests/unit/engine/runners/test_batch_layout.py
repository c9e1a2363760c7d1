"""Where the tokens of a step lie, against plain loops over sequences, positions, heads and
pages."""

# T tokens, S sequences, B those of a bucket, P pages, K kv heads, W widest sequence

from __future__ import annotations

import numpy as np
import pytest

from gyre.engine.runners.batch_layout import StepLayout, lay_out, plan_buckets
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import PrefillChunk, Step

PAGE_TOKENS, NUM_ROWS, NUM_PAGES, WIDTH = 4, 8, 400, 160


def make_rows(computed: dict[int, int], held: dict[int, int]) -> InputBatch:
    """Rows with these tokens computed and these pages held. What the table has behind them is of no
    row."""
    generator, rows = np.random.default_rng(0), InputBatch(NUM_ROWS, PAGE_TOKENS)
    rows.table_RP = generator.permutation(np.arange(1, NUM_PAGES))[
        : NUM_ROWS * WIDTH // PAGE_TOKENS
    ]
    rows.table_RP = rows.table_RP.reshape(NUM_ROWS, WIDTH // PAGE_TOKENS).astype(np.int32)
    rows.tokens_RW = generator.integers(0, 10**6, (NUM_ROWS, WIDTH)).astype(np.int32)
    for row, count in computed.items():
        rows.computed_R[row] = count
    for row, count in held.items():
        rows.pages_R[row] = count
    return rows


def make_step(decode: list[int], chunks: list[PrefillChunk], sample_chunks: list[int]) -> Step:
    none = np.empty(0, np.int64)
    return Step(
        decode_rows=np.asarray(decode, np.int64),
        chunks=tuple(chunks),
        sample_rows=none,
        sample_chunks=np.asarray(sample_chunks, np.int64),
        sample_positions=none,
        sample_generations=none,
        restored_rows=none,
        version=0,
        swap_out=None,
        swap_in=None,
        copies=(),
    )


def pages_for(tokens: int) -> int:
    return (tokens + PAGE_TOKENS - 1) // PAGE_TOKENS


def check(rows: InputBatch, step: Step, layout: StepLayout, num_kv_heads: int) -> list[int]:
    """Compare each token, read and write with plain loops; return the sequences in the order in
    which they lie. The sequences of a step are its decoding rows, then its chunks."""
    sequences = [(row, int(rows.computed_R[row]), 1) for row in step.decode_rows.tolist()]
    sequences += [(chunk.row, chunk.start, chunk.count) for chunk in step.chunks]
    pool = (NUM_PAGES, 2, num_kv_heads, PAGE_TOKENS)
    order, token = [], 0
    for bucket in layout.buckets:
        assert bucket.first_token == token
        members = []
        for start, count in zip(bucket.start_B.tolist(), bucket.counts_B.tolist(), strict=True):
            (index,) = (
                at
                for at, (row, begin, size) in enumerate(sequences)
                if (begin, size) == (start, count)
                and rows.tokens_RW[row, begin] == layout.tokens_T[token]
            )
            row = sequences[index][0]
            members.append(index)
            for position in range(start, start + count):
                page, slot = (
                    int(rows.table_RP[row, position // PAGE_TOKENS]),
                    position % PAGE_TOKENS,
                )
                assert layout.tokens_T[token] == rows.tokens_RW[row, position]
                assert layout.positions_T[token] == position
                for plane in range(2):
                    for head in range(num_kv_heads):
                        where = np.ravel_multi_index((page, plane, head, slot), pool)
                        assert layout.write_2TK[plane, token, head] == where
                token += 1
        order += members
        longest = max(
            pages_for(start + count) for _, start, count in (sequences[at] for at in members)
        )
        assert bucket.batch == len(members) and bucket.keys == longest * PAGE_TOKENS
        assert bucket.queries == max(sequences[at][2] for at in members)
        assert bucket.end_B.tolist() == [sequences[at][1] + sequences[at][2] for at in members]
        assert bucket.num_tokens == sum(sequences[at][2] for at in members)
        assert bucket.is_padded == (len({sequences[at][2] for at in members}) > 1)
        gather = bucket.gather.reshape(2, bucket.batch, num_kv_heads, longest)
        for place, at in enumerate(members):
            row = sequences[at][0]
            for column in range(longest):
                page = int(rows.table_RP[row, column]) if column < rows.pages_R[row] else 0
                for plane in range(2):
                    for head in range(num_kv_heads):
                        assert gather[plane, place, head, column] == np.ravel_multi_index(
                            (page, plane, head), pool[:3]
                        )
    assert token == len(layout.tokens_T) == len(layout.positions_T) == layout.write_2TK.shape[1]
    assert sorted(order) == list(range(len(sequences)))
    ends = np.cumsum([sequences[at][2] for at in order])
    last = {at: int(end) - 1 for at, end in zip(order, ends, strict=True)}
    first = {at: last[at] - sequences[at][2] + 1 for at in order}
    num_decode = len(step.decode_rows)
    expected = [last[at] for at in range(num_decode)] + [
        last[num_decode + at] for at in step.sample_chunks.tolist()
    ]
    found = list(range(token)) if layout.source_N is None else layout.source_N.tolist()
    assert found == expected
    assert layout.chunk_places_C.tolist() == [
        first[num_decode + at] for at in range(len(step.chunks))
    ]
    return order


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_decoding_rows_lie_in_their_order(num_kv_heads: int) -> None:
    """One of them has a page more than it reads, one exactly what it reads."""
    rows = make_rows({1: 7, 4: 0, 6: 11}, {1: 3, 4: 1, 6: 3})
    step = make_step([1, 4, 6], [], [])
    layout = lay_out(rows, step, num_kv_heads=num_kv_heads)
    assert check(rows, step, layout, num_kv_heads) == [0, 1, 2]
    assert layout.source_N is None and len(layout.buckets) == 1


def test_one_bucket_of_decoding_rows_and_chunks_keeps_the_given_order() -> None:
    """Of the chunks the second ends its prompt, with a fork; so does the third; the first does
    not."""
    rows = make_rows({2: 9, 0: 4}, {2: 3, 0: 2, 5: 2, 3: 1, 7: 3})
    chunks = [
        PrefillChunk(row=5, start=3, count=4),
        PrefillChunk(row=3, start=0, count=2),
        PrefillChunk(row=7, start=8, count=1),
    ]
    step = make_step([2, 0], chunks, [1, 1, 2])
    layout = lay_out(rows, step, num_kv_heads=2)
    assert check(rows, step, layout, 2) == [0, 1, 2, 3, 4]
    assert layout.source_N is not None and layout.source_N.tolist() == [0, 1, 7, 7, 8]
    assert layout.chunk_places_C.tolist() == [2, 6, 8]


def test_large_chunks_lie_in_a_bucket_of_their_own() -> None:
    """The first chunk has 100 queries over 100 keys, the last 90 over 120; beside them all else is
    small."""
    rows = make_rows({2: 30, 0: 4}, {2: 8, 0: 2, 5: 25, 3: 1, 7: 30})
    chunks = [
        PrefillChunk(row=5, start=0, count=100),
        PrefillChunk(row=3, start=0, count=2),
        PrefillChunk(row=7, start=30, count=90),
    ]
    step = make_step([2, 0], chunks, [0, 2])
    layout = lay_out(rows, step, num_kv_heads=2)
    assert [bucket.batch for bucket in layout.buckets] == [3, 2]
    order = check(rows, step, layout, 2)
    assert order == [1, 0, 3, 4, 2], "by queries, then by keys"
    assert layout.chunk_places_C.tolist() == [94, 2, 4]


def test_a_whole_prompt_of_one_token_is_its_own_source() -> None:
    rows = make_rows({2: 9}, {2: 3, 5: 1, 6: 1})
    step = make_step(
        [2], [PrefillChunk(row=5, start=0, count=1), PrefillChunk(row=6, start=2, count=1)], [0, 1]
    )
    layout = lay_out(rows, step, num_kv_heads=1)
    assert check(rows, step, layout, 1) == [0, 1, 2] and layout.source_N is None
    step = make_step(
        [2], [PrefillChunk(row=5, start=0, count=1), PrefillChunk(row=6, start=1, count=1)], [0]
    )
    layout = lay_out(rows, step, num_kv_heads=1)
    assert layout.source_N is not None and layout.source_N.tolist() == [0, 1]
    step = make_step(
        [],
        [PrefillChunk(row=5, start=0, count=2), PrefillChunk(row=6, start=1, count=1)],
        [1, 1, 1],
    )
    layout = lay_out(rows, step, num_kv_heads=1)
    assert layout.source_N is not None and layout.source_N.tolist() == [2, 2, 2]


HUGE = 10**7  # fits beside nobody, so that the others are cut into runs


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        # 5,860 pairs are padded: 4,096 of slack and 0.3 of the 5,880 real ones
        ([10, 5870], [(0, 2)]),
        ([10, 5871], [(0, 1), (1, 2)]),
        ([10, 5870, HUGE], [(0, 2), (2, 3)]),
        ([10, 5871, HUGE], [(0, 1), (1, 2), (2, 3)]),
        ([10, 13, 2427, HUGE], [(0, 3), (3, 4)]),  # 4,831: 4,096 and 0.3 of 2,450
        ([10, 13, 2428, HUGE], [(0, 2), (2, 3), (3, 4)]),
        ([1, 6002, 16998], [(0, 1), (1, 3)]),  # in the second run 10,996: 4,096 and 0.3 of 23,000
        ([1, 6002, 16999], [(0, 1), (1, 2), (2, 3)]),
        ([1, 10**6, 10**6 + 10, 10**6 + 13, HUGE], [(0, 1), (1, 4), (4, 5)]),
    ],
)
def test_a_bucket_pads_no_more_than_slack_and_waste(
    keys: list[int], bounds: list[tuple[int, int]]
) -> None:
    """Sequences of one query, in falling order of their keys: cut into runs, they are sorted."""
    order, found = plan_buckets(np.ones(len(keys), np.int64), np.asarray(keys[::-1]))
    assert found == bounds
    assert order.tolist() == (
        list(range(len(keys))) if len(bounds) == 1 else list(range(len(keys)))[::-1]
    )


@pytest.mark.parametrize(
    ("queries", "bounds"), [(587, [(0, 2), (2, 3)]), (588, [(0, 1), (1, 2), (2, 3)])]
)
def test_queries_are_padded_as_keys_are(queries: int, bounds: list[tuple[int, int]]) -> None:
    """Over ten keys each, 1 and 587 queries: 5,860 pairs are padded, as above."""
    order, found = plan_buckets(np.asarray([HUGE, queries, 1]), np.asarray([10, 10, 10]))
    assert found == bounds and order.tolist() == [2, 1, 0]


def test_sequences_are_sorted_by_queries_then_by_keys() -> None:
    order, _ = plan_buckets(np.asarray([2, 1, 2, 1]), np.asarray([10, HUGE, 5, 7]))
    assert order.tolist() == [3, 1, 2, 0]
