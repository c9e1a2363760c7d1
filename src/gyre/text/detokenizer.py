"""Detokenizer: a stream of tokens to text that never changes once returned.

In: ids. Out: new stable text; a character with missing bytes is held back. The returned pieces,
including `flush`, join to exactly `Tokenizer.decode` of all ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from gyre.text.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 4  # a UTF-8 character has at most 4 bytes, a byte token at least one of them


class Detokenizer:
    """Text of one completion, incrementally."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = False, kept_ids: Collection[int] = ()
    ) -> None:
        """Begin a text. `kept_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._kept_ids = kept_ids
        # Byte-level vocabularies are exact by a table. Others (sentencepiece) decode a window of
        # recent tokens, since what a token adds may depend on the one before it.
        self._bytes = (
            codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.is_byte_level else None
        )
        self._ids: list[int] = []
        self._start = 0  # window of the sentencepiece way: ids[start:given] have been given out
        self._given = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; return newly stable text."""
        if self._bytes is None:
            self._ids += [int(i) for i in ids if not self._skips(int(i))]
            return self._window(final=False)
        pieces = (self._tokenizer.piece_bytes(int(i)) for i in ids if not self._skips(int(i)))
        return self._bytes.decode(b"".join(pieces))

    def flush(self) -> str:
        """Return what was held back; an unfinished character becomes U+FFFD. Ends the text."""
        if self._bytes is None:
            return self._window(final=True)
        return self._bytes.decode(b"", final=True)

    def _skips(self, token_id: int) -> bool:
        skips = self._skip_special and self._tokenizer.is_special(token_id)
        return skips and token_id not in self._kept_ids

    def _window(self, *, final: bool) -> str:
        given = self._tokenizer.decode(self._ids[self._start : self._given])
        text = self._tokenizer.decode(self._ids[self._start :])
        unfinished = text.endswith("\ufffd") and len(self._ids) - self._given <= _MAX_HELD_TOKENS
        if unfinished and not final:
            return ""
        self._start, self._given = self._given, len(self._ids)
        return text[len(given) :]
