"""The scanner accepts what the standard library reads, and tells where a value ends."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gyre.server.parsers.json_scanner import JsonScanner

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def scan(text: str) -> tuple[bool, bool]:
    """Whether all of it may begin a value, and whether it is one."""
    scanner = JsonScanner()
    for character in text:
        if scanner.state == "done" or not scanner.push(character):
            return False, False
    return True, scanner.state == "done"


def reads(text: str) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(value=VALUES, indent=st.none() | st.integers(0, 2), is_ascii=st.booleans())
def test_a_value_is_done_with_its_last_bracket_and_not_before(value, indent, is_ascii) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=is_ascii)
    assert scan(text) == (True, True)
    for length in range(len(text)):
        assert scan(text[:length]) == (True, False)


@given(text=st.text(alphabet='{}[]",:\\ \n\ttruefalsn0123.-+eEu/', max_size=14))
@example(text='"\\u00e9"')
@example(text="-0.5e+07")
@example(text="01")
@example(text='{"a":1,}')
@example(text="[1,]")
@example(text='{"a":1]')
@example(text='"\x1f"')
def test_a_text_is_accepted_where_the_standard_library_accepts_it(text) -> None:
    closed = f"[{text}]"  # a number has no end of its own
    assert scan(closed)[1] == reads(closed)


def test_no_nesting_is_too_deep() -> None:
    assert scan("[" * 100_000 + "]" * 100_000) == (True, True)
