r"""Answer matcher: finds the answer in a completion and compares it with the label. In: texts. Out:
a Match.

Finding: the first form of `forms` whose mark occurs decides, by its last occurrence; a mark without
end is no answer.

    tag     <answer>…</answer>; a \boxed{…} inside is opened too.
    boxed   \boxed{…} or \fbox{…}, nested braces and \{ \} counted.
    hash    the rest of the line after ####.
    number  the last number in the text, with its sign, scale word or power of ten; a sum or product
            is no number.
    plain   the whole text.

Comparing, `how`:

    exact    same characters.
    numeric  both one number (rewards.answers.numbers).
    latex    numbers if both are, else same value by math-verify, which evaluates: the question is
             an answer too.
    auto     by the label. A number: numeric. An option's letter: rewards.answers.options.
             A date, a time of day, a score, a version, a name with digits or text without
             mathematics: the same words. Anything else: the same words or latex

docs/rewards.md lists what counts as a number, a percentage, a unit and an option, and the
tolerance. math-verify can compute without end on a few characters (a tower of exponents). So
`compare` belongs in a process that can be killed. All else here is linear in the text.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gyre.rewards.answers.markup import ascii_width, bare
from gyre.rewards.answers.numbers import DECIMAL, SCALES, read_number, same_number
from gyre.rewards.answers.options import read_label, read_option

Form = Literal["tag", "boxed", "hash", "number", "plain"]
How = Literal["auto", "exact", "numeric", "latex"]
Outcome = Literal["right", "wrong", "unreadable answer", "unreadable label"]

_LONGEST_MATH = 1000  # characters that are still taken for one expression
_SIGN = r"(?:(?<![0-9A-Za-z)])[-+] ?(?:\\?[$€£¥₹] ?)?)?"
# 1 000: one number to a reader, none to read_number
_SPACED = r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])"
_ONE = rf"(?:{_SPACED}|(?:{DECIMAL})(?:/[0-9]+| [0-9]+/[0-9]+)?)"
_JOINED = r"(?: [-+] ?| ?(?:×|\\times|\\cdot|\*|\^) ?\{?[-+]?)"
_IN_TEXT = re.compile(
    rf"{_SIGN}{_ONE}(?:{_JOINED}{_ONE}\}}?)*(?: ?\\?%| (?i:{'|'.join(SCALES)})(?![A-Za-z]))?"
)
_MATHEMATICAL = re.compile(r"[0-9\\^_=<>+*/(){}\[\]|-]")
_DATE_OR_TIME = re.compile(
    r"[0-9]{1,4}([-/.])[0-9]{1,2}\1[0-9]{1,4}|[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?"
)
_VERSION_OR_SCORE = re.compile(r"[0-9]+(?:\.[0-9]+){2,}|[0-9]+(?: ?[-–] ?[0-9]+)+")
# H2O, 10 am; not 2x
_NAME_OR_MEASURE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])(?![0-9]+ ?[xyz]+$)[0-9A-Za-z .:]+")
_NAMED_LABEL = re.compile(r"([A-Za-z]) ?= ?([^=]+)")
_BASED = re.compile(r"([0-9A-Za-z]+)_ ?\{?([0-9]+)\}?")  # 101_2; math-verify leaves the base out
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
    question: str = "",
    before_latex: Callable[[], None] | None = None,
) -> Match:
    """Find the answer in the last `tail_chars` characters (0: all) and compare it with the label.

    tolerance: relative, for numbers that are not whole. question: what was asked; it says whether
    percent counts, which words are units and which text an option has.
    """
    wanted = clean_label(label)
    if wanted is None:
        return Match(
            outcome="unreadable label", reason=f"the task has no readable answer: {_short(label)}"
        )
    found = extract(text[-tail_chars:] if tail_chars else text, forms)
    if found is None:
        return Match(outcome="unreadable answer", reason=f"no answer found as {' or '.join(forms)}")
    return compare(
        found, wanted, how=how, tolerance=tolerance, question=question, before_latex=before_latex
    )


def clean_label(label: Any) -> str | None:
    r"""Return the label as text; of a worked solution what follows #### or stands in its last
    \boxed. None when empty."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    if isinstance(label, float) and not math.isfinite(label):
        return None
    text = str(label)
    for form in ("hash", "boxed"):
        marked, inside = _EXTRACTORS[form](text)
        if marked:
            text = inside or ""
    return text.strip() or None


def extract(text: str, forms: Sequence[Form]) -> str | None:
    """Return the answer, or None when no form has its mark, or the mark has no end, or nothing
    stands inside."""
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
    found = _IN_TEXT.findall(ascii_width(text))
    return bool(found), found[-1].rstrip(".") if found else None


_EXTRACTORS: dict[str, Callable[[str], tuple[bool, str | None]]] = {
    "tag": _by_tag,
    "boxed": _by_box,
    "hash": _by_hash,
    "number": _by_number,
    "plain": lambda text: (True, text),
}


def compare(
    answer: str,
    label: str,
    *,
    how: How,
    tolerance: float = 1e-6,
    question: str = "",
    before_latex: Callable[[], None] | None = None,
) -> Match:
    """Say whether an extracted answer is the label. From `before_latex` on it may never return: see
    the file's head."""
    if answer.strip() == label.strip():
        return Match(outcome="right", reason=f"{_short(answer)} is the answer")
    if how == "exact":
        return _wrong(answer, label)
    if how == "auto":
        answer, label = _without_frame(answer, label)
    theirs = read_number(label, question, lead_in=False)
    if how == "numeric" and theirs is None:
        return Match(
            outcome="unreadable label", reason=f"the label {_short(label)} is not a number"
        )
    if theirs is not None:
        ours = read_number(answer, question)
        if ours is not None:
            return _match(
                same_number(ours, theirs, tolerance=tolerance, question=question), answer, label
            )
        if how != "latex":
            return Match(outcome="unreadable answer", reason=f"{_short(answer)} is not a number")
    if how == "auto":
        found = _compare_words(answer, label, question)
        if found is not None:
            return found
    if before_latex is not None:
        before_latex()
    return _compare_latex(answer, label, label_is_text=how == "auto")


def _without_frame(answer: str, label: str) -> tuple[str, str]:
    """Take `x =` and (…) off a label that holds one number, and the same off the answer: it is
    compared as a number."""
    ours, theirs = ascii_width(answer).strip(), ascii_width(label).strip()
    named = _NAMED_LABEL.fullmatch(theirs)
    if named:
        ours, theirs = re.sub(rf"^{named[1]} ?= ?", "", ours), named[2]
    if theirs.startswith("(") and theirs.endswith(")") and "," not in theirs:  # (10,100) is a point
        theirs = theirs[1:-1].strip()
        ours = ours[1:-1].strip() if ours.startswith("(") and ours.endswith(")") else ours
    return (answer, label) if read_number(theirs, lead_in=False) is None else (ours, theirs)


def _compare_words(answer: str, label: str, question: str) -> Match | None:
    """Decide what needs no mathematics, or return None."""
    letter = read_label(label)
    if letter is not None:
        return _match(read_option(answer, question) == letter, answer, label)
    if _same_words(answer, label):
        return Match(outcome="right", reason=f"{_short(answer)} is the answer")
    theirs, ours = _BASED.fullmatch(label.strip()), _BASED.fullmatch(bare(answer))
    if theirs and ours:
        return _match(ours.groups() == theirs.groups(), answer, label)
    texts = (_DATE_OR_TIME, _VERSION_OR_SCORE, _NAME_OR_MEASURE)
    if any(one.fullmatch(label.strip()) for one in texts) or not _MATHEMATICAL.search(label):
        return _wrong(answer, label)
    return None


def _same_words(answer: str, label: str) -> bool:
    def plain(text: str) -> str:
        return " ".join(_WRAPPER.sub(r"\1", text).split()).rstrip(".").casefold()

    if len(answer) > _LONGEST_MATH:  # nothing to take off of a text this long
        return plain(answer) == plain(label)
    return plain(bare(answer)) == plain(bare(label, lead_in=False))


def _compare_latex(answer: str, label: str, *, label_is_text: bool) -> Match:
    from math_verify import verify

    theirs = _parse_label(label)
    if not theirs:
        if label_is_text:
            return _wrong(answer, label)
        return Match(
            outcome="unreadable label", reason=f"the label {_short(label)} cannot be read as LaTeX"
        )
    ours = _parse_latex(answer)
    if not ours:
        return Match(
            outcome="unreadable answer", reason=f"{_short(answer)} cannot be read as mathematics"
        )
    return _match(bool(verify(theirs, ours, timeout_seconds=None)), answer, label)


def _parse_latex(text: str) -> list[Any]:
    """Read the whole text as one expression. math-verify's own time limit is off: signals do not
    end C code."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if len(text) > _LONGEST_MATH:
        return []
    wrapped = "$" + text.replace("$", " ").strip().rstrip(".") + "$"
    settings = [LatexExtractionConfig()]
    return parse(
        wrapped,
        extraction_config=settings,
        fallback_mode="no_fallback",
        parsing_timeout=None,  # type: ignore[arg-type]
    )


@functools.lru_cache(maxsize=256)
def _parse_label(label: str) -> list[Any]:
    """Siblings of a group share their label."""
    return _parse_latex(label)


def _match(right: bool, answer: str, label: str) -> Match:
    return (
        Match(outcome="right", reason=f"{_short(answer)} equals {_short(label)}")
        if right
        else _wrong(answer, label)
    )


def _wrong(answer: str, label: str) -> Match:
    return Match(outcome="wrong", reason=f"{_short(answer)} is not {_short(label)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:60] + "…" + text[-16:]
