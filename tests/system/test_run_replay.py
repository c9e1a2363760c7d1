"""The journal that a run keeps, played again on the weights that it exported, gives its tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from system_models import save_checkpoint
from system_runs import events_of, gyre, write_config

from gyre.engine.replay import replay
from gyre.engine.scheduler.journal import Commit, Start, read_journal
from gyre.launch.run_folder.run_folder import export_paths
from gyre.models.hub.load import load_hub
from gyre.observability.events import read_events
from run_logs import read_samples

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STEPS = 3
JOURNALED = {
    "model": {"path": "model"},
    "cold_start": None,
    "engine.journal": True,
    "trainer.steps": STEPS,
    "snapshot.every_steps": 0,
    "snapshot.export_every_steps": 1,
    "snapshot.keep_exports": STEPS,
}

Answered = Counter[tuple[tuple[int, ...], tuple[float, ...]]]


def sampled(run: Path) -> Answered:
    """What the run's own samples say: tokens and log-probs of each completion."""
    lineage = read_events(run / "events.jsonl").lineage
    return Counter(
        (tuple(row["tokens"]), tuple(row["logprobs"]))
        for row in read_samples(run / "samples.jsonl", lineage)
    )


def test_a_run_is_replayed_to_the_same_tokens(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "qwen3")
    answer = gyre("train", write_config(tmp_path, JOURNALED), "--plain", folder=tmp_path)
    assert answer.code == 0, answer.err
    run = tmp_path / "runs" / "tiny"
    (journal,) = (run / "journal").iterdir()
    entries = list(read_journal(journal))
    versions = {entry.version for entry in entries if isinstance(entry, Start | Commit)}
    folders = dict(enumerate([model, *export_paths(run)]))
    assert versions == set(folders) == set(range(STEPS + 1))
    assert len(events_of(run, "step.done")) == STEPS
    _, decoder = load_hub(model, device=CPU, dtype=torch.float32)
    own = dict(decoder.named_parameters())

    def load(version: int) -> None:
        _, source = load_hub(folders[version], device=CPU, dtype=torch.float32)
        with torch.no_grad():
            for name, tensor in source.named_parameters():
                own[name].copy_(tensor)

    parts: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for chunk in replay(entries, decoder, load=load, emit=lambda kind, **fields: None):
        tokens, logprobs = parts.setdefault((chunk.request_id, chunk.index), ([], []))
        tokens += chunk.tokens.tolist()
        logprobs += [round(float(each), 4) for each in chunk.logprobs]
    again = Counter((tuple(tokens), tuple(logprobs)) for tokens, logprobs in parts.values())
    kept = sampled(run)
    assert kept.total() == STEPS * 16 and kept <= again
