"""Dummy weights: a folder without weights is served, in its first version only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gyre.core.errors import ConfigError, GyreError
from gyre.launch.factories import load_policy, make_machine
from gyre.launch.run_folder.run_folder import find_model
from gyre.launch.serving.served_weights import ServedFolder
from gyre.launch.serving.server import ServeArgs, engine_spec, serve
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, init_weights
from gyre.text.tokenizer import train_tokenizer
from layout_cases import spec_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose weights are gone."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["one and two"], vocab_size=300, min_share=0.0)
    tokenizer.save(path / "tokenizer")
    decoder = Decoder(
        spec_of(vocab_size=tokenizer.vocab_size, hidden_size=8),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    init_weights(decoder, 0)
    export_hub(decoder, path / "hub", dtype=torch.float32, tokenizer_files=path / "tokenizer")
    (path / "hub" / "model.safetensors").unlink()
    return path / "hub"


def args_for(folder: Path, **changed: Any) -> ServeArgs:
    _, config = find_model(folder, None, ["run.device=cpu"])
    given = dict.fromkeys(ServeArgs.__dataclass_fields__) | {
        "folder": folder,
        "config": config,
        "host": "127.0.0.1",
        "tool_parser": "auto",
        "reasoning_parser": "auto",
        "load_format": "dummy",
    }
    return ServeArgs(**(given | changed))


def test_dummy_weights_are_drawn_without_files_and_each_time_the_same(folder: Path) -> None:
    machine = make_machine(args_for(folder).config)
    with machine.compute:
        first, second = (load_policy(folder, machine, load_format="dummy") for _ in range(2))
        with pytest.raises(GyreError):
            load_policy(folder, machine)
    ours, theirs = first.decoder.state_dict(), second.decoder.state_dict()
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert ours["embed.weight"].std() > 0
    assert first.tokenizer.fingerprint == second.tokenizer.fingerprint


def test_a_worker_that_starts_again_reads_the_files_of_a_later_version(folder: Path) -> None:
    args, served = args_for(folder), ServedFolder(folder)
    assert engine_spec(args, "engine-0", served, gpus=0).arguments["load_format"] == "dummy"
    served.move_to(folder, 1, ())
    assert engine_spec(args, "engine-0", served, gpus=0).arguments["load_format"] == "auto"


def test_only_what_starts_with_the_server_waits_for_its_tokenizer(folder: Path) -> None:
    args, served, kept = args_for(folder), ServedFolder(folder), folder / "kept.json"
    first = engine_spec(args, "engine-0", served, gpus=0, kept_tokenizer=kept)
    again = engine_spec(args, "engine-0", served, gpus=0)
    assert [spec.arguments["kept_tokenizer"] for spec in (first, again)] == [str(kept), ""]


def test_another_load_format_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="need auto or dummy"):
        serve(args_for(folder, load_format="safetensors"), as_json=True)
