"""Plan command: a config's stages, or a shape alone, as jobs for GPUs that are named and need not
be here. In: a PlanRequest, configs. Out: text and JSON-able mappings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gyre.cluster.config import ClusterConfig
from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.core.rounding import ceil_div
from gyre.distributed.config import Zero
from gyre.engine.config import PAGE_TOKENS, EngineConfig, plan_engine
from gyre.launch.factories import find_spec, make_tokenizer
from gyre.launch.stage_plan import read_inputs, reward_numbers
from gyre.launch.stages import Stage, StageData, load_stage_data, plan_stages
from gyre.launch.train_args import MAIN
from gyre.models.layout import local_spec, model_layout
from gyre.models.spec import ModelSpec
from gyre.planner.batch_sizes import check_lengths
from gyre.planner.gpus import Gpu, find_gpu
from gyre.planner.memory_model.engine import EngineDemand, make_engine
from gyre.planner.memory_model.job import RankPart, TrainingJob, make_job
from gyre.planner.model_zoo import SHAPES, find_shape, model_numbers, tensor_parts
from gyre.planner.plan import Dtype, PlanInputs, Saving, best_dtype
from gyre.planner.report.checklist import Settings, inference_lines, training_lines
from gyre.planner.report.describe import as_mapping, describe
from gyre.planner.report.explain import COLUMNS
from gyre.planner.report.features import built_features
from gyre.planner.search.candidates import Fixed, GpuCluster
from gyre.planner.search.search import SearchResult, choose
from gyre.runconfig.run_config import RunConfig
from gyre.trainer.adamw.blocks import check_parts
from gyre.trainer.config import SnapshotConfig

# times the published context: what the Qwen3 model cards state for YaRN (arXiv 2309.00071)
STRETCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the command line says beside the config."""

    gpus: int
    gpu: str
    host_bytes: int | None = None  # of one host
    shape: str | None = None  # in place of the config's model
    sequence_tokens: int = 8192  # without a config: length of the sequences
    update_tokens: int = 524_288  # without a config: tokens of an optimizer update, over all GPUs
    zero: Zero | None = None
    shard_ranks: int | None = None
    tensor_ranks: int | None = None
    columns: int = COLUMNS  # of the text

    def cluster(self) -> GpuCluster:
        if self.gpus < 1:
            raise ConfigError(f"--gpus {self.gpus}: need at least 1")
        return GpuCluster(gpus=self.gpus, gpu=find_gpu(self.gpu), host_bytes=self.host_bytes)


def read_stages(config: RunConfig) -> tuple[ModelSpec, list[tuple[Stage, StageData]]]:
    """Return the model's sizes and each stage's records, for a plan. Nothing is made and no log is
    kept."""
    emit: Emit = lambda kind, **fields: None  # noqa: E731
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = make_tokenizer(config, Path(scratch) / "tokenizer", emit)
    spec = find_spec(config, tokenizer)
    stages = plan_stages(config, "all")
    return spec, [
        (stage, load_stage_data(config, stage, tokenizer, spec.context_tokens, emit))
        for stage in stages
    ]


def plan_shape(request: PlanRequest) -> dict[str, Any]:
    """Supervised training of a published shape on full sequences."""
    if request.shape is None:
        raise ConfigError(
            "nothing to plan for: neither a config nor a shape",
            hint=f"give RUN.toml, or --shape with one of {', '.join(SHAPES)}",
        )
    spec, cluster = find_shape(request.shape), request.cluster()
    longest, published = request.sequence_tokens, spec.context_tokens
    if not 1 <= longest <= STRETCH * published:
        raise ConfigError(
            f"--sequence-tokens {longest}: {request.shape} was published for {published} tokens; "
            "accepted are 1 to "
            f"{STRETCH * published}, which a stretched rotary embedding can reach"
        )
    stretched = (
        f"{longest} tokens are beyond the published {published}: the model's rotary "
        "embedding must be stretched"
    )
    if request.update_tokens < 1:
        raise ConfigError(f"--update-tokens {request.update_tokens}: need at least 1")
    dtype = _dtype(None, cluster.gpu)
    job = TrainingJob(
        model=model_numbers(spec),
        dtype=dtype,
        saving=_saving(dtype, cluster.gpu),
        longest=request.sequence_tokens,
        mean_tokens=request.sequence_tokens,
        tokens_per_update=request.update_tokens,
        most_tokens_per_update=request.update_tokens,
        parts=_parts(spec, cluster),
    )
    settings = _settings(
        EngineConfig(), SnapshotConfig(), ClusterConfig(), cluster, completions_per_prompt=1
    )
    fixed = Fixed(
        zero=request.zero, shard_ranks=request.shard_ranks, tensor_ranks=request.tensor_ranks
    )
    notes = [stretched] if longest > published else []
    return _answer(
        {request.shape: (choose(job, cluster, fixed), settings)}, spec, request.columns, notes
    )


def plan_stages_for(
    config: RunConfig,
    spec: ModelSpec,
    stages: Sequence[tuple[Stage, StageData]],
    request: PlanRequest,
) -> dict[str, Any]:
    """Plan each stage of a config."""
    spec = find_shape(request.shape) if request.shape is not None else spec
    cluster = request.cluster()
    dtype = _dtype(None if config.run.dtype == "auto" else config.run.dtype, cluster.gpu)
    sizes = {"completions_per_prompt": config.rollout.completions_per_prompt}
    settings = _settings(config.engine, config.snapshot, config.cluster, cluster, **sizes)
    found = {}
    for stage, data in stages:
        whole = with_tensor_ranks(config, 1)
        inputs = read_inputs(whole, stage, model_numbers(spec), data, dtype=dtype)
        check_lengths(inputs)
        check_matmul(inputs, cluster.gpu)
        job = replace(
            job_for(inputs, dtype, cluster),
            parts=parts_for(config, stage, spec, cluster),
            engines=engines_for(config, inputs, spec, dtype, cluster),
        )
        found[stage.name] = choose(job, cluster, fixed_by(config, request)), settings
    return _answer(found, spec, request.columns)


def with_tensor_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """Return the config with so many ranks of the trainer that share layers, unchecked."""
    parallel = config.parallel.model_copy(update={"tensor_ranks": ranks})
    return config.model_copy(update={"parallel": parallel})


def parts_for(
    config: RunConfig, stage: Stage, spec: ModelSpec, cluster: GpuCluster
) -> dict[int, RankPart]:
    """Return a rank's part of each model, by the tensor ranks that a run of the config takes."""
    found = {}
    for ranks, part in _parts(spec, cluster).items():
        if not takes(config, cluster, "parallel", ranks):
            continue
        if stage.trainer.moments == "8_bit" and not _has_parts_of_blocks(spec, ranks):
            continue
        try:
            reward = reward_numbers(with_tensor_ranks(config, ranks))
        except ConfigError:  # the reward model does not divide
            continue
        reward = reward if stage.name == MAIN else None
        found[ranks] = replace(part, reward_model=reward)
    return found


def engines_for(
    config: RunConfig, inputs: PlanInputs, spec: ModelSpec, dtype: Dtype, cluster: GpuCluster
) -> dict[int, EngineDemand]:
    """Return an engine of several ranks on each GPU, by the ranks that a run of the config
    takes."""
    found = {}
    for ranks in tensor_parts(spec, cluster.gpu.gpus_per_host) if inputs.online else ():
        if takes(config, cluster, "engine", ranks):
            part = replace(inputs, engine_part=model_numbers(local_spec(spec, ranks)))
            engine = job_for(part, dtype, cluster, engine_ranks=ranks).engine
            assert engine is not None
            found[ranks] = engine
    return found


def takes(config: RunConfig, cluster: GpuCluster, section: str, ranks: int) -> bool:
    """Return whether a run takes so many tensor ranks: by the config's own rules, as workers of Ray
    where it is read for one GPU."""
    tree = config.model_dump(exclude_unset=True)
    tree[section] = {**tree.get(section, {}), "tensor_ranks": ranks}
    workers = {**tree.get("cluster", {}), "num_workers": 0}
    if config.cluster.kind == "inline":
        workers["kind"] = "ray"
    try:
        RunConfig.model_validate({**tree, "cluster": workers})
    except ValidationError:
        return False
    return True


def _parts(spec: ModelSpec, cluster: GpuCluster) -> dict[int, RankPart]:
    """Return a rank's part of the model that is trained, where ranks may share layers."""
    parts = tensor_parts(spec, cluster.gpu.gpus_per_host)
    return {ranks: RankPart(model=part) for ranks, part in parts.items()}


def _has_parts_of_blocks(spec: ModelSpec, ranks: int) -> bool:
    try:
        check_parts("model", model_layout(spec, ranks))
    except ConfigError:
        return False
    return True


def fixed_by(config: RunConfig, request: PlanRequest) -> Fixed:
    """Return the keys that the config or, before it, the command line sets. Other keys are
    searched."""
    trainer, parallel = config.trainer, config.parallel
    searched = ("tokens_per_chunk", "checkpointing", "offload_optimizer", "offload_gradients")
    ours = {name for name in searched if name in trainer.model_fields_set}
    zero = parallel.zero if "zero" in parallel.model_fields_set else None
    given = [
        section.tensor_ranks if "tensor_ranks" in section.model_fields_set else None
        for section in (parallel, config.engine)
    ]
    return Fixed(
        zero=zero if request.zero is None else request.zero,
        shard_ranks=(parallel.shard_ranks or None)
        if request.shard_ranks is None
        else request.shard_ranks,
        tensor_ranks=given[0] if request.tensor_ranks is None else request.tensor_ranks,
        engine_tensor_ranks=given[1],
        tokens_per_chunk=trainer.tokens_per_chunk if "tokens_per_chunk" in ours else None,
        checkpointing=trainer.checkpointing if "checkpointing" in ours else None,
        offload_optimizer=trainer.offload_optimizer if "offload_optimizer" in ours else None,
        offload_gradients=trainer.offload_gradients if "offload_gradients" in ours else None,
        residency=None if config.memory.residency == "auto" else config.memory.residency,
    )


def job_for(
    inputs: PlanInputs, dtype: Dtype, cluster: GpuCluster, *, engine_ranks: int = 1
) -> TrainingJob:
    """Return a stage as the search sees it: an engine, on one GPU or several, runs its part of the
    completions."""
    saving = _saving(dtype, cluster.gpu)
    sequences = inputs.prompts_per_step * inputs.completions_per_prompt
    most = inputs.max_running or sequences
    share = ceil_div(sequences * engine_ranks, cluster.gpus)
    engine = make_engine(
        inputs,
        dtype=dtype,
        saving=saving,
        page_tokens=inputs.page_tokens or PAGE_TOKENS["cuda"],
        max_running=most,
        running=min(most, share),
    )
    engine = None if engine is None else replace(engine, sequences=share)
    return make_job(inputs, dtype=dtype, saving=saving, engine=engine)


def check_matmul(inputs: PlanInputs, gpu: Gpu) -> None:
    """Refuse 8-bit products on GPUs that have none."""
    if inputs.matmul == "fp8" and not gpu.fp8_flops:
        raise ConfigError(
            f"trainer.matmul = 'fp8': {gpu.name} does not multiply 8-bit floats",
            hint="take GPUs of compute capability 8.9 or more, or leave trainer.matmul out",
        )


def _dtype(asked: Dtype | None, gpu: Gpu) -> Dtype:
    return asked or best_dtype("cuda", bf16=gpu.bf16)


def _saving(dtype: Dtype, gpu: Gpu) -> Saving:
    """Choose the kernels of GPUs that are not here; their torch, which brings Triton along, is not
    here either. Its kernels take no float32, and run where BF16 is multiplied. An older GPU keeps
    what products and a softmax keep."""
    if not gpu.bf16:
        return "torch_cpu"
    return "torch_cuda" if dtype == "float32" else "triton"


def _settings(
    engine: EngineConfig,
    snapshot: SnapshotConfig,
    workers: ClusterConfig,
    cluster: GpuCluster,
    *,
    completions_per_prompt: int,
) -> Settings:
    """Several GPUs have a worker each, though the config be inline: it is read for one GPU or for
    as many as there are."""
    decided = plan_engine(engine, device_type="cuda")
    return Settings(
        features=built_features(RunConfig),
        snapshot_every_steps=snapshot.every_steps,
        snapshot_in_background=snapshot.background,
        max_running=decided.max_running,
        token_budget=decided.token_budget,
        page_tokens=decided.page_tokens,
        prefix_cache=decided.prefix_cache,
        completions_per_prompt=completions_per_prompt,
        cluster_kind="ray" if cluster.gpus > 1 and workers.kind == "inline" else workers.kind,
        max_restarts=workers.max_restarts,
    )


def _answer(
    found: dict[str, tuple[SearchResult, Settings]],
    spec: ModelSpec,
    columns: int,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    texts, stages = [f"note: {note}\n" for note in notes], {}
    for name, (choice, settings) in found.items():
        training, inference = training_lines(choice, settings), inference_lines(choice, settings)
        texts.append(f"== {name} ==\n\n{describe(choice, training, inference, columns)}")
        stages[name] = as_mapping(choice, training, inference)
    return {
        "text": "\n".join(texts),
        "stages": stages,
        "notes": list(notes),
        "model": {"family": spec.family, "num_parameters": spec.num_parameters},
    }
