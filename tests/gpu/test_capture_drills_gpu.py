"""A tensor rank that dies, or stands still, while graphs with collectives are captured: the server ends
within a deadline, and names the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, init_weights
from gyre.text.tokenizer import train_tokenizer
from layout_cases import spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(400),
]
POINTS = Path(__file__).parent / "capture_points"
HANG_S, ENDED_S = 15.0, 150.0


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


@pytest.mark.parametrize(("how", "cause"), [("die", "SIGKILL"), ("hang", "")])
def test_a_rank_that_fails_amid_captures_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, cause: str
) -> None:
    """The server has not answered yet, so it ends, with all its processes."""
    point, log = tmp_path / "point", tmp_path / "log"
    point.write_text(how)
    argv = [sys.executable, "-c", "from gyre.cli.main import main; main()"]
    argv += ["serve", str(folder), "--port", "0", "--json"]
    argv += ["--set", "engine.tensor_ranks=2", "--set", f"cluster.hang_s={HANG_S}"]
    paths = os.pathsep.join([str(POINTS), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "CAPTURE_POINT": str(point), "PYTHONPATH": paths}
    with log.open("w") as told:
        ended = subprocess.run(argv, stderr=told, env=environment, timeout=ENDED_S, check=False)
    assert ended.returncode == 1 and not point.exists(), log.read_text()
    rows = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
    (lost,) = [row for row in rows if row["kind"] == "engine.lost"]
    assert "rank 1" in lost["cause"] and cause in lost["cause"], lost
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert "rank 1" in error and cause in error, error
