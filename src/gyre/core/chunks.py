"""Chunks: joins the pieces of a completion. In: TokenChunks and Partials, in order. Out: a
TokenChunk or a Partial. Pure.

C tokens of the whole, c of one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.core.records import Partial, Support, TokenChunk


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Join all chunks of a completion, with the last one's end."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return TokenChunk(
        request_id=last.request_id,
        index=last.index,
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        support=join_supports([chunk.support for chunk in chunks]),
        finish=last.finish,
        reason=last.reason,
        top_ids=_join_arrays([chunk.top_ids for chunk in chunks]),
        top_logprobs=_join_arrays([chunk.top_logprobs for chunk in chunks]),
        prompt_logprobs=next(
            (chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None
        ),
    )


def as_partial(index: int, parts: Sequence[Partial | TokenChunk]) -> Partial:
    """Return the tokens so far as a Partial, to resume completion `index` of the request."""
    return Partial(
        index=index,
        tokens=np.concatenate([part.tokens for part in parts]).astype(np.int32),
        logprobs=np.concatenate([part.logprobs for part in parts]).astype(np.float32),
        raw_logprobs=np.concatenate([part.raw_logprobs for part in parts]).astype(np.float32),
        versions=np.concatenate([part.versions for part in parts]).astype(np.int32),
        support=join_supports([part.support for part in parts]),
    )


def join_supports(supports: Sequence[Support | None]) -> Support | None:
    """Join the supports piece by piece; a piece without one was not truncated or has no tokens."""
    parts = [support for support in supports if support is not None]
    if not parts:
        return None
    counts = np.concatenate([np.diff(support.offsets) for support in parts])
    return Support(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ids=np.concatenate([support.ids for support in parts]).astype(np.int32),
    )


def _join_arrays(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    parts = [array for array in arrays if array is not None]
    return np.concatenate(parts) if parts else None
