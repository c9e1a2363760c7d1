"""Snapshots of a run that is not quite this one: another model is refused, another dtype is
taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gyre.core.errors import SnapshotError
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.trainer.checkpoint.store import SnapshotStore
from saver_cases import load_and_save, load_latest, save_trained
from trainer_cases import SPEC, assert_same, make_trainer


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mlp_size": 64}, "its mlp_size is 48, this run's is 64"),
        # every tensor has the same shape
        ({"rope_theta": 5e5}, "its rope_theta is 10000.0, this run's is 500000.0"),
    ],
)
def test_a_snapshot_of_another_model_is_refused_by_name(change, says, tmp_path):
    save_trained(None, str(tmp_path), "sft", steps=range(1))
    found = load_latest(SnapshotStore(tmp_path, keep=1, emit=lambda *_, **__: None))
    decoder = Decoder(replace(SPEC, **change), device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    trainer = make_trainer("sft", decoder=decoder)
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    with pytest.raises(SnapshotError, match=f"the snapshot is of another model: {says}"):
        trainer.restore_now({"tensors": found.tensors, "state": found.state["trainer"]})
    assert all(parameter.equal(before[name]) for name, parameter in decoder.named_parameters())
    assert trainer.version == 0


REFERENCE = "reference."  # of the names of its tensors


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize(
    ("before", "after", "rounds"),
    [("bfloat16", "float32", False), ("float32", "bfloat16", True), ("bfloat16", "float16", True)],
)
def test_a_run_with_a_reference_goes_on_in_another_dtype(before, after, rounds, average, tmp_path):
    """As from a GPU with BF16 to a CPU without, and back."""
    settings = {"reference_moving_average": average}
    saved = save_trained(
        None, str(tmp_path / "a"), "grpo", steps=range(1), dtype=before, **settings
    )
    events: list = []
    loaded = load_and_save(
        None,
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "grpo",
        dtype=after,
        events=events,
        **settings,
    )
    assert loaded.keys() == saved.keys() and any(name.startswith(REFERENCE) for name in saved)
    for name, numbers in loaded.items():
        source = (
            name.replace(REFERENCE, f"{REFERENCE}average.")
            if average and "average." not in name
            else name
        )
        expected = torch.from_numpy(saved.get(source, saved[name]))
        if name.startswith(REFERENCE) and "average." not in name:
            expected = expected.to(getattr(torch, after)).float()
        np.testing.assert_array_equal(numbers, expected.numpy(), err_msg=name)
    told = [fields for kind, fields in events if kind == "warn.reference_rounded"]
    assert told == ([{"dtype": f"torch.{after}"}] if rounds and not average else [])


@pytest.mark.slow
def test_ranks_take_a_reference_in_another_dtype(ranks, tmp_path):
    saved = save_trained(None, str(tmp_path / "a"), "grpo", steps=range(1), dtype="bfloat16")
    loaded = ranks.run(
        load_and_save, str(tmp_path / "a"), str(tmp_path / "b"), "grpo", layout="zero3"
    )
    assert_same(loaded[0], saved)
