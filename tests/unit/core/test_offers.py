"""The sources of a version are a closed union, told apart in core.offers alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import gyre
from gyre.core.offers import (
    SOURCE_KINDS,
    FolderTensors,
    LocalShards,
    LocalTensors,
    Offer,
    RegisteredShards,
    RemoteTensors,
    SharedStorage,
    SourceKind,
    WeightSource,
    kinds_for,
)
from gyre.core.records import Manifest

PACKAGE = Path(gyre.__file__).parent
CLASSES = {kind.__name__ for kind in get_args(WeightSource)}

# file and function that ask for a source's class, and why
OWNED = {
    ("core/offers.py", "folder"): "the properties by which all others ask",
    ("core/offers.py", "registered"): "the properties by which all others ask",
    ("core/offers.py", "is_per_rank"): "the properties by which all others ask",
    ("core/offers.py", "whole_tensors"): "the properties by which all others ask",
    ("core/offers.py", "shards"): "the properties by which all others ask",
    ("core/offers.py", "kinds_for"): "names of kinds, for abilities",
    ("weights/receive.py", "receive"): "takes each source in its own way",
    ("weights/receive.py", "carry"): "takes each source in its own way",
    ("weights/receive.py", "copy_out"): "takes each source in its own way",
    ("weights/receive.py", "join_offers"): "takes each source in its own way",
    ("sidecars/vllm/host_tensors.py", "encode_offer"): "a codec: writes the two of other processes",
    ("sidecars/vllm/host_tensors.py", "open_tensors"): "reads what this codec has decoded",
}


def named(node: ast.expr | None) -> set[str]:
    if node is None:
        return set()
    found = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return found | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def asks(node: ast.AST) -> bool:
    """Return whether a node asks for a source's class, by its type or by its name."""
    match node:
        case ast.MatchClass(cls=kind):
            return bool(named(kind) & CLASSES)
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kind]):
            return bool(named(kind) & CLASSES)
        case ast.Compare(left=left, comparators=others):
            parts = [left, *others]
            words = {
                inner.value
                for part in parts
                for inner in ast.walk(part)
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            }
            is_type = any(named(part) & CLASSES for part in parts)
            return is_type or bool(words & CLASSES)
    return False


def questions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (node.name for inner in ast.walk(node) if asks(inner))


def test_only_the_listed_functions_ask_for_a_sources_class() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), function)
        for path in PACKAGE.rglob("*.py")
        for function in questions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == OWNED.keys()


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, FolderTensors)",
        "isinstance(x.source, (int, offers.LocalShards))",
        "type(x) is SharedStorage",
        'type(x).__name__ == "RegisteredShards"',
        'kind in ("FolderTensors",)',
    ],
)
def test_the_search_finds_each_form(line: str) -> None:
    assert list(questions(ast.parse(f"def f():\n    return {line}")))
    assert list(questions(ast.parse("def f():\n match x:\n  case LocalTensors():\n   pass")))


async def fetch() -> Offer:
    raise AssertionError("not asked for")


EACH = {
    SharedStorage(tensors={}): {"is_per_rank", "whole_tensors"},
    LocalTensors(tensors={}): {"whole_tensors"},
    LocalShards(shards="shards"): {"is_per_rank", "shards"},
    RemoteTensors(fetch=fetch): set(),
    FolderTensors(folder="/models/one"): {"folder", "addressed"},
    RegisteredShards(parts=()): {"registered", "addressed"},
}


@pytest.mark.parametrize(("source", "true"), EACH.items(), ids=lambda one: type(one).__name__)
def test_each_source_has_the_properties_of_its_class(source: WeightSource, true: set[str]) -> None:
    manifest = Manifest(version=1, entries=(), shared=False)
    offer = Offer(manifest=manifest, source=source)
    names = ("folder", "registered", "addressed", "is_per_rank", "whole_tensors", "shards")
    assert {name for name in names if getattr(offer, name) not in (None, False)} == true
    assert offer.kind == type(source).__name__


def test_the_kinds_are_the_union_but_what_is_fetched_first() -> None:
    assert set(SOURCE_KINDS) == CLASSES - {"RemoteTensors"}
    assert get_args(SourceKind) == SOURCE_KINDS


def test_an_engine_takes_its_trainers_tensors_or_all_else() -> None:
    assert kinds_for(shared=True, reads_part=False) == ("SharedStorage",)
    assert set(kinds_for(shared=False, reads_part=False)) == set(SOURCE_KINDS) - {"SharedStorage"}
    assert kinds_for(shared=False, reads_part=True) == ("FolderTensors", "RegisteredShards")
