"""Prompt bounds: refuse a text that cannot fit a context before much of it is tokenized. In: a
tokenizer, a text, the most tokens. Out: the text's ids, or PromptTooLong.

Two looks come first. One counts characters, where the vocabulary says how many a token holds at
most. The other tokenizes the beginning of a text that is long for its tokens.
"""

from __future__ import annotations

import numpy as np

from gyre.core.errors import PromptTooLong
from gyre.text.tokenizer import Tokenizer

LIKELY_CHARS = 8  # of a token; a text with more per token is looked at before it is encoded


def encode_within(tokenizer: Tokenizer, text: str, most_tokens: int) -> np.ndarray:
    """Return int32 ids of `text`. PromptTooLong where it certainly has more than `most_tokens`; one
    that has somewhat more may be returned."""
    tokenizer.check_text(text)
    check_chars(tokenizer, text, most_tokens)
    if len(text) > LIKELY_CHARS * most_tokens and tokenizer.is_longer(text, most_tokens):
        raise too_long(f"{len(text)} characters", most_tokens)
    return tokenizer.encode(text)


def check_chars(tokenizer: Tokenizer, text: str, most_tokens: int) -> None:
    """PromptTooLong where the count of characters alone says that `text` has more tokens."""
    most_chars = tokenizer.most_token_chars
    if most_chars is not None and len(text) > most_chars * most_tokens:
        raise too_long(f"{len(text)} characters", most_tokens)


def too_long(found: str, most_tokens: int) -> PromptTooLong:
    """Return the refusal of a prompt; `found` says how long it is."""
    return PromptTooLong(
        f"a prompt of {found}: it cannot fit the context of {most_tokens} tokens",
        hint="send a shorter one",
    )
