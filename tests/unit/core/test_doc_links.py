"""Every link of the docs leads somewhere: to a file, and to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reference_pages import DOCS

ROOT = DOCS.parent
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
FILES = [
    path.as_posix() for top in ("src", "tests", "bench") for path in (ROOT / top).rglob("*.py")
]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors_of(page: Path) -> set[str]:
    """Return the names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors_of(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`([a-z_0-9/]+\.py)`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any(path.endswith(f"/{name}") for path in FILES)]
    assert missing == [], "no such file"


def test_every_page_is_on_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert pages - set(re.findall(r"\]\(([^)#]+)\)", index)) == set()
