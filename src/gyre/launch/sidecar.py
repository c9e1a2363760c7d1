"""Sidecar: the role of a vLLM engine, ready to be started. In: the config, the model's spec. Out: a
RoleSpec in vLLM's environment, which is made when it is missing.

The config's [engine] sizes it, as far as vLLM has the same sizes. What else is set there is
refused by name, unless it sizes members, which run the native engine. So are rollouts that vLLM
cannot do, for the whole run: any of its engines may get any request. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from gyre.core.contracts import EngineAbilities, find_unable_commit
from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.core.records import ProcessLimits, Request, RoleSpec, Sampling
from gyre.distributed.environment import child_environment
from gyre.models.hub.export import write_json
from gyre.models.hub.folders import CONFIG_FILE
from gyre.models.spec import ModelSpec, hub_config_from_spec
from gyre.runconfig.run_config import RolloutEngineConfig, RunConfig
from gyre.sidecars.vllm.device_memory import ProofLimits
from gyre.sidecars.vllm.environment import (
    default_folder,
    find_environment,
    install,
    process_variables,
    python_of,
    refuse_missing,
)
from gyre.sidecars.vllm.llm import VllmRole, VllmSettings
from gyre.sidecars.vllm.requests import TokenLimits, find_refusal
from gyre.sidecars.vllm.versions import VllmBuild, build_for

BUILDER = "gyre.launch.placement.vllm_worker:build_vllm_engine"
# keys of [engine] that mean the same for vLLM
SHARED_KEYS = {
    *("kind", "vllm", "max_running", "max_queued"),
    *("token_budget", "prefix_cache", "drain_deadline_s"),
}
# keys of the native engine that are no use to members: what only a whole pool does, and folders
NEVER_KEYS = {"batch_invariant", "journal", "disk_folder", "tensor_ranks"}


def find_device() -> str:
    """Return "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def build_of(config: RunConfig) -> VllmBuild:
    """Return the version of vLLM for the run's device."""
    return build_for(find_device() if config.run.device == "auto" else config.run.device)


def ensure_environment(config: RunConfig, build: VllmBuild, emit: Emit) -> Path:
    """Return the environment's folder; makes a missing one. ConfigError where that fails, or where
    packages are gone from one that is there."""
    named = config.engine.vllm.environment
    folder = Path(named).absolute() if named else default_folder(build)
    found = find_environment(folder)
    if found is not None and found.version == build.version:
        refuse_missing(folder)
        return folder
    install(build, folder, say=lambda text: emit("engine.installing", doing=text))
    return folder


def make_vllm_role(
    config: RunConfig,
    spec: ModelSpec,
    *,
    name: str,
    dtype: str,
    eos_ids: tuple[int, ...],
    scratch: Path,
    emit: Emit,
    threads: int = 1,
    cores: tuple[int, ...] = (),
    version: int = 0,
) -> RoleSpec:
    """Return the role of one vLLM engine. `scratch` is a folder of the run, into which the model's
    config.json goes: weights come with the first hand-over."""
    build = build_of(config)
    has_members = bool(config.cluster.members_address)
    refuse_unsupported(config.engine, spec, build, has_members=has_members)
    environment = ensure_environment(config, build, emit)
    scratch.mkdir(parents=True, exist_ok=True)
    write_json(scratch / CONFIG_FILE, {**hub_config_from_spec(spec), "dtype": dtype})
    engine, vllm = config.engine, config.engine.vllm
    role = VllmRole(
        settings=VllmSettings(
            folder=str(scratch.absolute()),
            dtype=dtype,
            context_tokens=spec.context_tokens,
            max_running=engine.max_running,
            token_budget=engine.token_budget,
            prefix_cache=engine.prefix_cache,
            gpu_memory_utilization=vllm.gpu_memory_utilization,
            kv_bytes=vllm.kv_bytes,
            enforce_eager=vllm.enforce_eager,
            start_deadline_s=vllm.start_deadline_s,
            update_deadline_s=vllm.update_deadline_s,
            extra=vllm.extra,
        ),
        limits=_token_limits(config, spec, eos_ids),
        drain_deadline_s=engine.drain_deadline_s,
        during_training=vllm.during_training,
        proof=_proof_limits(config),
        version=version,
    )
    return RoleSpec(
        name=name,
        builder=BUILDER,
        arguments={"role_json": msgspec.json.encode(role).decode()},
        environment={
            **process_variables(build, threads=threads, eager=vllm.enforce_eager),
            **child_environment(multicast=config.cluster.multicast),
        },
        gpus=1.0 if build.device == "cuda" else 0.0,
        cpus=config.cluster.cpus_per_worker,
        deadline_s=config.cluster.start_deadline_s,
        interpreter=str(python_of(environment)),
        limits=ProcessLimits(data_bytes=vllm.data_bytes, cores=cores),
    )


def _proof_limits(config: RunConfig) -> ProofLimits:
    return ProofLimits(
        outside_tolerance_bytes=config.memory.outside_tolerance_bytes,
        release_deadline_s=config.memory.release_deadline_s,
    )


def _token_limits(config: RunConfig, spec: ModelSpec, eos_ids: tuple[int, ...]) -> TokenLimits:
    return TokenLimits(
        vocab_size=spec.vocab_size,
        context_tokens=spec.context_tokens,
        most_completions=config.engine.max_running + config.engine.max_queued,
        eos_ids=eos_ids,
    )


def check_vllm(config: RunConfig, spec: ModelSpec, build: VllmBuild) -> None:
    """Raise ConfigError for what the config asks of this build and it cannot do."""
    has_members = bool(config.cluster.members_address)
    refuse_unsupported(config.engine, spec, build, has_members=has_members)
    refuse_rollouts(config, spec, build.abilities())


def refuse_rollouts(config: RunConfig, spec: ModelSpec, abilities: EngineAbilities) -> None:
    """Raise ConfigError for rollouts or evaluations that vLLM would refuse, and for updates that it
    cannot take. Members could do them, but each request may go to vLLM."""
    limits = _token_limits(config, spec, spec.eos_ids)
    for table, sampling in _samplings(config):
        # the loop asks for fewer completions at once where there are too many
        asked = Request(
            request_id=table, tokens=np.zeros(1, np.int32), sampling=replace(sampling, n=1)
        )
        if reason := find_refusal(asked, limits, abilities, unanswered=0):
            raise ConfigError(
                f"[{table}] with engine.kind = 'vllm': {reason}",
                hint=f"change [{table}], or set engine.kind = 'native'",
            )
    if reason := find_unable_commit(config.rollout.weight_update, abilities):
        raise ConfigError(
            f"rollout.weight_update = '{config.rollout.weight_update}': {reason}",
            hint="set rollout.weight_update = 'drain', or engine.kind = 'native'",
        )


def _samplings(config: RunConfig) -> Iterator[tuple[str, Sampling]]:
    rollout = config.rollout.sampling()
    yield "rollout", rollout
    if config.eval.num_problems:
        max_tokens = config.eval.max_tokens or rollout.max_tokens
        yield "eval", Sampling(temperature=config.eval.temperature, max_tokens=max_tokens)


def refuse_unsupported(
    engine: RolloutEngineConfig, spec: ModelSpec, build: VllmBuild, *, has_members: bool = False
) -> None:
    """Raise ConfigError for keys that neither vLLM nor members, if there are any, use. Also
    for a model or a way to park that the build does not have."""
    given, unused = engine.vllm.model_fields_set, engine.model_fields_set - SHARED_KEYS
    if has_members:
        unused &= NEVER_KEYS
    if unused:
        raise ConfigError(
            f"engine.{min(unused)} is the native engine's, and engine.kind = 'vllm'",
            hint="remove it; [engine.vllm] has vLLM's settings",
        )
    if build.head_dims and spec.head_dim not in build.head_dims:
        raise ConfigError(
            f"vLLM {build.version} on {build.device} has no attention for heads of "
            f"{spec.head_dim}; it has {', '.join(map(str, build.head_dims))}",
            hint="take another model.head_dim, or engine.kind = 'native'",
        )
    if build.device == "cuda" and {"kv_bytes", "gpu_memory_utilization"} <= given:
        raise ConfigError(
            "engine.vllm has kv_bytes and gpu_memory_utilization, and each sizes KV on a GPU",
            hint="leave out gpu_memory_utilization; kv_bytes lets vLLM start while the policy "
            "trains",
        )
    if engine.vllm.during_training == "sleep" and not build.sleep_levels:
        raise ConfigError(
            f"vLLM {build.version} on {build.device} has no sleep levels",
            hint="set engine.vllm.during_training to 'terminate' or 'keep'",
        )
