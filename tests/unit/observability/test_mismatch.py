"""What the report says of a gap between engine and trainer: nothing where it is rounding, else one
line with its cause. The gaps come from distributions that differ by that cause, not from numbers
written down here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gyre.objectives.api import finish_sums, loss_sum
from gyre.objectives.config import GrpoConfig
from gyre.objectives.inputs import LossInputs
from gyre.observability.events import EventLog
from gyre.observability.mismatch import find_mismatch
from gyre.observability.report.build import gather, write_report

TOKENS, VOCAB = 600, 60


def step_metrics(engine_TV: torch.Tensor, trainer_TV: torch.Tensor, seed: int) -> dict[str, float]:
    """Metrics of a step whose tokens the engine samples from its own distribution."""
    drawn = torch.multinomial(engine_TV.exp(), 1, generator=torch.Generator().manual_seed(seed))
    inputs = LossInputs(
        num_sequences=1,
        sequence_index_N=torch.zeros(len(drawn), dtype=torch.int64),
        target_counts_S=torch.tensor([len(drawn)]),
        logprobs_N=trainer_TV.gather(1, drawn)[:, 0],
        behavior_logprobs_N=engine_TV.gather(1, drawn)[:, 0],
        advantages_N=torch.ones(len(drawn)),
    )
    return finish_sums(loss_sum(GrpoConfig(), inputs)[1])


def logits(seed: int, spread: float = 2.5) -> torch.Tensor:
    return torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def noisy(logits_TV: torch.Tensor, size: float, seed: int) -> torch.Tensor:
    return logits_TV + size * torch.randn(
        logits_TV.shape, generator=torch.Generator().manual_seed(seed + 1000)
    )


def truncated(logits_TV: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    ordered_TV, order_TV = logits_TV.softmax(-1).sort(-1, descending=True)
    keep_TV = ordered_TV.cumsum(-1) - ordered_TV < top_p
    keep_TV &= torch.arange(VOCAB) < (top_k or VOCAB)
    kept_TV = torch.zeros_like(keep_TV).scatter(1, order_TV, keep_TV)
    return logits_TV.masked_fill(~kept_TV, -torch.inf).log_softmax(-1)


def steps(cause: str) -> list[dict[str, float]]:
    made = []
    for seed in range(6):
        plain = logits(seed)
        engine, trainer, stale = plain.log_softmax(-1), plain.log_softmax(-1), 0.0
        if cause == "same":
            trainer = noisy(plain, 1e-6, seed).log_softmax(-1)
        elif cause.startswith("rounding"):
            trainer = noisy(plain, float(cause.split()[1]), seed).log_softmax(-1)
        elif cause.startswith("top_k"):
            engine = truncated(noisy(plain, 0.005, seed), top_k=int(cause.split()[1]))
        elif cause.startswith("top_p"):
            engine = truncated(noisy(plain, 0.005, seed), top_p=float(cause.split()[1]))
        # most tokens nearly certain, as a trained model's are
        elif cause.startswith("confident top_p"):
            plain = logits(seed, spread=6.0)
            engine, trainer = truncated(noisy(plain, 0.005, seed), top_p=0.9), plain.log_softmax(-1)
        elif cause == "other prompt":
            trainer = logits(seed + 50).log_softmax(-1)
        elif cause == "other prompt, confident":
            engine, trainer = (
                logits(seed, spread=8.0).log_softmax(-1),
                logits(seed + 50, spread=8.0).log_softmax(-1),
            )
        elif cause == "other tokens":
            trainer = noisy(plain, 2.0, seed).log_softmax(-1)
        elif cause == "stale sometimes" and seed % 2:
            trainer, stale = noisy(plain, 0.3, seed).log_softmax(-1), 0.6
        elif cause == "stale always":
            trainer, stale = noisy(plain, 0.2, seed).log_softmax(-1), 0.4
        elif cause == "never handed over":
            trainer = noisy(plain, 0.06 * seed + 1e-3, seed).log_softmax(-1)
        made.append(step_metrics(engine, trainer, seed) | {"stale_tokens_share": stale})
    return made


@pytest.mark.parametrize(
    ("made", "dtype", "cause"),
    [
        ("same", "float32", None),
        ("same", "bfloat16", None),
        ("rounding 0.01", "bfloat16", None),
        ("rounding 0.01", "float32", "precision"),
        ("rounding 0.1", "bfloat16", "precision"),
        ("top_k 5", "bfloat16", "truncation set"),
        ("top_k 20", "float32", "truncation set"),
        ("top_p 0.9", "bfloat16", "truncation set"),
        ("confident top_p", "bfloat16", "truncation set"),
        ("other tokens", "bfloat16", "template"),
        ("other prompt", "bfloat16", "template"),
        ("other prompt, confident", "float32", "template"),
        ("stale sometimes", "bfloat16", "stale weights"),
        ("stale always", "float32", "stale weights"),
        ("never handed over", "bfloat16", "stale weights"),
    ],
)
def test_the_cause_is_told_from_the_metrics_of_the_steps(made, dtype, cause):
    found = find_mismatch(steps(made), dtype)
    assert (None if found is None else found.cause) == cause
    if found is not None:
        assert cause in found.line and "\n" not in found.line


@pytest.mark.parametrize("made", ["stale sometimes", "stale always"])
def test_a_gap_of_tokens_that_may_be_old_is_no_finding(made):
    """With rollout.max_staleness the steps say how old; other causes are still told."""
    aged = [step | {"staleness_max": float(step["stale_tokens_share"] > 0)} for step in steps(made)]
    assert find_mismatch(aged, "bfloat16") is None
    wrong = [step | {"staleness_max": 1.0} for step in steps("other prompt")]
    found = find_mismatch(wrong, "bfloat16")
    assert found is not None and found.cause == "template"


def test_a_gap_that_is_no_number_is_told():
    found = find_mismatch([{"logprob_gap": 0.0}, {"logprob_gap": float("nan")}], "float32")
    assert (
        found is not None
        and found.cause == "not a number"
        and (found.num_steps, found.num_measured) == (1, 2)
    )
    assert "no number" in found.line


def test_steps_without_an_engine_say_nothing():
    assert find_mismatch([], "float32") is None
    assert find_mismatch([{"loss": 1.0}], "float32") is None


@pytest.mark.parametrize("made", ["same", "top_k 5"])
def test_the_report_has_the_line(tmp_path: Path, made: str):
    log = EventLog(tmp_path / "events.jsonl", attempt=1, check_schema=False)
    log.emit("run.started", name="gap", stages=[{"name": "main", "steps": 6}], dtype="float32")
    for number, metrics in enumerate(steps(made), 1):
        log.emit("step.done", step=number, stage="main", metrics=metrics)
    log.close()
    lines = gather(tmp_path)["mismatches"]
    page = write_report(tmp_path).read_text()
    if made == "same":
        assert lines == []
    else:
        assert len(lines) == 1 and "on 6 of 6 steps" in lines[0] and "truncation set" in lines[0]
        assert json.dumps(lines[0], ensure_ascii=False)[1:40] in page
