"""A tensor rank that dies, or stands still, while graphs with collectives are captured: the server ends
within a deadline, by name."""

from __future__ import annotations

import os
import re
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
START_S, ENDED_S = 40.0, 150.0  # of a start; of the server


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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("die", "engine-0 is lost: rank 1 of the engine .* ended by SIGKILL"),
        ("hang", f"worker engine-0 .* 'engine.start' after {START_S:g} s"),
    ],
)
def test_a_rank_that_fails_amid_captures_ends_the_start(
    folder: Path, tmp_path: Path, how: str, said: str
) -> None:
    """The server has answered nothing yet, so it ends."""
    point, log = tmp_path / "point", tmp_path / "log"
    point.write_text(how)
    argv = [sys.executable, "-c", "from gyre.cli.main import main; main()"]
    argv += ["serve", str(folder), "--port", "0", "--json"]
    argv += ["--set", "engine.tensor_ranks=2", "--set", f"cluster.call_deadline_s={START_S}"]
    paths = os.pathsep.join([str(POINTS), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "CAPTURE_POINT": str(point), "PYTHONPATH": paths}
    with log.open("w") as told:
        ended = subprocess.run(argv, stderr=told, env=environment, timeout=ENDED_S, check=False)
    assert ended.returncode == 2 and not point.exists(), log.read_text()
    (error,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert re.search(said, error), error
