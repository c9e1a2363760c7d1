"""Layout: the tokens of a step as index arrays. In: the rows and a Step. Out: a StepLayout. Pure
(numpy).

The KV pool of a layer is [page, 2, K, page_tokens, D]. Writes see it as rows of D. Reads see it as
rows of page_tokens × D, one per (page, k or v, kv head). One gather yields [2, B, K, L, D].
Sequences of similar size are attended to together, in buckets, so padding stays small.
"""

# T tokens of the step, S its sequences, B those of a bucket, P pages per sequence, K kv heads, D
# head dim

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gyre.core.rounding import ceil_div
from gyre.engine.kv_cache.page_allocator import NULL_PAGE
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.step import Step

BUCKET_SLACK = 4096  # padded query-key pairs worth less than the operations of one more bucket
BUCKET_WASTE = 0.3  # padded pairs per real one that a bucket may have beyond the slack


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBucket:
    """Sequences attended to in one batched product, padded to the longest of them."""

    gather: np.ndarray  # int64 [2 · B · K · P], rows of the pool to read
    batch: int  # B
    queries: int  # Q
    keys: int  # L
    start_B: np.ndarray  # int64, position of the first query
    end_B: np.ndarray  # int64, known KV after this step
    first_token: int  # of the bucket within the step's tokens
    counts_B: np.ndarray  # int64, real queries

    @property
    def num_tokens(self) -> int:
        return int(self.counts_B.sum())

    @property
    def is_padded(self) -> bool:
        return self.num_tokens < self.batch * self.queries


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Index arrays of one step. Tokens are in the order of their buckets."""

    tokens_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    write_2TK: np.ndarray  # int64, rows of D in a layer's pool
    source_N: (
        np.ndarray | None
    )  # int64, the token whose hidden state each sampling row continues; None for all, in order
    chunk_places_C: np.ndarray  # int64, where the first token of each of the step's chunks is
    buckets: tuple[AttentionBucket, ...]


def lay_out(rows: InputBatch, step: Step, *, num_kv_heads: int) -> StepLayout:
    """Order the step's sequences into buckets and index everything they read and write."""
    num_decode = len(step.decode_rows)
    row_S = np.concatenate(
        [step.decode_rows, np.asarray([c.row for c in step.chunks], dtype=np.int64)]
    )
    start_S = np.concatenate(
        [rows.computed_R[step.decode_rows], np.asarray([c.start for c in step.chunks], np.int64)]
    )
    count_S = np.ones(len(row_S), dtype=np.int64)
    count_S[num_decode:] = [c.count for c in step.chunks]
    pages_S = ceil_div(start_S + count_S, rows.page_tokens)
    order_S, bounds = plan_buckets(count_S, pages_S * rows.page_tokens)
    row_S, start_S, count_S, pages_S = (
        row_S[order_S],
        start_S[order_S],
        count_S[order_S],
        pages_S[order_S],
    )

    last_S = np.cumsum(count_S)
    seq_T = np.repeat(np.arange(len(row_S)), count_S)
    positions_T = np.arange(int(last_S[-1])) - (last_S - count_S)[seq_T] + start_S[seq_T]
    rows_T = row_S[seq_T]
    page_T = rows.table_RP[rows_T, positions_T // rows.page_tokens].astype(np.int64)
    slot_T = page_T * (2 * num_kv_heads * rows.page_tokens) + positions_T % rows.page_tokens
    head_2K = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads) * rows.page_tokens
    return StepLayout(
        tokens_T=rows.tokens_RW[rows_T, positions_T].astype(np.int64),
        positions_T=positions_T,
        write_2TK=slot_T[None, :, None] + head_2K,
        source_N=_find_sources(step, order_S, last_S),
        chunk_places_C=(last_S - count_S)[np.argsort(order_S)[num_decode:]],
        buckets=tuple(
            _make_bucket(
                rows,
                row_S[a:b],
                start_S[a:b],
                count_S[a:b],
                int(pages_S[a:b].max()),
                num_kv_heads,
                first,
            )
            for (a, b), first in zip(
                bounds, [0, *(int(last_S[b - 1]) for _, b in bounds)], strict=False
            )
        ),
    )


def plan_buckets(
    count_S: np.ndarray, keys_S: np.ndarray
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Order sequences by size and cut them into runs whose padding is small. Returns the order and
    the runs' bounds. One run in the given order when that is good enough, as in most decoding
    steps."""
    area_S = count_S * keys_S
    if _fits(len(area_S), int(count_S.max()), int(keys_S.max()), int(area_S.sum())):
        return np.arange(len(area_S)), [(0, len(area_S))]
    order_S = np.lexsort((keys_S, count_S))
    bounds, begin, area, most_count, most_keys = [], 0, 0, 0, 0
    for place, sequence in enumerate(order_S.tolist()):
        count, keys = max(most_count, int(count_S[sequence])), max(most_keys, int(keys_S[sequence]))
        grown = area + int(area_S[sequence])
        if not _fits(place + 1 - begin, count, keys, grown):
            bounds.append((begin, place))
            begin, grown = place, int(area_S[sequence])
            count, keys = int(count_S[sequence]), int(keys_S[sequence])
        area, most_count, most_keys = grown, count, keys
    bounds.append((begin, len(order_S)))
    return order_S, bounds


def _fits(batch: int, count: int, keys: int, area: int) -> bool:
    return batch * count * keys - area <= BUCKET_SLACK + BUCKET_WASTE * area


def _find_sources(step: Step, order_S: np.ndarray, last_S: np.ndarray) -> np.ndarray | None:
    num_decode = len(step.decode_rows)
    place_S = np.empty_like(order_S)
    place_S[order_S] = np.arange(len(order_S))
    sequence_N = np.concatenate([np.arange(num_decode), num_decode + step.sample_chunks])
    source_N = last_S[place_S[sequence_N]] - 1
    in_order = len(source_N) == last_S[-1] and (source_N == np.arange(len(source_N))).all()
    return None if in_order else source_N


def _make_bucket(
    rows: InputBatch,
    row_B: np.ndarray,
    start_B: np.ndarray,
    count_B: np.ndarray,
    num_pages: int,
    num_kv_heads: int,
    first_token: int,
) -> AttentionBucket:
    held_BP = np.arange(num_pages) < rows.pages_R[row_B, None]
    page_BP = np.where(held_BP, rows.table_RP[row_B, :num_pages], NULL_PAGE).astype(np.int64)
    plane_2K = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1)
    return AttentionBucket(
        gather=(page_BP[None, :, None, :] * (2 * num_kv_heads) + plane_2K).ravel(),
        batch=len(row_B),
        queries=int(count_B.max()),
        keys=num_pages * rows.page_tokens,
        start_B=start_B,
        end_B=start_B + count_B,
        first_token=first_token,
        counts_B=count_B,
    )
