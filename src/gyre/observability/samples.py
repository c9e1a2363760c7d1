"""Samples: rollouts for people to read, as lines of JSON. In: rollouts with scores. Out:
samples.jsonl, and rows back.

Rows carry the attempt and a number from the event log's own counter, so the fences of events.jsonl
hold here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.core.records import Rollout, Score
from gyre.observability.events import EventLog
from gyre.observability.jsonl import LineWriter

LOGPROB_DIGITS = 4  # enough to read, and half the bytes


class SampleLog:
    """Appends samples of one attempt."""

    def __init__(self, path: Path | str, events: EventLog):
        self._events = events
        self._writer = LineWriter(Path(path))

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append one sample: the fields of `sample_row`, or some of them."""
        self._writer.append(
            {"seq": self._events.take_seq(), **sample, "attempt": self._events.attempt}
        )

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def sample_row(
    rollout: Rollout, score: Score, *, step: int, stage: str, pieces: Sequence[str]
) -> dict[str, Any]:
    """Format one rollout for people. `pieces` holds the text of each token after the prompt."""
    start = len(rollout.prompt.tokens)
    tokens = [int(token) for token in rollout.tokens[start:]]
    assert len(pieces) == len(tokens), f"{len(pieces)} pieces for {len(tokens)} tokens"
    logprobs = [
        round(float(logprob), LOGPROB_DIGITS) if chosen else None
        for logprob, chosen in zip(rollout.logprobs[start:], rollout.sampled[start:], strict=True)
    ]
    parts = [
        {
            "name": part.name,
            "value": part.value,
            "weight": part.weight,
            "reason": part.reason,
            "outcome": part.outcome,
        }
        for part in score.parts
    ]
    return {
        "step": step,
        "stage": stage,
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "tokens": tokens,
        "pieces": list(pieces),
        "logprobs": logprobs,
        "logprob_kind": rollout.logprob_kind,
        "score": score.value,
        "parts": parts,
        "finish": rollout.finish,
    }
