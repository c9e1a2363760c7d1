"""Token characters: how much text one token of a vocabulary stands for at most. In: the library's
tokenizer. Out: a count, or None where nothing bounds it. A longer text certainly has more tokens.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

# bytes of UTF-8 that NFC makes one of at most: U+1FBE and two marks become U+0390
NFC_SHRINKS = 4
_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())


def find_most_token_chars(backend: tokenizers.Tokenizer) -> int | None:
    """Return how many characters of a text a token stands for at most. None where there is no such
    number: for vocabularies that are not byte-level, and for those that drop characters."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    shrinks = _normalizer_shrinks(backend)
    is_known = (
        isinstance(backend.model, models.BPE)
        and not backend.model.dropout
        and backend.truncation is None
        and shrinks is not None
        and _keeps_characters(backend)
        and vocabulary.keys() >= _ALPHABET
        and not any(one.lstrip or one.rstrip for one in backend.get_added_tokens_decoder().values())
    )
    if not is_known:
        return None
    assert shrinks is not None
    # a character of a byte-level token is a byte, and a character of the text at least one
    return shrinks * max(map(len, vocabulary))


def _normalizer_shrinks(backend: tokenizers.Tokenizer) -> int | None:
    if backend.normalizer is None:
        return 1
    return NFC_SHRINKS if _state(backend.normalizer).get("type") == "NFC" else None


def _keeps_characters(backend: tokenizers.Tokenizer) -> bool:
    """Return whether every byte of a text reaches the vocabulary."""
    if backend.pre_tokenizer is None:
        return False
    state = _state(backend.pre_tokenizer)
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return any(part["type"] == "ByteLevel" for part in parts) and all(
        part["type"] in ("ByteLevel", "Digits")
        or (part["type"] == "Split" and part["behavior"] != "Removed")
        for part in parts
    )


def _state(part: Any) -> dict[str, Any]:
    return json.loads(part.__getstate__())
