"""How the package reads, held where the redesign brought it: sizes of folders, one class to a name,
plain docstrings, and tests that look at what callers see."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE, TESTS = ROOT / "src" / "gyre", ROOT / "tests"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
SENTENCE = re.compile(r"(?<=[.!?:;])\s+")
PRIVATE = re.compile(r"(?<!self)(?<!cls)\._[a-z]\w*")  # of another object
MOST_FILES, MOST_WORDS = 16, 25
# as wanted of the redesign: a handful of exceptions is no fault
MOST_SHORT, MOST_LONG_SENTENCES, MOST_PRIVATE_READS = 40, 10, 40
SHORT_LINES = 60


def room_of(path: Path) -> str:
    return str(path.parent.relative_to(SOURCE))


def docstrings() -> Iterator[tuple[Path, str]]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (said := ast.get_docstring(node)):
                yield path, said


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    counts = Counter(map(room_of, FILES))
    assert not {room: count for room, count in counts.items() if count > MOST_FILES}


def test_a_public_class_name_is_of_one_room() -> None:
    rooms = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(room_of(path))
    assert not {name: where for name, where in rooms.items() if len(where) > 1}


def test_files_name_no_callers() -> None:
    heads = {path: path.read_text(encoding="utf-8").splitlines()[:14] for path in FILES}
    assert not [path for path, head in heads.items() if re.search(r"\bCallers?:", "\n".join(head))]


def test_few_files_are_so_short_that_they_only_lengthen_the_way() -> None:
    short = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if path.name != "__init__.py"
        and len(path.read_text(encoding="utf-8").splitlines()) < SHORT_LINES
    ]
    assert len(short) <= MOST_SHORT, short


def test_docstrings_are_in_short_sentences() -> None:
    long = [
        f"{path.relative_to(SOURCE)}: {sentence}"
        for path, said in docstrings()
        for sentence in SENTENCE.split(said)
        if len(sentence.split()) > MOST_WORDS
    ]
    assert len(long) <= MOST_LONG_SENTENCES, long


def test_tests_read_little_private_state() -> None:
    reads = [
        f"{path.relative_to(TESTS)}:{number}"
        for path in sorted(TESTS.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE.search(line) and "import" not in line
    ]
    assert len(reads) <= MOST_PRIVATE_READS, reads


def test_records_are_decoded_by_the_codec() -> None:
    """msgspec works a type out at its first use. In two threads at once that ends the process."""
    found = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path, tree in TREES.items()
        if path != SOURCE / "core" / "codec.py"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and re.fullmatch(r"msgspec(\.\w+)?\.(decode|convert)", ast.unparse(call.func))
        and any(keyword.arg == "type" for keyword in call.keywords)
    ]
    assert not found, f"use decode_json or decode_msgpack of gyre.core.codec: {found}"
