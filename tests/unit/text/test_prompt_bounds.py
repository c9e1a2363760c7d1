"""A text that cannot fit is refused before it is tokenized, and no text that fits is."""

from __future__ import annotations

import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from gyre.core.errors import InputError, PromptTooLong
from gyre.text.prompt_bounds import encode_within
from gyre.text.token_chars import NFC_SHRINKS, find_most_token_chars
from gyre.text.tokenizer import Tokenizer, train_tokenizer

TEXTS = ["what is one and one", "é 漢 ü what is"]
OWN = train_tokenizer(TEXTS, vocab_size=320, min_share=0.0)
QWEN2 = train_tokenizer(TEXTS, vocab_size=320, min_share=0.0, style="qwen2")


def changed(**parts: object) -> tokenizers.Tokenizer:
    """The backend of our tokenizer with other parts."""
    backend = tokenizers.Tokenizer.from_str(OWN.backend.to_str())
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


@pytest.mark.parametrize("tokenizer", [OWN, QWEN2])
@given(text=st.text(alphabet="whatisone é漢\u0301\u1fbe\u0308 \n1-", max_size=60))
def test_no_text_that_fits_is_refused(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert (encode_within(tokenizer, text, max(1, len(tokens))) == tokens).all()


def test_a_long_text_is_refused_by_its_characters_alone(monkeypatch) -> None:
    most = OWN.most_token_chars
    assert most is not None
    monkeypatch.setattr(Tokenizer, "is_longer", lambda *args: pytest.fail("it was tokenized"))
    with pytest.raises(PromptTooLong, match=f"{10 * most + 1} characters.* 10 tokens"):
        encode_within(OWN, "x" * (10 * most + 1), 10)


def test_where_nothing_bounds_a_token_its_beginning_is_tokenized(monkeypatch) -> None:
    backend = changed(normalizer=normalizers.Strip())
    loose = Tokenizer(backend, eos_ids=(1,), bos_id=None, pad_id=0, chat_template="")
    assert loose.most_token_chars is None
    monkeypatch.setattr(Tokenizer, "encode", lambda *args: pytest.fail("all was tokenized"))
    with pytest.raises(PromptTooLong):
        encode_within(loose, "q" * 100_000, 10)


def test_a_lone_surrogate_is_no_length() -> None:
    with pytest.raises(InputError, match="lone surrogate") as caught:
        encode_within(OWN, "x" * 100_000 + "\ud83d", 10)
    assert not isinstance(caught.value, PromptTooLong)


def test_the_bound_is_the_longest_token() -> None:
    longest = max(map(len, OWN.backend.get_vocab()))
    assert find_most_token_chars(OWN.backend) == longest
    assert find_most_token_chars(QWEN2.backend) == NFC_SHRINKS * max(
        map(len, QWEN2.backend.get_vocab())
    )


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LOOSE = {
    "a normalizer that drops text": {"normalizer": normalizers.Strip()},
    "a cut that drops text": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(" "), "removed"), BYTES]
        )
    },
    "no byte level": {"pre_tokenizer": pre_tokenizers.Whitespace()},
    "no cuts": {"pre_tokenizer": None},
}


@pytest.mark.parametrize("what", LOOSE)
def test_a_vocabulary_that_drops_text_has_no_bound(what: str) -> None:
    assert find_most_token_chars(changed(**LOOSE[what])) is None


def test_tokens_that_swallow_spaces_and_cut_texts_have_no_bound() -> None:
    backend = changed()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert find_most_token_chars(backend) is None
    backend = changed()
    backend.enable_truncation(8)
    assert find_most_token_chars(backend) is None


def test_composition_shrinks_no_text_by_more() -> None:
    """The longest spelling of each composed character, in bytes."""
    chars = [chr(code) for code in range(0x30000) if not 0xD800 <= code <= 0xDFFF]
    spelled: dict[str, int] = {}
    for char in chars:
        parts = unicodedata.normalize("NFD", char)
        if len(parts) == 1:
            spelled[parts] = max(spelled.get(parts, 0), len(char.encode()))
    most = max(
        sum(spelled[part] for part in unicodedata.normalize("NFD", char)) / len(char.encode())
        for char in chars
    )
    assert 3 < most <= NFC_SHRINKS


def test_a_long_text_has_the_ids_of_a_short_one() -> None:
    text = "what is one é漢 " * 3000
    ids = OWN.encode(text)
    assert ids.tolist() == OWN.backend.encode(text, add_special_tokens=False).ids
    assert ids.dtype == OWN.encode("x").dtype and OWN.decode(ids) == text
