"""The glossary names classes that exist, and each word once."""

from __future__ import annotations

import re

from reference_pages import DOCS, SOURCE

PAGE = (DOCS / "glossary.md").read_text(encoding="utf-8")


def test_each_class_on_the_page_is_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    defined = set(re.findall(r"^(?:class )?([A-Z][A-Za-z]+|VARIANTS)\b(?=[(:]| = |: )", code, re.M))
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", PAGE))
    assert named - defined == set()


def test_each_file_on_the_page_is_in_the_code() -> None:
    for name in re.findall(r"`([a-z_/]+\.py)`", PAGE):
        assert [path for path in SOURCE.rglob("*.py") if path.as_posix().endswith(f"/{name}")], name


def test_each_word_stands_once() -> None:
    words = re.findall(r"^\| ([^|]+) \|", PAGE, re.M)
    words = [word for word in words if word != "word"]
    assert len(words) > 50 and len(words) == len(set(words))
