"""Procedural problems and their worked traces, checked by reasoning-gym's own scorers on thousands
of problems."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import reasoning_gym

from gyre.core.errors import ConfigError
from gyre.data.config import DataConfig
from gyre.data.examples import load_examples, tokenizer_texts
from gyre.data.problems import by_prompt
from gyre.data.sources import load_prompts
from gyre.data.tasks import answer_checker, generate_problems
from gyre.data.traces import corrupt_trace, traced_tasks, write_trace
from gyre.text.tokenizer import train_tokenizer
from unit.data.test_sources import Events

ARITHMETIC = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
CASES = [
    ("chain_sum", ARITHMETIC, 3000),
    ("chain_sum", {"min_terms": 1, "max_terms": 6, "allow_negation": True}, 2000),
    ("products", {"max_terms": 4, "allow_negation": True}, 1000),
    ("basic_arithmetic", {}, 3000),
    ("basic_arithmetic", {"format_style": "natural", "whitespace": "random"}, 1000),
    ("count_bits", {}, 1000),
    ("spell_backward", {}, 2000),
    ("letter_counting", {}, 1000),
    ("number_sorting", {}, 1000),
    ("gcd", {"max_numbers": 4}, 1000),
]


def config(task: str, options: dict, count: int, seed: int = 0) -> DataConfig:
    return DataConfig(task=task, task_options=options, num_problems=count, seed=seed)


@pytest.mark.parametrize(("task", "options", "count"), CASES)
def test_every_trace_is_right_and_ends_with_its_answer(
    task: str, options: dict, count: int
) -> None:
    made = list(generate_problems(config(task, options, count), emit=Events()))
    check = answer_checker(config(task, options, count))
    assert len(made) == count
    for problem in made:
        trace = write_trace(problem.task)
        assert trace is not None
        assert trace.think.splitlines()[-1].endswith(trace.answer)
        assert check(trace.answer, dict(problem.task)) == 1.0, problem.task


@pytest.mark.parametrize(("task", "options", "count"), CASES)
def test_a_slip_changes_the_answer_and_nothing_else_of_the_form(
    task: str, options: dict, count: int
) -> None:
    rng = random.Random(1)
    check = answer_checker(config(task, options, count))
    wrong = 0
    for problem in generate_problems(config(task, options, count // 5), emit=Events()):
        right, slipped = write_trace(problem.task), corrupt_trace(problem.task, rng)
        if right is None or slipped is None:
            continue
        assert slipped.think.endswith(slipped.answer)
        assert slipped.think.count("\n") == right.think.count("\n")
        wrong += check(slipped.answer, dict(problem.task)) < 1.0
    assert wrong >= 0.95 * (count // 5)  # the rest: 0 × anything, words of one letter


def test_chain_slip_is_one_line_and_the_rest_follows_from_it() -> None:
    rng = random.Random(0)
    for problem in generate_problems(
        config("chain_sum", {"min_terms": 4, "max_terms": 5}, 300), emit=Events()
    ):
        trace = corrupt_trace(problem.task, rng)
        assert trace is not None
        wrong_lines = 0
        before = problem.task["metadata"]["expression"].split()[0]
        for line in trace.think.splitlines():
            left, operator, right, _, result = line.split()
            assert left == before
            exact = int(left) + int(right) * (1 if operator == "+" else -1)
            wrong_lines += exact != int(result)
            before = result
        assert wrong_lines == 1


def test_arithmetic_tokens_are_few() -> None:
    settings = config("chain_sum", ARITHMETIC, 2000)
    tokenizer = train_tokenizer(
        tokenizer_texts(settings, num_texts=1000, emit=Events()), vocab_size=512
    )
    prompts = load_prompts(settings, tokenizer, emit=Events()).train
    responses = [
        int(s.columns["loss_mask"].sum())
        for s in load_examples(settings, tokenizer, emit=Events()).train
    ]
    assert np.mean([p.tokens.size for p in prompts]) <= 10
    assert np.mean(responses) <= 25
    assert max(p.tokens.size for p in prompts) <= 16
    assert max(responses) <= 40


def test_problems_are_different_and_follow_the_seed() -> None:
    first, again, other = (
        [
            p.prompt
            for p in generate_problems(config("chain_sum", ARITHMETIC, 500, seed), emit=Events())
        ]
        for seed in (0, 0, 1)
    )
    assert first == again
    assert len(set(first)) == 500
    # small problems may recur; a shifted seed would share nearly all
    assert len(set(first) & set(other)) < 100


def test_more_problems_keep_the_first_ones() -> None:
    few, many = (
        list(generate_problems(config("chain_sum", {}, n), emit=Events())) for n in (50, 80)
    )
    assert [by_prompt(p) for p in few] == [by_prompt(p) for p in many[:50]]


@pytest.mark.parametrize(
    "task", ["chain_sum", "number_sorting", "countdown", "simple_equations", "leg_counting"]
)
def test_task_survives_json_and_scores(task: str) -> None:
    """What lands in Prompt.task is enough for reasoning-gym's scorer, also from another process."""
    score = reasoning_gym.get_score_answer_fn(task)
    for problem in generate_problems(config(task, {}, 20), emit=Events()):
        entry = json.loads(json.dumps(problem.task))
        assert entry == problem.task
        assert entry["task"] == task
        assert score(entry["answer"], entry) == 1.0
        assert score("no answer", entry) < 1.0


def test_a_small_task_runs_out_loudly() -> None:
    events = Events()
    made = list(
        generate_problems(config("chain_sum", {"max_terms": 2, "max_digits": 1}, 5000), emit=events)
    )
    assert len(made) == 200
    assert events.named("data.exhausted") == [
        {"task": "chain_sum", "asked": 5000, "found": 200, "draws": 101_000}
    ]


def test_answers_that_ignore_precedence_give_no_trace() -> None:
    """Without parentheses the task's own answers go from the left; such problems are dropped from
    examples, counted."""
    events = Events()
    settings = config("basic_arithmetic", {"allow_parentheses": False, "max_digits": 1}, 300)
    tokenizer = train_tokenizer(["Calculate 1."], vocab_size=262)
    kept = load_examples(settings, tokenizer, emit=events)
    dropped = events.named("data.loaded")[0]["dropped"]["untraced"]
    assert dropped > 0
    assert len(kept.train) + len(kept.held_out) + dropped == 300


def test_faults_name_the_nearest(tmp_path) -> None:
    with pytest.raises(ConfigError, match="chain_sun") as caught:
        list(generate_problems(config("chain_sun", {}, 3), emit=Events()))
    assert "chain_sum" in caught.value.hint
    with pytest.raises(ConfigError, match="max_term ") as caught:
        list(generate_problems(config("chain_sum", {"max_term": 3}, 3), emit=Events()))
    assert "max_terms" in caught.value.hint
    with pytest.raises(ConfigError, match="refused by chain_sum"):
        list(
            generate_problems(
                config("chain_sum", {"min_terms": 9, "max_terms": 3}, 3), emit=Events()
            )
        )
    assert "chain_sum" in traced_tasks()
