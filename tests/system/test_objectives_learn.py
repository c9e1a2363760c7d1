"""Every objective learns: each config of configs/ is run as a user runs it and must reach its own
[goal], which names the metric, the margin and n. One cold start serves all that begin with a policy
(--stage main --set model.path=…).

The goal of arith_grpo_cpu is the demo's, that of arith_grpo_1gpu a GPU's; gsm8k_grpo_1gpu needs a
hub too: its path is run on stand-ins. grpo_8b_ray has none: it is what bench/ring.py measures.
CI runs two configs and two variants; the others are part of `make test-variants`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from system_models import gsm8k_rows, save_checkpoint, save_rows
from system_runs import Command, events_of

from gyre.objectives.config import VARIANTS
from gyre.runconfig.run_config import RunConfig, load_run_config
from shown_settings import show

CONFIGS = Path(__file__).parents[2] / "configs"
FRESH = ("sft_cpu",)  # begins with random weights
POLICY = ("dpo_cpu", "dpo_online_cpu", "ppo_cpu")  # begin with the cold start's policy
# the second one's reward is what the first one exports
CHAINED = ("rm_cpu", "grpo_reward_model_cpu")
SHOWN = ("dpo_cpu", "ppo_cpu")  # of POLICY, in CI; the cold start itself learns as sft_cpu does
SHOWN_VARIANTS = ("dapo", "cispo")  # with a clip and without; the demo is grpo
FEWEST = 200  # problems or pairs that a goal is judged on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def train(
    name: str, folder: Path, *sets: str, model: Path | None = None, stage: str = "main"
) -> dict[str, Any]:
    """Run a config; all of it, or one stage that begins with `model`."""
    changes = [f"run.folder={folder}", "snapshot.every_steps=0", *sets]
    words: list[str | Path] = ["train", CONFIGS / f"{name}.toml", "--json", "--stage", stage]
    for change in (*changes, *([f"model.path={model}"] if model else [])):
        words += ["--set", change]
    answer = Command(*words, folder=folder).wait(timeout_s=2000.0)
    assert answer.code == 0, answer.err[-3000:]
    return answer.json


def check_goal(name: str, result: dict[str, Any]) -> None:
    """The run says that it reached its goal; the goal is one that says something."""
    config = load_run_config(CONFIGS / f"{name}.toml", [])
    assert (
        config.goal is not None
        and config.goal.at_least_after is not None
        and config.goal.margin is not None
    )
    assert result["goal"]["reached"], result["goal"]["verdict"]
    assert result["evals"][config.goal.metric]["n"] == config.eval.num_problems >= FEWEST


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cold-started policy of the main job: knows the format, answers right less than half the
    time."""
    result = train("arith_grpo_cpu", tmp_path_factory.mktemp("cold"), stage="cold_start")
    return Path(result["export"])


@pytest.fixture(scope="session")
def reward_model(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("rm_cpu", tmp_path_factory.mktemp("rm"), model=policy)


def test_no_config_is_forgotten() -> None:
    named = {
        *FRESH,
        *POLICY,
        *CHAINED,
        "arith_variants_cpu",
        "arith_grpo_cpu",
        "arith_grpo_1gpu",
        "gsm8k_grpo_1gpu",
    }
    elsewhere = {"grpo_8b_ray", "arith_grpo_pod"}  # bench/ring.py, test_pod_runs.py
    assert {path.stem for path in CONFIGS.glob("*.toml")} == named | elsewhere


@pytest.mark.parametrize("name", show((), FRESH))
def test_supervised_alone(name: str, tmp_path: Path) -> None:
    check_goal(name, train(name, tmp_path, stage="all"))


@pytest.mark.parametrize("name", show(SHOWN, POLICY))
def test_lifts_accuracy(name: str, policy: Path, tmp_path: Path) -> None:
    check_goal(name, train(name, tmp_path, model=policy))


@pytest.mark.parametrize("variant", show(SHOWN_VARIANTS, VARIANTS))
def test_variant_lifts_accuracy(variant: str, policy: Path, tmp_path: Path) -> None:
    result = train("arith_variants_cpu", tmp_path, f"objective.variant={variant}", model=policy)
    check_goal("arith_variants_cpu", result)
    steps = [step["metrics"] for step in events_of(Path(result["run"]), "step.done")]
    check_ratios(variant, steps)
    assert steps[-1]["kl_reference"] > 1e-3, "the config turns the KL on"


def test_a_stage_begins_at_its_reference_and_leaves_it(policy: Path, tmp_path: Path) -> None:
    """With one update a step, the first step's KL is that of the policy to itself."""
    sets = ("trainer.sequences_per_update=0", "trainer.steps=3", "eval.num_problems=8")
    result = train("arith_variants_cpu", tmp_path, *sets, model=policy)
    kls = [step["metrics"]["kl_reference"] for step in events_of(Path(result["run"]), "step.done")]
    assert len(kls) == 3 and kls[0] == 0.0 < kls[-1]


def check_ratios(variant: str, steps: list[dict[str, float]]) -> None:
    """A step's second update is one step off its samples: ratios leave 1, and the clip acts where
    there is one."""
    assert any(step["kl_old"] > 0.0 for step in steps), (
        "the policy moved between the two updates of a step"
    )
    clipped = [step["clip_fraction"] for step in steps]
    row = VARIANTS[variant]
    if row["surrogate"] == "clip":
        assert any(fraction > 0.0 for fraction in clipped), "the clip acted"
        sides = [sum(step[f"clip_{side}_fraction"] for step in steps) for side in ("low", "high")]
        assert all(side > 0.0 for side in sides), "on both sides"
    else:
        assert row["clip_low"] == 1.0 and row["clip_high"] >= 4.0, (
            "cispo's bounds are for ratios that have run away"
        )
        assert max(clipped) < 0.01
    assert max(clipped) < 1.0


@pytest.mark.variant
def test_reward_model_tells_right_from_wrong(reward_model: dict[str, Any]) -> None:
    check_goal("rm_cpu", reward_model)
    assert reward_model["evals"]["pair_accuracy"]["after"] >= 0.9


@pytest.mark.variant
def test_learnt_reward_lifts_the_true_accuracy(
    reward_model: dict[str, Any], policy: Path, tmp_path: Path
) -> None:
    config = load_run_config(CONFIGS / "grpo_reward_model_cpu.toml", [])
    weights = {part.kind: part.weight for part in config.rewards.parts}
    assert weights["answer"] == 0.0 < weights["model"], (
        "the true answer is measured and teaches nothing"
    )
    path = f"rewards.parts.{place_of_model(config)}.path={reward_model['run']}"
    check_goal(
        "grpo_reward_model_cpu", train("grpo_reward_model_cpu", tmp_path, path, model=policy)
    )


def place_of_model(config: RunConfig) -> int:
    return [part.kind for part in config.rewards.parts].index("model")


def test_gsm8k_on_stand_ins(tmp_path: Path) -> None:
    """The config as it is, but for where model and data lie, the device and the sizes."""
    model = save_checkpoint(tmp_path / "model", "qwen3", context_tokens=2048)
    rows, held_out = gsm8k_rows(60), gsm8k_rows(20)
    result = train(
        "gsm8k_grpo_1gpu",
        tmp_path,
        f"data.path={save_rows(tmp_path / 'train.jsonl', rows)}",
        f"data.held_out_path={save_rows(tmp_path / 'test.jsonl', held_out)}",
        'data.held_out_split=""',
        "data.source=jsonl",
        "data.max_prompt_tokens=1024",  # the stand-in's tokenizer has few merges
        "run.device=cpu",
        "trainer.steps=2",
        "rollout.prompts_per_step=4",
        "rollout.completions_per_prompt=4",
        "rollout.max_tokens=24",
        "eval.num_problems=16",
        model=model,
    )
    steps = events_of(Path(result["run"]), "step.done")
    assert len(steps) == 2
    assert {"reward/answer", "reward/format", "reward/length"} <= steps[-1]["metrics"].keys()
    assert result["evals"]["accuracy"]["n"] == 16 and result["goal"] is None
    (loaded,) = events_of(Path(result["run"]), "data.loaded")
    assert loaded["held_out"] == 20 and loaded["dropped"]["overlong"] == 0
    assert (Path(result["export"]) / "model.safetensors").is_file()
