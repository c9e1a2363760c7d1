"""docs/architecture.md tells the rooms as they are, and its three journeys name files and
definitions that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from reference_pages import DOCS, SOURCE

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
JOURNEYS = PAGE[PAGE.index("## Three journeys") : PAGE.index("## Nouns")]
ROWS = re.findall(r"^\| (?!step)([^|]+) \| (`[^|]+`) \| (`[^|]+`) \|$", JOURNEYS, re.M)


ROOMS = re.findall(r"^\| [0-9]* ?\| (.+?) \| ([0-9, ]+) \| ", PAGE, re.M)


def test_each_room_has_about_the_lines_that_the_page_says() -> None:
    told = {
        room: int(lines.replace(",", ""))
        for names, counts in ROOMS
        for room, lines in zip(re.findall(r"`(\w+)`", names), counts.split(", "), strict=True)
    }
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert told.keys() == rooms
    for room, lines in told.items():
        found = lines_in(SOURCE / room)
        assert abs(found - lines) <= max(100, 0.15 * found), (room, lines, found)


SUB_ROOMS = re.findall(r"^\| `(\w+/[\w/]+)` \| ([0-9,]+) \| (.+) \|$", PAGE, re.M)


def lines_in(folder: Path) -> int:
    paths = folder.rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def may_import(sub_room: str) -> str:
    """Return what import-linter lets a sub-room import of its room, as the page says it."""
    config = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    room, _, name = sub_room.rpartition("/")
    container = f"gyre.{room.replace('/', '.')}"
    for contract in config["tool"]["importlinter"]["contracts"]:
        layers = [layer.split(" | ") for layer in contract.get("layers", ())]
        ranks = [at for at, layer in enumerate(layers) if name in layer]
        if contract.get("containers") == [container] and ranks:
            below = [module for layer in layers[ranks[0] + 1 :] for module in layer]
            return ", ".join(f"`{module}`" for module in below) or "nothing"
    return "not held"


def test_each_sub_room_has_about_the_lines_and_the_imports_that_the_page_says() -> None:
    folders = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")}
    names = {folder.as_posix() for folder in folders if len(folder.parts) > 1}
    assert {name for name, _, _ in SUB_ROOMS} == names
    for name, lines, imports in SUB_ROOMS:
        found, told = lines_in(SOURCE / name), int(lines.replace(",", ""))
        assert abs(found - told) <= max(50, 0.15 * found), (name, told, found)
        assert imports == may_import(name), name


def test_each_folder_of_the_package_has_one_of_tests() -> None:
    tests = DOCS.parent / "tests/unit"
    packages = {path.parent for path in SOURCE.rglob("__init__.py")}
    folders = {one.relative_to(SOURCE) for one in packages if len([*one.glob("*.py")]) > 1}
    missing = [folder.as_posix() for folder in folders if not any((tests / folder).glob("test_*"))]
    assert missing == []


def test_each_row_is_read() -> None:
    assert len(ROWS) == len(re.findall(r"^\| (?!step|source)[a-z]", JOURNEYS, re.M)) > 20


@pytest.mark.parametrize(("step", "files", "names"), ROWS)
def test_each_step_is_where_the_page_says(step: str, files: str, names: str) -> None:
    code = "\n".join(
        (SOURCE / file).read_text(encoding="utf-8") for file in re.findall(r"`([^`]+)`", files)
    )
    for name in re.findall(r"`([^`]+)`", names):
        assert re.search(rf"^ *(?:async )?(?:def|class) {name}\b", code, re.M), (step, name)
