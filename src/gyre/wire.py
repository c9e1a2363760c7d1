"""Wire: names in the config become objects; the only file that names concrete classes. In: a RunConfig, a folder.
Out: what a command came to. Callers: cli.

    train ─▶ Session (tokenizer, model, engine, scorer) ─▶ for each stage: trainer, memory manager, loop ─▶ export, report
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gyre import __version__
from gyre.core.errors import ConfigError, InputError, SnapshotError
from gyre.core.records import Phase, Prompt, Request, Sampling, TrainBatch, TrainSequence
from gyre.core.seeds import derive_seed
from gyre.data.config import DataConfig
from gyre.data.examples import load_examples, tokenizer_texts
from gyre.data.pairs import load_pairs
from gyre.data.sources import PairSource, PromptSet, ShuffledSource, load_prompts
from gyre.engine.native import NativeEngine
from gyre.loop.config import EvalConfig
from gyre.loop.controller import Ring, RingConfig
from gyre.loop.evaluate import Outcome, Rollouts
from gyre.loop.offline import OfflineConfig, OfflineLoop
from gyre.loop.ports import Observers, Parts, StageSpec
from gyre.loop.resume import Progress, from_snapshot
from gyre.models.decoder import Decoder
from gyre.models.export import export_hub
from gyre.models.heads import ScalarHead
from gyre.models.init import init_weights
from gyre.models.load import load_hub, load_scalar_head, verify_export
from gyre.models.spec import ModelSpec, spec_from_shape
from gyre.objectives.config import AnyObjective, SftConfig, is_pairwise, needs_rollouts, trains_scores
from gyre.observe.events import EventLog, next_attempt
from gyre.observe.hardware import describe_hardware
from gyre.observe.live import make_progress
from gyre.observe.report import write_report
from gyre.observe.samples import SampleLog
from gyre.observe.sinks import TensorBoardSink, WandbSink
from gyre.observe.spans import Spans
from gyre.rewards.score import RuleScorer
from gyre.runconfig import RunConfig, load_run_config
from gyre.text.detokenise import Detokeniser
from gyre.text.render import render_prompt
from gyre.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from gyre.trainer.config import TrainerConfig
from gyre.trainer.native import NativeTrainer
from gyre.trainer.snapshot import SnapshotStore
from gyre.vram.config import MemoryConfig
from gyre.vram.manager import MemoryManager
from gyre.vram.phases import default_needs

Emit = Callable[..., None]
MAIN, COLD_START = "main", "cold_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where tensors live and who works on them. One thread does all tensor work of a process."""

    device: torch.device
    dtype: torch.dtype
    compute: ThreadPoolExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model with its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer
    spec: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a run, before anything is built."""

    name: str
    objective: AnyObjective
    trainer: TrainerConfig
    data: DataConfig
    records_per_step: int  # prompts, examples or pairs


# Commands ------------------------------------------------------------------------------------------------------------


def train(
    config_path: Path | None, overrides: list[str], *, resume: Path | None, stage: str, plain: bool
) -> dict[str, Any]:
    """Make a run folder (or go on with one), run the stages, export, report."""
    if resume is not None:
        folder, overrides = resume, read_overrides(resume)
        config = load_run_config(folder / "config.toml", overrides)
    else:
        assert config_path is not None
        config = load_run_config(config_path, overrides)
        folder = make_run_folder(config, config_path, overrides, stage)
    run = Run(config, folder, stage=(folder / "stage.txt").read_text().strip(), plain=plain)
    try:
        return asyncio.run(run.go())
    finally:
        run.close()


def evaluate(target: Path, config_path: Path | None, overrides: list[str], *, num_problems: int) -> dict[str, Any]:
    """Accuracy of a run's export, or of a model folder, on a config's held-out problems."""
    model, config = find_model(target, config_path, overrides)
    machine = make_machine(config)
    events: list[str] = []
    emit: Emit = lambda kind, **fields: events.append(kind)  # noqa: E731
    policy = load_policy(model, machine)
    prompts = load_prompts(config.data, policy.tokenizer, emit=emit).held_out
    prompts = prompts[: num_problems or config.eval.num_problems or len(prompts)]

    async def go() -> Outcome:
        engine = make_engine(config, policy, machine, emit)
        scorer = RuleScorer(config.rewards, emit=emit)
        try:
            await engine.start(dummy=False)
            judge = make_judge(config, engine, scorer, policy.tokenizer)
            return await judge.run(prompts)
        finally:
            await scorer.close()
            await engine.terminate()

    outcome = asyncio.run(go())
    machine.compute.shutdown()
    return {"metric": outcome.metric, "value": outcome.value, "n": outcome.n, "detail": outcome.detail}


def chat(
    target: Path, turns: Iterator[str], write: Callable[[str], None], *, max_tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Answer each turn; a conversation goes on until "/new"."""
    model, config = find_model(target, None, [])
    machine = make_machine(config)
    policy = load_policy(model, machine)
    emit: Emit = lambda kind, **fields: None  # noqa: E731  a chat keeps no log
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    answers: list[str] = []

    async def go() -> None:
        engine = make_engine(config, policy, machine, emit)
        await engine.start(dummy=False)
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(turns):
            if turn.strip() == "/new":
                messages = []
                continue
            messages.append({"role": "user", "content": turn})
            tokens, _ = render_prompt(
                policy.tokenizer, messages, template=config.data.template, system=config.data.system
            )
            request = Request(request_id=str(number), tokens=tokens, sampling=sampling, seed=derive_seed(seed, number))
            words, pieces = Detokeniser(policy.tokenizer, skip_special=True), []
            async for chunk in engine.submit(request):
                if chunk.finish == "refused":
                    raise InputError(f"the model cannot answer: {chunk.reason}", hint="ask something shorter, or /new")
                pieces.append(words.push(chunk.tokens))
                write(pieces[-1])
            pieces.append(words.flush())
            write(pieces[-1] + "\n")
            answers.append("".join(pieces))
            messages.append({"role": "assistant", "content": answers[-1]})
        await engine.terminate()

    asyncio.run(go())
    machine.compute.shutdown()
    return {"answers": answers}


# The run -------------------------------------------------------------------------------------------------------------


class Run:
    """One attempt at a run: its folder, log, model and scorer, and the stages that it goes through."""

    def __init__(self, config: RunConfig, folder: Path, *, stage: str, plain: bool) -> None:
        self._config, self._folder, self._stage = config, folder, stage
        self._events = EventLog(folder / "events.jsonl", attempt=next_attempt(folder / "events.jsonl"))
        self._samples = SampleLog(folder / "samples.jsonl", self._events)
        self._emit = self._events.emit
        self._progress = make_progress(plain=plain)
        self._events.subscribe(self._progress)
        self._sinks = make_sinks(config, folder, self._events)
        self._spans = Spans(self._emit)
        self._machine = make_machine(config)

    async def go(self) -> dict[str, Any]:
        stages = plan_stages(self._config, self._stage)
        at, progress, found = self._find_progress(stages)
        policy = self._make_policy()
        self._announce(stages, policy, at)
        version, result = 0, progress
        for stage in stages[at:]:
            result, version = await self._run_stage(stage, policy, result, found, version)
            found = None
        export = self._export(policy)
        report = self._finish(stages[-1], result, version)
        return self._result(result, version, export, report)

    def close(self) -> None:
        self._progress.close()
        for sink in self._sinks:
            sink.close()
        self._samples.close()
        self._events.close()
        self._machine.compute.shutdown(wait=True)

    def _store(self, stage: Stage) -> SnapshotStore:
        folder = self._folder / "snapshots" / stage.name
        return SnapshotStore(folder, keep=self._config.snapshot.keep, emit=self._emit)

    def _find_progress(self, stages: list[Stage]) -> tuple[int, Progress, Mapping[str, Any] | None]:
        """(index of the stage to go on with, where it stands, what its trainer is restored from)."""
        for at in range(len(stages) - 1, -1, -1):
            snapshot = self._store(stages[at]).load_latest()
            if snapshot is not None:
                progress = from_snapshot(snapshot.state["loop"], snapshot.blobs)
                position = snapshot.state["loop"]["events"]
                self._events.fence(position["attempt"], position["seq"], step=progress.step, stage=progress.stage)
                return at, progress, {"tensors": snapshot.tensors, "state": snapshot.state["trainer"]}
        if self._events.attempt > 1:
            self._events.fence(None)
        return 0, Progress(stage=stages[0].name), None

    def _make_policy(self) -> Policy:
        """The model of the config; its tokenizer is kept in the run folder, where a resumed run finds it."""
        config, kept = self._config, self._folder / "tokenizer"
        source = config.tokenizer.path or config.model.path
        if kept.is_dir():
            tokenizer = load_tokenizer(kept)
        elif source:
            tokenizer = load_tokenizer(source)
        else:
            texts = tokenizer_texts(
                config.cold_start_data or config.data, num_texts=config.tokenizer.num_texts, emit=self._emit
            )
            tokenizer = train_tokenizer(
                texts, vocab_size=config.tokenizer.vocab_size, min_share=config.tokenizer.min_share
            )
        if not kept.is_dir():
            tokenizer.save(kept)
        return make_policy(config, tokenizer, self._machine)

    def _announce(self, stages: list[Stage], policy: Policy, at: int) -> None:
        config = self._config
        self._emit(
            "run.started",
            name=self._folder.name,
            stages=[{"name": stage.name, "steps": stage.trainer.steps} for stage in stages],
            objective=config.objective.kind,
            model={
                "path": config.model.path,
                "family": policy.spec.family,
                "num_parameters": policy.spec.num_parameters,
            },
            seed=config.run.seed,
            gyre=__version__,
            hardware=describe_hardware(),
            device=str(self._machine.device),
            dtype=str(self._machine.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            stage_index=at,
        )

    async def _run_stage(
        self, stage: Stage, policy: Policy, progress: Progress, found: Mapping[str, Any] | None, version: int
    ) -> tuple[Progress, int]:
        if progress.stage != stage.name:
            progress = Progress(stage=stage.name)
        with_engine = stage.name == MAIN and uses_engine(self._config, stage.objective)
        self._emit("stage.started", stage=stage.name, steps=stage.trainer.steps, step=progress.step)
        built = Built(self._config, self._folder, self._machine, self._emit)
        try:
            trainer = built.trainer(stage, policy, version)
            if found is not None:
                trainer.restore(found)
            parts = await built.parts(stage, policy, trainer, self._observers(), self._store(stage), with_engine)
            loop = built.loop(stage, parts)
            progress = await loop.run(progress)
            version = trainer.version
            if trains_scores(stage.objective):
                built.save_head(policy, trainer, self._folder)
        finally:
            await built.close()
        self._emit("stage.done", stage=stage.name, step=progress.step, version=version)
        return progress, version

    def _observers(self) -> Observers:
        return Observers(
            events=self._events,
            samples=self._samples,
            spans=self._spans,
            sample_groups_per_step=self._config.observe.sample_groups_per_step,
        )

    def _export(self, policy: Policy) -> Path:
        """Write the hub layout and read it back before saying so."""
        folder = self._folder / "export"
        with self._spans.phase("export"):
            head = folder.with_name("scalar_head.safetensors")
            scalar_head = load_scalar_head(self._folder, device=self._machine.device) if head.is_file() else None
            export_hub(
                policy.decoder,
                folder,
                dtype=self._machine.dtype,
                tokenizer_files=self._folder / "tokenizer",
                scalar_head=scalar_head,
            )
            verify_export(folder, policy.decoder)
        self._emit("export.verified", folder=folder.name)
        return folder

    def _finish(self, stage: Stage, progress: Progress, version: int) -> Path | None:
        self._emit("run.done", step=progress.step, version=version, evals=dict(progress.evals), stage=stage.name)
        self._samples.sync()
        report = write_report(self._folder) if self._config.observe.report else None
        self._progress.summary(self._folder, report=report)
        return report

    def _result(self, progress: Progress, version: int, export: Path, report: Path | None) -> dict[str, Any]:
        evals = {name: dict(numbers) for name, numbers in progress.evals.items()}
        return {
            "run": str(self._folder),
            "step": progress.step,
            "version": version,
            "evals": evals,
            "seconds": {phase: round(seconds, 3) for phase, seconds in self._spans.seconds().items()},
            "export": str(export),
            "report": None if report is None else str(report),
            "goal": judge_goal(self._config, evals),
        }


class Built:
    """The live objects of one stage, made in order and closed in reverse."""

    def __init__(self, config: RunConfig, folder: Path, machine: Machine, emit: Emit) -> None:
        self._config, self._folder, self._machine, self._emit = config, folder, machine, emit
        self._trainer: NativeTrainer | None = None
        self._engine: NativeEngine | None = None
        self._scorer: RuleScorer | None = None

    def trainer(self, stage: Stage, policy: Policy, version: int) -> NativeTrainer:
        reward, reward_model = self._config.rewards.model_part(), None
        if reward is not None and stage.name == MAIN:
            reward_model = load_reward_model(reward.path, self._machine, policy)
        self._trainer = NativeTrainer(
            decoder=policy.decoder,
            objective=stage.objective,
            config=stage.trainer,
            compute=self._machine.compute,
            emit=self._emit,
            seed=derive_seed(self._config.run.seed, "trainer", stage.name),
            reward_model=load_reward_model(reward.path, self._machine, policy)
            if reward and stage.name == MAIN
            else None,
            version=version,
            shared=True,
            disk_folder=self._disk_folder(),
        )
        return self._trainer

    async def parts(
        self,
        stage: Stage,
        policy: Policy,
        trainer: NativeTrainer,
        observers: Observers,
        store: SnapshotStore,
        with_engine: bool,
    ) -> Parts:
        config, data = self._config, load_stage_data(self._config, stage, policy.tokenizer, self._emit)
        if with_engine:
            self._scorer = RuleScorer(config.rewards, emit=self._emit)
            self._engine = make_engine(config, policy, self._machine, self._emit)
            await self._engine.start(dummy=False)
        gate = Gate(self._manager(trainer), self._machine.compute)
        return Parts(
            source=data.source,
            trainer=trainer,
            gate=gate,
            snapshots=Snapshots(store, trainer, self._machine.compute),
            observers=observers,
            text=policy.tokenizer,
            engine=self._engine,
            lifecycle=self._engine,
            scorer=self._scorer,
            eval_prompts=data.eval_prompts if with_engine else (),
            eval_batch=data.eval_batch,
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
                accuracy_part=accuracy_part(config),
                reward_model=(reward.name, reward.weight) if reward else None,
                restart_engine=config.memory.leave.get("engine") == "destroy",
            )
            return Ring(spec, parts, ring, compute=self._machine.compute)
        judge = None
        if self._engine is not None and self._scorer is not None:
            judge = make_judge(config, self._engine, self._scorer, parts.text)
        offline = OfflineConfig(
            records_per_step=stage.records_per_step,
            snapshot_every_steps=config.snapshot.every_steps,
            eval_every_steps=config.eval.every_steps,
        )
        return OfflineLoop(spec, parts, offline, judge=judge, compute=self._machine.compute)

    def save_head(self, policy: Policy, trainer: NativeTrainer, folder: Path) -> None:
        from gyre.models.export import save_scalar_head

        save_scalar_head(trainer.head, folder)

    async def close(self) -> None:
        if self._scorer is not None:
            await self._scorer.close()
        if self._engine is not None:
            await self._engine.terminate()
        if self._trainer is not None:
            await self._trainer.close()

    def _disk_folder(self) -> Path | None:
        name = self._config.memory.disk_folder
        return self._folder / name if name else None

    def _manager(self, trainer: NativeTrainer) -> MemoryManager:
        tenants = [trainer] if self._engine is None else [self._engine, trainer]
        return MemoryManager(
            tenants,
            resolve_memory(self._config, self._machine),
            self._machine.device,
            self._emit,
            needs=default_needs(shared_weights=True),
        )


class Gate:
    """PhaseGate over the memory manager, on the compute thread."""

    def __init__(self, manager: MemoryManager, compute: ThreadPoolExecutor) -> None:
        self._manager, self._compute = manager, compute

    async def enter(self, phase: Phase, *, step: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._compute, lambda: self._manager.enter(phase, step=step))


class Snapshots:
    """SnapshotPort: the trainer's tensors and the loop's state in one folder."""

    def __init__(self, store: SnapshotStore, trainer: NativeTrainer, compute: ThreadPoolExecutor) -> None:
        self._store, self._trainer, self._compute = store, trainer, compute

    async def save(self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._compute, self._save, step, state, blobs)

    def _save(self, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        own = self._trainer.snapshot()
        # Copies: a storage whose bytes the writer has looked at can no longer leave the device.
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in own["tensors"].items()}
        self._store.save(step, tensors=tensors, state={"loop": state, "trainer": own["state"]}, blobs=blobs)


# Pieces --------------------------------------------------------------------------------------------------------------


def plan_stages(config: RunConfig, wanted: str) -> list[Stage]:
    """The stages that a run goes through, in order."""
    main = Stage(
        name=MAIN,
        objective=config.objective,
        trainer=config.trainer,
        data=config.data,
        records_per_step=config.rollout.prompts_per_step,
    )
    cold = config.cold_start
    if wanted == COLD_START and cold is None:
        raise ConfigError("--stage cold_start: the config has no [cold_start]", hint="add the table, or run all stages")
    if cold is None or wanted == MAIN:
        return [main]
    supervised = Stage(
        name=COLD_START,
        objective=SftConfig(),
        trainer=TrainerConfig(
            steps=cold.steps,
            learning_rate=cold.learning_rate,
            schedule="cosine",
            warmup_steps=cold.warmup_steps,
            final_learning_rate_fraction=0.1,
            tokens_per_chunk=config.trainer.tokens_per_chunk,
        ),
        data=config.cold_start_data or config.data,
        records_per_step=cold.examples_per_step,
    )
    return [supervised] if wanted == COLD_START else [supervised, main]


def uses_engine(config: RunConfig, objective: AnyObjective) -> bool:
    """Online objectives generate to learn; the others generate only to be judged by rewards."""
    judged = bool(config.eval.num_problems and config.rewards.parts) and not trains_scores(objective)
    return needs_rollouts(objective) or judged


@dataclass(frozen=True, slots=True, kw_only=True)
class StageData:
    source: Any  # PromptSource
    eval_prompts: tuple[Prompt, ...] = ()
    eval_batch: TrainBatch | None = None


def load_stage_data(config: RunConfig, stage: Stage, tokenizer: Tokenizer, emit: Emit) -> StageData:
    """The stage's records, and what it is judged on."""
    seed, num = derive_seed(config.run.seed, "data", stage.name), config.eval.num_problems
    prompts: tuple[Prompt, ...] = ()
    if stage.name == MAIN and uses_engine(config, stage.objective):
        found = load_prompts(config.data, tokenizer, emit=emit)
        prompts = take_held_out(found, num)
        if needs_rollouts(stage.objective):
            return StageData(source=ShuffledSource(found.train, seed, found.source), eval_prompts=prompts)
    if is_pairwise(stage.objective):
        pairs = load_pairs(stage.data, tokenizer, emit=emit)
        held_out = tuple(sequence for pair in pairs.held_out[:num] for sequence in pair)
        return StageData(
            source=PairSource(pairs.train, seed, pairs.source),
            eval_prompts=prompts,
            eval_batch=TrainBatch(sequences=held_out, step=0) if held_out else None,
        )
    examples = load_examples(stage.data, tokenizer, emit=emit)
    held_out_sequences: tuple[TrainSequence, ...] = examples.held_out[:num]
    return StageData(
        source=ShuffledSource(examples.train, seed, examples.source),
        eval_prompts=prompts,
        eval_batch=TrainBatch(sequences=held_out_sequences, step=0) if held_out_sequences else None,
    )


def take_held_out(found: PromptSet, num: int) -> tuple[Prompt, ...]:
    if num > len(found.held_out):
        raise ConfigError(
            f"eval.num_problems = {num}: {found.source} holds out {len(found.held_out)}",
            hint="raise data.num_problems or data.held_out_fraction, or lower eval.num_problems",
        )
    return found.held_out[:num]


def make_machine(config: RunConfig) -> Machine:
    """Resolve device, dtype and threads."""
    if config.run.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"run.device = '{config.run.device}': accepted are auto, cpu, cuda")
    name = config.run.device if config.run.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device = 'cuda': torch sees no CUDA device here", hint="`gyre doctor` says why")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if config.run.dtype != "auto" and config.run.dtype not in dtypes:
        raise ConfigError(f"run.dtype = '{config.run.dtype}': accepted are auto, {', '.join(dtypes)}")
    dtype = dtypes.get(config.run.dtype) or (torch.bfloat16 if has_fast_bf16(name) else torch.float32)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    return Machine(device=torch.device(name), dtype=dtype, compute=ThreadPoolExecutor(1, thread_name_prefix="compute"))


def has_fast_bf16(device: str) -> bool:
    """Whether the hardware multiplies bfloat16 itself."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(describe_hardware()["flags"]["bf16"])


def make_policy(config: RunConfig, tokenizer: Tokenizer, machine: Machine) -> Policy:
    if config.model.path:
        spec, decoder = load_hub(config.model.path, device=machine.device, dtype=machine.dtype)
        if spec.vocab_size < tokenizer.vocab_size:
            raise InputError(
                f"the tokenizer has {tokenizer.vocab_size} entries, the model's vocabulary {spec.vocab_size}",
                hint="set tokenizer.path to the tokenizer that the model was made with",
            )
        return Policy(decoder=decoder, tokenizer=tokenizer, spec=spec)
    assert config.model.shape is not None
    spec = spec_from_shape(
        config.model.shape, vocab_size=tokenizer.vocab_size, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids
    )
    decoder = Decoder(spec, device=machine.device, dtype=machine.dtype)
    init_weights(decoder, derive_seed(config.run.seed, "model", config.model.init_seed))
    return Policy(decoder=decoder, tokenizer=tokenizer, spec=spec)


def load_policy(folder: Path, machine: Machine) -> Policy:
    spec, decoder = load_hub(folder, device=machine.device, dtype=machine.dtype)
    return Policy(decoder=decoder, tokenizer=load_tokenizer(folder), spec=spec)


def load_reward_model(path: str, machine: Machine, policy: Policy) -> tuple[Decoder, ScalarHead]:
    """A folder that objective rm exported; it must read the policy's own token ids."""
    folder = Path(path) / "export" if (Path(path) / "export").is_dir() else Path(path)
    _, decoder = load_hub(folder, device=machine.device, dtype=machine.dtype)
    theirs = load_tokenizer(folder).fingerprint
    if theirs != policy.tokenizer.fingerprint:
        raise InputError(
            f"the reward model in {path} has another tokenizer than the policy",
            hint="train both with the same tokenizer: set tokenizer.path of one run to the other's tokenizer folder",
        )
    return decoder, load_scalar_head(folder, device=machine.device)


def make_engine(config: RunConfig, policy: Policy, machine: Machine, emit: Emit) -> NativeEngine:
    return NativeEngine(
        policy.decoder,
        config.engine,
        policy.tokenizer,
        compute=machine.compute,
        emit=emit,
        device=machine.device,
        dtype=machine.dtype,
        shared_weights=True,
    )


def make_judge(config: RunConfig, engine: NativeEngine, scorer: RuleScorer, text: Any) -> Rollouts:
    settings: EvalConfig = config.eval.model_copy(update={"part": accuracy_part(config)})
    return Rollouts(engine, scorer, text, config.rollout, settings, seed=derive_seed(config.run.seed, "eval"))


def accuracy_part(config: RunConfig) -> str:
    """Name of the reward part whose value 1 counts as right."""
    rules = [part.name for part in config.rewards.parts if part.kind != "model"]
    if config.eval.part and config.eval.part not in rules:
        raise ConfigError(f"eval.part = '{config.eval.part}': the rewards are named {', '.join(rules) or 'nothing'}")
    return config.eval.part or (rules[0] if rules else "")


def resolve_memory(config: RunConfig, machine: Machine) -> MemoryConfig:
    """Budgets in bytes: what the config says, or what is free now."""
    memory = describe_hardware()
    available = int(memory["memory_available_bytes"] or 8 << 30)
    device = available // 2
    if machine.device.type == "cuda":
        device = torch.cuda.mem_get_info()[0]
    auto = {
        "device_budget_bytes": device,
        "host_budget_bytes": available // 2,
        "disk_budget_bytes": shutil.disk_usage(".").free // 2,
    }
    decided = {key: value for key, value in auto.items() if getattr(config.memory, key) == "auto"}
    return config.memory.model_copy(update=decided)


def make_sinks(config: RunConfig, folder: Path, events: EventLog) -> list[TensorBoardSink | WandbSink]:
    sinks: list[TensorBoardSink | WandbSink] = []
    if config.observe.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard"))
    if config.observe.wandb != "off":
        sinks.append(
            WandbSink(
                folder,
                project=config.observe.wandb_project,
                name=folder.name,
                mode=config.observe.wandb,
                config=config.model_dump(mode="json"),
                attempt=events.attempt,
            )
        )
    for sink in sinks:
        events.subscribe(sink.write)
    return sinks


def judge_goal(config: RunConfig, evals: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Whether the run reached its [goal], in numbers and in words."""
    goal = config.goal
    if goal is None:
        return None
    numbers = evals.get(goal.metric)
    if numbers is None:
        return {"reached": False, "verdict": f"goal missed: no evaluation named {goal.metric} was made"}
    before, after = numbers["before"], numbers["after"]
    checks = {
        f"before {before:.3f} ≤ {goal.at_most_before}": goal.at_most_before is None or before <= goal.at_most_before,
        f"after {after:.3f} ≥ {goal.at_least_after}": goal.at_least_after is None or after >= goal.at_least_after,
        f"gain {after - before:.3f} ≥ {goal.margin}": goal.margin is None or after - before >= goal.margin,
    }
    asked = [words for words in checks if not words.endswith("None")]
    reached = all(checks.values())
    return {
        "reached": reached,
        "verdict": f"goal {'reached' if reached else 'missed'}: {goal.metric} {', '.join(asked)}",
    }


# Folders -------------------------------------------------------------------------------------------------------------


def make_run_folder(config: RunConfig, config_path: Path, overrides: list[str], stage: str) -> Path:
    """runs/NAME, or NAME-2, …; holds the config as given and what the command line changed."""
    base = Path(config.run.folder) / config.run.name
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    folder.mkdir(parents=True)
    shutil.copyfile(config_path, folder / "config.toml")
    (folder / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")
    (folder / "stage.txt").write_text(stage, encoding="utf-8")
    return folder


def read_overrides(folder: Path) -> list[str]:
    if not (folder / "config.toml").is_file():
        raise SnapshotError(f"{folder} is no run folder: it has no config.toml", hint="give a folder under runs/")
    return (folder / "overrides.txt").read_text(encoding="utf-8").splitlines()


def find_model(target: Path, config_path: Path | None, overrides: list[str]) -> tuple[Path, RunConfig]:
    """(hub-layout folder, config) of a run folder or of a model folder."""
    if (target / "events.jsonl").is_file():
        model = target / "export"
        if not model.is_dir():
            raise InputError(f"{target} has no export yet", hint=f"finish it: gyre train --resume {target}")
        own = load_run_config(config_path or target / "config.toml", [*read_overrides(target), *overrides])
        return model, own
    if not (target / "config.json").is_file():
        raise InputError(f"{target} is neither a run folder nor a model folder", hint="runs are under runs/")
    if config_path is not None:
        return target, load_run_config(config_path, overrides)
    with tempfile.TemporaryDirectory() as bare:
        minimal = Path(bare) / "chat.toml"
        minimal.write_text(f'[model]\npath = "{target}"\n[objective]\nkind = "sft"\n', encoding="utf-8")
        return target, load_run_config(minimal, overrides)
