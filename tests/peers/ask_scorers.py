"""What the peers' scorers say of answers. In: a JSON list of [label, answer]. Out: one verdict
each, "+", "-" or "?".

Started by `environment.ask` in the peers' environment. Each scorer gets the answer in the form that
it looks for: `#### …` (verl gsm8k), `Answer: …` (verl math_dapo), `\\boxed{…}` (verl math_reward,
TRL), as it is (reasoning-gym). "?": TRL cannot read the label and skips the sample.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoning_gym
from trl.rewards import accuracy_reward
from verl.utils.reward_score import gsm8k, math_dapo, math_reward

SUMS = reasoning_gym.get_score_answer_fn("chain_sum")


def _trl(label: str, answer: str) -> str:
    solution = "$" + label.replace("$", "\\$").replace("\\%", "%").replace("%", "\\%") + "$"
    value = accuracy_reward(
        [[{"role": "assistant", "content": f"\\boxed{{{answer}}}"}]], [solution]
    )[0]
    return "?" if value is None else _sign(value == 1.0)


def _sign(right: bool) -> str:
    return "+" if right else "-"


SCORERS = {
    "gsm8k": lambda label, answer: _sign(gsm8k.compute_score(f"#### {answer}", label) == 1.0),
    "dapo": lambda label, answer: _sign(math_dapo.compute_score(f"Answer: {answer}", label)["acc"]),
    "math": lambda label, answer: _sign(
        math_reward.compute_score(f"\\boxed{{{answer}}}", label) == 1.0
    ),
    "trl": _trl,
    "rg": lambda label, answer: _sign(SUMS(answer, {"answer": label}) == 1.0),
}


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    answer = [{name: score(*case) for name, score in SCORERS.items()} for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(answer))
