"""Run config: the tree of all rooms' config models. In: a TOML file and --set overrides. Out: a
frozen RunConfig, or a ConfigError that names the key, what it got and what it accepts. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from gyre.cluster.config import ClusterConfig
from gyre.core.config import Section
from gyre.core.errors import ConfigError
from gyre.data.config import DataConfig
from gyre.distributed.config import ParallelConfig
from gyre.engine.config import EngineConfig
from gyre.loop.config import (
    MOST_SEQUENCES,
    ColdStartConfig,
    EvalConfig,
    GoalConfig,
    RolloutConfig,
    RunSection,
    why_not_asynchronous,
)
from gyre.memory.config import MemoryConfig
from gyre.models.config import ModelConfig
from gyre.objectives.config import (
    GrpoConfig,
    ObjectiveConfig,
    is_pairwise,
    needs_critic,
    needs_reference,
    needs_rollouts,
)
from gyre.observability.config import ObserveConfig
from gyre.rewards.config import RewardsConfig
from gyre.runconfig.faults import describe_faults, find_conversions
from gyre.runconfig.toml_tree import apply_overrides, read_toml
from gyre.sidecars.vllm.config import VllmConfig
from gyre.text.config import TokenizerConfig
from gyre.trainer.config import SnapshotConfig, TrainerConfig

CHECK_HINT = "`gyre plan` checks a config without running it"
# context of a check for `gyre serve`, whose engines are no run's
SERVED = MappingProxyType({"served": True})

INVARIANT_REFUSAL = (
    "engine.batch_invariant = true: the trainer cannot give the engine's log-probs to the bit"
)
INVARIANT_HINT = (
    "Training in this mode needs a GPU with bfloat16, or several tensor ranks on a CPU; a model "
    "without sliding windows, and rollouts without truncation; "
    "leave it out to train, serving can use it"
)


class RolloutEngineConfig(EngineConfig):
    """The rollout engine: the native one, or vLLM in a sidecar.

    KV memory is the first of these that is set: `num_pages`, `kv_bytes`, `kv_fraction` of the free
    bytes. Otherwise it holds `max_running` sequences of full context, within a quarter of the free
    bytes. A training run takes `num_pages` or `kv_bytes` where they are set, refuses `kv_fraction`,
    and otherwise takes what its plan leaves. vLLM has its own settings in `engine.vllm`; of these
    it takes max_running, max_queued, token_budget, prefix_cache and drain_deadline_s. The others
    size members of other hosts then, which run the native engine (`cluster.members_address`).
    """

    kind: Literal["native", "vllm"] = Field(
        default="native", description="Which engine samples; vllm needs cluster.kind = 'pod'."
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """vLLM's settings. Used with kind = "vllm"."""


class RunConfig(Section):
    """A whole run. Each table belongs to one room, which documents its keys."""

    run: RunSection = Field(default_factory=RunSection)
    """Name, folder, seed, device, dtype."""
    model: ModelConfig
    """Where the policy comes from."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Where the tokenizer comes from."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Problems, examples or pairs of the main stage."""
    objective: ObjectiveConfig = Field(default_factory=GrpoConfig)
    """What the main stage optimizes. `kind` decides which keys there are."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """How the main stage updates."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Completions per step. Used by grpo, ppo, and dpo with pairs = "online"."""
    engine: RolloutEngineConfig = Field(default_factory=RolloutEngineConfig)
    """The engine that samples. Used with rollouts, by `gyre eval` and by `gyre chat`."""
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """What completions are scored by. Used with rollouts and by `gyre score`."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Budgets and tiers."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Devices that the run works on."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """How models are sharded over the trainer's ranks."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out evaluation."""
    goal: GoalConfig | None = None
    """The mark that the run must reach; without it there is none."""
    cold_start: ColdStartConfig | None = None
    """A supervised stage before the main one; without it there is none."""
    cold_start_data: DataConfig | None = None
    """Examples of the cold start, with the keys of [data]; else the worked traces of [data]. A
    tokenizer that a run makes is trained on them too, also without a cold start."""
    snapshot: SnapshotConfig = Field(default_factory=SnapshotConfig)
    """Resumable state."""
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    """Report and trackers."""

    @model_validator(mode="after")
    def check_together(self, info: ValidationInfo) -> RunConfig:
        """Raise ValueError with the first reason why values of several tables do not go together.
        The context SERVED stands for a server. It may cut its engine over ranks whatever the
        cluster is, and keeps no journal. It has no trainer that its engine must agree with."""
        is_served = info.context == SERVED
        reason = (
            self._why_no_batch()
            or self._why_no_state_file()
            or self._why_no_weights_away()
            or self._why_no_tensor_ranks()
            or self._why_nothing_to_compare()
            or (None if is_served else self._why_no_rollouts())
            or self._why_no_engine(is_served=is_served)
            or (None if is_served else self._why_no_float8())
        )
        if reason:
            raise ValueError(reason)
        return self

    def _why_no_batch(self) -> str | None:
        """Return what is wrong with the sequences of a step and of an update."""
        objective, rollout = self.objective, self.rollout
        per_prompt = 2 if is_pairwise(objective) else 1
        if needs_rollouts(objective):
            per_prompt = rollout.completions_per_prompt
        if (sequences := rollout.prompts_per_step * per_prompt) > MOST_SEQUENCES:
            return (
                f"rollout.prompts_per_step = {rollout.prompts_per_step:,} with "
                f"{per_prompt:,} sequences each: {sequences:,} sequences, and a step has "
                f"{MOST_SEQUENCES:,} at most; take fewer prompts per step and more steps "
                "(trainer.steps)"
            )
        if needs_rollouts(objective) and not self.rewards.parts:
            return (
                f"objective.kind = '{objective.kind}' learns from rewards: name at least one "
                "[[rewards.parts]]"
            )
        if is_pairwise(objective) and self.trainer.sequences_per_update % 2:
            return (
                f"trainer.sequences_per_update = {self.trainer.sequences_per_update}: pairs stay "
                "together, give an even number"
            )
        return None

    def _why_no_state_file(self) -> str | None:
        if self.trainer.offload_optimizer == "disk" and not self.memory.disk_folder:
            return (
                "trainer.offload_optimizer = 'disk' needs a folder for its file: set "
                "memory.disk_folder"
            )
        return None

    def _why_nothing_to_compare(self) -> str | None:
        """Return that an objective compares the completions of a prompt, of which there is one."""
        objective, size = self.objective, self.rollout.completions_per_prompt
        compares = isinstance(objective, GrpoConfig) and objective.baseline != "none"
        if size < 2 and (compares or (objective.kind == "dpo" and needs_rollouts(objective))):
            return (
                f"rollout.completions_per_prompt = {size}: objective.kind = '{objective.kind}' "
                "compares completions of one prompt with each other, give 2 or more"
            )
        return None

    def _why_no_rollouts(self) -> str | None:
        """Return why rollouts cannot have the trainer's bits, or cannot run beside it, as asked."""
        samples = needs_rollouts(self.objective)
        if self.engine.batch_invariant and samples and (reason := self._why_not_invariant()):
            return f"{INVARIANT_REFUSAL}: {reason}. {INVARIANT_HINT}"
        return why_not_asynchronous(
            self.rollout,
            separate_weights=self.cluster.kind == "pod" and not self.cluster.colocated,
            needs_rollouts=samples,
            batch_invariant=self.engine.batch_invariant,
            restarts_engine=self.memory.leave.get("engine") == "destroy",
        )

    def _why_no_engine(self, *, is_served: bool) -> str | None:
        """Return why the engine cannot run in this cluster."""
        if self.engine.kind == "vllm" and self.cluster.kind != "pod":
            return (
                f"engine.kind = 'vllm' with cluster.kind = '{self.cluster.kind}': vLLM runs as a "
                "sidecar of a pod, set cluster.kind = 'pod' or engine.kind = 'native'"
            )
        if is_served and self.engine.journal:
            return (
                "engine.journal = true: `gyre serve` has no run folder to keep a journal in, set "
                "engine.journal = false"
            )
        cut = self.engine.tensor_ranks > 1 and not is_served
        if cut and (reason := self._why_no_tensor_engine()):
            return f"engine.tensor_ranks = {self.engine.tensor_ranks}: {reason}"
        return None

    def _why_no_float8(self) -> str | None:
        if self.trainer.matmul == "fp8" and self.run.dtype == "float16":
            return (
                "trainer.matmul = 'fp8' with run.dtype = 'float16': a GPU that has the one has "
                "bfloat16, give run.dtype = 'bfloat16', 'float32' or 'auto'"
            )
        return None

    def _why_no_weights_away(self) -> str | None:
        """Return a model on the list that the run has not."""
        wants_reference = needs_reference(self.objective) and self.trainer.reference == "initial"
        there = {
            "actor": True,
            "critic": needs_critic(self.objective),
            "reference": wants_reference,
            "reward": self.rewards.model_part() is not None,
        }
        for model in self.trainer.offload_parameters:
            if not there[model]:
                has = ", ".join(name for name, is_there in there.items() if is_there)
                return (
                    f"trainer.offload_parameters names '{model}', this run has {has}: take it "
                    "off the list"
                )
        return None

    def _why_no_tensor_ranks(self) -> str | None:
        """Return what does not go with several ranks that share layers; docs/parallel.md has the
        table. The model may say more."""
        if self.parallel.tensor_ranks == 1 or (reason := self._why_no_tensor_trainer()) is None:
            return None
        return f"parallel.tensor_ranks = {self.parallel.tensor_ranks} with {reason}"

    def _why_no_tensor_trainer(self) -> str | None:
        cluster, tensor_ranks = self.cluster, self.parallel.tensor_ranks
        if cluster.kind == "inline":
            return "cluster.kind = 'inline', which has one rank: set 'ray' or 'pod'"
        if cluster.num_workers % tensor_ranks:
            return f"cluster.num_workers = {cluster.num_workers}: give a multiple of {tensor_ranks}"
        if cluster.kind == "ray" and cluster.engine_workers:
            return (
                f"cluster.engine_workers = {cluster.engine_workers} of Ray, whose engines "
                "take whole weights: leave engine_workers out, or set cluster.kind = 'pod'"
            )
        return None

    def _why_no_tensor_engine(self) -> str | None:
        """Return what the config has that an engine over several ranks cannot do."""
        cluster, tensor_ranks = self.cluster, self.engine.tensor_ranks
        if cluster.kind == "inline":
            return (
                "each rank of an engine is a process, set cluster.kind = 'pod', or 'ray' and "
                "parallel.tensor_ranks alike"
            )
        if cluster.kind == "ray" and self.parallel.tensor_ranks != tensor_ranks:
            return (
                "on Ray each rank's engine has the part of the model that its trainer has, set "
                f"parallel.tensor_ranks = {tensor_ranks}, too"
            )
        if cluster.kind == "pod":
            try:
                self.count_pod_engines(cluster.num_workers)
            except ConfigError as error:
                return f"{error.message}, {error.hint}"
        if self.engine.kind == "vllm":
            return "vLLM cuts its model by itself, leave it out or set engine.kind = 'native'"
        if cluster.weight_transport == "nccl":
            return (
                "its ranks read their own parts, and a broadcast is read whole, set "
                "cluster.weight_transport = 'shm' or 'cuda-ipc'"
            )
        if cluster.members_address:
            return "members of other hosts have one rank, leave cluster.members_address out"
        if cluster.kind == "ray" and self.engine.batch_invariant and needs_rollouts(self.objective):
            return "equal bits are not shown on Ray, set cluster.kind = 'pod'"
        if self.engine.disk_folder:
            return "its ranks would write the same files, leave engine.disk_folder out"
        return None

    def count_pod_engines(self, trainer_ranks: int) -> int:
        """Return the engines of a pod. Where the config gives no number, as many as trainer ranks;
        of several tensor ranks on shared devices, as many as these fill. ConfigError where they do
        not fill them evenly. No trainer ranks are a number that is not known yet."""
        tensor_ranks = self.engine.tensor_ranks
        if self.cluster.engine_workers or tensor_ranks == 1 or not self.cluster.colocated:
            return self.cluster.engine_workers or trainer_ranks
        if trainer_ranks % tensor_ranks:
            raise ConfigError(
                f"engines of {tensor_ranks} ranks do not fill the devices of {trainer_ranks} "
                "trainer ranks, which they share with cluster.colocated = true",
                hint=f"set cluster.num_workers to a multiple of {tensor_ranks}, or "
                "cluster.engine_workers",
            )
        return trainer_ranks // tensor_ranks

    def _why_not_invariant(self) -> str | None:
        """Return what the config alone says; the model and the device may say more."""
        engine, trainer = self.engine.tensor_ranks, self.parallel.tensor_ranks
        if engine != trainer:
            return (
                f"engine.tensor_ranks = {engine} and parallel.tensor_ranks = {trainer} cut sums "
                "into other parts, need the same number"
            )
        cutting = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for key, off in cutting.items():
            if (value := getattr(self.rollout, key)) != off:
                return f"rollout.{key} = {value} truncates, need {off}"
        one_rank = (("device", "cpu", "cuda"), ("dtype", "float32", "bfloat16"))
        for key, refused, accepted in one_rank:  # over more, a CPU can and takes float32
            if trainer == 1 and getattr(self.run, key) == refused:
                return f"run.{key} = '{refused}', need '{accepted}' or 'auto'"
        if self.trainer.matmul == "fp8":
            return "trainer.matmul = 'fp8' rounds what the engine does not, need 'same'"
        for model in ("actor", "reference"):
            if model in self.trainer.offload_parameters:
                return (
                    f"trainer.offload_parameters names '{model}', whose layers the engine's "
                    "kernels read as they lie"
                )
            if (zero := self.parallel.of(model)[0]) >= 2:
                return f"parallel.zero = {zero} of the {model} keeps weights in shards, need 0 or 1"
        return None


def load_run_config(path: Path, overrides: list[str], *, served: bool = False) -> RunConfig:
    """Read `path`, apply overrides "a.b=c" in order, check everything; what an engine over ranks
    asks of a run, not where it is to be `served`."""
    tree = apply_overrides(read_toml(path), overrides)
    return parse_run_config(tree, where=str(path), served=served)


def read_served_config(text: str) -> RunConfig:
    """Return the config of JSON that a server has sent to a worker."""
    return RunConfig.model_validate_json(text, context=SERVED)


def parse_run_config(tree: Mapping[str, Any], *, where: str, served: bool = False) -> RunConfig:
    """Check a tree of plain values. ConfigError with one sentence for each key at fault."""
    try:
        config = RunConfig.model_validate(tree, context=SERVED if served else None)
    except ValidationError as error:
        faults = describe_faults(error, tree, RunConfig)
        raise ConfigError(f"{where}: " + "; ".join(faults), hint=CHECK_HINT) from error
    converted = list(find_conversions(tree, config, ""))
    if converted:
        raise ConfigError(f"{where}: " + "; ".join(converted), hint=CHECK_HINT)
    return config
