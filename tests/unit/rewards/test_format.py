"""Format checker and length penalty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.rewards.format import TAGS, check_format, length_value

GOOD = "<think>a\nb</think>\n<answer>5</answer>\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (GOOD, 1.0),
        ("  <think>a</think><answer>∅</answer>", 1.0),
        ("<think></think><answer>5</answer>", 0.0),
        ("<think> \n\t</think><answer>5</answer>", 0.0),
        ("<think>\u200b\u00a0</think><answer>5</answer>", 0.0),
        ("<think>...</think><answer>5</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<think>a</think><answer> \u2060</answer>", 0.0),
        ("<think></think><answer></answer>", 0.0),
        ("x" + GOOD, 0.0),
        (GOOD + "x", 0.0),
        ("<think>a</think> so <answer>5</answer>", 0.0),
        ("<answer>5</answer><think>a</think>", 0.0),
        ("<think><answer>5</answer></think>", 0.0),
        (GOOD + GOOD, 0.0),
        ("<think>a<think>b</think><answer>5</answer>", 0.0),
        ("<think>a</think><answer>5", 0.0),
        ("<answer>5</answer>", 0.0),
        ("", 0.0),
        ("<THINK>a</THINK><answer>5</answer>", 0.0),
    ],
)
def test_format(text, value):
    got, reason = check_format(text)
    assert got == value and reason


def test_reasons_name_the_fault():
    assert "</answer> stands 0 times" in check_format("<think>a</think><answer>5")[1]
    assert "after </answer>" in check_format(GOOD + "and more")[1]
    assert "order" in check_format("<answer>5</answer><think>a</think>")[1]


def test_an_empty_block_is_named():
    assert check_format("<think> </think><answer>5</answer>")[1] == "nothing inside <think>"
    assert check_format("<think>a</think><answer></answer>")[1] == "nothing inside <answer>"
    assert check_format(" </think><answer>5</answer>", opened_by_prompt=True)[0] == 0.0


def test_prompt_may_open_the_block():
    assert check_format("a</think><answer>5</answer>", opened_by_prompt=True)[0] == 1.0
    assert check_format(GOOD, opened_by_prompt=True)[0] == 0.0


def test_partial_credit_is_asked_for():
    text = "<think>a</think> so <answer>5"
    assert check_format(text)[0] == 0.0
    assert check_format(text, partial=True)[0] == pytest.approx(0.6)
    assert check_format(GOOD + "x", partial=True)[0] == pytest.approx(0.8)
    assert check_format(GOOD, partial=True)[0] == 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("</answer><answer></think><think>", 0.0),
        ("<answer>5</answer><think>a</think>", 0.0),
        ("</think>a<think>", 0.0),
        ("<think></think><answer>5</answer>", 0.4),
        ("<think>a</think><answer></answer>", 0.4),
        ("<think></think><answer></answer>", 0.0),
        ("<think></think>", 0.0),
        ("<think>a</think>", 0.4),
    ],
)
def test_partial_credit_needs_order_and_content(text, value):
    assert check_format(text, partial=True)[0] == pytest.approx(value)


@given(st.lists(st.sampled_from([*TAGS, "x", " "]), max_size=9))
def test_only_the_four_tags_in_order_pass(pieces):
    text = "".join(pieces)
    tags = [piece for piece in pieces if piece in TAGS]
    value, _ = check_format(text)
    assert value == 0.0 or (tags == list(TAGS) and text.count("x") >= 2)
    partial, _ = check_format(text, partial=True)
    assert (partial == 1.0) == (value == 1.0) and 0.0 <= partial <= 1.0


@given(st.integers(0, 400))
def test_length_penalty_follows_dapo(num_tokens):
    value, _ = length_value(num_tokens, soft_tokens=100, max_tokens=300)
    expected = 0.0 if num_tokens <= 100 else max((100 - num_tokens) / 200, -1.0)
    assert value == pytest.approx(expected)
