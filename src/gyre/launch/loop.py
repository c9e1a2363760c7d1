"""Loop: the loop of one stage, over whatever holds its trainer and engine. In: Stage, data, plan,
placed objects. Out: a loop, and what is to be closed after it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from gyre.core.events import Emit
from gyre.core.seeds import derive_seed
from gyre.launch.factories import engine_window, make_judge, make_scorer
from gyre.launch.goal import accuracy_metric
from gyre.launch.stages import Stage, StageData
from gyre.loop.controller import Ring, RingConfig
from gyre.loop.offline import OfflineConfig, OfflineLoop
from gyre.loop.ports import Observers, Parts, StageParts, StageSpec, TextPort
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import needs_rollouts
from gyre.rewards.score import RuleScorer
from gyre.runconfig.run_config import RunConfig


class StageInputs:
    """What one stage needs beside its trainer and engine."""

    def __init__(self, config: RunConfig, emit: Emit, *, rewards_log: Path) -> None:
        self._config = config
        self._emit = emit
        self._rewards_log = rewards_log
        self._scorer: RuleScorer | None = None

    def parts(
        self,
        placed: StageParts,
        text: TextPort,
        data: StageData,
        observers: Observers,
        stop: StopRequest,
    ) -> Parts:
        if placed.engine is not None:
            self._scorer = make_scorer(self._config, self._emit, log=self._rewards_log)
        return Parts(
            **{part.name: getattr(placed, part.name) for part in fields(placed)},
            source=data.source,
            observers=observers,
            text=text,
            scorer=self._scorer,
            eval_prompts=data.eval_prompts if placed.engine is not None else (),
            eval_batch=data.eval_batch,
            stop=stop,
        )

    def loop(self, stage: Stage, parts: Parts) -> Ring | OfflineLoop:
        config = self._config
        spec = StageSpec(
            name=stage.name,
            objective=stage.objective,
            steps=stage.trainer.steps,
            seed=derive_seed(config.run.seed, "stage", stage.name),
        )
        if needs_rollouts(stage.objective):
            reward = config.rewards.model_part()
            ring = RingConfig(
                rollout=config.rollout,
                evaluation=config.eval,
                snapshot_every_steps=config.snapshot.every_steps,
                export_every_steps=config.snapshot.export_every_steps,
                accuracy=accuracy_metric(config),
                max_failed_share=config.rewards.max_failed_share,
                reward_model=(reward.name, reward.weight) if reward else None,
                window=engine_window(config.engine),
                restart_engine=config.memory.leave.get("engine") == "destroy",
            )
            return Ring(spec, parts, ring)
        judge = None
        if parts.engine is not None and self._scorer is not None:
            judge = make_judge(config, parts.engine, self._scorer, parts.text, self._emit)
        offline = OfflineConfig(
            records_per_step=stage.records_per_step,
            snapshot_every_steps=config.snapshot.every_steps,
            export_every_steps=config.snapshot.export_every_steps,
            eval_every_steps=config.eval.every_steps,
        )
        return OfflineLoop(spec, parts, offline, judge=judge)

    async def close(self) -> None:
        if self._scorer is not None:
            await self._scorer.close()
