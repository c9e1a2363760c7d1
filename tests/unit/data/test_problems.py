"""The split is a pure function of the prompt's text, and no prompt is on both sides."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gyre.data.problems import (
    Problem,
    by_prompt,
    is_held_out,
    prompt_key,
    split_by_file,
    split_by_hash,
)
from gyre.text.messages import Message

PROMPTS = st.lists(st.text("ab \n", min_size=1, max_size=5), max_size=30)
FRACTIONS = st.floats(0.0, 0.99)


def problems(prompts: list[str]) -> list[Problem]:
    return [
        Problem(where=str(i), prompt=text, task={}, fields={"n": i})
        for i, text in enumerate(prompts)
    ]


@given(PROMPTS, FRACTIONS)
def test_no_prompt_is_in_both_and_none_is_lost(prompts: list[str], fraction: float) -> None:
    split = split_by_hash(problems(prompts), fraction, by_prompt)
    train, held_out = (
        [prompt_key(p.prompt) for p in half] for half in (split.train, split.held_out)
    )
    assert not set(train) & set(held_out)
    assert Counter(train + held_out) == Counter({prompt_key(text): 1 for text in prompts})
    assert len(train) + len(held_out) + split.num_duplicates == len(prompts)


@given(PROMPTS, FRACTIONS, st.randoms(use_true_random=False))
def test_the_side_does_not_depend_on_order_or_company(
    prompts: list[str], fraction: float, random
) -> None:
    sides = {prompt_key(text): is_held_out(prompt_key(text), fraction) for text in prompts}
    some = random.sample(prompts, len(prompts) // 2)
    split = split_by_hash(problems(some), fraction, by_prompt)
    assert all(sides[prompt_key(p.prompt)] for p in split.held_out)
    assert not any(sides[prompt_key(p.prompt)] for p in split.train)


@given(PROMPTS, FRACTIONS)
def test_repeats_of_a_prompt_stay_on_one_side(prompts: list[str], fraction: float) -> None:
    """Several responses to one prompt are several examples, all in the same half."""
    split = split_by_hash(problems(prompts), fraction, lambda p: p.where)
    assert split.num_duplicates == 0
    assert not {by_prompt(p) for p in split.train} & {by_prompt(p) for p in split.held_out}


@given(PROMPTS, PROMPTS)
def test_a_prompt_in_both_files_stays_held_out(train: list[str], held_out: list[str]) -> None:
    split = split_by_file(problems(train), problems(held_out), by_prompt)
    tested = {by_prompt(p) for p in split.held_out}
    assert tested == {prompt_key(text) for text in held_out}
    assert {by_prompt(p) for p in split.train} == {prompt_key(text) for text in train} - tested
    kept = len(split.train) + len(split.held_out)
    assert kept + split.num_duplicates + split.num_overlapping == len(train) + len(held_out)


def test_the_fraction_is_kept_and_grows_by_adding() -> None:
    keys = [f"problem {i}" for i in range(20_000)]
    small = {key for key in keys if is_held_out(key, 0.1)}
    large = {key for key in keys if is_held_out(key, 0.3)}
    assert small < large
    assert abs(len(small) / len(keys) - 0.1) < 0.01  # 4.7 standard deviations
    assert abs(len(large) / len(keys) - 0.3) < 0.015
    assert not any(is_held_out(key, 0.0) for key in keys)


def test_sides_of_known_prompts_never_change() -> None:
    """A release that moved prompts across the split would let old checkpoints be tested on what
    they learned."""
    keys = ("1 + 1 =", "2 + 2 =", "3 + 3 =", "4 + 4 =", "5 + 5 =")
    assert [is_held_out(key, 0.5) for key in keys] == [False, False, True, False, True]


def test_conversations_have_keys_too() -> None:
    """The text of a key decides a prompt's side, so it stays as it is."""
    one, same = (Message(role="user", content=text) for text in ("a  b", "a b"))
    assert prompt_key((one,)) == prompt_key((same,)) == '[{"content": "a b", "role": "user"}]'
    assert prompt_key((one,)) != prompt_key((Message(role="system", content="a b"),))
