"""A tensor rank that dies, or stands still, while graphs with collectives are captured: its engine is
given up by name within a deadline, and is started again."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
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
    pytest.mark.timeout(400),
]
POINTS = Path(__file__).parent / "capture_points"
HANG_S, BACK_S = 15.0, 120.0
ASKED = {
    "prompt": list(range(5, 45)),
    "params": {"max_tokens": 16, "temperature": 0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["one and two"], vocab_size=300, min_share=0.0)
    tokenizer.save(path / "tokenizer")
    sizes = {"hidden_size": 256, "num_layers": 2, "mlp_size": 512}
    spec = spec_of("qwen3", vocab_size=tokenizer.vocab_size, **sizes)
    decoder = Decoder(
        replace(spec, head_dim=64, context_tokens=256),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    init_weights(decoder, 0)
    export_hub(decoder, path / "hub", dtype=torch.bfloat16, tokenizer_files=path / "tokenizer")
    return path / "hub"


def events_of(served: Served, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in served.log.read_text().splitlines() if line[:1] == "{"]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize("how", ["die", "hang"])
def test_a_rank_that_fails_amid_captures_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A weight change makes an engine capture nothing, so its second start is the drill: rank 1 of the
    first one is killed, and of the next one fails amid its captures."""
    point = tmp_path / "point"
    monkeypatch.setenv("CAPTURE_POINT", str(point))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(POINTS), os.environ["PYTHONPATH"]]))
    sets = ["engine.tensor_ranks=2", f"cluster.hang_s={HANG_S}"]
    options = [option for one in sets for option in ("--set", one)]
    point.write_text(how)
    begun_s = time.monotonic()
    try:
        with serving(folder, tmp_path / "log", *options) as served:
            print("READY after", time.monotonic() - begun_s)
            answer = httpx.post(f"{served.url}/generate", json=ASKED, timeout=BACK_S)
            print(answer.status_code, answer.text[:300])
            print(events_of(served, "engine.lost"), events_of(served, "engine.restarted"))
    except AssertionError as error:
        print("ENDED after", time.monotonic() - begun_s, str(error)[-3000:])
    print((tmp_path / "log").read_text()[-3000:])
    assert not point.exists()
    raise AssertionError("look")
