"""What it costs to make a decoder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BLANK = """
import sys
import torch
from gyre.models.decoder import Decoder
from layout_cases import spec_of
decoder = Decoder(spec_of("qwen3"), device=torch.device("meta"), dtype=torch.float32)
assert decoder.inv_freq_F.is_meta
print("torch._dynamo" in sys.modules)
"""


def test_a_blank_decoder_imports_no_compiler() -> None:
    """torch's compiler takes half a second of every start."""
    support = Path(__file__).parents[2] / "support"
    found = subprocess.run(
        [sys.executable, "-c", BLANK],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(support), *sys.path])},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "False"
