"""Stage plan: the plan of one stage on this machine. In: RunConfig, Stage, StageData. Out: Plan, or
the planner's inputs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from gyre.core.errors import ConfigError
from gyre.core.files import read_json
from gyre.distributed.config import ParallelConfig
from gyre.distributed.mesh import data_ranks, shard_size
from gyre.engine.config import EngineConfig, engine_part
from gyre.launch.goal import accuracy_metric
from gyre.launch.stages import Stage, StageData, reward_folder, uses_engine
from gyre.launch.train_args import COLD_START, MAIN
from gyre.loop.refill import drops_equal, filter_metric, why_filtered_by_score
from gyre.models.hub.folders import CONFIG_FILE
from gyre.models.layout import model_layout
from gyre.models.spec import ModelSpec, spec_from_hub_config
from gyre.objectives.config import (
    AnyObjective,
    is_pairwise,
    needs_critic,
    needs_reference,
    needs_rollouts,
)
from gyre.planner.decide import make_plan
from gyre.planner.hardware import read_hardware
from gyre.planner.memory_model.activations import ITEM_BYTES
from gyre.planner.memory_model.job import MODELS
from gyre.planner.memory_model.states import matrix_shapes
from gyre.planner.model_zoo import model_numbers, model_part
from gyre.planner.plan import Dtype, Hardware, ModelNumbers, Plan, PlanInputs, Shards
from gyre.runconfig.run_config import RunConfig
from gyre.trainer.adamw.blocks import check_codes, check_parts
from gyre.trainer.config import HIGH_RATE, refuse_cut
from gyre.weights.transports.shared_memory import SLOTS


def plan_run(
    config: RunConfig,
    stage: Stage,
    spec: ModelSpec,
    data: StageData,
    *,
    dtype: Dtype,
    folder: Path,
    share: int = 1,
    ranks: int = 1,
) -> Plan:
    """Decide what the config left open, for one stage. After it nothing is "auto". `share` devices
    share this machine, and the plan is for each of them; `ranks` train together, each with its part
    of the states."""
    disk = folder / config.memory.disk_folder if config.memory.disk_folder else None
    inputs = read_inputs(config, stage, model_numbers(spec), data, dtype=dtype)
    tensor_ranks = config.parallel.tensor_ranks
    with_data = data_ranks(ranks, tensor_ranks)
    if stage.trainer.moments == "8_bit":
        check_parts("model", model_layout(spec, tensor_ranks))
    shards = lie_over(config.parallel, with_data)
    for model in stage.trainer.offload_parameters:
        refuse_cut(model, zero=shards[model].zero, ranks=shards[model].ranks)
    is_pod = config.cluster.kind == "pod"
    reads_in_place = not is_pod and (tensor_ranks == 1 or has_parts(config))
    shared = shards["actor"].zero < 2 and reads_in_place
    alone = config.cluster.engine_workers > 0 and not is_pod
    apart = tuple(
        model
        for model in ("critic", "reference", "reward")
        if getattr(config.parallel, model).zero is not None
    )
    inputs = replace(
        inputs,
        ranks=with_data,
        trained_part=model_part(spec, tensor_ranks) if tensor_ranks > 1 else None,
        shards=shards,
        shared_weights=shared,
        engines_alone=alone,
        lie_apart=apart,
    )
    beside = ranks // config.engine.tensor_ranks if has_parts(config) else ranks
    engines = config.count_pod_engines(ranks) if is_pod else beside + config.cluster.engine_workers
    inputs = replace(inputs, engines=engines, engine_part=cut_engine(config.engine, spec))
    if is_pod and inputs.engine_part is not None and inputs.online:
        remark = tell_devices(ranks, engines, config.engine, colocated=config.cluster.colocated)
        inputs = replace(inputs, remarks=(*inputs.remarks, remark))
    if is_pod and inputs.online:
        size_bytes = SLOTS * inputs.model.num_parameters * ITEM_BYTES[dtype]
        remark = (
            f"{SLOTS} versions of the weights are kept in /dev/shm: {size_bytes / 2**20:,.1f} MiB"
        )
        inputs = replace(inputs, remarks=(*inputs.remarks, remark))
    hardware = cut_hardware(read_hardware(disk), share)
    takes_turns = is_pod and config.cluster.colocated and inputs.online
    return plan_in_turns(inputs, hardware) if takes_turns else make_plan(inputs, hardware)


def plan_in_turns(inputs: PlanInputs, hardware: Hardware) -> Plan:
    """Plan for a trainer and an engine that are processes of their own on one device. Where not
    everything fits, each leaves it: its ledger cannot tell when the other wants room."""
    plan = make_plan(inputs, hardware)
    if plan.residency != "spill" or inputs.residency is not None:
        return plan
    plan = make_plan(replace(inputs, residency="phase"), hardware)
    reason = "not everything fits at once: a process leaves the device to the other"
    return replace(plan, reasons={**plan.reasons, "residency": reason})


def has_parts(config: RunConfig) -> bool:
    """Return whether each rank's trainer and engine have the same part of the model in one process.
    The engine is then cut over the trainer's tensor ranks."""
    ranks = config.engine.tensor_ranks
    return config.cluster.kind == "ray" and ranks > 1 and ranks == config.parallel.tensor_ranks


def cut_engine(engine: EngineConfig, spec: ModelSpec) -> ModelNumbers | None:
    """Return what each rank of an engine holds; None where that is the whole model. ConfigError
    where the model does not divide."""
    return None if engine.tensor_ranks == 1 else model_numbers(engine_part(engine, spec))


def tell_devices(ranks: int, engines: int, engine: EngineConfig, *, colocated: bool) -> str:
    """Return in words what is on the devices of a pod whose engines have several tensor ranks.
    Pure."""
    cut = engines * engine.tensor_ranks
    each = f"{engines} engine{'s' if engines > 1 else ''} of {engine.tensor_ranks} ranks"
    if not colocated:
        return f"{ranks + cut} devices: {ranks} with a trainer rank each, then {cut} with {each}"
    both, most = min(ranks, cut), max(ranks, cut)
    told = (
        f"{most} devices, {each}: device i has trainer rank i and, after it leaves, rank i of the "
        "engines; what a phase has on the device is the sum"
    )
    if both < most:
        which = "an engine's rank" if cut > ranks else "a trainer rank"
        told += f". From device {both} on there is {which} alone"
    return told


def expected_ranks(config: RunConfig) -> int:
    """Return how many ranks will train together, as far as the config says. Without a number, as
    few as its shards and its engines ask for."""
    if config.cluster.kind == "inline":
        return 1
    cluster = config.cluster
    asked = max(1, *(config.parallel.of(model)[1] for model in MODELS))
    asked *= config.parallel.tensor_ranks
    if cluster.kind == "pod" and cluster.colocated and not cluster.engine_workers:
        asked = math.lcm(asked, config.engine.tensor_ranks)  # engines fill the trainer's devices
    return cluster.num_workers or asked


def lie_over(parallel: ParallelConfig, ranks: int) -> dict[str, Shards]:
    """Return the sharding of each model over the ranks. ConfigError if copies would not be
    whole."""
    found = {}
    for model in MODELS:
        zero, shard_ranks = parallel.of(model)
        size = shard_size(ranks, shard_ranks) if zero else 1
        found[model] = Shards(zero=zero, ranks=size) if size > 1 else Shards()
    return found


def read_inputs(
    config: RunConfig, stage: Stage, model: ModelNumbers, data: StageData, *, dtype: Dtype | None
) -> PlanInputs:
    """Return the planner's inputs for one stage."""
    online, with_engine = (
        needs_rollouts(stage.objective),
        stage.name == MAIN and uses_engine(config, stage.objective),
    )
    memory = config.memory
    if with_engine:
        _refuse_offloaded_actor(stage)
        _refuse_kv_fraction(config)
    if stage.trainer.moments == "8_bit":
        check_codes("model", matrix_shapes(model))
    return PlanInputs(
        model=model,
        objective=stage.objective.kind,
        online=with_engine,
        prompts_per_step=stage.records_per_step,
        completions_per_prompt=_sequences_per_record(config, stage),
        max_prompt_tokens=data.longest_prompt_tokens,
        max_completion_tokens=config.rollout.max_tokens if online else 0,
        sequences_per_update=stage.trainer.sequences_per_update or None,
        tokens_per_chunk=stage.trainer.tokens_per_chunk,
        checkpointing=stage.trainer.checkpointing,
        matmul=stage.trainer.matmul,
        moments=stage.trainer.moments,
        offload_optimizer=stage.trainer.offload_optimizer,
        offload_gradients=stage.trainer.offload_gradients,
        offload_parameters=stage.trainer.offload_parameters,
        offload_cut_bytes=stage.trainer.offload_cut_bytes,
        epochs_per_batch=stage.trainer.epochs_per_batch,
        critic=needs_critic(stage.objective),
        reference=needs_reference(stage.objective) and stage.trainer.reference == "initial",
        reward_model=reward_numbers(config) if stage.name == MAIN else None,
        device=None if config.run.device == "auto" else config.run.device,
        dtype=dtype,
        threads=config.run.threads or None,
        page_tokens=config.engine.page_tokens or None,
        kv_pages=config.engine.num_pages or None,
        kv_bytes=config.engine.kv_bytes or None,
        kv_host_bytes=config.engine.kv_host_bytes,
        max_running=config.engine.max_running,
        max_queued=config.engine.max_queued,
        max_queued_tokens=config.engine.max_queued_tokens,
        max_refills=config.rollout.max_refills if drops_equal(stage.objective) else 0,
        not_given=not_given(config, stage),
        remarks=(*filter_remarks(config, stage.objective), *rate_remarks(stage)),
        engine_tokens_per_step=config.engine.token_budget,
        batch_invariant=config.engine.batch_invariant,
        residency=None if memory.residency == "auto" else memory.residency,
        device_budget_bytes=None
        if memory.device_budget_bytes == "auto"
        else memory.device_budget_bytes,
        host_budget_bytes=None if memory.host_budget_bytes == "auto" else memory.host_budget_bytes,
        disk_budget_bytes=None if memory.disk_budget_bytes == "auto" else memory.disk_budget_bytes,
        disk_tier=bool(memory.disk_folder),
        leave=memory.leave,
        snapshot_background=config.snapshot.background,
        reference_average=bool(stage.trainer.reference_moving_average),
        sum_gradients=config.parallel.sum_gradients,
    )


def _refuse_kv_fraction(config: RunConfig) -> None:
    """Raise ConfigError where a fraction of free bytes sizes KV: a run has its models in the same
    memory."""
    engine = config.engine
    if engine.kv_fraction and not (engine.num_pages or engine.kv_bytes):
        raise ConfigError(
            f"engine.kv_fraction = {engine.kv_fraction:g} in a run, whose plan sizes KV "
            "beside the models that it trains",
            hint="give engine.kv_bytes or engine.num_pages, or leave all three out",
        )


def _refuse_offloaded_actor(stage: Stage) -> None:
    """Raise ConfigError where the actor's weights leave the device: an engine reads them there."""
    if "actor" in stage.trainer.offload_parameters:
        raise ConfigError(
            f"trainer.offload_parameters = {list(stage.trainer.offload_parameters)} in a stage "
            "with an engine, which computes with the actor's own weights",
            hint="take 'actor' off the list; for an offline stage set eval.num_problems = 0, or "
            "leave the rewards out",
        )


def not_given(config: RunConfig, stage: Stage) -> dict[str, str]:
    """Names of the plan that neither the file nor --set gave a value for, and where their values
    come from."""
    cold = stage.name != MAIN and config.cold_start is not None
    generated = needs_rollouts(stage.objective)
    given = {
        "objective": not cold and "kind" in config.objective.model_fields_set,
        "prompts_per_step": "examples_per_step" in config.cold_start.model_fields_set
        if cold and config.cold_start is not None
        else "prompts_per_step" in config.rollout.model_fields_set,
        "completions_per_prompt": generated
        and "completions_per_prompt" in config.rollout.model_fields_set,
        "tokens_per_chunk": "tokens_per_chunk" in config.trainer.model_fields_set,
        "max_running": "max_running" in config.engine.model_fields_set,
        "dtype": config.run.dtype != "auto",
    }
    words = {
        "objective": "a cold start is supervised" if cold else "default",
        "completions_per_prompt": "default"
        if generated
        else f"sequences of one row for {stage.objective.kind}",
    }
    return {name: words.get(name, "default") for name, is_given in given.items() if not is_given}


def rate_remarks(stage: Stage) -> tuple[str, ...]:
    """Return learning rates that leave nothing of what a model learned, with the keys that set
    them."""
    cold, trainer = stage.name == COLD_START, stage.trainer
    rates = {"cold_start.learning_rate" if cold else "trainer.learning_rate": trainer.learning_rate}
    if needs_critic(stage.objective) and trainer.critic_learning_rate is not None:
        rates["trainer.critic_learning_rate"] = trainer.critic_learning_rate
    return tuple(
        f"{key} = {rate:g}: AdamW moves each weight by about as much in one update, and weights "
        "begin at about "
        f"{HIGH_RATE:g}; 1e-6 to 3e-3 is usual"
        for key, rate in rates.items()
        if rate > HIGH_RATE
    )


def filter_remarks(config: RunConfig, objective: AnyObjective) -> tuple[str, ...]:
    """Return the plan's remarks on what dynamic sampling compares."""
    if not drops_equal(objective):
        return ()
    accuracy = accuracy_metric(config)
    metric = filter_metric(objective, accuracy)
    what = (
        f"'{metric.part}' is at least {metric.threshold:g} in none or all"
        if metric
        else "all scores are equal"
    )
    refills = config.rollout.max_refills
    if metric is None and config.rewards.model_part() is not None:
        then = "none is replaced, because the learned reward comes after the rollouts"
    else:
        then = (
            f"further prompts replace them, {refills} times a step at most"
            if refills
            else "none is replaced"
        )
    reason = why_filtered_by_score(objective, accuracy)
    return (f"groups are dropped in which {what}; {then}" + (f" ({reason})" if reason else ""),)


def reward_numbers(config: RunConfig) -> ModelNumbers | None:
    """Return the numbers of what a rank has of the reward model, from its own folder. It reads the
    policy's tokens and may be of any size."""
    part = config.rewards.model_part()
    if part is None:
        return None
    spec = spec_from_hub_config(read_json(reward_folder(part.path) / CONFIG_FILE))
    return model_part(spec, config.parallel.tensor_ranks)


def cut_hardware(hardware: Hardware, share: int) -> Hardware:
    """Return one of `share` equal parts of a machine. A GPU is whole: each device has its own."""
    on_cpu = hardware.device == "cpu"
    return replace(
        hardware,
        device_total_bytes=hardware.device_total_bytes // (share if on_cpu else 1),
        device_free_bytes=hardware.device_free_bytes // (share if on_cpu else 1),
        host_total_bytes=hardware.host_total_bytes // share,
        host_available_bytes=hardware.host_available_bytes // share,
        disk_free_bytes=hardware.disk_free_bytes // share,
        cores=max(1, hardware.cores // share),
    )


def _sequences_per_record(config: RunConfig, stage: Stage) -> int:
    if needs_rollouts(stage.objective):
        return config.rollout.completions_per_prompt
    return 2 if is_pairwise(stage.objective) else 1
