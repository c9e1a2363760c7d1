"""What each command says about a finished run, in words and as JSON; and that the export is what
transformers reads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from system_runs import TINY, gyre, read_story, write_config

QUESTION = "State the final answer to the following arithmetic problem: 3 + 4 ="
SIZES = ("prompts_per_step", "completions_per_prompt", "sequences_per_update", "tokens_per_chunk")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, made with --json; what it printed is beside it."""
    folder = tmp_path_factory.mktemp("finished")
    answer = gyre("train", write_config(folder, {"cold_start.steps": 30}), "--json", folder=folder)
    assert answer.code == 0, answer.err
    (folder / "printed.json").write_text(answer.out, encoding="utf-8")
    return folder / "runs" / "tiny"


def test_train_prints_one_object(finished: Path) -> None:
    printed = (finished.parent.parent / "printed.json").read_text(encoding="utf-8")
    assert printed.count("\n") == 1, "nothing but the object goes to stdout"
    result = json.loads(printed)
    assert result["run"] == str(finished)
    assert result["step"] == 5
    assert result["version"] == 35, "one update per step, cold start included"
    accuracy = result["evals"]["accuracy"]
    assert {"before", "after", "n"} <= set(accuracy) and accuracy["n"] == 8
    assert {"rollout", "train", "evaluate"} <= set(result["seconds"])
    assert all(seconds >= 0.0 for seconds in result["seconds"].values())


def test_eval_agrees_with_the_run(finished: Path) -> None:
    answer = gyre("eval", finished, "--json", folder=finished)
    assert answer.code == 0, answer.err
    result = answer.json
    last = read_story(finished).evals[-1]
    assert (result["metric"], result["n"]) == ("accuracy", 8)
    assert result["value"] == last["accuracy"]
    assert result["detail"] == pytest.approx(last["detail"])
    assert not answer.left_behind


def test_eval_of_a_model_folder_with_a_config(finished: Path) -> None:
    config = write_config(finished.parent.parent)
    answer = gyre(
        "eval",
        finished / "export",
        "--config",
        config,
        "--problems",
        "5",
        "--json",
        folder=finished.parent.parent,
    )
    assert answer.code == 0, answer.err
    assert answer.json["n"] == 5


def test_eval_says_which_problems_and_what_failed(finished: Path) -> None:
    folder = finished.parent.parent
    reward = '[{kind="function", path="system_rewards:gives_nan"}]'
    answer = gyre(
        "eval",
        finished,
        "--problems",
        "4",
        "--set",
        f"rewards.parts={reward}",
        "--json",
        folder=folder,
    )
    assert answer.code == 0, answer.err
    assert answer.json["source"] == "reasoning_gym/chain_sum" and answer.json["value"] == 0.0
    assert answer.json["counted"]["warn.reward_failed"] == 4
    told = gyre("eval", finished, "--problems", "4", folder=folder)
    assert "4 held-out problems of reasoning_gym/chain_sum" in told.err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--problems", "100000"), "--problems = 100000"),
        (("--set", "rewards.parts=[]", "--set", 'objective={kind="sft"}'), "no rule reward"),
    ],
)
def test_eval_refuses_what_it_cannot_measure(
    finished: Path, more: tuple[str, ...], words: str
) -> None:
    answer = gyre("eval", finished, *more, "--json", folder=finished)
    assert answer.code == 2, answer.err
    assert words in answer.json["error"]["message"] and answer.json["error"]["hint"]


def test_a_reward_model_is_not_asked_for_answers(finished: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(finished / "export", model)
    (model / "scalar_head.safetensors").touch()
    for argv in (("eval", model), ("chat", model, "--prompt", QUESTION)):
        answer = gyre(*argv, "--json", folder=tmp_path)
        assert answer.code == 2 and "reward model" in answer.json["error"]["message"]


def test_a_folder_with_quotes_in_its_name(finished: Path, tmp_path: Path) -> None:
    model = tmp_path / 'a "b" \\c'
    shutil.copytree(finished / "export", model)
    answer = gyre(
        "chat", model, "--prompt", QUESTION, "--max-tokens", "2", "--json", folder=tmp_path
    )
    assert answer.code == 0, answer.err


def test_a_place_that_holds_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    config = write_config(tmp_path)
    answer = gyre(
        "train", config, "--set", f"run.folder={tmp_path / 'taken'}", "--json", folder=tmp_path
    )
    assert answer.code == 2, answer.err
    assert (
        "taken" in answer.json["error"]["message"] and "run.folder" in answer.json["error"]["hint"]
    )


def test_chat_is_what_transformers_generates(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answer = gyre(
        "chat", finished, "--prompt", QUESTION, "--max-tokens", "24", "--json", folder=finished
    )
    assert answer.code == 0, answer.err
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    model = AutoModelForCausalLM.from_pretrained(finished / "export", dtype=torch.float32)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        generated = model.generate(
            **rendered, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    chosen = generated[0, rendered["input_ids"].shape[1] :]
    words = tokenizer.decode(chosen, skip_special_tokens=True)
    assert answer.json["answers"] == [words]


def test_chat_shows_words_as_they_come(finished: Path) -> None:
    quiet = gyre(
        "chat", finished, "--prompt", QUESTION, "--max-tokens", "8", "--json", folder=finished
    )
    shown = gyre("chat", finished, "--prompt", QUESTION, "--max-tokens", "8", folder=finished)
    assert shown.out.rstrip("\n") == quiet.json["answers"][0].rstrip("\n")


def test_chat_refuses_what_does_not_fit(finished: Path) -> None:
    answer = gyre("chat", finished, "--prompt", QUESTION * 60, "--json", folder=finished)
    assert answer.code == 2, answer.err
    assert (
        answer.json["error"]["kind"] in ("input", "refused")
        and "context" in answer.json["error"]["message"]
    )


def test_report(finished: Path) -> None:
    answer = gyre("report", finished, "--json", folder=finished)
    assert answer.code == 0, answer.err
    page = Path(answer.json["report"]).read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html") and "reward" in page
    assert not re.search(r"""(src|href)=["']https?://""", page), "the page is self-contained"


def test_plan_in_words(finished: Path) -> None:
    folder = finished.parent.parent
    answer = gyre("plan", write_config(folder), folder=folder)
    assert answer.code == 0, answer.err
    main = answer.out.split("== main ==")[1]
    for name, unit in zip(SIZES, ("prompts", "completions", "sequences", "tokens"), strict=True):
        assert re.search(rf"{name} +[\d,]+ +{unit}", main), name
    assert "Memory by phase" in main and "engine.kv" in main
    assert not (folder / "runs" / "tiny-2").exists(), "a plan starts nothing"


def test_plan_as_json(finished: Path) -> None:
    folder = finished.parent.parent
    answer = gyre("plan", write_config(folder), "--json", folder=folder)
    assert answer.code == 0, answer.err
    assert answer.out.count("\n") == 1
    sizes = answer.json["stages"]["main"]["sizes"]
    rollout, trainer = TINY["rollout"], TINY["trainer"]
    assert [sizes[name] for name in SIZES] == [
        rollout["prompts_per_step"],
        rollout["completions_per_prompt"],
        16,
        trainer["tokens_per_chunk"],
    ]
    assert answer.json["stages"]["main"] == {
        **json.loads((finished / "plan.json").read_text()),
        "hardware": answer.json["stages"]["main"]["hardware"],
        "device_budget_bytes": answer.json["stages"]["main"]["device_budget_bytes"],
        "host_budget_bytes": answer.json["stages"]["main"]["host_budget_bytes"],
        "reasons": answer.json["stages"]["main"]["reasons"],
        "phases": answer.json["stages"]["main"]["phases"],
    }, "the run decided what the plan says"


def test_doctor(tmp_path: Path) -> None:
    answer = gyre("doctor", "--json", folder=tmp_path)
    assert answer.code == 0, answer.err
    findings = {finding["what"]: finding for finding in answer.json["findings"]}
    assert {"processor", "memory", "torch", "code sandbox"} <= set(findings)
    assert all(finding["verdict"] in ("ok", "weaker", "missing") for finding in findings.values())
    words = gyre("doctor", folder=tmp_path)
    assert all(what in words.out for what in findings)


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["train", "nowhere.toml"], "config"),
        (["train"], "config"),
        (["train", "run.toml", "--stage", "later"], "config"),
        (["train", "--resume", "nowhere"], "snapshot"),
        (["eval", "nowhere"], "input"),
        (["chat", "nowhere", "--prompt", "hello"], "input"),
        (["report", "nowhere"], "input"),
        (["plan", "nowhere.toml"], "config"),
    ],
)
def test_errors_are_json_too(tmp_path: Path, argv: list[str], kind: str) -> None:
    write_config(tmp_path)
    answer = gyre(*argv, "--json", folder=tmp_path)
    assert answer.code == 2
    assert answer.out.count("\n") == 1
    error = answer.json["error"]
    assert error["kind"] == kind and error["message"] and error["message"] in answer.err
    assert error["hint"], "what to do next"
    assert "Traceback" not in answer.err


@pytest.mark.slow
def test_stages_run_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"goal": {"metric": "accuracy", "margin": -1.0}})
    cold = gyre("train", config, "--stage", "cold_start", "--json", folder=tmp_path)
    assert cold.code == 0, cold.err
    assert cold.json["evals"]["loss"]["after"] < cold.json["evals"]["loss"]["before"]
    assert cold.json["goal"]["reached"] is None and "main stage" in cold.json["goal"]["verdict"]
    export = Path(cold.json["export"])
    main = gyre(
        "train",
        config,
        "--stage",
        "main",
        "--set",
        f'model={{path="{export}"}}',
        "--json",
        folder=tmp_path,
    )
    assert main.code == 0, main.err
    assert main.json["step"] == 5 and main.json["run"].endswith("tiny-2")
    assert main.json["goal"]["reached"] is True
    told = read_story(Path(main.json["run"]))
    assert {step["stage"] for step in told.steps} == {"main"}


def test_help_lists_commands(tmp_path: Path) -> None:
    answer = gyre("--help", folder=tmp_path)
    assert answer.code == 0
    assert all(
        command in answer.out for command in ("train", "plan", "eval", "chat", "report", "doctor")
    )


@pytest.mark.slow
def test_plan_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    answer = gyre(
        "plan", write_config(tmp_path), "--gpus", "8", "--gpu", "h200", "--json", folder=tmp_path
    )
    assert answer.code == 0, answer.err
    for stage in answer.json["stages"].values():
        assert stage["best"]["short_device_bytes"] == 0 and stage["best"]["layout"]["gpus"] == 8
        assert len(stage["checklists"]["training"]) == len(stage["checklists"]["inference"]) == 7
    refused = gyre("plan", "--shape", "llama-3-70b", "--gpu", "l4", "--json", folder=tmp_path)
    assert refused.code == 2
    error = refused.json["error"]
    assert (
        error["kind"] == "memory"
        and "bytes too little" in error["message"]
        and "GPUs" in error["hint"]
    )
