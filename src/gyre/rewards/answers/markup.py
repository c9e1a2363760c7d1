r"""Markup: takes off what writers put around an answer. In: an answer or a label. Out: the bare
text.

Full-width signs become ASCII. Taken off while they enclose the whole text: **bold**, *italic*,
__bold__, `code`, quotes, $…$, $$…$$, \(…\), \[…\], {…}, \text{…} and its like, \boxed{…}; one
period at the end; one lead-in of a closed list ("The answer is", "Final answer:"). What stands
beside other text stays, so "4 or **5**" is not "5".
"""

from __future__ import annotations

import re

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0x3000: 0x20,
    0x2212: 0x2D,
    0x00A0: 0x20,
}
_PAIRS = (
    ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ('"', '"'), ("'", "'"), ("“", "”"),
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"),
)  # fmt: skip
_BRACED = re.compile(
    r"(?:\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed|fbox))?\{(.*)\}", re.DOTALL
)
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|result|solution)\s*(?:\bis\b\s*:?|equals\b|:|=)\s*(?=\S)",
    re.IGNORECASE,
)


def ascii_width(text: str) -> str:
    """Full-width signs, the minus sign and no-break spaces as their ASCII forms; all else as it
    is."""
    return text.translate(_FULL_WIDTH)


def bare(text: str, *, lead_in: bool = True) -> str:
    """Take off what encloses the whole text, layer by layer; `lead_in` False keeps "The answer
    is"."""
    text = ascii_width(text).strip()
    before = None
    while text != before:
        before = text
        text = _unwrap(text).strip()
        if text == before and lead_in:
            found = _LEAD_IN.match(_BOLD_LABEL.sub(r"\1 ", text))
            if found:
                text, lead_in = _BOLD_LABEL.sub(r"\1 ", text)[found.end() :], False
    return text


_BOLD_LABEL = re.compile(r"^\*\*([^*\n]{1,40}:)\*\*")  # **Answer:** 42


def _unwrap(text: str) -> str:
    """Take off one layer, or return the text as it is."""
    for opening, closing in _PAIRS:
        inside = text[len(opening) : -len(closing)]
        if (
            text == opening + inside + closing
            and inside
            and opening not in inside
            and closing not in inside
        ):
            return inside
    braced = _BRACED.fullmatch(text)
    if braced and _balanced(braced[1]):
        return braced[1]
    if text.endswith(".") and not text.endswith(".."):
        return text[:-1]
    return text


def _balanced(text: str) -> bool:
    """Check that every closing brace has its opening one before it. Escaped braces are a set's, and
    give False."""
    depth = 0
    for letter in text.replace("\\{", "}"):
        depth += (letter == "{") - (letter == "}")
        if depth < 0:
            return False
    return depth == 0
