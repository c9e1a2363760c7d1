"""Engines whose ranks lie beside a trainer's with the same cut, over real processes: the ring gives
what one process gives, no weight is copied where a rank holds its part whole, and each rank's
memory is its own ledger's."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from beside_cases import TURN, Given, begun, ring
from gyre.core.errors import ConfigError
from gyre.launch.factories import make_facts
from gyre.launch.placement.stage_runtime import refuse_hosts
from gyre.launch.stage_plan import plan_run
from gyre.launch.stages import plan_stages
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub
from gyre.models.init import init_weights
from gyre.runconfig.run_config import RunConfig
from rank_pool import RankPool
from trainer_cases import assert_close
from unit.data.test_examples import TOKENIZER
from unit.launch.test_stages import load_online, online

SHAPE = {
    "family": "qwen3",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 64,
    "context_tokens": 128,
}


def given(folder: Path, ranks: int = 1, *, tensor_ranks: int = 1, **tables: Any) -> Given:
    """What each of `ranks` is given; one is inline."""
    folder.mkdir(exist_ok=True)
    TOKENIZER.save(folder)
    cut: Mapping[str, Any] = {"tensor_ranks": tensor_ranks}
    config = online(
        folder,
        model={"shape": SHAPE},
        run={"device": "cpu", "dtype": "float32", "threads": 1, "seed": 5},
        cluster={"kind": "ray", "num_workers": ranks} if ranks > 1 else {"kind": "inline"},
        parallel={**cut, **tables.pop("parallel", {})},
        engine={**cut, "num_pages": 24, "page_tokens": 4, "max_running": 4},
        trainer={"learning_rate": 1e-2, "tokens_per_chunk": 64, "steps": 3},
        memory={"residency": "phase", **tables.pop("memory", {})},
        **tables,
    )
    (stage,), data = plan_stages(config, "all"), load_online(config)
    spec = make_facts(config, TOKENIZER).spec
    plan = plan_run(config, stage, spec, data, dtype="float32", folder=folder, ranks=ranks)
    return Given(
        config_json=config.model_dump_json(),
        plan_json=plan.to_json(),
        folder=str(folder),
        round_id=uuid.uuid4().hex,
    )


def run(pool: RankPool, one: Given, **changes: Any) -> list[dict[str, Any]]:
    return pool.run(ring, replace(one, port=pool.port, **changes))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process gives."""
    return ring(None, given(tmp_path_factory.mktemp("alone") / "run"))


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["answers"] == expected["answers"]
    assert len(found["answers"]) == 3 and all(found["answers"])
    assert_close(found["weights"], expected["weights"], relative=1e-4)


def named(seen: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [fields for name, fields in seen["events"] if name == kind]


@pytest.mark.slow
def test_a_ring_of_two_ranks_gives_what_one_process_gives_and_copies_no_weight(
    pair: RankPool, tmp_path: Path, alone: dict[str, Any]
) -> None:
    first, second = run(pair, given(tmp_path / "run", 2, tensor_ranks=2))
    close(first, alone)
    for seen in (first, second):
        assert seen["in_place"], "the engine's tensors are the trainer's"
        committed = named(seen, "engine.committed")
        assert [one["version"] for one in committed] == [0, 1, 2]
        assert all(one["shared"] for one in committed)
        assert not named(seen, "weights.gathered") and not named(seen, "weights.staged")
    assert not second["answers"], "the first rank has the requests"


def test_each_rank_keeps_its_own_ledger_and_a_phase_has_the_same_bytes_each_time(
    pair: RankPool, tmp_path: Path
) -> None:
    """Over more than ten changes; what leaves on one rank leaves on the other."""
    one = given(tmp_path / "run", 2, tensor_ranks=2)
    seen = run(pair, one, turns=4)
    ledgers = []
    for rank in seen:
        rows = [row for row in named(rank, "memory") if row["phase"] in TURN]
        assert len(rows) > 4 * 4
        by_phase: dict[str, set[str]] = {}
        for row in rows[4:]:  # from the second turn on
            by_phase.setdefault(row["phase"], set()).add(repr(sorted(row["owners"].items())))
        assert all(len(found) == 1 for found in by_phase.values()), by_phase
        last = {row["phase"]: row["owners"] for row in rows}
        assert last["rollout"]["engine.kv"]["device"] > 0 == last["train"]["engine.kv"]["device"]
        assert last["train"]["actor.optimizer"]["device"] > 0
        assert last["rollout"]["actor.optimizer"]["device"] == 0
        assert "engine.weights" not in last["rollout"], "they are the trainer's"
        ledgers.append(last)
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_an_engine_that_restarts_at_each_hand_over_beside_states_on_disk(
    pair: RankPool, tmp_path: Path, alone: dict[str, Any]
) -> None:
    memory = {"disk_folder": "parked", "leave": {"engine": "destroy", "actor.optimizer": "disk"}}
    one = given(tmp_path / "run", 2, tensor_ranks=2, memory=memory)
    for seen in run(pair, replace(one, restarts_engine=True)):
        assert len(named(seen, "engine.started")) == 3
        trained = [row for row in named(seen, "memory") if row["phase"] == "rollout"]
        assert all(row["owners"]["actor.optimizer"]["disk"] > 0 for row in trained)
        if seen["answers"]:
            close(seen, alone)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_two_engines_of_two_ranks_beside_shards(
    ranks: RankPool, tmp_path: Path, alone: dict[str, Any], zero: int
) -> None:
    """Shards are gathered among the ranks that hold one part together, into that part."""
    one = given(tmp_path / "run", 4, tensor_ranks=2, parallel={"zero": zero})
    seen = run(ranks, one)
    close(seen[0], alone)
    assert seen[2]["answers"] == seen[0]["answers"], "each engine was asked the same"
    for rank in seen:
        gathered = named(rank, "weights.gathered")
        assert rank["in_place"] == (zero == 1) and len(gathered) == (3 if zero == 3 else 0)
        part_bytes = sum(row["size_bytes"] for row in named(rank, "weights.gathered")[:1])
        whole_bytes = 4 * sum(
            array.size for name, array in seen[0]["weights"].items() if ".master." in name
        )
        assert part_bytes < 0.6 * whole_bytes


def exported(folder: Path, one: Given, seed: int) -> str:
    """A folder with a model of the run's sizes."""
    spec = make_facts(RunConfig.model_validate_json(one.config_json), TOKENIZER).spec
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, seed)
    export_hub(decoder, folder, dtype=torch.float32, tokenizer_files=None)
    return str(folder)


def test_ranks_that_have_other_weights_to_begin_with_are_refused(
    pair: RankPool, tmp_path: Path
) -> None:
    """As on nodes of which one has an older version of the model. A copy is the same."""
    one = given(tmp_path / "run", 2, tensor_ranks=2)
    first, copy, older = (
        exported(tmp_path / name, one, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert pair.run(begun, one, [first, copy]) == ["", ""]
    told = pair.run(begun, one, [first, older])
    assert told[0] == told[1] and told[0].startswith("the ranks have different weights")
    assert f"rank 0 ({platform.node()}): {first} is " in told[0]
    assert f"rank 1 ({platform.node()}): {older} is " in told[0] and "one folder" in told[0]


def test_ranks_of_an_engine_on_several_hosts_are_refused() -> None:
    refuse_hosts(["a", "a"])
    with pytest.raises(ConfigError, match=r"tensor_ranks = 3: ranks \[1\] of an engine are on"):
        refuse_hosts(["a", "b", "a"])
