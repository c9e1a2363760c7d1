"""Rollouts for the rewards tests, and a record of events."""

from __future__ import annotations

from typing import Any

import numpy as np

from gyre.core.records import Prompt, Rollout, Sampling


def rollout(number: int, text: str, task: dict[str, Any], *, num_tokens: int = 5) -> Rollout:
    """One rollout with `num_tokens` sampled tokens after a prompt of three."""
    total = 3 + num_tokens
    prompt = Prompt(
        prompt_id=str(number),
        tokens=np.arange(3, dtype=np.int32),
        text="What is it?",
        task=task,
        source="test",
    )
    zeros = np.zeros(total, np.float32)
    return Rollout(
        rollout_id=f"r{number}",
        group_id="g",
        prompt=prompt,
        tokens=np.arange(total, dtype=np.int32),
        sampled=np.arange(total) >= 3,
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=np.zeros(total, np.int32),
        sampling=Sampling(),
        finish="stop",
        text=text,
    )


class Events(list):
    """Collects what is emitted: a list of (kind, fields)."""

    def emit(self, kind: str, **fields: Any) -> None:
        self.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]
