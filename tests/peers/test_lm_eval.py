"""lm-eval through the completions endpoint of a served model, beside transformers in its own process:
the same log-likelihoods, texts and metrics of every question.

Both compute in float32. A log-likelihood is a sum over at most a dozen tokens, each from logits that
were added up in another order, in a batch of another form: they differed by less than 1e-5. Ten
times that is allowed, which is far below the gap between two choices.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from environment import ask

from served import Served, serving

sys.path.insert(0, str(Path(__file__).parents[1] / "system"))
from system_models import gsm8k_rows, save_checkpoint

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
CONTEXT, QUESTIONS, TOLERANCE = 256, 24, 1e-4
CHOICE = """
task: apples_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{target}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT = """
task: apples_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{greedy}}}}"
generation_kwargs: {{until: ["\\n\\n", "."], max_gen_toks: {tokens}, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
TOKENS = 24


def save_tasks(folder: Path, served: Served) -> Path:
    """Questions with four choices: numbers of equal length, and a text that the model prefers itself."""
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for number, row in enumerate(gsm8k_rows(QUESTIONS)):
            right = int(row["answer"].rpartition(" ")[2].strip())
            choices = [f" {right + 10 * step} apples" for step in range(3)]
            greedy = [say(served, f"{row['question']}\nAnswer:", tokens) for tokens in (2, TOKENS)]
            choices.append(greedy[0])
            end = greedy[1] if number % 2 else "144"  # so that half of the texts match
            target = number % len(choices)
            line = {**row, "choices": choices, "target": target, "greedy": end}
            file.write(json.dumps(line) + "\n")
    for name, text in (("choice", CHOICE), ("text", TEXT)):
        (folder / f"{name}.yaml").write_text(text.format(rows=json.dumps(str(rows)), tokens=TOKENS))
    return folder


def say(served: Served, prompt: str, tokens: int) -> str:
    """The model's own text, greedily."""
    body = {"model": served.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """Both ways' results and samples."""
    folder = tmp_path_factory.mktemp("model") / "qwen"
    save_checkpoint(folder, "qwen3", context_tokens=CONTEXT)
    options = ["--set", "run.threads=1", "--set", "run.dtype=float32"]
    with serving(folder, tmp_path_factory.mktemp("log") / "stderr", *options) as served:
        case = {
            "folder": str(folder),
            "url": served.url,
            "model": served.model,
            "tasks": str(save_tasks(tmp_path_factory.mktemp("tasks"), served)),
            "context_tokens": CONTEXT,
        }
        return ask(HERE / "ask_lm_eval.py", case)


def test_log_likelihoods_are_those_of_transformers(found) -> None:
    ours, theirs = (found[way]["samples"]["apples_choice"] for way in ("gyre", "transformers"))
    assert len(ours) == len(theirs) == QUESTIONS
    greedy = []
    for one, other in zip(ours, theirs, strict=True):
        assert one["asked"] == other["asked"]
        for (ours_sum, ours_best), (theirs_sum, theirs_best) in zip(
            one["kept"], other["kept"], strict=True
        ):
            assert ours_sum == pytest.approx(theirs_sum, abs=TOLERANCE)
            assert ours_best == theirs_best
            greedy.append(ours_best)
    assert any(greedy) and not all(greedy)


def test_texts_are_those_of_transformers(found) -> None:
    ours, theirs = (found[way]["samples"]["apples_text"] for way in ("gyre", "transformers"))
    assert ours == theirs and len({str(one["kept"]) for one in ours}) > 1


def test_metrics_are_equal(found) -> None:
    ours, theirs = found["gyre"]["results"], found["transformers"]["results"]
    assert ours == theirs
    assert 0 < ours["apples_choice"]["acc,none"] < 1
    assert 0 < ours["apples_text"]["exact_match,none"] < 1
