"""The three journeys of docs/architecture.md name files and definitions that exist."""

from __future__ import annotations

import re

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
        paths = (SOURCE / room).rglob("*.py")
        found = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        assert abs(found - lines) <= max(100, 0.15 * found), (room, lines, found)


def test_each_row_is_read() -> None:
    assert len(ROWS) == len(re.findall(r"^\| (?!step)[a-z]", JOURNEYS, re.M)) > 20


@pytest.mark.parametrize(("step", "files", "names"), ROWS)
def test_each_step_is_where_the_page_says(step: str, files: str, names: str) -> None:
    code = "\n".join(
        (SOURCE / file).read_text(encoding="utf-8") for file in re.findall(r"`([^`]+)`", files)
    )
    for name in re.findall(r"`([^`]+)`", names):
        assert re.search(rf"^ *(?:async )?(?:def|class) {name}\b", code, re.M), (step, name)
