"""gyre init's samples: the data say what is right, and the configs ask what the data can answer."""

from __future__ import annotations

import json
import re
import tomllib
from typing import get_args

import pytest

from gyre.cli.begin import GUESSED_SHARE, make_files
from gyre.rewards.config import RewardPart

RL, PAIRS = ("grpo", "ppo"), ("dpo", "rm")
KINDS = ("sft", *RL, *PAIRS)
STEP = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")
ANSWER = re.compile(r"so <answer>(\d+)</answer>")


def rows_of(kind: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in make_files("demo", kind)["demo.jsonl"].splitlines()]


def told(prompt: str) -> list[int]:
    """The numbers of a problem, signed as its words say."""
    start = re.search(r"has (\d+)", prompt)
    assert start is not None
    changes = re.findall(r"(gets|gives away) (\d+)", prompt)
    return [int(start[1]), *(int(n) if word == "gets" else -int(n) for word, n in changes)]


def steps_of(response: str) -> list[tuple[int, str, int, int]]:
    return [(int(a), sign, int(b), int(c)) for a, sign, b, c in STEP.findall(response)]


def holds(step: tuple[int, str, int, int]) -> bool:
    a, sign, b, result = step
    return result == (a + b if sign == "+" else a - b)


@pytest.mark.parametrize("kind", RL)
def test_a_template_names_every_kind_of_reward(kind: str) -> None:
    union, _ = get_args(RewardPart)
    kinds = {part.model_fields["kind"].default for part in get_args(union)}
    (line,) = re.findall(r'^kind = "function" # .*', make_files("demo", kind)["demo.toml"], re.M)
    assert (
        len(kinds) > 5 and {name for name in kinds if not re.search(rf"\b{name}\b", line)} == set()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_what_the_words_come_to(kind: str) -> None:
    rows = rows_of(kind)
    assert len({row["prompt"] for row in rows}) > 0.99 * len(rows) >= 1900
    for row in rows:
        numbers, right = told(row["prompt"]), row["chosen" if kind in PAIRS else "response"]
        assert len(numbers) == 4 and row["answer"] == str(sum(numbers))
        assert ANSWER.findall(right) == [row["answer"]]
        steps = steps_of(right)
        if steps:
            assert [step[0] for step in steps] == [sum(numbers[:i]) for i in (1, 2, 3)] and all(
                map(holds, steps)
            )
        else:
            assert kind in RL and right == f"so <answer>{row['answer']}</answer>"


@pytest.mark.parametrize("kind", RL)
def test_reinforcement_learning_begins_from_responses_of_two_kinds(kind: str) -> None:
    """It has something to find out; where all are worked out, supervised training is enough."""
    rows = rows_of(kind)
    guessed = sum("=" not in row["response"] for row in rows)
    assert abs(guessed / len(rows) - GUESSED_SHARE) < 0.04


@pytest.mark.parametrize("kind", PAIRS)
def test_a_rejected_response_errs_in_its_last_step_alone(kind: str) -> None:
    for row in rows_of(kind):
        right, wrong = steps_of(row["chosen"]), steps_of(row["rejected"])
        assert right[:-1] == wrong[:-1] and right[-1][:3] == wrong[-1][:3] and not holds(wrong[-1])
        assert ANSWER.findall(row["rejected"]) == [str(wrong[-1][3])] != [row["answer"]]


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_has_as_many_problems_as_are_held_out(kind: str) -> None:
    config = tomllib.loads(make_files("demo", kind)["demo.toml"])
    assert config["eval"]["num_problems"] <= config["data"]["held_out_fraction"] * len(
        rows_of(kind)
    )
