"""Answer matcher: finds the answer in a completion and compares it with the label. In: texts. Out: a Match.

Finding: the first form of `forms` whose mark occurs decides, by its last occurrence; a mark without end is no answer.

    tag     <answer>…</answer>; a \\boxed{…} inside is opened too
    boxed   \\boxed{…} or \\fbox{…}, nested braces and \\{ \\} counted
    hash    the rest of the line after ####
    number  the last number in the text
    plain   the whole text

Comparing, `how`: exact (same characters), numeric (same number), latex (same value, by math-verify), auto (exact, then
numeric if both are numbers, then latex if the label is mathematics). Numbers may have thousands separators, be
fractions (3/4, \\frac{3}{4}, 1 1/2), carry $ or %. Whole numbers must agree exactly, others within a tolerance.
math-verify can compute without end on a few characters (a tower of exponents), so `compare` belongs in a process that
can be killed; all else here is linear in the text. Callers: rewards.checks, evaluations through `wire`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

Form = Literal["tag", "boxed", "hash", "number", "plain"]
How = Literal["auto", "exact", "numeric", "latex"]
Outcome = Literal["right", "wrong", "unreadable answer", "unreadable label"]

_LONGEST_MATH = 1000  # characters that are still taken for one expression
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?"
_NUMBER = re.compile(rf"([-+]?)({_DECIMAL})")
_RATIO = re.compile(r"([-+]?)([0-9]+)/([0-9]+)")
_MIXED = re.compile(r"([-+]?)([0-9]+) ([0-9]+)/([0-9]+)")
_FRACTION = re.compile(r"([-+]?)\\[dtc]?frac(?:\{([-+]?[0-9]+)\}|([0-9]))(?:\{([-+]?[0-9]+)\}|([0-9]))")
_READERS: tuple[tuple[re.Pattern[str], Callable[[list[str]], Fraction]], ...] = (
    (_NUMBER, lambda parts: Fraction(parts[0].replace(",", ""))),
    (_RATIO, lambda parts: Fraction(int(parts[0]), int(parts[1]))),
    (_MIXED, lambda parts: int(parts[0]) + Fraction(int(parts[1]), int(parts[2]))),
    (_FRACTION, lambda parts: Fraction(int(parts[0]), int(parts[1]))),
)
_IN_TEXT = re.compile(rf"[-+]?(?:{_DECIMAL})(?:/[0-9]+)?")
_MATHEMATICAL = re.compile(r"[0-9\\^_=<>+*/(){}\[\]|-]")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the comparison found."""

    outcome: Outcome
    reason: str


def match_answer(
    text: str,
    label: Any,
    *,
    forms: Sequence[Form],
    how: How = "auto",
    tolerance: float = 1e-6,
    tail_chars: int = 0,
    before_latex: Callable[[], None] | None = None,
) -> Match:
    """Find the answer in the last `tail_chars` characters (0: all) and compare it with the label."""
    wanted = clean_label(label)
    if wanted is None:
        return Match(outcome="unreadable label", reason=f"the task has no readable answer: {_short(label)}")
    found = extract(text[-tail_chars:] if tail_chars else text, forms)
    if found is None:
        return Match(outcome="unreadable answer", reason=f"no answer found as {' or '.join(forms)}")
    return compare(found, wanted, how=how, tolerance=tolerance, before_latex=before_latex)


def clean_label(label: Any) -> str | None:
    """The label as text; of a worked solution what follows #### or stands in its last \\boxed. None when empty."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    text = str(label)
    for form in ("hash", "boxed"):
        marked, inside = _EXTRACTORS[form](text)
        if marked:
            text = inside or ""
    return text.strip() or None


def extract(text: str, forms: Sequence[Form]) -> str | None:
    """Return the answer, or None when no form has its mark, or the mark has no end, or nothing stands inside."""
    for form in forms:
        marked, inside = _EXTRACTORS[form](text)
        if marked:
            return inside.strip() or None if inside is not None else None
    return None


def _by_tag(text: str) -> tuple[bool, str | None]:
    start = text.rfind("<answer>")
    if start < 0:
        return False, None
    end = text.find("</answer>", start)
    if end < 0:
        return True, None
    inside = text[start + len("<answer>") : end]
    boxed, value = _by_box(inside)
    return True, value if boxed else inside


def _by_box(text: str) -> tuple[bool, str | None]:
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return False, None
    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip() not in ("\\boxed", "\\fbox"):
        return True, None
    depth, place = 0, opening
    while place < len(text):
        letter = text[place]
        if letter == "\\":
            place += 1  # the next character is escaped
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return True, text[opening + 1 : place]
        place += 1
    return True, None


def _by_hash(text: str) -> tuple[bool, str | None]:
    start = text.rfind("####")
    return start >= 0, text[start + 4 :].partition("\n")[0] if start >= 0 else None


def _by_number(text: str) -> tuple[bool, str | None]:
    found = _IN_TEXT.findall(text)
    return bool(found), found[-1].rstrip(".") if found else None


_EXTRACTORS: dict[str, Callable[[str], tuple[bool, str | None]]] = {
    "tag": _by_tag,
    "boxed": _by_box,
    "hash": _by_hash,
    "number": _by_number,
    "plain": lambda text: (True, text),
}


def compare(
    answer: str, label: str, *, how: How, tolerance: float = 1e-6, before_latex: Callable[[], None] | None = None
) -> Match:
    """Say whether an extracted answer is the label. From `before_latex` on it may never return: see the file's head."""
    if answer.strip() == label.strip():
        return Match(outcome="right", reason=f"{_short(answer)} is the answer")
    if how == "exact":
        return _wrong(answer, label)
    ours, theirs = parse_number(answer), parse_number(label)
    if ours is not None and theirs is not None:
        percent = ("%" in answer) != ("%" in label)
        return _verdict(_same_number(ours, theirs, tolerance, percent=percent), answer, label)
    if how == "numeric":
        if theirs is None:
            return Match(outcome="unreadable label", reason=f"the label {_short(label)} is not a number")
        return Match(outcome="unreadable answer", reason=f"{_short(answer)} is not a number")
    if how == "auto" and _same_words(answer, label):
        return Match(outcome="right", reason=f"{_short(answer)} is the answer")
    if how == "auto" and not _MATHEMATICAL.search(label):
        return _wrong(answer, label)
    if before_latex is not None:
        before_latex()
    return _compare_latex(answer, label, label_is_text=how == "auto")


def parse_number(text: str) -> Fraction | None:
    """Read one number that fills the text, or None. Exponents have three digits at most, so this is always quick."""
    if len(text) > 200:
        return None
    text = _normalise(text)
    for pattern, value in _READERS:
        found = pattern.fullmatch(text)
        if found:
            sign, *parts = found.groups()
            try:
                size = value([part for part in parts if part is not None])
            except (ZeroDivisionError, ValueError):
                return None
            return -size if sign == "-" else size
    return None


def _normalise(text: str) -> str:
    text = text.strip().replace("−", "-").replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\ ", " ")
    for mark in ("\\(", "\\)", "\\[", "\\]", "\\$", "$", "\\%", "%", "\\left", "\\right", "\\displaystyle"):
        text = text.replace(mark, "")
    return " ".join(text.split()).rstrip(".").replace("- ", "-")


def _same_number(ours: Fraction, theirs: Fraction, tolerance: float, *, percent: bool) -> bool:
    if percent and _same_number(ours * 100, theirs, tolerance, percent=False):
        return True
    if percent and _same_number(ours, theirs * 100, tolerance, percent=False):
        return True
    if ours.denominator == theirs.denominator == 1:
        return ours == theirs
    return abs(ours - theirs) <= Fraction(tolerance) * max(1, abs(theirs))


def _same_words(answer: str, label: str) -> bool:
    def plain(text: str) -> str:
        return " ".join(_WRAPPER.sub(r"\1", text).split()).rstrip(".").casefold()

    return plain(answer) == plain(label)


def _compare_latex(answer: str, label: str, *, label_is_text: bool) -> Match:
    from math_verify import verify

    theirs = _parse_label(label)
    if not theirs:
        if label_is_text:
            return _wrong(answer, label)
        return Match(outcome="unreadable label", reason=f"the label {_short(label)} cannot be read as LaTeX")
    ours = _parse_latex(answer)
    if not ours:
        return Match(outcome="unreadable answer", reason=f"{_short(answer)} cannot be read as mathematics")
    return _verdict(bool(verify(theirs, ours, timeout_seconds=None)), answer, label)


def _parse_latex(text: str) -> list[Any]:
    """Read the whole text as one expression. math-verify's own time limit is off: signals do not end C code."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if len(text) > _LONGEST_MATH:
        return []
    wrapped = "$" + text.replace("$", " ").strip().rstrip(".") + "$"
    settings = [LatexExtractionConfig()]
    return parse(wrapped, extraction_config=settings, fallback_mode="no_fallback", parsing_timeout=None)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _parse_label(label: str) -> list[Any]:
    """Siblings of a group share their label."""
    return _parse_latex(label)


def _verdict(right: bool, answer: str, label: str) -> Match:
    return Match(outcome="right", reason=f"{_short(answer)} equals {_short(label)}") if right else _wrong(answer, label)


def _wrong(answer: str, label: str) -> Match:
    return Match(outcome="wrong", reason=f"{_short(answer)} is not {_short(label)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + "…" + text[-16:]
