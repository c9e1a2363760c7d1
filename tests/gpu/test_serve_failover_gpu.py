"""gyre serve with two engines on GPUs, batch-invariant: one is killed in mid-stream, and each answer
is what it is when nothing happens."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, init_weights
from gyre.text.tokenizer import train_tokenizer
from layout_cases import spec_of
from served import Served, serving
from served_account import engines_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]
STREAMS, TOKENS, ANSWER_S = 8, 1800, 120.0
SETTINGS = ("--replicas", "2", "--set", "engine.batch_invariant=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["one and two"], vocab_size=300, min_share=0.0)
    tokenizer.save(path / "tokenizer")
    spec = spec_of(
        "qwen3",
        vocab_size=tokenizer.vocab_size,
        hidden_size=512,
        num_layers=8,
        mlp_size=1024,
    )
    spec = replace(spec, head_dim=64, context_tokens=2048)
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    export_hub(decoder, path / "hub", dtype=torch.bfloat16, tokenizer_files=path / "tokenizer")
    return path / "hub"


def ask_many(served: Served, *, then: Callable[[], object] = lambda: None) -> list[str]:
    """Streams at once, with a prompt and a seed each; `then` is called at the first text of any."""
    came = threading.Event()

    def ask(seed: int) -> str:
        texts = []
        asked = {
            "model": served.model,
            "prompt": list(range(5, 20 + 3 * seed)),
            "max_tokens": TOKENS,
            "seed": seed,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=asked, timeout=ANSWER_S
        ) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    texts += [choice["text"] for choice in event["choices"]]
                    came.set()
        return "".join(texts)

    with ThreadPoolExecutor(STREAMS) as threads:
        asked = [threads.submit(ask, seed) for seed in range(STREAMS)]
        assert came.wait(ANSWER_S)
        then()
        return [one.result(timeout=ANSWER_S) for one in asked]


def test_a_replica_that_dies_costs_no_token_in_batch_invariant_mode(folder, tmp_path) -> None:
    """Its streams go on at the other GPU, in batches of other sizes."""
    with serving(folder, tmp_path / "log", *SETTINGS) as served:
        engines = engines_of(served)
        seen = {one.environ()["CUDA_VISIBLE_DEVICES"] for one in engines}
        assert len(seen) == 2, "each engine has a GPU of its own"
        undisturbed = ask_many(served)
        assert len(set(undisturbed)) == STREAMS
        assert ask_many(served, then=engines[0].kill) == undisturbed
        assert '"retry.request_requeued"' in served.log.read_text()
