"""Reward of bench/grpo_step.py: the share of digits among a completion's characters;
peers/trl_grpo.py has the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def digit_share(task: Mapping[str, Any], completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
