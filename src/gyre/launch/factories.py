"""Factories: one object each from the config. In: a RunConfig. Out: machine, policy, engine,
scorer, judge, sinks.

With launch.loop, the only place that names concrete classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from gyre.core.contracts import RolloutEngine
from gyre.core.errors import ConfigError, InputError
from gyre.core.events import Emit
from gyre.core.files import read_json, replacing_folder
from gyre.core.records import Prompt, Rollout
from gyre.core.seeds import derive_seed
from gyre.data.examples import tokenizer_texts
from gyre.distributed.process_group import RankGroup
from gyre.engine.config import EngineConfig
from gyre.engine.core_worker import FollowingRanks
from gyre.engine.engine import NativeEngine
from gyre.engine.runners.select import why_not_fused, why_not_tokenwise
from gyre.kernels.cpu.process import avoid_hidden_tiles, keep_freed_memory
from gyre.kernels.dispatch import why_too_old
from gyre.launch.goal import accuracy_metric
from gyre.launch.stages import Stage, reward_folder, trains_invariant
from gyre.loop.collect import Window
from gyre.loop.evaluate import Rollouts
from gyre.loop.ports import TextPort
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.folders import CONFIG_FILE, LoadFormat, find_folder
from gyre.models.hub.load import load_hub, load_scalar_head
from gyre.models.hub_keys import keys_without_effect
from gyre.models.init import FreshWeights, init_dummies
from gyre.models.layers.tensor_parallel import ReplicatedRows
from gyre.models.spec import ModelSpec, spec_from_hub_config, spec_from_shape
from gyre.observability.events import EventLog
from gyre.observability.hardware import describe_hardware
from gyre.observability.prometheus import PrometheusSink
from gyre.observability.tracing.otlp_sender import OtlpSender, read_endpoint
from gyre.observability.tracing.span_queue import SpanQueue
from gyre.observability.tracing.step_spans import StepTraceSink
from gyre.observability.trackers import TensorBoardSink, Tracker, WandbSink
from gyre.planner.plan import DeviceKind, Dtype, best_dtype
from gyre.rewards.pool.validate import check_rewards
from gyre.rewards.score import RuleScorer
from gyre.runconfig.run_config import INVARIANT_HINT, INVARIANT_REFUSAL, RunConfig
from gyre.text.hub_child import load_apart, load_kept
from gyre.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from gyre.weights.gather import ShardSource

DTYPES: Mapping[Dtype, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where tensors live and who works on them. One thread does all tensor work of a process."""

    device: torch.device
    dtype: torch.dtype
    compute: ThreadPoolExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a model whose weights are elsewhere."""

    tokenizer: Tokenizer
    spec: ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model with its tokenizer. The decoder of a new run is on the meta device until a trainer
    takes it. So is that of a stage that starts from shards."""

    decoder: Decoder
    tokenizer: Tokenizer
    spec: ModelSpec
    # what fills a decoder of the meta device
    weights: Checkpoint | FreshWeights | ShardSource | None = None


def make_machine(config: RunConfig) -> Machine:
    """Resolve device, dtype and threads."""
    best: DeviceKind = "cuda" if torch.cuda.is_available() else "cpu"
    name = best if config.run.device == "auto" else config.run.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "run.device = 'cuda': torch sees no CUDA device here",
            hint="`gyre doctor` says why; `gyre plan RUN.toml --gpu h200` plans for a GPU that is "
            "not here",
        )
    asked = config.run.dtype
    dtype = DTYPES[best_dtype(name, bf16=has_fast_bf16(name)) if asked == "auto" else asked]
    avoid_hidden_tiles()
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if name == "cpu":
        keep_freed_memory()
    return Machine(
        device=torch.device(name),
        dtype=dtype,
        compute=ThreadPoolExecutor(1, thread_name_prefix="compute"),
    )


def dtype_name(machine: Machine) -> Dtype:
    return next(name for name, dtype in DTYPES.items() if dtype == machine.dtype)


def has_fast_bf16(device: str) -> bool:
    """Return whether the hardware multiplies bfloat16 natively."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(describe_hardware()["flags"]["bf16"])


def make_tokenizer(config: RunConfig, kept: Path, emit: Emit) -> Tokenizer:
    """Load the tokenizer of the config or the model, or train one on the data. It is kept in the
    run folder for a resume."""
    source = config.tokenizer.path or config.model.path
    if kept.is_dir():
        return load_tokenizer(kept)
    if source:
        tokenizer = load_tokenizer(source, end_token=config.tokenizer.end_token)
    elif config.tokenizer.end_token:
        raise ConfigError(
            f"tokenizer.end_token = {config.tokenizer.end_token!r}: a tokenizer that is trained "
            "here has its own",
            hint="leave it out, or set tokenizer.path",
        )
    else:
        data = config.cold_start_data or config.data
        texts = tokenizer_texts(data, num_texts=config.tokenizer.num_texts, emit=emit)
        shape, wanted = config.model.shape, config.tokenizer
        style = "qwen2" if shape is not None and shape.family == "qwen2" else "clauses"
        tokenizer = train_tokenizer(
            texts, vocab_size=wanted.vocab_size, min_share=wanted.min_share, style=style
        )
    with replacing_folder(kept, durable=False) as aside:
        tokenizer.save(aside)  # whole or not there: a run killed here can go on
    return tokenizer


def make_policy(config: RunConfig, tokenizer: Tokenizer, machine: Machine) -> Policy:
    """Make the model's shapes and find its weights. Of a checkpoint names and shapes are checked
    now; no weight is read before a trainer knows which ones its rank holds."""
    spec = make_facts(config, tokenizer).spec
    if config.model.path:
        weights = Checkpoint(config.model.path)
    else:
        weights = FreshWeights(spec, derive_seed(config.run.seed, "model", config.model.init_seed))
    return Policy(
        decoder=blank_decoder(spec, machine), tokenizer=tokenizer, spec=spec, weights=weights
    )


def blank_decoder(spec: ModelSpec, machine: Machine) -> Decoder:
    """Shapes without numbers; they take no memory."""
    return Decoder(spec, device=torch.device("meta"), dtype=machine.dtype)


def make_facts(config: RunConfig, tokenizer: Tokenizer) -> Facts:
    """Return the model's sizes. InputError if its vocabulary is too small for the tokenizer."""
    spec = find_spec(config, tokenizer)
    if spec.vocab_size < tokenizer.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} entries, the model's vocabulary "
            f"{spec.vocab_size}",
            hint="set tokenizer.path to the tokenizer that the model was made with",
        )
    # An export must end where this run's rollouts did, whatever the base model's config.json says.
    return Facts(tokenizer=tokenizer, spec=replace(spec, eos_ids=tokenizer.eos_ids))


def find_spec(config: RunConfig, tokenizer: Tokenizer) -> ModelSpec:
    """Return the model's sizes, without its weights."""
    if config.model.path:
        return spec_from_hub_config(read_json(find_folder(config.model.path) / CONFIG_FILE))
    shape = config.model.shape
    assert shape is not None
    if 0 < shape.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.shape.vocab_size = {shape.vocab_size}: the tokenizer has "
            f"{tokenizer.vocab_size} entries",
            hint="leave it out to take the tokenizer's number, or give a larger one",
        )
    vocab_size = shape.vocab_size or tokenizer.vocab_size
    return spec_from_shape(
        shape, vocab_size=vocab_size, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids
    )


def tell_ignored_keys(config: RunConfig, emit: Emit) -> None:
    """Emit one event per model folder whose config.json has unread keys: they may ask for something
    else."""
    reward = config.rewards.model_part()
    folders = [find_folder(config.model.path)] if config.model.path else []
    for folder in [*folders, *([reward_folder(reward.path)] if reward else [])]:
        keys = keys_without_effect(read_json(folder / CONFIG_FILE))
        if keys:
            emit("warn.model_keys_ignored", folder=str(folder), keys=keys)


def check_invariant(
    config: RunConfig, stage: Stage, spec: ModelSpec, machine: Machine, page_tokens: int
) -> None:
    """Refuse batch-invariant training where the trainer cannot run the engine's kernels."""
    if not trains_invariant(config, stage):
        return
    reason = "on a CPU engine and trainer run different kernels, but for several tensor ranks"
    if machine.device.type == "cuda":
        reason = why_too_old(machine.device) or why_not_fused(spec, machine.dtype, page_tokens)
    elif config.parallel.tensor_ranks > 1:
        reason = why_not_tokenwise(spec, machine.dtype)
    if reason is not None:
        raise ConfigError(f"{INVARIANT_REFUSAL}: {reason}", hint=INVARIANT_HINT)


@contextmanager
def reading_tokenizer(
    folder: Path, end_token: str, kept: Path | None = None
) -> Iterator[Future[Tokenizer]]:
    """Read a model folder's tokenizer beside the block. A hub folder is read in a process of its
    own, since the import of transformers would hold the interpreter for seconds. `kept` is where
    another process leaves what it has read."""
    read = load_apart if kept is None else partial(load_kept, kept=kept)
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
        yield beside.submit(load_tokenizer, folder, end_token=end_token, read=read)


def load_policy(
    folder: Path,
    machine: Machine,
    *,
    end_token: str = "",
    load_format: LoadFormat = "auto",
    kept_tokenizer: Path | None = None,
) -> Policy:
    """Load a model folder, its tokenizer beside the weights. With "dummy" it needs no weights: they
    are drawn on the device."""
    with reading_tokenizer(folder, end_token, kept_tokenizer) as reading:
        if load_format == "dummy":
            spec = spec_from_hub_config(read_json(folder / CONFIG_FILE))
            decoder = Decoder(spec, device=machine.device, dtype=machine.dtype)
            init_dummies(decoder)
        else:
            spec, decoder = load_hub(folder, device=machine.device, dtype=machine.dtype)
        return Policy(decoder=decoder, tokenizer=reading.result(), spec=spec)


def make_reward_model(
    path: str, machine: Machine, policy: Policy
) -> tuple[Decoder, ScalarHead, Checkpoint]:
    """Make a reward model: its decoder on the meta device, its scalar head, and what fills the
    decoder."""
    folder = find_reward_model(path, policy)
    weights = Checkpoint(folder)
    return (
        blank_decoder(weights.spec, machine),
        load_scalar_head(folder, device=machine.device),
        weights,
    )


def find_reward_model(path: str, policy: Policy | Facts) -> Path:
    """Return a folder that objective rm exported; it must read the policy's own token ids."""
    folder = reward_folder(path)
    if load_tokenizer(folder).fingerprint != policy.tokenizer.fingerprint:
        raise InputError(
            f"the reward model in {path} has another tokenizer than the policy",
            hint="train both with the same tokenizer: set tokenizer.path of one run to the "
            "other's tokenizer folder",
        )
    load_scalar_head(folder, device=torch.device("cpu"))  # refused now if there is none
    return folder


def make_rows(group: RankGroup, spec: ModelSpec, machine: Machine, emit: Emit) -> ReplicatedRows:
    """Return what sums the rows of an engine's ranks: on GPUs few of them by peers' memory. All
    ranks call it."""
    if machine.device.type != "cuda":
        return ReplicatedRows(group)
    from gyre.engine.runners.peer_memory import meet_peers  # needs Triton

    sizes = {"width": spec.hidden_size, "dtype": machine.dtype}
    return ReplicatedRows(group, meet_peers(group, **sizes, emit=emit))


def make_engine(
    config: EngineConfig,
    policy: Policy,
    machine: Machine,
    emit: Emit,
    *,
    shared_weights: bool = True,
    version: int = 0,
    journal_folder: Path | None = None,
    followers: FollowingRanks | None = None,
) -> NativeEngine:
    """`journal_folder` takes the journal that `engine.journal` asks for; without a run there is
    none. `followers` are the other ranks of the engine."""
    return NativeEngine(
        policy.decoder,
        config,
        policy.tokenizer,
        compute=machine.compute,
        emit=emit,
        device=machine.device,
        dtype=machine.dtype,
        shared_weights=shared_weights,
        version=version,
        journal_folder=journal_folder,
        followers=followers,
    )


def make_scorer(config: RunConfig, emit: Emit, *, log: Path | None = None) -> RuleScorer:
    """`log` takes what rewards print; None is stderr."""
    return RuleScorer(config.rewards, emit=emit, clock=time.monotonic, log=log)


def try_rewards(
    config: RunConfig, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, log: Path
) -> None:
    """Run the user's own reward functions on sample rollouts, before anything expensive. InputError
    with the case."""
    samples = []
    for prompt in prompts[:3]:
        text = f"<think>a thought</think><answer>{prompt.task.get('answer', '')}</answer>"
        chosen = tokenizer.encode(text)
        tokens = np.concatenate([prompt.tokens, chosen])
        zeros = np.zeros(len(tokens), dtype=np.float32)
        samples.append(
            Rollout(
                rollout_id=f"sample {prompt.prompt_id}",
                group_id="sample",
                prompt=prompt,
                tokens=tokens,
                sampled=np.arange(len(tokens)) >= len(prompt.tokens),
                logprobs=zeros,
                raw_logprobs=zeros,
                versions=np.zeros(len(tokens), dtype=np.int32),
                sampling=config.rollout.sampling(),
                finish="stop",
                text=text,
            )
        )
    if samples:
        check_rewards(config.rewards, samples, log=log)


def make_judge(
    config: RunConfig, engine: RolloutEngine, scorer: RuleScorer, text: TextPort, emit: Emit
) -> Rollouts:
    seed, accuracy = derive_seed(config.run.seed, "eval"), accuracy_metric(config)
    return Rollouts(
        engine,
        scorer,
        text,
        config.rollout,
        config.eval,
        accuracy=accuracy,
        seed=seed,
        emit=emit,
        window=engine_window(config.engine),
    )


def engine_window(engine: EngineConfig) -> Window:
    """Return how many requests the loop may leave unanswered: as many as one engine accepts. So
    none is refused, even if one engine of a pool is left."""
    return Window(
        completions=engine.max_running + engine.max_queued, tokens=engine.max_queued_tokens
    )


def make_sinks(config: RunConfig, folder: Path, events: EventLog) -> list[Tracker]:
    sinks: list[Tracker] = []
    if config.observe.prometheus:
        sinks.append(
            PrometheusSink(config.observe.prometheus, run=folder.name, attempt=events.attempt)
        )
    if config.observe.otlp_endpoint:
        sender = OtlpSender(
            read_endpoint(config.observe.otlp_endpoint, "observe.otlp_endpoint"),
            service="gyre-train",
            attributes={"gyre.run": folder.name, "gyre.attempt": events.attempt},
        )
        sinks.append(StepTraceSink(SpanQueue(sender, emit=events.emit)))
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
                emit=events.emit,
            )
        )
    for sink in sinks:
        events.subscribe(sink.write)
    return sinks
