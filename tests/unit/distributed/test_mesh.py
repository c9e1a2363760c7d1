"""The mesh: coordinates, and which ranks each group joins, over real processes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import gyre
from gyre.distributed.mesh import Coordinate, make_mesh
from gyre.distributed.process_group import RankGroup, alone
from rank_pool import RankPool

ROOMS_THAT_START_RANKS = ("distributed", "launch")


def members(all_ranks: RankGroup, shard_ranks: int, tensor_ranks: int) -> dict[str, object]:
    """Return this rank's coordinate, and the ranks that each of its groups sums over."""
    mesh = make_mesh(all_ranks, shard_ranks, tensor_ranks=tensor_ranks)
    found: dict[str, object] = {"coordinate": mesh.coordinate}
    for name in ("all_ranks", "data", "replica", "shard", "tensor", "holders"):
        group = getattr(mesh, name)
        seen_N = torch.zeros(all_ranks.size)
        seen_N[all_ranks.rank] = 1.0
        group.all_reduce(seen_N)
        found[name] = tuple(seen_N.nonzero().flatten().tolist())
        assert len(found[name]) == group.size
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard_ranks", "tensor_ranks"), [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (0, 4)]
)
def test_every_group_joins_the_ranks_of_its_axes(
    ranks: RankPool, shard_ranks: int, tensor_ranks: int
) -> None:
    """The expectation is arithmetic on coordinates: a group joins the ranks that differ on its axes
    only."""
    size = ranks.size // tensor_ranks
    shard = shard_ranks or size
    places = [
        Coordinate(replica=replica, shard=place, tensor=tensor)
        for replica in range(size // shard)
        for place in range(shard)
        for tensor in range(tensor_ranks)
    ]
    axes = {
        "all_ranks": ("replica", "shard", "tensor"),
        "data": ("replica", "shard"),
        "replica": ("replica",),
        "shard": ("shard",),
        "tensor": ("tensor",),
        "holders": ("shard", "tensor"),
    }
    for rank, found in enumerate(ranks.run(members, shard_ranks, tensor_ranks)):
        own = places[rank]
        assert found["coordinate"] == own
        for name, free in axes.items():
            fixed = {"replica", "shard", "tensor"} - set(free)
            expected = tuple(
                other
                for other, place in enumerate(places)
                if all(getattr(place, axis) == getattr(own, axis) for axis in fixed)
            )
            assert found[name] == expected, (rank, name)


@pytest.fixture(scope="module")
def ranks():
    pool = RankPool(4)
    yield pool
    pool.close()


def test_one_process_is_at_the_origin() -> None:
    mesh = make_mesh(alone(), 0)
    assert mesh.coordinate == Coordinate(replica=0, shard=0, tensor=0)
    assert {mesh.data.size, mesh.replica.size, mesh.shard.size, mesh.tensor.size} == {1}


def test_only_the_rooms_that_start_ranks_speak_of_a_world() -> None:
    """Everywhere else a group is named by its use: a world is wrong as soon as an axis is added."""
    found = []
    root = Path(gyre.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] in ROOMS_THAT_START_RANKS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = (
                getattr(node, "id", None)
                or getattr(node, "attr", None)
                or getattr(node, "arg", None)
            )
            if name is not None and "world" in name.split("_"):
                found.append(f"{path.relative_to(root)}:{node.lineno} {name}")
    assert not found
