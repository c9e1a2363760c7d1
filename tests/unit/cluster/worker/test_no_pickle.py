"""Nothing that carries calls or weights between processes can pickle: not the links, not the checkpoint
engine, not the sidecars. What runs do is looked at in tests/system/test_pod_runs.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gyre

SOURCE = Path(gyre.__file__).parent
ROOMS = ("cluster/worker", "weights", "sidecars", "launch/placement")
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLERS |= {"multiprocessing", "ray"}  # their pipes and calls pickle
# of torch and of its groups, which pickle what is no tensor
CALLS = {"all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"}
CALLS |= {"send_object_list", "recv_object_list"}


def find_picklers(tree: ast.AST) -> Iterator[str]:
    """Return what in a module pickles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            yield from (one.name for one in node.names if one.name in CALLS)
        elif isinstance(node, ast.Attribute):
            names = []
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in CALLS or (owner == "torch" and node.attr in ("load", "save")):
                yield ast.unparse(node)
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] in PICKLERS)


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_on_the_way_of_weights_pickles(room: str) -> None:
    paths = sorted((SOURCE / room).rglob("*.py"))
    assert paths
    found = {
        str(path.relative_to(SOURCE)): list(find_picklers(ast.parse(path.read_text())))
        for path in paths
    }
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from multiprocessing.connection import Client",
        "dist.broadcast_object_list([1])",
        "torch.load(path)",
    ],
)
def test_what_pickles_is_seen(text: str) -> None:
    assert list(find_picklers(ast.parse(text)))
