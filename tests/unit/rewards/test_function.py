"""Function rewards: the check before a run, and labeled scores during it."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from gyre.core.errors import InputError
from gyre.rewards.config import RewardsConfig
from gyre.rewards.function import as_number, call_function, load_function, wanted_extras
from gyre.rewards.pool.validate import check_reward_function, check_rewards
from rewards_cases import rollout

MODULE = """
import math, os, sys, time

def good(task, completion, *, bonus=0.0):
    print("noise on stdout")
    return float(task["answer"] in completion) + bonus

def reasoned(task, completion):
    return 1, f"{len(completion)} characters"

def with_extras(task, completion, prompt, num_tokens):
    return len(prompt) + num_tokens

def raises(task, completion):
    if "bad" in completion:
        raise KeyError("color")
    return 1.0

def raises_on_empty(task, completion):
    return float(completion[0] == "a")

def nan(task, completion):
    return math.nan if "bad" in completion else 1.0

def text(task, completion):
    return "1.0"

def nothing(task, completion):
    pass

def slow(task, completion):
    time.sleep(1000 if "bad" in completion else 0)
    return 1.0

def leaves(task, completion):
    os._exit(3)

def goes_silent(task, completion):
    os.closerange(1, 64)
    time.sleep(1000)

not_callable = 5
"""
SAMPLES = [
    rollout(1, "a good one: 5", {"answer": "5"}),
    rollout(2, "a bad one", {"answer": "7", "level": 3}),
]


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_rewards.py").write_text(MODULE)
    (folder / "my_broken.py").write_text("import no_such_module_at_all")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.mark.parametrize("name", ["good", "reasoned", "with_extras"])
def test_accepts_what_keeps_the_contract(name):
    check_reward_function(f"my_rewards:{name}", SAMPLES)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "raises",
            ["raised KeyError at ", "my_rewards.py:16: 'color'", "'a bad one'", "'level': 3"],
        ),
        ("raises_on_empty", ["IndexError", "on the completion ''"]),
        ("nan", ["returned nan (", "my_rewards.py:22)", "'a bad one'"]),
        ("text", ["returned str, not a number (", "my_rewards.py:25): '1.0'", "'a good one: 5'"]),
        ("nothing", ["NoneType"]),
        ("slow", ["took longer than 0.5 s", "'a bad one'"]),
        ("leaves", ["exit code 3", "'a good one: 5'"]),
        ("goes_silent", ["closed the channel of its process", "'a good one: 5'"]),
        ("not_callable", ["has no function 'not_callable'"]),
        ("missing", ["has no function 'missing'"]),
    ],
)
def test_refuses_with_the_failing_case(name, said):
    with pytest.raises(InputError) as refusal:
        check_reward_function(
            f"my_rewards:{name}", SAMPLES, limit_s=0.5 if name in ("slow", "goes_silent") else 10.0
        )
    for words in said:
        assert words in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("path", "said"), [("my_broken:f", "no_such_module_at_all"), ("nowhere_at_all:f", "nowhere")]
)
def test_refuses_what_cannot_be_imported(path, said):
    with pytest.raises(InputError, match=said):
        check_reward_function(path, SAMPLES)


def test_options_reach_the_function_and_unknown_ones_are_refused():
    part = {"kind": "function", "path": "my_rewards:good", "options": {"bonus": 0.5}}
    check_rewards(RewardsConfig.model_validate({"parts": [part]}), SAMPLES)
    part["options"] = {"bonnus": 0.5}
    with pytest.raises(InputError, match="bonnus"):
        check_rewards(RewardsConfig.model_validate({"parts": [part]}), SAMPLES)


@pytest.mark.parametrize(
    ("result", "outcome", "value"),
    [
        (1, "ok", 1.0),
        (True, "ok", 1.0),
        (0.25, "ok", 0.25),
        (np.float32(0.5), "ok", 0.5),
        (np.array(2.0), "ok", 2.0),
        ((0.5, "half"), "ok", 0.5),
        (math.inf, "invalid", 0.0),
        (np.float64("nan"), "invalid", 0.0),
        (10**400, "invalid", 0.0),
        ("0.5", "invalid", 0.0),
        (None, "invalid", 0.0),
        (np.zeros(2), "invalid", 0.0),
        (1 + 1j, "invalid", 0.0),
    ],
)
def test_results_are_judged(result, outcome, value):
    got, reason, label = call_function(lambda task, text: result, {}, "", {}, {})
    assert (label, got) == (outcome, value) and reason


def test_anything_raised_is_a_labeled_score():
    for error in (ValueError("x"), SystemExit(1), KeyboardInterrupt(), RecursionError()):

        def function(task, text, error=error):
            raise error

        value, reason, outcome = call_function(function, {}, "", {}, {})
        assert (value, outcome) == (0.0, "error") and type(error).__name__ in reason


def test_extras_are_given_by_name():
    assert wanted_extras(load_function("my_rewards:with_extras")) == ("prompt", "num_tokens")
    assert wanted_extras(load_function("my_rewards:good")) == ()
    assert as_number(load_function("my_rewards:good")) is None
