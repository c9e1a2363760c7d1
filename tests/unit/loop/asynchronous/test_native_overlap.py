"""Engines with weights of their own, in threads of their own: rollouts run while the policy trains,
and the real one learns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster_roles import start_workers
from fakes.scorer import TableScorer
from fakes.source import ListSource
from fakes.trainer import CountingTrainer
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.core.records import RoleSpec, Rollout
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
from local_cluster import LocalCluster
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


class Log:
    """The sinks of one run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "events.jsonl"
        self.events = EventLog(self.path, attempt=1)
        self.samples = SampleLog(folder / "samples.jsonl", self.events)

    def close(self) -> list[dict]:
        """Return the rows."""
        self.samples.close()
        self.events.close()
        return list(read_events(self.path))


def ring_of(
    log: Log, trainer: Any, engine: Any, objective: GrpoConfig, steps: int, **rollout: Any
) -> Ring:
    emit = log.events.emit
    observers = Observers(
        events=log.events, samples=log.samples, spans=Spans(emit), sample_groups_per_step=1
    )
    parts = Parts(
        source=ListSource(TRAIN, seed=5),
        trainer=trainer,
        gate=Gate(),
        snapshots=NoSnapshots(),
        observers=observers,
        text=TOKENIZER,
        engine=engine,
        lifecycle=engine,
        scorer=TableScorer(low_share, emit=emit),
    )
    config = RingConfig(
        rollout=RolloutConfig(**ROLLOUT | rollout),
        evaluation=EvalConfig(),
        snapshot_every_steps=0,
        accuracy=None,
        max_failed_share=1.0,
    )
    return Ring(StageSpec(name="main", objective=objective, steps=steps, seed=11), parts, config)


def learn(folder: Path, *, steps: int, objective: GrpoConfig, **rollout: Any) -> list[dict]:
    """Run a ring from the same initial weights; returns the rows of its log."""
    log = Log(folder)
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
            emit=log.events.emit,
        )
        engine = NativeEngine(
            decoders[1],
            EngineConfig(num_pages=400),
            TOKENIZER,
            compute=engine_thread,
            emit=log.events.emit,
            device=CPU,
            dtype=torch.float32,
            shared_weights=False,
        )
        ring = ring_of(log, trainer, engine, objective, steps, **rollout)

        async def go() -> None:
            await engine.start(dummy=True)
            await ring.run(StageProgress(stage="main"))
            await engine.terminate()
            await trainer.close()

        try:
            run(go())
        finally:
            rows = log.close()
    return rows


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


@pytest.mark.parametrize("weight_update", ["drain", "continue"])
def test_a_pool_of_two_engines_takes_versions_beside_its_rollouts(tmp_path, weight_update):
    """Engines behind workers; each has served rollouts of more than one version."""
    log = Log(tmp_path)
    cluster = LocalCluster(on_event=lambda worker, kind, **fields: None)
    names = ("engine-0", "engine-1")
    specs = [RoleSpec(name=name, builder="cluster_roles:fake_engine") for name in names]
    pool = EnginePool(
        cluster,
        start_workers(cluster, specs),
        settings=PoolSettings(call_deadline_s=30.0, hang_s=30.0, progress_tokens=4),
        emit=log.events.emit,
    )
    trainer = CountingTrainer(emit=log.events.emit)
    ring = ring_of(
        log, trainer, pool, GrpoConfig(), 6, max_staleness=2, weight_update=weight_update
    )

    async def go() -> dict[str, int]:
        await pool.start(dummy=True)
        await ring.run(StageProgress(stage="main"))
        found = {status.name: status.stats for status in await pool.inspect()}
        await pool.terminate()
        await pool.close()
        await cluster.close()
        return {name: stats.generated_tokens for name, stats in found.items() if stats is not None}

    try:
        generated = run(go())
    finally:
        rows = log.close()
    assert generated.keys() == set(names) and min(generated.values()) > 0
    assert sum(generated.values()) == 6 * 4 * 8 * 8
    ages = metrics(rows, "staleness_max")
    assert len(ages) == 6 and ages[0] == 0 and 1 <= max(ages) <= 2
    versions = [row["version"] for row in rows if row["kind"] == "weights.published"]
    assert versions == list(range(7))
