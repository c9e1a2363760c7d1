"""Options of a multiple choice: "B", "(B)", "B.", "B) Paris". In: an answer and a label. Out: the
letter, or None.

Read, with rewards.answers.markup taken off: the letter alone, in parentheses or before one of `) .
:`; "Option B"; and the letter with a mark followed by the option's text. Where the question shows
that option, the text must be the option's; else it must hold no further option, no "or", "and" or
"not". A letter beside words without a mark ("a man") is none.
"""

from __future__ import annotations

import re

from gyre.rewards.answers.markup import bare

_ALONE = re.compile(r"(?:(?:option|choice) )?(?:\(([A-Za-z])\)|([A-Za-z])[).:]?)", re.IGNORECASE)
_WITH_TEXT = re.compile(
    r"(?:(?:option|choice) )?(?:\(([A-Za-z])\)[.:]?|([A-Za-z])[).:]) ?(\S.*)", re.IGNORECASE
)
_HEDGED = re.compile(
    r"(?i:\b(?:or|and|not|nor|neither|either|both)\b)|&|/|\b[B-HJ-Z]\b|\b[A-Za-z]\)|^[A-Za-z]\W*$"
)
_MARK = re.compile(r"(?<![A-Za-z0-9(])(?:\(([A-Z])\)[.:]?|([A-Z])[).:])\s*(?=\S)")
_LONGEST = 1000  # characters


def read_label(label: str) -> str | None:
    """Return the letter of a label that is one option's letter, as a capital."""
    found = _ALONE.fullmatch(label.strip())
    return (found[1] or found[2]).upper() if found else None


def read_option(answer: str, question: str = "") -> str | None:
    """Return the letter of an answer that names one option, as a capital."""
    if len(answer) > _LONGEST:
        return None
    text = " ".join(bare(answer).replace("**", "").split())
    found = _ALONE.fullmatch(text)
    if found:
        return (found[1] or found[2]).upper()
    found = _WITH_TEXT.fullmatch(text)
    if not found:
        return None
    letter, said = (found[1] or found[2]).upper(), found[3]
    shown = _shown(letter, question)
    if shown:
        return letter if any(one.startswith(_plain(said)) for one in shown) else None
    return None if _HEDGED.search(said) else letter


def _shown(letter: str, question: str) -> list[str]:
    """List what the question writes behind this letter's mark, each time up to the next letter's
    mark."""
    marks = list(_MARK.finditer(question))
    ends = [mark.start() for mark in marks[1:]] + [len(question)]
    return [
        _plain(question[mark.end() : end])
        for mark, end in zip(marks, ends, strict=False)
        if letter in (mark[1], mark[2])
    ]


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()
