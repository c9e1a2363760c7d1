"""A call of a contract starts no thread and no event loop of its own: those live as long as the
object."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import gyre
from gyre.core import contracts

PACKAGE = Path(gyre.__file__).parent
STARTS = {
    "Thread",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "new_event_loop",
    "Runner",
}
CONTRACTS = {
    name: {
        method for method in vars(one) if not method.startswith("_") and callable(vars(one)[method])
    }
    for name, one in inspect.getmembers(contracts, inspect.isclass)
    if one.__module__ == contracts.__name__ and getattr(one, "_is_protocol", False)
}


def called(node: ast.AST) -> Iterator[str]:
    """Yield what is called within a method, functions defined in it included."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            function = inner.func
            if isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                yield (
                    "new_event_loop"
                    if (owner, function.attr) == ("asyncio", "run")
                    else (function.attr)
                )
            elif isinstance(function, ast.Name):
                yield function.id


def contract_methods(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the methods of each class that has all methods of a contract."""
    for one in ast.walk(tree):
        if not isinstance(one, ast.ClassDef) or "Protocol" in map(ast.unparse, one.bases):
            continue
        methods = {
            node.name: node
            for node in one.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for contract, names in CONTRACTS.items():
            if names <= methods.keys():
                yield from ((f"{one.name}.{name} ({contract})", methods[name]) for name in names)


def test_a_contracts_call_starts_no_thread_and_no_event_loop() -> None:
    seen, wrong = set(), []
    for path in PACKAGE.rglob("*.py"):
        for name, method in contract_methods(ast.parse(path.read_text(encoding="utf-8"))):
            seen.add(name.rpartition("(")[2].rstrip(")"))
            if STARTS & set(called(method)):
                wrong.append(f"{path.relative_to(PACKAGE)}: {name}")
    assert wrong == []
    assert seen == CONTRACTS.keys(), "a contract that no class of the package has"


def test_the_search_finds_one() -> None:
    body = "def close(self): asyncio.run(go())\n def score(self): Thread(target=f).start()"
    tree = ast.parse(f"class Rules:\n {body}")
    found = {name: set(called(method)) for name, method in contract_methods(tree)}
    assert found["Rules.close (Scorer)"] & STARTS and found["Rules.score (Scorer)"] & STARTS
