"""A user's own checkpoint and JSONL: loaded, trained by GRPO, exported, and read by transformers
again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from system_models import gsm8k_rows, save_checkpoint, save_rows
from system_runs import events_of, gyre, write_config

QUESTION = "Anna has 3 apples and buys 4 more. How many apples does she have?"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [*(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "qwen2")), "qwen3"],
)
def test_trains_and_exports(tmp_path: Path, family: str) -> None:
    model = save_checkpoint(tmp_path / "model", family)
    hub = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**hub, "made_by": "me"}))
    rows = save_rows(tmp_path / "train.jsonl", gsm8k_rows(80))
    config = write_config(
        tmp_path,
        {
            "model": {"path": str(model)},
            "data": {
                "source": "jsonl",
                "path": str(rows),
                "prompt_field": "question",
                "answer_field": "answer",
                "answer_pattern": "#### (.+)",
                "held_out_fraction": 0.2,
            },
            "cold_start": None,
            "trainer.steps": 2,
        },
    )
    answer = gyre("train", config, "--json", folder=tmp_path)
    assert answer.code == 0, answer.err
    run = Path(answer.json["run"])
    started = events_of(run, "run.started")[0]
    assert started["model"]["family"] == family
    (ignored,) = events_of(run, "warn.model_keys_ignored")
    assert ignored["keys"] == ["made_by"] and ignored["folder"] == str(model)
    assert len(events_of(run, "step.done")) == 2 and answer.json["version"] == 2

    before, after = (
        load_file(model / "model.safetensors"),
        load_file(run / "export" / "model.safetensors"),
    )
    assert {name: array.shape for name, array in before.items()} == {
        name: a.shape for name, a in after.items()
    }
    assert any(not np.array_equal(before[name], after[name]) for name in before), (
        "it learned something"
    )

    check_export(run, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_fresh_model_with_a_tokenizer_of_ours_exports(tmp_path: Path, family: str) -> None:
    """transformers chooses the class that reads the tokenizer's files by the family. (qwen3:
    test_commands.)"""
    config = write_config(tmp_path, {"model.shape.family": family, "trainer.steps": 1})
    answer = gyre("train", config, "--json", folder=tmp_path)
    assert answer.code == 0, answer.err
    run = Path(answer.json["run"])
    assert not events_of(run, "warn.tokenizer_misread")
    check_export(run, family)


@pytest.mark.slow
def test_a_tokenizer_that_others_would_misread_is_an_event(tmp_path: Path) -> None:
    first = gyre(
        "train", write_config(tmp_path, {"trainer.steps": 1}), "--json", folder=tmp_path
    ).json["run"]
    sets = {
        "model.shape.family": "qwen2",
        "trainer.steps": 1,
        "tokenizer": {"path": f"{first}/tokenizer"},
    }
    answer = gyre("train", write_config(tmp_path, sets), "--json", folder=tmp_path)
    assert answer.code == 0, answer.err
    (event,) = events_of(Path(answer.json["run"]), "warn.tokenizer_misread")
    assert event["family"] == "qwen2"


def check_export(run: Path, family: str) -> None:
    """transformers reads the export as the same model, with the same words."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reloaded = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    assert type(reloaded).__name__.lower().startswith(family)
    words = gyre(
        "chat", run, "--prompt", QUESTION, "--max-tokens", "12", "--json", folder=run
    ).json["answers"][0]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        generated = reloaded.generate(**rendered, max_new_tokens=12, do_sample=False)
    chosen = generated[0, rendered["input_ids"].shape[1] :]
    assert words == tokenizer.decode(chosen, skip_special_tokens=True)
