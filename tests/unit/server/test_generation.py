"""Answer text: however an answer is cut into chunks, what is sent is the text before its stop
string."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from gyre.server.generation import AnswerText, cut_at_stop
from gyre.server.parsers.spans import held_chars
from gyre.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["abcab cba ü 漢 bca"], vocab_size=300, min_share=0.0)


@given(
    text=st.text(alphabet="abcü漢 ", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
@example(text="abab", stops=["abc"], cuts=[1, 2, 3])
def test_what_is_sent_is_the_text_before_the_stop(text, stops, cuts) -> None:
    tokens = TOKENIZER.encode(text)
    expected, taken = text, len(tokens)
    for count in range(1, len(tokens) + 1):  # the engine ends with the token that completes a stop
        begun = TOKENIZER.decode(tokens[:count])
        if any(stop in begun for stop in stops):
            expected, taken = cut_at_stop(begun, stops), count
            break
    finish = "stop" if expected != text or taken < len(tokens) else "length"
    if any(stop in TOKENIZER.decode(tokens[:taken]) for stop in stops):
        finish = "stop"
    places = sorted({min(cut, taken) for cut in cuts} | {0, taken})
    parts = [tokens[a:b] for a, b in itertools.pairwise(places)] or [tokens[:0]]
    answer = AnswerText(TOKENIZER, stops)
    sent = [
        answer.push(np.asarray(part), finish if number == len(parts) - 1 else None)
        for number, part in enumerate(parts)
    ]
    assert "".join(sent) == expected
    for number in range(len(sent)):  # nothing that was sent is taken back
        assert expected.startswith("".join(sent[: number + 1]))


def test_only_what_may_begin_a_stop_is_held() -> None:
    assert held_chars("xab", ["abc", "b"]) == 2
    assert held_chars("xabd", ["abc"]) == 0
    assert held_chars("aa", ["aab"]) == 2
    assert held_chars("a", []) == 0
