"""What users get wrong: refused before anything expensive, in words that say what was got, what is
accepted, what to do. A reward that breaks later costs labeled scores and nothing else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import system_rewards
from system_models import gsm8k_rows, save_checkpoint, save_rows
from system_runs import Answer, Command, events_of, gyre, read_story, write_config

pytestmark = pytest.mark.slow

JSONL = {
    "source": "jsonl",
    "prompt_field": "question",
    "answer_pattern": "#### (.+)",
    "held_out_fraction": 0.2,
}


def refused(folder: Path, sets: Mapping[str, Any], *, kind: str, words: tuple[str, ...]) -> Answer:
    """Train must fail with all of `words`, before it trained anything."""
    answer = gyre("train", write_config(folder, sets), "--json", folder=folder)
    assert answer.code == 2, (answer.code, answer.err)
    assert "Traceback" not in answer.err, answer.err
    assert not answer.left_behind
    error = answer.json["error"]
    assert error["kind"] == kind, error
    assert error["hint"], error
    text = f"{error['message']} {error['hint']}"
    for word in words:
        assert word in text, (word, text)
    for run in (folder / "runs").glob("*"):
        assert not events_of(run, "step.done"), "nothing was trained"
    return answer


def with_model(path: Path | str) -> dict[str, Any]:
    return {"model": {"path": str(path)}, "cold_start": None}


def wait_for(run: Path, text: bytes, command: Command) -> None:
    """Return when the run's log holds this text."""
    while not (run / "events.jsonl").exists() or text not in (run / "events.jsonl").read_bytes():
        assert command.process.exitcode is None, command.wait()
        time.sleep(0.02)


# ---- models


def test_missing_model_folder(tmp_path: Path) -> None:
    refused(tmp_path, with_model(tmp_path / "nowhere"), kind="input", words=("nowhere",))


def test_folder_that_holds_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path, with_model(tmp_path / "empty"), kind="input", words=("empty",))


@pytest.mark.parametrize("harm", ["cut", "garbage", "missing", "tensor", "config"])
def test_unreadable_weights(tmp_path: Path, harm: str) -> None:
    from safetensors.torch import load_file, save_file

    model = save_checkpoint(tmp_path / "model", "qwen3")
    weights = model / "model.safetensors"
    words = ("model.safetensors",)
    if harm == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif harm == "garbage":
        weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    elif harm == "missing":
        weights.unlink()
        words = ("safetensors",)
    elif harm == "tensor":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
        words = ("model.layers.1.mlp.up_proj.weight",)
    else:
        (model / "config.json").write_text("{", encoding="utf-8")
        words = ("config.json",)
    data = {**JSONL, "path": str(save_rows(tmp_path / "rows.jsonl", gsm8k_rows(40)))}
    refused(tmp_path, {**with_model(model), "data": data}, kind="input", words=words)


# ---- data


def test_missing_data_file(tmp_path: Path) -> None:
    data = {**JSONL, "path": "nowhere.jsonl"}
    refused(tmp_path, {"data": data}, kind="input", words=("nowhere.jsonl", "does not exist"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"query": "1 + 1?", "answer": "#### 2"}',
            ("rows.jsonl:7", "question", "query", "data.prompt_field"),
        ),
        ('{"question": "1 + 1?"}', ("rows.jsonl:7", "answer")),
        ('{"question": "1 + 1?", "answer": "two"}', ("rows.jsonl:7", "answer_pattern")),
        ('{"question": "1 + 1?", ', ("rows.jsonl:7",)),
        ('{"question": "", "answer": "#### 2"}', ("rows.jsonl:7", "question")),
    ],
)
def test_bad_row(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    lines = [json.dumps(row) for row in gsm8k_rows(20)]
    lines.insert(6, line)
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model = save_checkpoint(tmp_path / "model", "qwen3")
    sets = {**with_model(model), "data": {**JSONL, "path": str(tmp_path / "rows.jsonl")}}
    refused(tmp_path, sets, kind="input", words=words)


def test_prompt_longer_than_the_context(tmp_path: Path) -> None:
    rows = gsm8k_rows(20)
    rows[4]["question"] = "How many? " * 300
    sets = {
        **with_model(save_checkpoint(tmp_path / "model", "qwen3", context_tokens=128)),
        "data": {**JSONL, "path": str(save_rows(tmp_path / "rows.jsonl", rows))},
        "eval.num_problems": 0,
    }
    answer = refused(tmp_path, sets, kind="input", words=("rows.jsonl:5", "920 tokens", "context"))
    assert "112" in answer.json["error"]["message"], "128 less the 16 of a completion"


def test_prompt_and_completion_together_longer_than_the_context(tmp_path: Path) -> None:
    answer = gyre(
        "train", write_config(tmp_path, {"rollout.max_tokens": 500}), "--json", folder=tmp_path
    )
    assert answer.code == 2, answer.err
    assert "Traceback" not in answer.err
    assert "128" in answer.json["error"]["message"] and "max_tokens" in str(answer.json["error"])


def test_fewer_held_out_problems_than_asked_for(tmp_path: Path) -> None:
    refused(
        tmp_path,
        {"eval.num_problems": 100_000},
        kind="config",
        words=("eval.num_problems", "held_out_fraction"),
    )


# ---- keys


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("trainer.lerning_rate", 0.1, ("lerning_rate", "learning_rate")),
        ("rollout.max_token", 5, ("max_token", "max_tokens")),
        ("objektive", {"kind": "grpo"}, ("objektive", "objective")),
        ("trainer.steps", "many", ("trainer.steps", "many")),
        ("objective.kind", "grpp", ("grpp", "grpo")),
        ("objective.variant", "dappo", ("dappo", "dapo")),
        ("run.dtype", "float8", ("run.dtype", "float8", "bfloat16")),
        ("rewards.parts", [], ("rewards.parts",)),
        ("memory.leave", {"actor.params": "destroy"}, ("actor.params", "destroy")),
        ("eval.metric.part", "nonsense", ("nonsense", "function")),
    ],
)
def test_bad_keys(tmp_path: Path, key: str, value: Any, words: tuple[str, ...]) -> None:
    refused(tmp_path, {key: value}, kind="config", words=words)


def test_bad_override(tmp_path: Path) -> None:
    answer = gyre(
        "train", write_config(tmp_path), "--set", "trainer.steps", "--json", folder=tmp_path
    )
    assert answer.code == 2 and "KEY=VALUE" in answer.json["error"]["message"]


def test_resume_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    answer = gyre("train", "--resume", tmp_path / "other", "--json", folder=tmp_path)
    assert answer.code == 2 and answer.json["error"]["kind"] == "snapshot"
    assert "not a run folder" in answer.json["error"]["message"]
    assert not list((tmp_path / "other").iterdir()), "nothing was written there"


def test_resume_while_it_still_runs(tmp_path: Path) -> None:
    """Two processes must not write one run."""
    first = Command(
        "train", write_config(tmp_path, {"trainer.steps": 2000}), "--plain", folder=tmp_path
    )
    run = tmp_path / "runs" / "tiny"
    try:
        wait_for(run, b'"step.done"', first)
        second = gyre("train", "--resume", run, "--json", folder=tmp_path)
        assert second.code == 2, second.err
        assert "still running" in second.json["error"]["message"], second.json
    finally:
        first.kill()
        first.wait()


# ---- rewards


def with_reward(name: str, **more: Any) -> dict[str, Any]:
    return {
        "rewards.parts": [
            {"kind": "function", "path": f"system_rewards:{name}", "limit_s": 1.0, **more}
        ]
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ("KeyError", "no such thing", "completion")),
        pytest.param("gives_nan", ("nan", "completion"), marks=pytest.mark.slow),
        pytest.param("no_number", ("not a number", "completion"), marks=pytest.mark.slow),
        ("hangs", ("longer than 1 s", "completion")),
        ("not_there", ("not_there", "has no function")),
    ],
)
def test_bad_reward_function_is_refused(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    refused(tmp_path, {**with_reward(name), "cold_start": None}, kind="input", words=words)


def test_bad_reward_function_is_refused_before_the_cold_start(tmp_path: Path) -> None:
    refused(tmp_path, with_reward("raises"), kind="input", words=("KeyError",))


def test_reward_that_starts_failing_costs_labeled_scores(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    sets = {
        **with_reward("fails_later", options={"flag": str(flag)}),
        "cold_start": None,
        "eval.num_problems": 0,
    }
    sets["rewards.max_failed_share"] = 1.0
    command = Command(
        "train", write_config(tmp_path, {**sets, "trainer.steps": 6}), "--plain", folder=tmp_path
    )
    run = tmp_path / "runs" / "tiny"
    wait_for(run, b'"weights.published"', command)
    flag.touch()
    answer = command.wait()
    assert answer.code == 0, answer.err
    assert not answer.left_behind
    story = read_story(run)
    assert [step["step"] for step in story.steps] == [1, 2, 3, 4, 5, 6], "the run goes on"
    outcomes = {part["outcome"] for sample in story.samples for part in sample["parts"]}
    assert {"ok", "error", "invalid", "timeout"} <= outcomes
    for sample in story.samples:
        for part in sample["parts"]:
            assert part["outcome"] == "ok" or (part["value"] <= 0.0 and part["reason"])
    assert {row["what"].split()[-1] for row in events_of(run, "warn.reward_failed")} >= {
        "error",
        "invalid",
        "timeout",
    }


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raises", ("system_rewards:breaks_later raised RuntimeError at", "no service for")),
        ("nan", ("system_rewards:breaks_later returned nan",)),
    ],
)
def test_reward_that_breaks_stops_the_run_and_says_where(
    tmp_path: Path, way: str, words: tuple[str, ...]
) -> None:
    flag = tmp_path / "flag"
    sets = {
        **with_reward("breaks_later", options={"flag": str(flag), "way": way}),
        "cold_start": None,
    }
    sets |= {"eval.num_problems": 0, "trainer.steps": 500, "observe.report": True}
    command = Command("train", write_config(tmp_path, sets), "--plain", "--json", folder=tmp_path)
    run = tmp_path / "runs" / "tiny"
    wait_for(run, b'"step.done"', command)
    if way == "nan":  # the report cannot be written: that must not hide what ended the run
        (run / "report.html" / "taken").mkdir(parents=True)
    flag.touch()
    answer = command.wait()
    assert answer.code == 1 and not answer.left_behind
    error = answer.json["error"]
    failed = re.search(r"failed on (\d+) of 16 completions", error["message"])
    # the flag may fall within a step, of which the first completions are scored
    assert error["kind"] == "reward" and failed and int(failed[1]) > 0.2 * 16, error
    place = re.search(r"system_rewards\.py:(\d+)", error["message"])
    assert place is not None
    line = Path(system_rewards.__file__).read_text().splitlines()[int(place[1]) - 1]
    assert ("raise RuntimeError(" if way == "raises" else "def breaks_later") in line
    page = [] if way == "nan" else [(run / "report.html").read_text(encoding="utf-8")]
    assert len(events_of(run, "warn.report_not_written")) == 1 - len(page)
    for said in (error["message"], answer.err, *page):
        assert all(word in said for word in words), said[-3000:]
    told = [line for line in answer.err.splitlines() if line.startswith("reward failed: function")]
    # a step that the flag fell into may have failed too little to end the run, and be told first
    *earlier, last = counts = [event["count"] for event in events_of(run, "warn.reward_failed")]
    assert last == int(failed[1]) and len(earlier) <= 1 and all(n <= 0.2 * 16 for n in earlier)
    assert all(event["checks"] == 16 for event in events_of(run, "warn.reward_failed"))
    assert len(told) == 1 and f"{counts[0]} of 16 completions at step" in told[0]
    assert "this reward prints" in (run / "rewards.log").read_text(encoding="utf-8")
    assert "this reward prints" not in answer.err + answer.out
