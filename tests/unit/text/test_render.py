"""Rendering, incremental text and stop strings, against whole-text decoding and brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from gyre.core.errors import InputError
from gyre.text.detokenizer import Detokenizer
from gyre.text.render import r1_response, render_example, render_prompt
from gyre.text.tokenizer import END, Tokenizer, plain_chat
from unit.text.test_tokenizer import TOKENIZER


def sentencepiece_like() -> Tokenizer:
    """Metaspace with byte fallback: what a token adds depends on its neighbors."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special[:2], show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat"] * 9 + special[2:], trainer)
    backend.add_tokens(special[2:])
    state = backend.to_str()
    backend = tokenizers.Tokenizer.from_str(state)
    return Tokenizer(backend, eos_ids=(1,), bos_id=None, pad_id=0, chat_template="")


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def streamed(
    tokenizer: Tokenizer, pieces: list[list[int]], *, skip_special: bool = False
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40),
    st.lists(st.integers(0, 99), max_size=8),
    st.booleans(),
)
def test_pieces_join_to_the_decoded_whole(
    ids: list[int], cuts: list[int], skip_special: bool
) -> None:
    """Random ids: bytes that are no UTF-8, special tokens and ids without a token are all among
    them."""
    whole = TOKENIZER.decode(ids, skip_special=skip_special)
    assert "".join(streamed(TOKENIZER, chunks(ids, cuts), skip_special=skip_special)) == whole


@given(st.text(), st.integers(0, 60))
def test_text_given_out_is_a_prefix_that_never_changes(text: str, at: int) -> None:
    ids = TOKENIZER.encode(text).tolist()
    detokenizer = Detokenizer(TOKENIZER)
    given_out = detokenizer.push(ids[:at])
    assert text.startswith(given_out)  # no half character, so no U+FFFD that is not in the text
    assert given_out + detokenizer.push(ids[at:]) == text


@given(st.text(), st.lists(st.integers(0, 99), max_size=8))
def test_sentencepiece_pieces_join_too(text: str, cuts: list[int]) -> None:
    tokenizer = SENTENCEPIECE
    ids = tokenizer.encode(text).tolist()
    assert not tokenizer.is_byte_level
    assert "".join(streamed(tokenizer, chunks(ids, cuts))) == tokenizer.decode(ids)


def test_sentencepiece_holds_a_character_back() -> None:
    ids = [SENTENCEPIECE.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert streamed(SENTENCEPIECE, [[i] for i in ids]) == ["", "", "", "🙂", ""]
    broken = streamed(SENTENCEPIECE, [[ids[0]]] * 9)
    assert any(broken[:-1]), "bytes that will never be a character are not held for ever"


SENTENCEPIECE = sentencepiece_like()


def test_example_masks_the_prompt_and_ends_once() -> None:
    prompt, text = render_prompt(TOKENIZER, "What is 1 + 2?", system="Think.")
    assert text == "Think.\nWhat is 1 + 2?\n"
    for response in (r1_response("1 + 2 = 3", "3"), r1_response("1 + 2 = 3", "3") + END):
        tokens, loss_mask = render_example(TOKENIZER, prompt, response)
        assert (tokens.dtype, loss_mask.dtype, tokens.shape) == (
            np.int32,
            np.bool_,
            loss_mask.shape,
        )
        assert (
            TOKENIZER.decode(tokens[loss_mask])
            == f"<think>1 + 2 = 3</think><answer>3</answer>{END}"
        )
        assert TOKENIZER.decode(tokens[~loss_mask]) == text


def test_empty_response_is_an_end_token() -> None:
    prompt, _ = render_prompt(TOKENIZER, "hi")
    tokens, loss_mask = render_example(TOKENIZER, prompt, "")
    assert tokens[loss_mask].tolist() == [TOKENIZER.end_id]


@pytest.mark.parametrize("template", ["chat", "{system}\n{prompt}\n"])
def test_braces_in_the_prompt_are_text(template: str) -> None:
    _, text = render_prompt(TOKENIZER, "f({x}) {system}?", template=template, system="S")
    assert text == "S\nf({x}) {system}?\n"


def test_one_system_message_is_given_not_two() -> None:
    own = [{"role": "system", "content": "OWN"}, {"role": "user", "content": "a"}]
    assert render_prompt(TOKENIZER, own)[1] == "OWN\na\n"
    assert render_prompt(TOKENIZER, own[1:], system="GIVEN")[1] == "GIVEN\na\n"
    for turns in (own, [*own[1:], {"role": "assistant", "content": "b"}, *own]):
        with pytest.raises(
            InputError, match=r"data\.system is set, and the prompt has a system message of its own"
        ):
            render_prompt(TOKENIZER, turns, system="GIVEN")


def test_plain_chat_of_a_conversation() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert plain_chat(turns) == f"a\nb{END}c\n"
