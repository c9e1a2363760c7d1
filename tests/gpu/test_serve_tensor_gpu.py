"""gyre serve with each engine over two GPUs: the answers of one GPU but for rounding, and a rank
that is killed comes back with its engine."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, init_weights
from gyre.text.tokenizer import train_tokenizer
from layout_cases import spec_of
from served import Served, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]
SIZES = {"hidden_size": 256, "num_layers": 2, "mlp_size": 512}
BF16 = 0.1  # of a log-prob near -6: sums of two parts in bfloat16
ASKED = {
    "prompt": list(range(5, 45)),
    "params": {"max_tokens": 16, "temperature": 0, "ignore_eos": True},
}
START_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["one and two"], vocab_size=300, min_share=0.0)
    tokenizer.save(path / "tokenizer")
    spec = spec_of("qwen3", vocab_size=tokenizer.vocab_size, **SIZES)
    spec = replace(spec, head_dim=64, context_tokens=256)
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter *= 8.0  # so that it prefers some tokens to others
    export_hub(decoder, path / "hub", dtype=torch.bfloat16, tokenizer_files=path / "tokenizer")
    return path / "hub"


def answer(served: Served) -> dict[str, Any]:
    found = httpx.post(f"{served.url}/generate", json=ASKED, timeout=START_S)
    assert found.status_code == 200, found.text
    return found.json()


def events_of(served: Served, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in served.log.read_text().splitlines() if line[:1] == "{"]
    return [row for row in rows if row["kind"] == kind]


def test_two_gpus_answer_as_one_does_and_a_lost_rank_comes_back(folder, tmp_path) -> None:
    with serving(folder, tmp_path / "one") as served:
        expected = answer(served)
    with serving(folder, tmp_path / "two", "--set", "engine.tensor_ranks=2") as served:
        found = answer(served)
        assert found["tokens"][0] == expected["tokens"][0]
        assert found["logprobs"][0] == pytest.approx(expected["logprobs"][0], abs=BF16)
        (started,) = events_of(served, "cluster.started")
        pids = {name: int(at.rpartition("pid ")[2]) for name, at in started["workers"].items()}
        seen = {psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in pids.values()}
        assert len(seen) == 2, "each rank has a GPU of its own"
        assert not events_of(served, "engine.torch_kernels"), "the fused pass serves"
        psutil.Process(pids["engine-0.1"]).kill()
        ends = time.monotonic() + START_S
        while not events_of(served, "engine.rejoined"):
            assert time.monotonic() < ends
            time.sleep(0.1)
        assert answer(served)["tokens"] == found["tokens"]
