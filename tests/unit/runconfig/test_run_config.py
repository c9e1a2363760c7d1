"""The run's config: what is read, what is refused, and in which words. Past 500 lines: each refusal
is a case of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.config import Section
from gyre.core.errors import ConfigError
from gyre.runconfig.run_config import (
    RunConfig,
    load_run_config,
    parse_run_config,
    read_served_config,
)
from gyre.runconfig.toml_tree import apply_overrides, read_toml

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
MODEL = {"model": {"path": "somewhere"}}
JARGON = re.compile(
    r"pydantic|validation|\[type=|https?://|dictionary|instance "
    r"of|Input|tuple|NoneType|discriminator"
)


def refusal(**tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run_config({**MODEL, **tables}, where="run.toml")
    assert caught.value.hint
    message = caught.value.message
    assert message.startswith("run.toml: ") and not JARGON.search(message), message
    return message.removeprefix("run.toml: ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_we_ship_parses(path):
    config = load_run_config(path, [])
    assert (
        parse_run_config(config.model_dump(mode="json", exclude_none=True), where="again") == config
    )


def test_there_are_configs_to_ship():
    assert CONFIGS


def test_a_model_is_all_that_is_needed():
    config = parse_run_config(MODEL, where="run.toml")
    assert config.objective.kind == "grpo" and [part.name for part in config.rewards.parts] == [
        "answer"
    ]


@pytest.mark.parametrize(
    ("tables", "key", "near"),
    [
        ({"trainr": {}}, "unknown key 'trainr'", "trainer"),
        (
            {"trainer": {"learning_rte": 1.0}},
            "trainer: unknown key 'learning_rte'",
            "learning_rate",
        ),
        (
            {"model": {"shape": {"num_layer": 2}}},
            "model.shape: unknown key 'num_layer'",
            "num_layers",
        ),
        ({"objective": {"kind": "ppo", "gama": 1.0}}, "objective: unknown key 'gama'", "gamma"),
        (
            {"rewards": {"parts": [{"kind": "format", "wieght": 1}]}},
            "rewards.parts.0: unknown key",
            "weight",
        ),
        (
            {"rewards": {"parts": [{"kind": "code", "limits": {"walls": 1}}]}},
            "parts.0.limits: unknown",
            "wall_s",
        ),
        ({"memory": {"residensy": "spill"}}, "memory: unknown key 'residensy'", "residency"),
        ({"parallel": {"shard_rank": 2}}, "parallel: unknown key 'shard_rank'", "shard_ranks"),
        ({"parallel": {"critic": {"zeros": 2}}}, "parallel.critic: unknown key 'zeros'", "zero"),
        ({"observe": {"tensor_board": True}}, "observe: unknown key 'tensor_board'", "tensorboard"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(tables, key, near):
    message = refusal(**tables)
    assert key in message and f"did you mean '{near}'?" in message


@pytest.mark.parametrize(
    ("tables", "meant"),
    [
        ({"learning_rate": 1e-5}, "'trainer.learning_rate' or 'cold_start.learning_rate'"),
        ({"trainer": {"max_tokens": 8}}, "'rollout.max_tokens' or 'eval.max_tokens'"),
        ({"rollout": {"kl_coef": 0.1}}, "'objective.kl_coef'"),
        ({"model": {"hidden_size": 64}}, "'model.shape.hidden_size'"),
        ({"objective": {"kind": "grpo", "checkpointing": True}}, "'trainer.checkpointing'"),
    ],
)
def test_a_key_in_the_wrong_table_is_told_the_right_one(tables, meant):
    message = refusal(**tables)
    assert "unknown key" in message and f"did you mean {meant}" in message


def test_a_key_that_many_tables_take_gets_no_list_of_them():
    assert "did you mean" not in refusal(objective={"kind": "grpo", "zero": 2})


def sections(kind: type[Section], place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The places of all tables that need no choice of a kind."""
    found = [place]
    for name, field in kind.model_fields.items():
        inner = [
            each
            for each in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(each, type)
        ]
        for each in inner:
            if issubclass(each, Section) and name not in ("objective", "rewards"):
                found += sections(each, (*place, name))
    return found


@pytest.mark.parametrize("place", sections(RunConfig), ids=lambda place: ".".join(place) or "top")
def test_an_unknown_key_at_any_depth_is_refused(place):
    tree: dict[str, Any] = {}
    node = tree
    for name in place:
        node = node.setdefault(name, {})
    node["zzz"] = 1
    message = refusal(**tree)
    assert (".".join(place) + ": unknown key 'zzz'").removeprefix(": ") in message
    assert "accepted: " in message


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"trainer": {"steps": "ten"}}, "trainer.steps = 'ten': need a whole number"),
        ({"trainer": {"steps": "10"}}, "trainer.steps = '10': need a whole number"),
        ({"trainer": {"steps": True}}, "trainer.steps = true: need a whole number"),
        ({"trainer": {"steps": 1.5}}, "trainer.steps = 1.5: need a whole number"),
        ({"trainer": {"steps": 2.0}}, "trainer.steps = 2.0: need a whole number"),
        ({"trainer": {"steps": 0}}, "trainer.steps = 0: need 1 or more"),
        ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate = 'fast': need a number"),
        ({"trainer": {"learning_rate": True}}, "trainer.learning_rate = true: need a number"),
        (
            {"trainer": {"learning_rate": float("nan")}},
            "trainer.learning_rate = nan: need a finite number",
        ),
        ({"trainer": {"betas": [0.9]}}, "trainer.betas.1 is missing"),
        ({"trainer": {"betas": [0.9, 0.9, 0.9]}}, "trainer.betas: need a list of 2 at most"),
        ({"trainer": {"betas": [0.9, "x"]}}, "trainer.betas.1 = 'x': need a number"),
        ({"trainer": {"betas": [0.9, 1.0]}}, "trainer.betas.1 = 1.0: need less than 1.0"),
        ({"trainer": {"betas": [1.0, 0.95]}}, "trainer.betas.0 = 1.0: need less than 1.0"),
        ({"trainer": {"betas": [-3.0, 0.9]}}, "trainer.betas.0 = -3.0: need 0.0 or more"),
        ({"trainer": {"weight_decay": -0.1}}, "trainer.weight_decay = -0.1: need 0.0 or more"),
        (
            {"trainer": {"schedule": "cosin"}},
            "need 'constant', 'cosine' or 'linear'; did you mean 'cosine'?",
        ),
        ({"trainer": 3}, "trainer = 3: need a table"),
        ({"trainer": [1]}, "trainer: need a table"),
        ({"run": {"name": 5}}, "run.name = 5: need a text in quotes"),
        ({"observe": {"report": "yes"}}, "observe.report = 'yes': need true or false"),
        ({"observe": {"report": 1}}, "observe.report = 1: need true or false"),
        (
            {"memory": {"device_budget_bytes": "lots"}},
            "device_budget_bytes = 'lots': need a whole number or 'auto'",
        ),
        (
            {"memory": {"device_budget_bytes": -1}},
            "device_budget_bytes = -1: need more than 0 or 'auto'",
        ),
        ({"memory": {"leave": {"engine": "destory"}}}, "memory.leave.engine = 'destory': need"),
        ({"model": {"shape": {"head_dim": 3}}}, "model.shape.head_dim = 3: need a multiple of 2"),
        ({"objective": {"kind": "grop"}}, "objective.kind = 'grop': need"),
        ({"objective": {"variant": "dapo"}}, "objective.kind is missing"),
        ({"objective": {"kind": "grpo", "variant": "dap"}}, "did you mean 'dapo'?"),
        ({"rewards": {"parts": {"kind": "answer"}}}, "rewards.parts: need a list"),
        ({"rewards": {"parts": [{"kind": "anser"}]}}, "rewards.parts.0.kind = 'anser': need"),
        ({"rewards": {"parts": [{"kind": "length"}]}}, "rewards.parts.0.soft_tokens is missing"),
        (
            {"rewards": {"parts": [{"kind": "answer", "weight": "x"}]}},
            "rewards.parts.0.weight = 'x': need a number",
        ),
        ({"rewards": {"parts": [{"kind": "answer"}] * 2}}, "rewards.parts: two parts are named"),
        ({"rollout": {"presence_penalty": 0.5}}, "rollout: presence_penalty is for serving only"),
        (
            {"rollout": {"logit_bias": []}},
            "leave it out, or use temperature, top_p, top_k or min_p",
        ),
        ({"goal": {"metric": "acuracy"}}, "goal.metric = 'acuracy': need"),
        ({"goal": {}}, "goal: give at least one of"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(tables, words):
    assert words in refusal(**tables)


def test_each_fault_is_named_once():
    message = refusal(trainer={"steps": "ten", "eps": 0}, engine={"burst_steps": 0})
    assert message.split("; ") == [
        "trainer.steps = 'ten': need a whole number",
        "trainer.eps = 0: need more than 0.0",
        "engine.burst_steps = 0: need 1 or more",
    ]


def test_a_missing_or_ambiguous_model_is_said():
    with pytest.raises(ConfigError, match=r"run\.toml: model is missing"):
        parse_run_config({}, where="run.toml")
    assert "path" in refusal(model={}) and "[model.shape]" in refusal(
        model={"path": "x", "shape": {}}
    )


def test_pairs_need_an_even_number_of_sequences():
    for kind in ("rm", "dpo"):
        message = refusal(objective={"kind": kind}, trainer={"sequences_per_update": 7})
        assert message.startswith("trainer.sequences_per_update = 7") and "even" in message
    parse_run_config(
        {**MODEL, "objective": {"kind": "sft"}, "trainer": {"sequences_per_update": 7}}, where=""
    )


@pytest.mark.parametrize(
    "objective", [{"kind": "grpo"}, {"kind": "ppo"}, {"kind": "dpo", "pairs": "online"}]
)
def test_objectives_that_learn_from_rewards_need_some(objective):
    assert f"objective.kind = '{objective['kind']}' learns from rewards" in refusal(
        objective=objective, rewards={"parts": []}
    )
    parse_run_config({**MODEL, "objective": {"kind": "sft"}, "rewards": {"parts": []}}, where="")
    assert parse_run_config({**MODEL, "objective": objective}, where="").rewards.parts, (
        "the default is one part"
    )


def test_groups_of_one_cannot_be_compared():
    alone = {"completions_per_prompt": 1}
    for objective in ({"kind": "grpo", "variant": "dapo"}, {"kind": "dpo", "pairs": "online"}):
        assert "rollout.completions_per_prompt = 1" in refusal(objective=objective, rollout=alone)
    for objective in (
        {"kind": "grpo", "variant": "reinforce_pp"},
        {"kind": "ppo"},
        {"kind": "sft"},
    ):
        parse_run_config({**MODEL, "objective": objective, "rollout": alone}, where="")


@pytest.mark.parametrize(
    ("tables", "sequences"),
    [
        ({"rollout": {"prompts_per_step": 1_000_000}}, "8,000,000 sequences"),
        ({"rollout": {"completions_per_prompt": 1_000_000}}, "32,000,000 sequences"),
        (
            {"rollout": {"prompts_per_step": 2**18 + 1}, "objective": {"kind": "sft"}},
            "262,145 sequences",
        ),
        (
            {"rollout": {"prompts_per_step": 2**17 + 1}, "objective": {"kind": "rm"}},
            "262,146 sequences",
        ),
    ],
)
def test_a_step_that_nothing_could_hold_is_refused_at_once(tables, sequences):
    message = refusal(**tables)
    assert sequences in message and "262,144 at most" in message and "trainer.steps" in message
    parse_run_config(
        {**MODEL, "rollout": {"prompts_per_step": 2**15, "completions_per_prompt": 8}}, where=""
    )


# --set
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("trainer.steps=10", ("trainer", "steps"), 10),
        ("trainer.learning_rate = 1e-3", ("trainer", "learning_rate"), 1e-3),
        ("run.name=my run", ("run", "name"), "my run"),
        ('run.name="10"', ("run", "name"), "10"),
        ("run.name=a=b", ("run", "name"), "a=b"),
        ("model.path=", ("model", "path"), ""),
        ("observe.report=false", ("observe", "report"), False),
        ("trainer.betas=[0.8, 0.9]", ("trainer", "betas"), [0.8, 0.9]),
        ("data.task_options={min_terms = 2}", ("data", "task_options"), {"min_terms": 2}),
        ("new.table.key=1", ("new", "table", "key"), 1),
        ("run.name=1\nother = 2", ("run", "name"), "1\nother = 2"),
        ("rewards.parts.1.weight=0.5", ("rewards", "parts", 1, "weight"), 0.5),
        ('rewards.parts.0={kind="format"}', ("rewards", "parts", 0), {"kind": "format"}),
    ],
)
def test_set_changes_one_key(override, place, value):
    tree = {
        "trainer": {"steps": 1, "eps": 2.0},
        "rewards": {"parts": [{"kind": "answer"}, {"kind": "format"}]},
    }
    before = repr(tree)
    changed: Any = apply_overrides(tree, [override])
    for name in place:
        changed = changed[name]
    assert changed == value and type(changed) is type(value)
    assert repr(tree) == before, "the tree that was given changed"


def test_later_overrides_win():
    assert apply_overrides({}, ["a.b=1", "a.b=2", "a.c=3"]) == {"a": {"b": 2, "c": 3}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"device": "cpu"}}, "run.device = 'cpu', need 'cuda' or 'auto'"),
        ({"run": {"dtype": "float32"}}, "run.dtype = 'float32', need 'bfloat16' or 'auto'"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p = 0.9 truncates, need 1.0"),
        ({"rollout": {"top_k": 50}}, "rollout.top_k = 50 truncates, need 0"),
        ({"rollout": {"min_p": 0.1}}, "rollout.min_p = 0.1 truncates, need 0.0"),
        (
            {"parallel": {"zero": 3}},
            "parallel.zero = 3 of the actor keeps weights in shards, need 0 or 1",
        ),
        (
            {"parallel": {"reference": {"zero": 2}}},
            "parallel.zero = 2 of the reference keeps weights in shards",
        ),
        (
            {"trainer": {"matmul": "fp8"}},
            "trainer.matmul = 'fp8' rounds what the engine does not, need 'same'",
        ),
    ],
)
def test_batch_invariant_training_is_refused_where_the_config_rules_it_out(tables, words):
    """The engine alone may be in the mode, and a trainer that learns from data does not care."""
    mode = {"engine": {"batch_invariant": True}}
    told = refusal(**mode, **tables)
    assert (
        told.startswith("engine.batch_invariant = true: ")
        and words in told
        and "leave it out to train" in told
    )
    parse_run_config({**MODEL, **mode, **tables, "objective": {"kind": "sft"}}, where="run.toml")
    parse_run_config({**MODEL, **tables}, where="run.toml")
    parse_run_config({**MODEL, **mode, "rollout": {"temperature": 0.7}}, where="run.toml")


def test_8_bit_products_beside_float16_are_refused():
    told = refusal(run={"dtype": "float16"}, trainer={"matmul": "fp8"})
    assert told.startswith("trainer.matmul = 'fp8' with run.dtype = 'float16'") and "'auto'" in told
    assert "'fp8'" in refusal(trainer={"matmul": "fp4"})


@pytest.mark.parametrize(
    "override",
    [
        "trainer.steps",
        "=3",
        "trainer..steps=3",
        ".x=1",
        "run.name.first=x",
        "parts.2.weight=1",
        "parts.x.weight=1",
        "parts.7=1",
    ],
)
def test_an_override_that_leads_nowhere_is_refused(override):
    with pytest.raises(ConfigError, match=re.escape(f"--set {override}")) as caught:
        apply_overrides({"run": {"name": "x"}, "parts": [{}, {}]}, [override])
    assert caught.value.hint


KEYS = st.lists(st.text("abc_", min_size=1, max_size=4), min_size=1, max_size=3).map(".".join)


@given(KEYS, st.integers() | st.booleans() | st.text("xyz ,[]{}='\"\\\n#1.", max_size=12))
def test_any_value_is_read_as_toml_or_as_the_text_that_it_is(key, value):
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    got: Any = apply_overrides({}, [f"{key}={shown}"])
    for name in key.split("."):
        got = got[name]
    if isinstance(value, str):
        assert got == value.strip() or not isinstance(got, str) or got in value
    else:
        assert got == value and type(got) is type(value)


def test_a_bad_override_is_refused_as_the_file_would_be(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "x"\n')
    assert load_run_config(path, ["trainer.steps=3", "run.name=me"]).run.name == "me"
    for override, words in [
        ("trainer.steps=three", "trainer.steps = 'three': need a whole number"),
        ("trainer.stps=3", "did you mean 'steps'"),
        ("model=3", "model = 3: need a table"),
        ("cluster.num_workers=2", "give kind = 'ray'"),
        ("cluster.kind=slurm", "need 'inline', 'ray' or 'pod'"),
        ("cluster.colocated=false", "kind = 'inline' does not use colocated"),
        ("cluster.rendezvous.lease_s=3", "kind = 'inline' does not use rendezvous"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(words)):
            load_run_config(path, [override])


# Files
# ---------------------------------------------------------------------------------------------------------------


def test_state_on_disk_needs_a_folder():
    tables = {"trainer": {"offload_optimizer": "disk"}}
    assert "trainer.offload_optimizer = 'disk' needs a folder" in refusal(**tables)
    parse_run_config({**MODEL, **tables, "memory": {"disk_folder": "spill"}}, where="run.toml")


def test_weights_in_host_memory_are_refused_of_models_that_are_not_there_or_cannot():
    offline = {"objective": {"kind": "sft"}}
    told = refusal(**offline, trainer={"offload_parameters": ["reference"]})
    assert (
        told
        == "trainer.offload_parameters names 'reference', this run has actor: take it off the list"
    )
    told = refusal(trainer={"offload_parameters": ["critic"], "offload_optimizer": "host"})
    assert (
        told
        == "trainer.offload_parameters names 'critic', this run has actor: take it off the list"
    )
    compares = {"objective": {"kind": "grpo", "kl_coef": 0.1}}
    assert "the larger state goes first" in refusal(
        **offline, trainer={"offload_parameters": ["actor"]}
    )
    assert "'actor', 'critic', 'reference' or 'reward'" in refusal(
        trainer={"offload_parameters": ["engine"]}
    )
    told = refusal(
        **compares, engine={"batch_invariant": True}, trainer={"offload_parameters": ["reference"]}
    )
    assert (
        "trainer.offload_parameters names 'reference', whose layers the engine's kernels read"
        in told
    )
    parse_run_config(
        {**MODEL, **compares, "trainer": {"offload_parameters": ["reference"]}}, where="run.toml"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cluster": {"kind": "inline"}}, "cluster.kind = 'inline', which has one rank"),
        ({"cluster": {"kind": "pod", "num_workers": 3}}, "num_workers = 3: give a multiple of 2"),
        ({"cluster": {"kind": "ray", "engine_workers": 1}}, "cluster.engine_workers = 1 of Ray"),
    ],
)
def test_what_does_not_go_with_tensor_ranks_is_refused_by_name(settings, words):
    """The table of docs/parallel.md; one tensor rank takes all of it."""
    tree = {"cluster": {"kind": "pod"}, **settings}
    told = refusal(**tree, parallel={"tensor_ranks": 2})
    assert told.startswith("parallel.tensor_ranks = 2 with ") and words in told
    parse_run_config({**MODEL, **tree, "parallel": {"tensor_ranks": 1}}, where="run.toml")


def test_files_that_cannot_be_used(tmp_path):
    (tmp_path / "torn.toml").write_text("[model\npath = 3")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "twice.toml").write_text("[model]\npath = 'a'\npath = 'b'")
    for name, words in [
        ("nowhere.toml", "cannot read"),
        ("", "cannot read"),
        ("torn.toml", "is no TOML"),
        ("binary.toml", "is no TOML"),
        ("twice.toml", "is no TOML"),
    ]:
        with pytest.raises(ConfigError, match=words) as caught:
            load_run_config(tmp_path / name, [])
        assert str(tmp_path / name) in caught.value.message and caught.value.hint


def test_keys_may_be_64_deep_and_texts_may_have_any_number_of_dots(tmp_path):
    path, dots = tmp_path / "run.toml", "a." * 99 + "a"
    path.write_text(
        f'# {dots}\nx = "{dots} \\"{dots}"\ny = \'{dots}\'\nz = """\n{dots}\n"{dots}\\\\"""\n'
        f"t = '''\n{dots}'''\nf = [{'0.5, ' * 99}]\n"
    )
    tree = read_toml(path)
    assert tree == {
        "x": f'{dots} "{dots}',
        "y": dots,
        "z": f'{dots}\n"{dots}\\',
        "t": dots,
        "f": [0.5] * 99,
    }
    for num_parts, refused in ((64, False), (65, True)):
        key = ".".join(["a"] * num_parts)
        for text, overrides in (
            (f"{key} = 1", []),
            ("", [f"{key}=1"]),
            ("", [f"a={{{key[2:]}=1}}"]),
        ):
            path.write_text(text)
            if refused:
                with pytest.raises(ConfigError, match="more than 64 deep"):
                    apply_overrides(read_toml(path), overrides)
            else:
                assert apply_overrides(read_toml(path), overrides)


# Imports
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["gyre", "gyre.runconfig.run_config", "gyre.cli.main"])
def test_it_loads_no_torch(module):
    code = (
        f"import {module}, sys; print(sorted(sys.modules.keys() & {{'torch', 'transformers', "
        f"'tokenizers', 'wandb'}}))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_parallel_settings_are_inherited():
    tables = {
        "parallel": {
            "zero": 3,
            "shard_ranks": 8,
            "reference": {"zero": 0},
            "critic": {"shard_ranks": 2},
        }
    }
    parallel = parse_run_config({**MODEL, **tables}, where="run.toml").parallel
    assert [parallel.of(model) for model in ("actor", "critic", "reference", "reward")] == [
        (3, 8),
        (3, 2),
        (0, 8),
        (3, 8),
    ]
    assert "parallel.zero = 4: need 0, 1, 2 or 3" in refusal(parallel={"zero": 4})


def test_a_place_in_a_list_has_few_digits() -> None:
    with pytest.raises(ConfigError, match="is no place in a list of 1"):
        apply_overrides({"rewards": {"parts": [{}]}}, ["rewards.parts." + "9" * 5000 + ".weight=1"])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "set cluster.kind = 'pod' and cluster.colocated = false, or max_staleness = 0"),
        ({"cluster": {"kind": "pod"}}, "or share its device"),
        ({"cluster": {"kind": "ray"}}, "they read the trainer's storage"),
        ({"objective": {"kind": "sft"}}, "trains on given data"),
    ],
)
def test_rollouts_beside_training_are_refused_where_the_config_rules_them_out(tables, words):
    told = refusal(rollout={"max_staleness": 2}, **tables)
    assert told.startswith("rollout.max_staleness = 2") and words in told


def test_new_weights_under_running_rollouts_need_rollouts_beside_training():
    told = refusal(rollout={"weight_update": "continue"})
    assert "weight_update = 'continue' needs max_staleness of 1 or more" in told


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_weights_quantized_on_the_way_are_refused(engine):
    told = refusal(cluster={"kind": "pod", "weight_dtype": "fp8"}, engine={"kind": engine})
    assert "weight_dtype = 'fp8': weights are not quantized" in told
    assert "take weight_dtype = 'same': leave it out" in told
    tables = {**MODEL, "cluster": {"kind": "pod", "weight_dtype": "same"}}
    assert parse_run_config(tables, where="run.toml").cluster.weight_dtype == "same"


def test_members_may_work_beside_vllm():
    pod = {"kind": "pod", "members_address": "127.0.0.1:0"}
    tables = {**MODEL, "engine": {"kind": "vllm"}, "cluster": pod}
    config = parse_run_config(tables, where="run.toml")
    assert config.engine.kind == "vllm" and config.cluster.members_address == "127.0.0.1:0"


POD = {"kind": "pod", "colocated": False}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "set cluster.kind = 'pod', or 'ray'"),
        ({"cluster": {"kind": "ray"}}, "set parallel.tensor_ranks = 2, too"),
        (
            {"cluster": {"kind": "ray"}, "parallel": {"tensor_ranks": 4}},
            "the part of the model that its trainer has",
        ),
        (
            {
                "cluster": {"kind": "ray"},
                "parallel": {"tensor_ranks": 2},
                "engine": {"batch_invariant": True},
            },
            "equal bits are not shown on Ray, set cluster.kind = 'pod'",
        ),
        ({"cluster": {"kind": "pod", "num_workers": 3}}, "a multiple of 2, or cluster.engine_wo"),
        ({"cluster": POD | {"weight_transport": "nccl"}}, "'shm' or 'cuda-ipc'"),
        ({"cluster": POD | {"members_address": "127.0.0.1:0"}}, "have one rank"),
        ({"cluster": POD, "engine": {"kind": "vllm"}}, "vLLM cuts its model by itself"),
        ({"cluster": POD, "engine": {"disk_folder": "parked"}}, "leave engine.disk_folder"),
    ],
)
def test_what_an_engine_over_several_ranks_cannot_do_is_refused(tables, words):
    engine = {"tensor_ranks": 2, **tables.get("engine", {})}
    told = refusal(**{**tables, "engine": engine})
    assert told.startswith("engine.tensor_ranks = 2: ") and words in told


@pytest.mark.parametrize(("engine", "trainer"), [(2, 1), (1, 2), (2, 4)])
def test_equal_logprobs_need_the_same_tensor_ranks(engine, trainer):
    """A CPU may, in float32 too: docs/parallel.md."""
    tree = {
        "cluster": POD | {"num_workers": 4},
        "run": {"device": "cpu", "dtype": "float32"},
        "engine": {"tensor_ranks": engine, "batch_invariant": True},
        "parallel": {"tensor_ranks": trainer},
    }
    told = refusal(**tree)
    assert told.startswith("engine.batch_invariant = true: ") and "need the same number" in told
    assert f"engine.tensor_ranks = {engine} and parallel.tensor_ranks = {trainer}" in told
    parse_run_config({**MODEL, **tree, "objective": {"kind": "sft"}}, where="run.toml")
    both = {"engine": {**tree["engine"], "tensor_ranks": 2}, "parallel": {"tensor_ranks": 2}}
    parse_run_config({**MODEL, **tree, **both}, where="run.toml")


def test_a_served_engine_may_have_several_ranks_whatever_the_run_works_on():
    tables = {**MODEL, "engine": {"tensor_ranks": 2}}
    config = parse_run_config(tables, where="run.toml", served=True)
    assert config.engine.tensor_ranks == 2
    assert read_served_config(config.model_dump_json()) == config


def test_a_served_engine_need_not_agree_with_the_trainer_of_its_run():
    run = {"rollout": {"top_p": 0.9}, "trainer": {"matmul": "fp8"}}
    engine = {"tensor_ranks": 2, "batch_invariant": True}
    tables = {**MODEL, **run, "objective": {"kind": "grpo"}, "engine": engine}
    tables["run"] = {"dtype": "float16"}
    config = parse_run_config(tables, where="run.toml", served=True)
    assert config.engine.batch_invariant and config.engine.tensor_ranks == 2
    with pytest.raises(ConfigError, match="batch_invariant"):
        parse_run_config(tables, where="run.toml")


def test_a_server_which_keeps_no_journal_refuses_to():
    tables = {**MODEL, "engine": {"journal": True}}
    assert parse_run_config(tables, where="run.toml").engine.journal
    with pytest.raises(ConfigError, match=r"engine.journal = true: `gyre serve` has no run folder"):
        parse_run_config(tables, where="run.toml", served=True)


def test_an_engine_over_several_ranks_is_part_of_a_pod():
    tables = {**MODEL, "engine": {"tensor_ranks": 2}, "memory": {"disk_folder": "parked"}}
    for pod in (POD, {"kind": "pod"}, {"kind": "pod", "num_workers": 3, "engine_workers": 1}):
        config = parse_run_config({**tables, "cluster": pod}, where="run.toml")
        assert config.engine.tensor_ranks == 2


@pytest.mark.parametrize(
    ("cluster", "tensor_ranks", "trainer_ranks", "engines"),
    [
        ({}, 1, 3, 3),
        ({}, 2, 4, 2),
        ({}, 2, 3, None),
        ({}, 2, 1, None),
        ({"engine_workers": 1}, 2, 3, 1),
        ({"engine_workers": 5}, 2, 1, 5),
        ({"colocated": False}, 2, 3, 3),
    ],
)
def test_how_many_engines_a_pod_has(cluster, tensor_ranks, trainer_ranks, engines):
    """On shared devices engines of several ranks fill those of the trainer's, or their number is
    given."""
    tables = {**MODEL, "cluster": {"kind": "pod", **cluster}}
    config = parse_run_config(
        {**tables, "engine": {"tensor_ranks": tensor_ranks}}, where="run.toml"
    )
    if engines is None:
        with pytest.raises(ConfigError, match=f"do not fill the devices of {trainer_ranks} tr"):
            config.count_pod_engines(trainer_ranks)
        return
    assert config.count_pod_engines(trainer_ranks) == engines


def test_an_engine_over_several_ranks_on_ray_is_beside_a_trainer_of_as_many():
    tables = {"cluster": {"kind": "ray"}, "parallel": {"tensor_ranks": 2}}
    tables = {**MODEL, **tables, "engine": {"tensor_ranks": 2}}
    assert parse_run_config(tables, where="run.toml").engine.tensor_ranks == 2
