"""The real trainer and an engine with weights of its own, each on its own thread: rollouts run while
the policy trains, and it learns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.scorer import TableScorer
from fakes.source import ListSource
from gyre.core.records import Rollout
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.loop.config import EvalConfig, RolloutConfig
from gyre.loop.controller import Ring, RingConfig
from gyre.loop.ports import Observers, Parts, StageSpec
from gyre.loop.resume import StageProgress
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.objectives.config import GrpoConfig
from gyre.observability.events import EventLog, read_events
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans
from loop_cases import TOKENIZER, TRAIN, Gate, run
from trainer_cases import CPU, make_trainer
from unit.loop.test_native import SPEC

ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 4,
    "completions_per_prompt": 8,
    "max_tokens": 8,
    "ignore_eos": True,
}


def low_share(rollout: Rollout) -> float:
    """The share of chosen tokens in the lower half of the vocabulary: a half by chance."""
    return float(np.mean(rollout.tokens[rollout.sampled] < SPEC.vocab_size // 2))


class NoSnapshots:
    async def save(self, **given: Any) -> None: ...


def learn(folder: Path, *, steps: int, objective: GrpoConfig, **rollout: Any) -> list[dict]:
    """Run a ring from the same initial weights; returns the rows of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    events = EventLog(folder / "events.jsonl", attempt=1)
    samples = SampleLog(folder / "samples.jsonl", events)
    decoders = [Decoder(SPEC, device=CPU, dtype=torch.float32) for _ in range(2)]
    for decoder in decoders:
        init_weights(decoder, 3)
    with ThreadPoolExecutor(1) as learner_thread, ThreadPoolExecutor(1) as engine_thread:
        trainer = make_trainer(
            decoder=decoders[0],
            objective=objective,
            compute=learner_thread,
            shared=False,
            learning_rate=1e-2,
            steps=steps,
            tokens_per_chunk=512,
            emit=events.emit,
        )
        engine = NativeEngine(
            decoders[1],
            EngineConfig(num_pages=400),
            TOKENIZER,
            compute=engine_thread,
            emit=events.emit,
            device=CPU,
            dtype=torch.float32,
            shared_weights=False,
        )
        parts = Parts(
            source=ListSource(TRAIN, seed=5),
            trainer=trainer,
            gate=Gate(),
            snapshots=NoSnapshots(),
            observers=Observers(
                events=events,
                samples=samples,
                spans=Spans(events.emit),
                sample_groups_per_step=1,
            ),
            text=TOKENIZER,
            engine=engine,
            lifecycle=engine,
            scorer=TableScorer(low_share, emit=events.emit),
        )
        ring = Ring(
            StageSpec(name="main", objective=objective, steps=steps, seed=11),
            parts,
            RingConfig(
                rollout=RolloutConfig(**ROLLOUT | rollout),
                evaluation=EvalConfig(),
                snapshot_every_steps=0,
                accuracy=None,
                max_failed_share=1.0,
            ),
        )

        async def go() -> None:
            await engine.start(dummy=True)
            await ring.run(StageProgress(stage="main"))
            await engine.terminate()
            await trainer.close()

        try:
            run(go())
        finally:
            samples.close()
            events.close()
    return list(read_events(folder / "events.jsonl"))


def metrics(rows: list[dict], name: str) -> list[float]:
    return [row["metrics"][name] for row in rows if row["kind"] == "step.done"]


def test_one_step_off_differs_by_age_alone_and_repeats_to_the_bit(tmp_path):
    """At equal weights engine and trainer agree to rounding; a version apart they do not."""
    settings: dict[str, Any] = {"steps": 4, "objective": GrpoConfig()}
    plain = learn(tmp_path / "plain", **settings)
    rows = learn(tmp_path / "first", **settings, max_staleness=1)
    again = learn(tmp_path / "again", **settings, max_staleness=1)
    for name in ("reward", "loss", "grad_norm", "logprob_gap"):
        assert metrics(rows, name) == metrics(again, name), name
    assert max(metrics(plain, "logprob_gap")) < 1e-4
    gaps = metrics(rows, "logprob_gap")
    assert gaps[0] < 1e-4 < 1e-3 < min(gaps[1:])
    assert metrics(rows, "staleness_mean") == [0.0, 1.0, 1.0, 1.0]
    assert metrics(rows, "loss")[0] == metrics(plain, "loss")[0]
    assert all(value > 0 for value in metrics(rows, "chi2_token")[1:])


@pytest.mark.parametrize(
    ("weight_update", "bound", "correction"), [("drain", 1, "tis"), ("continue", 2, "icepop")]
)
def test_it_learns_from_stale_rollouts(tmp_path, weight_update, bound, correction):
    rows = learn(
        tmp_path,
        steps=24,
        objective=GrpoConfig(correction=correction, variant="dr_grpo", fixed_length_tokens=8),
        max_staleness=bound,
        weight_update=weight_update,
    )
    rewards = metrics(rows, "reward")
    assert np.mean(rewards[:3]) < 0.6 < 0.8 < np.mean(rewards[-3:])
    assert max(metrics(rows, "staleness_max")) <= bound
    policies = {row["policy"] for row in rows if row["kind"] == "engine.committed"}
    assert policies == {weight_update}
