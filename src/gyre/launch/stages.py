"""Stages: which stages a run has, and what each one learns from. In: RunConfig. Out: Stage,
StageData."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gyre.core.contracts import PromptSource
from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.core.records import Prompt, TrainBatch, TrainSequence
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.examples import load_examples
from gyre.data.pairs import load_pairs
from gyre.data.sources import PairSource, PromptSet, ShuffledSource, load_prompts
from gyre.launch.train_args import COLD_START, MAIN
from gyre.loop.config import ColdStartConfig
from gyre.models.hub.folders import find_folder
from gyre.objectives.config import (
    AnyObjective,
    SftConfig,
    is_pairwise,
    needs_rollouts,
    trains_scores,
)
from gyre.runconfig.run_config import RunConfig
from gyre.text.tokenizer import Tokenizer
from gyre.trainer.config import TrainerConfig

Record = TypeVar("Record")
# trainer keys that a cold start leaves at their defaults; every other one holds for both stages
MAIN_STAGE_ONLY = (
    "critic_learning_rate",
    "betas",
    "eps",
    "weight_decay",
    "grad_clip",
    "sequences_per_update",
    "epochs_per_batch",
    "trace_steps",
    "reference",
    "reference_refresh_steps",
    "reference_moving_average",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a run, before anything is built."""

    name: str
    objective: AnyObjective
    trainer: TrainerConfig
    data: DataConfig
    records_per_step: int  # prompts, examples or pairs


def plan_stages(config: RunConfig, wanted: str) -> list[Stage]:
    """Return the stages that a run goes through, in order."""
    main = Stage(
        name=MAIN,
        objective=config.objective,
        trainer=config.trainer,
        data=config.data,
        records_per_step=config.rollout.prompts_per_step,
    )
    cold = config.cold_start
    assert cold is not None or wanted != COLD_START, "read_train_args refuses it"
    if cold is None or wanted == MAIN:
        return [main]
    supervised = Stage(
        name=COLD_START,
        objective=SftConfig(),
        trainer=_cold_start_trainer(config.trainer, cold),
        data=config.cold_start_data or config.data,
        records_per_step=cold.examples_per_step,
    )
    return [supervised] if wanted == COLD_START else [supervised, main]


def _cold_start_trainer(trainer: TrainerConfig, cold: ColdStartConfig) -> TrainerConfig:
    """Return the main stage's knobs, but for those of its optimization and of its objective."""
    defaults = {name: TrainerConfig.model_fields[name].default for name in MAIN_STAGE_ONLY}
    own = {
        "steps": cold.steps,
        "learning_rate": cold.learning_rate,
        "schedule": "cosine",
        "warmup_steps": cold.warmup_steps,
        "final_learning_rate_fraction": 0.1,
    }
    return trainer.model_copy(update={**defaults, **own})


def uses_engine(config: RunConfig, objective: AnyObjective) -> bool:
    """Online objectives generate to learn; the others generate only to be judged by rewards."""
    judged = bool(config.eval.num_problems and config.rewards.parts) and not trains_scores(
        objective
    )
    return needs_rollouts(objective) or judged


def trains_invariant(config: RunConfig, stage: Stage) -> bool:
    """Return whether the trainer must reproduce the engine's log-probs to the bit."""
    return config.engine.batch_invariant and needs_rollouts(stage.objective)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    source: PromptSource
    longest_prompt_tokens: int  # of an online stage; the longest whole sequence of an offline one
    eval_prompts: tuple[Prompt, ...] = ()
    sample_prompts: tuple[Prompt, ...] = ()  # a few, to try reward functions on
    eval_batch: TrainBatch | None = None


def load_stage_data(
    config: RunConfig, stage: Stage, tokenizer: Tokenizer, context_tokens: int, emit: Emit
) -> StageData:
    """Load the stage's records, and what it is judged on."""
    learned = bound_lengths(stage.data, prompt=context_tokens, sequence=context_tokens)
    seed, num = derive_seed(config.run.seed, "data", stage.name), config.eval.num_problems
    prompts: tuple[Prompt, ...] = ()
    if stage.name == MAIN and uses_engine(config, stage.objective):
        found = load_problems(config, tokenizer, context_tokens, emit)
        prompts = take_held_out(found.held_out, num, found.source)
        check_answers_fit(config, prompts, context_tokens)
        if needs_rollouts(stage.objective):
            longest = max(len(prompt.tokens) for prompt in (*found.train, *prompts))
            source = ShuffledSource(found.train, seed, found.source)
            return StageData(
                source=source,
                longest_prompt_tokens=longest,
                eval_prompts=prompts,
                sample_prompts=found.train[:3],
            )
    if is_pairwise(stage.objective):
        pairs = load_pairs(learned, tokenizer, emit=emit)
        judged = _take_records(stage, pairs.held_out, num, pairs.source, emit)
        held_out = tuple(sequence for pair in judged for sequence in pair)
        return StageData(
            source=PairSource(pairs.train, seed, pairs.source),
            longest_prompt_tokens=_longest(
                [sequence for pair in pairs.train for sequence in pair], prompts, config
            ),
            eval_prompts=prompts,
            sample_prompts=prompts[:3],
            eval_batch=TrainBatch(sequences=held_out, step=0) if held_out else None,
        )
    examples = load_examples(learned, tokenizer, emit=emit)
    held_out_sequences = _take_records(stage, examples.held_out, num, examples.source, emit)
    return StageData(
        source=ShuffledSource(examples.train, seed, examples.source),
        longest_prompt_tokens=_longest(examples.train, prompts, config),
        eval_prompts=prompts,
        sample_prompts=prompts[:3],
        eval_batch=TrainBatch(sequences=held_out_sequences, step=0) if held_out_sequences else None,
    )


async def read_stage_data(
    config: RunConfig, stage: Stage, tokenizer: Tokenizer, context_tokens: int, emit: Emit
) -> StageData:
    """Load a stage's records on a thread: the event loop keeps leases alive meanwhile."""
    return await asyncio.to_thread(load_stage_data, config, stage, tokenizer, context_tokens, emit)


def load_problems(
    config: RunConfig, tokenizer: Tokenizer, context_tokens: int, emit: Emit
) -> PromptSet:
    """Load the problems of the main stage: what `gyre eval` measures is what the run held out."""
    asked = bound_lengths(
        config.data, prompt=context_tokens - config.rollout.max_tokens, sequence=context_tokens
    )
    return load_prompts(asked, tokenizer, emit=emit)


def check_answers_fit(config: RunConfig, prompts: Sequence[Prompt], context_tokens: int) -> None:
    """Rollouts fit by how the problems were bounded; evaluation may ask for longer answers."""
    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    if longest + config.eval.max_tokens > context_tokens:
        raise ConfigError(
            f"eval.max_tokens = {config.eval.max_tokens} after held-out prompts of up to "
            f"{longest} tokens: the context "
            f"is {context_tokens} tokens",
            hint=f"lower eval.max_tokens to at most {max(1, context_tokens - longest)}, or leave "
            "it out to take "
            f"rollout.max_tokens = {config.rollout.max_tokens}",
        )


def bound_lengths(data: DataConfig, *, prompt: int, sequence: int) -> DataConfig:
    """Limits that were left open become what the context has room for, so that a row beyond it is
    named or dropped."""
    limits = {"max_prompt_tokens": max(0, prompt), "max_sequence_tokens": max(0, sequence)}
    return data.model_copy(
        update={name: limit for name, limit in limits.items() if not getattr(data, name)}
    )


def take_held_out(
    held_out: tuple[Record, ...], num: int, source: str, key: str = "eval.num_problems"
) -> tuple[Record, ...]:
    """Return the first `num`. ConfigError when there are fewer, since a mean over fewer would not
    be what was asked for."""
    if num > len(held_out):
        raise ConfigError(
            f"{key} = {num}: {source} holds out {len(held_out)}",
            hint="give more rows (data.num_problems of a task), raise data.held_out_fraction, or "
            f"lower {key} "
            f"to at most {len(held_out)}",
        )
    return held_out[:num]


def _take_records(
    stage: Stage, held_out: tuple[Record, ...], num: int, source: str, emit: Emit
) -> tuple[Record, ...]:
    """Pairs or examples that a stage is judged on. eval.num_problems is about the main stage: a
    cold start is measured on what its data hold out, and it is an event when that is less."""
    if stage.name == MAIN:
        return take_held_out(held_out, num, source)
    if len(held_out) < num:
        emit("warn.fewer_held_out", stage=stage.name, source=source, asked=num, got=len(held_out))
    return held_out[:num]


def _longest(
    sequences: Sequence[TrainSequence], prompts: Sequence[Prompt], config: RunConfig
) -> int:
    """Tokens of the longest sequence that an offline stage trains on or generates."""
    generated = (
        max((len(prompt.tokens) for prompt in prompts), default=0) + config.rollout.max_tokens
    )
    return max(max(len(sequence.tokens) for sequence in sequences), generated if prompts else 0)


def reward_folder(path: str) -> Path:
    """Return the export of a run that trained a reward model, or the folder of the model itself."""
    exported = Path(path) / "export"
    return find_folder(exported if exported.is_dir() else path)
