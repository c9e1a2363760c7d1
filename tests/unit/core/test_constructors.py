"""Constructors assign one name a line: what an object holds is read down a column."""

from __future__ import annotations

import ast

from reference_pages import SOURCE


def test_no_constructor_packs_assignments_into_a_tuple() -> None:
    """Unpacking what one call returns is no packing."""
    packed = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for made in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(made, ast.FunctionDef) and made.name == "__init__"
        for node in ast.walk(made)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    ]
    assert not packed
