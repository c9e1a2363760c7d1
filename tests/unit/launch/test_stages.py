"""What a stage is judged on: as many held-out records as were asked for, or words."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainer_cases
from gyre.core.errors import ConfigError
from gyre.launch import commands, stages
from gyre.launch.factories import Machine, check_invariant
from gyre.launch.stages import (
    MAIN_STAGE_ONLY,
    load_stage_data,
    plan_stages,
    read_stage_data,
)
from gyre.loop.evaluate import share_outcome
from gyre.observability.events import is_counted
from gyre.runconfig.run_config import RunConfig, parse_run_config
from gyre.trainer.config import TrainerConfig
from unit.data.test_examples import TOKENIZER
from unit.data.test_sources import Events, write_jsonl

ROWS = [
    {"prompt": f"p{i}", "response": f"r{i}", "chosen": f"good{i}", "rejected": f"bad{i}"}
    for i in range(40)
]


def config_for(tmp_path, kind: str, num: int, **tables) -> RunConfig:
    data = {
        "source": "jsonl",
        "path": str(write_jsonl(tmp_path / "rows.jsonl", ROWS)),
        "held_out_fraction": 0.25,
    }
    tree = {
        "model": {"path": "somewhere"},
        "data": data,
        "objective": {"kind": kind},
        "rewards": {"parts": []},
        "eval": {"num_problems": num},
    }
    return parse_run_config({**tree, **tables}, where="run.toml")


def load(config: RunConfig, events: Events, stage: int = 0):
    return load_stage_data(config, plan_stages(config, "all")[stage], TOKENIZER, 256, events)


@pytest.mark.parametrize(("kind", "sequences"), [("rm", 2), ("dpo", 2), ("sft", 1)])
def test_held_out_pairs_and_examples_are_as_many_as_asked_for_or_refused(tmp_path, kind, sequences):
    events = Events()
    whole = load(config_for(tmp_path, kind, 3), events)
    assert whole.eval_batch is not None and len(whole.eval_batch.sequences) == 3 * sequences
    there = events.named("data.loaded")[0]["held_out"]
    assert 3 < there < 30
    load(config_for(tmp_path, kind, there), events)
    with pytest.raises(ConfigError) as caught:
        load(config_for(tmp_path, kind, there + 1), events)
    assert f"eval.num_problems = {there + 1}" in caught.value.message
    assert f"holds out {there}" in caught.value.message and f"at most {there}" in caught.value.hint


def test_a_cold_start_is_judged_on_what_there_is_and_the_report_counts_it(tmp_path):
    """Its data are others than the main stage's, which eval.num_problems is about."""
    few = {
        "source": "jsonl",
        "path": str(write_jsonl(tmp_path / "few.jsonl", ROWS[:9])),
        "held_out_fraction": 0.3,
    }
    config = config_for(tmp_path, "sft", 5, cold_start={"steps": 1}, cold_start_data=few)
    events = Events()
    found = load(config, events)
    assert found.eval_batch is not None
    got = len(found.eval_batch.sequences)
    assert 0 < got < 5
    ((kind, fields),) = [event for event in events if event[0].startswith("warn.")]
    assert is_counted({"kind": kind, **fields})
    assert (fields["asked"], fields["got"], fields["stage"]) == (5, got, "cold_start")


def test_rows_that_are_left_out_are_counted(tmp_path):
    rows = [*ROWS, ROWS[0], {**ROWS[1], "prompt": "long " * 99}]
    data = {
        "source": "jsonl",
        "path": str(write_jsonl(tmp_path / "more.jsonl", rows)),
        "overlong": "drop",
    }
    events = Events()
    load(config_for(tmp_path, "sft", 1, data={**data, "held_out_fraction": 0.25}), events)
    ((kind, fields),) = [event for event in events if is_counted({"kind": event[0], **event[1]})]
    assert kind == "drop.rows" and (fields["count"], fields["duplicate"], fields["overlong"]) == (
        2,
        1,
        1,
    )
    events = Events()
    load(config_for(tmp_path, "sft", 1), events)
    assert [kind for kind, _ in events] == ["data.loaded"], "nothing dropped, nothing counted"


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "words"),
    [
        ("cpu", torch.bfloat16, {}, "on a CPU engine and trainer run different kernels"),
        ("cuda", torch.bfloat16, {"window_tokens": 64}, "sliding windows"),
        ("cuda", torch.float32, {}, "dtype torch.float32"),
        ("cuda", torch.bfloat16, {"head_dim": 48}, "head_dim 48"),
    ],
)
def test_batch_invariant_training_is_refused_where_the_kernels_cannot_run(
    tmp_path, monkeypatch, device, dtype, changes, words
):
    # as where Triton is installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("gyre.launch.factories.why_too_old", lambda device: None)
    config = config_for(
        tmp_path,
        "grpo",
        0,
        engine={"batch_invariant": True},
        rewards={"parts": [{"kind": "answer"}]},
    )
    machine = Machine(device=torch.device(device), dtype=dtype, compute=ThreadPoolExecutor(1))
    (stage,), spec = plan_stages(config, "all"), replace(trainer_cases.SPEC, **changes)
    with pytest.raises(ConfigError, match=words) as caught:
        check_invariant(config, stage, spec, machine, 64)
    assert (
        caught.value.message.startswith("engine.batch_invariant = true: ")
        and "leave it out" in caught.value.hint
    )
    able = replace(machine, device=torch.device("cuda"), dtype=torch.bfloat16)
    check_invariant(config, stage, trainer_cases.SPEC, able, 64)
    monkeypatch.setattr("gyre.launch.factories.why_too_old", lambda device: "compute capability 7")
    with pytest.raises(ConfigError, match="compute capability 7"):
        check_invariant(config, stage, trainer_cases.SPEC, able, 64)
    (offline,) = plan_stages(
        config_for(tmp_path, "sft", 0, engine={"batch_invariant": True}), "all"
    )
    check_invariant(config, offline, spec, machine, 64)


def test_batch_invariant_training_over_ranks_of_a_cpu_is_token_by_token(tmp_path) -> None:
    config = config_for(
        tmp_path,
        "grpo",
        0,
        engine={"batch_invariant": True, "tensor_ranks": 2},
        parallel={"tensor_ranks": 2},
        cluster={"kind": "pod", "num_workers": 2, "engine_workers": 1, "colocated": False},
        rewards={"parts": [{"kind": "answer"}]},
    )
    machine = Machine(
        device=torch.device("cpu"), dtype=torch.float32, compute=ThreadPoolExecutor(1)
    )
    (stage,) = plan_stages(config, "all")
    check_invariant(config, stage, trainer_cases.SPEC, machine, 64)
    with pytest.raises(ConfigError, match="sliding windows"):
        check_invariant(config, stage, replace(trainer_cases.SPEC, window_tokens=8), machine, 64)
    with pytest.raises(ConfigError, match=r"torch\.float16: over ranks of a CPU"):
        check_invariant(
            config, stage, trainer_cases.SPEC, replace(machine, dtype=torch.float16), 64
        )


GRADED = [{"prompt": "more " * (i % 7) + f"p{i}", "answer": f"a{i}"} for i in range(60)]
CONTEXT_TOKENS = 40


def online(tmp_path, **tables) -> RunConfig:
    rows = str(write_jsonl(tmp_path / "graded.jsonl", GRADED))
    data = {"source": "jsonl", "path": rows, "held_out_fraction": 0.4, "overlong": "drop"}
    tree = {
        "rollout": {"max_tokens": 24},
        "eval": {"num_problems": 5},
        "rewards": {"parts": [{"kind": "answer"}]},
    }
    return config_for(tmp_path, "grpo", 5, data=data, **{**tree, **tables})


def load_online(config: RunConfig):
    return load_stage_data(
        config, plan_stages(config, "main")[0], TOKENIZER, CONTEXT_TOKENS, Events()
    )


def test_eval_asks_the_problems_that_the_run_asked(tmp_path, monkeypatch):
    """Prompts that leave no room for an answer are dropped before the halves are counted off, in
    both."""
    asked = []

    class Judge:
        async def run(self, prompts):
            asked.extend(prompts)
            return share_outcome("accuracy", [0.0] * len(prompts), "none is right", {})

    class Nothing:
        async def start(self, *, dummy: bool) -> None: ...

        async def terminate(self) -> None: ...

        async def close(self) -> None: ...

    policy = SimpleNamespace(
        tokenizer=TOKENIZER, spec=SimpleNamespace(context_tokens=CONTEXT_TOKENS)
    )
    for name, stand_in in (
        ("load_policy", policy),
        ("make_engine", Nothing()),
        ("make_scorer", Nothing()),
    ):
        monkeypatch.setattr(commands, name, lambda *args, stand_in=stand_in, **_: stand_in)
    monkeypatch.setattr(commands, "make_judge", lambda *args: Judge())
    config = online(tmp_path)
    of_the_run = load_online(config).eval_prompts
    assert max(len(prompt.tokens) for prompt in of_the_run) <= CONTEXT_TOKENS - 24
    commands.evaluate(Path(tmp_path / "model"), config, num_problems=0)
    assert [prompt.prompt_id for prompt in asked] == [prompt.prompt_id for prompt in of_the_run]


def test_answers_that_evaluation_cannot_have_are_refused_by_their_own_key(tmp_path):
    longest = max(len(prompt.tokens) for prompt in load_online(online(tmp_path)).eval_prompts)
    room = CONTEXT_TOKENS - longest
    load_online(online(tmp_path, eval={"num_problems": 5, "max_tokens": room}))
    with pytest.raises(ConfigError) as caught:
        load_online(online(tmp_path, eval={"num_problems": 5, "max_tokens": room + 1}))
    assert (
        f"eval.max_tokens = {room + 1}" in caught.value.message
        and f"{CONTEXT_TOKENS} tokens" in caught.value.message
    )
    assert f"at most {room}" in caught.value.hint


SHAPE = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_size": 16,
}


NOT_DEFAULT = {  # a value of each trainer key that is not its default
    "steps": 7,
    "learning_rate": 5e-4,
    "critic_learning_rate": 6e-4,
    "schedule": "linear",
    "warmup_steps": 3,
    "final_learning_rate_fraction": 0.3,
    "betas": (0.8, 0.99),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "grad_clip": 2.0,
    "sequences_per_update": 4,
    "epochs_per_batch": 2,
    "tokens_per_chunk": 4096,
    "checkpointing": "full",
    "matmul": "fp8",
    "moments": "8_bit",
    "offload_optimizer": "host",
    "offload_gradients": True,
    "offload_parameters": ("actor",),
    "offload_cut_bytes": 1 << 20,
    "offload_deadline_s": 30.0,
    "trace_steps": (1, 2),
    "reference": "none",
    "reference_refresh_steps": 5,
    "reference_moving_average": 0.5,
}


def test_every_trainer_key_reaches_the_cold_start_or_is_named_as_one_that_does_not(tmp_path):
    assert NOT_DEFAULT.keys() == TrainerConfig.model_fields.keys()
    config = config_for(tmp_path, "sft", 0, trainer=NOT_DEFAULT, cold_start={"steps": 9})
    cold, main = (stage.trainer for stage in plan_stages(config, "all"))
    own = {
        "steps": 9,
        "learning_rate": 3e-3,
        "schedule": "cosine",
        "warmup_steps": 20,
        "final_learning_rate_fraction": 0.1,
    }
    defaults = {name: getattr(TrainerConfig(), name) for name in MAIN_STAGE_ONLY}
    assert cold.model_dump() == {**NOT_DEFAULT, **defaults, **own}
    assert main.model_dump() == NOT_DEFAULT
    assert TrainerConfig.model_validate(cold.model_dump()) == cold, "the copy breaks a rule"


def test_the_loop_goes_on_while_records_are_read(tmp_path, monkeypatch) -> None:
    went_on, config = threading.Event(), config_for(tmp_path, "sft", 4)

    def load(*given):
        assert went_on.wait(30.0), "the loop stands still"
        return load_stage_data(*given)

    async def read():
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        (stage,) = plan_stages(config, "main")
        return await read_stage_data(config, stage, TOKENIZER, 64, Events())

    monkeypatch.setattr(stages, "load_stage_data", load)
    assert len(asyncio.run(read()).eval_batch.sequences) == 4
