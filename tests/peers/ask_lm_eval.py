"""What lm-eval finds of a model folder: through a server of the completions API, and with
transformers. In: {"folder", "url", "model", "tasks"}: a model folder, a server of it, its name
there, a folder of task files. Out: of each way {"results", "samples"}.

Started by `environment.ask` in the peers' environment. The tokenizer is the folder's both times, and
prompts go to the server as token ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = ["apples_choice", "apples_text"]


def evaluate(tasks: str, kind: str, settings: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """The metrics of each task, and of each question what the model was asked and said."""
    found = simple_evaluate(
        model=kind,
        model_args=settings,
        tasks=TASKS,
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
        cache_requests=False,
    )
    samples = {
        name: [
            {
                "asked": sample["arguments"],
                "said": sample["resps"],
                "kept": sample["filtered_resps"],
            }
            for sample in sorted(rows, key=lambda sample: sample["doc_id"])
        ]
        for name, rows in found["samples"].items()
    }
    return {"results": found["results"], "samples": samples}


def main(given: Path, answer: Path) -> None:
    case = json.loads(given.read_text())
    folder, tasks = case["folder"], case["tasks"]
    served = {
        "model": case["model"],
        "base_url": f"{case['url']}/v1/completions",
        "tokenizer": folder,
        "tokenizer_backend": "huggingface",
        "max_length": case["context_tokens"],
        "max_retries": 1,
    }
    plain = {"pretrained": folder, "dtype": "float32", "max_length": case["context_tokens"] - 1}
    found = {
        "gyre": evaluate(tasks, "local-completions", served, 4),
        "transformers": evaluate(tasks, "hf", plain, 4),
    }
    answer.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
