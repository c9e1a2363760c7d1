"""The ranks of a served engine, in processes of their own: what they refuse when they meet, by name
and in time. `tests/system/test_serve_tensor.py` has ranks that serve."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster_roles import HERE
from gyre.cluster.process_cluster import ProcessCluster
from gyre.cluster.worker.rpc import ask
from gyre.core.errors import ConfigError, GyreError, InputError, RankError
from gyre.core.records import RoleSpec
from gyre.launch.run_folder.run_folder import find_model
from gyre.launch.serving.engine_groups import EngineGroups
from gyre.launch.serving.server import rank_environment
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, init_weights
from gyre.text.tokenizer import train_tokenizer
from layout_cases import spec_of

START_S = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["one and two"], vocab_size=300, min_share=0.0)
    tokenizer.save(path / "tokenizer")
    spec = spec_of(vocab_size=tokenizer.vocab_size)
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    export_hub(decoder, path / "hub", dtype=torch.float32, tokenizer_files=path / "tokenizer")
    return path / "hub"


def met(folder: Path, builder: str, *settings: str, **arguments: Any) -> tuple[Any, float]:
    """What became of two ranks that were let meet, and after how long."""
    overrides = ["run.device=cpu", "run.threads=1", "engine.tensor_ranks=2", *settings]
    _, config = find_model(folder, None, overrides, served=True)
    path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
    spec = RoleSpec(
        name="engine-0",
        builder=builder,
        arguments={
            "folder": str(folder),
            "version": 3,
            "config_json": config.model_dump_json(),
            **arguments,
        },
        environment={**rank_environment(config, 2), "PYTHONPATH": path},
        deadline_s=START_S,
    )

    async def main() -> Any:
        cluster = ProcessCluster(gpus=0, on_event=lambda worker, kind, **fields: None)
        engines = EngineGroups(cluster, 2, emit=lambda kind, **fields: None)
        try:
            group = await engines.start(spec)
            await ask(group, "engine.start", False, deadline_s=START_S)
            return await ask(group, "engine.stats", deadline_s=START_S)
        except GyreError as error:
            return error
        finally:
            await cluster.close()

    began_s = time.monotonic()
    return asyncio.run(main()), time.monotonic() - began_s


def test_ranks_meet_and_are_an_engine_of_the_version(folder: Path) -> None:
    stats, _ = met(folder, "gyre.launch.serving.served_rank:build_served_rank")
    assert stats.version == 3 and stats.pages_total > 0


@pytest.mark.slow
def test_gpus_of_two_sizes_are_no_group(folder: Path) -> None:
    error, seconds = met(folder, "rank_roles:build_mixed", memories=[80, 40])
    assert type(error) is ConfigError and seconds < START_S
    assert "rank 0 (here): H with 80.0 GiB" in error.message
    assert "rank 1 (here): H with 40.0 GiB" in error.message


@pytest.mark.slow
def test_ranks_that_see_other_files_are_refused(folder: Path) -> None:
    error, _ = met(folder, "rank_roles:build_torn")
    assert type(error) is InputError and "other files for one rank" in error.message


@pytest.mark.slow
def test_a_rank_that_does_not_come_ends_the_meeting_in_time(folder: Path) -> None:
    error, seconds = met(folder, "rank_roles:build_late", "parallel.timeout_s=4")
    assert isinstance(error, RankError) and seconds < 60
    assert "could not join" in error.message
