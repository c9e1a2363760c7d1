"""JSON scanner: one JSON value, a character at a time. In: characters. Out: whether they can still
become a value, how deep they are, and what may come next. It accepts what RFC 8259 does, keeps no
text, and needs no recursion, so that no nesting is too deep.
"""

from __future__ import annotations

from typing import Literal

WHITE = " \t\n\r"
DIGITS = "0123456789"

State = Literal[
    "value",  # anything
    "item",  # a value, or the end of an empty list
    "first_key",  # a key, or the end of an empty object
    "key",
    "in_key",
    "colon",
    "in_text",
    "in_number",
    "in_word",  # true, false, null
    "next",  # a comma or a closing bracket
    "done",
]

# A number's parts: the characters that may follow, and the part that each begins.
NUMBER: dict[str, tuple[tuple[str, str], ...]] = {
    "minus": (("0", "zero"), ("123456789", "whole")),
    "zero": ((".", "point"), ("eE", "exponent")),
    "whole": ((DIGITS, "whole"), (".", "point"), ("eE", "exponent")),
    "point": ((DIGITS, "fraction"),),
    "fraction": ((DIGITS, "fraction"), ("eE", "exponent")),
    "exponent": (("+-", "sign"), (DIGITS, "power")),
    "sign": ((DIGITS, "power"),),
    "power": ((DIGITS, "power"),),
}
NUMBER_ENDS = ("zero", "whole", "fraction", "power")
WORDS = {"t": "rue", "f": "alse", "n": "ull"}


class JsonScanner:
    """The place in one JSON value."""

    def __init__(self) -> None:
        self.state: State = "value"
        self._open: list[str] = []  # the brackets that will close what is open
        self._part = ""  # of a number; or what is left of a word or an escape

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._open)

    @property
    def in_plain_text(self) -> bool:
        """Return whether a string is open, and no escape in it."""
        return self.state == "in_text" and not self._part

    def push(self, character: str) -> bool:
        """Go on by one character; return whether the text is still the beginning of a value. After
        False the scanner is of no use."""
        state = self.state
        if state in ("in_text", "in_key"):
            return self._in_string(character)
        if state == "in_number":
            return self._in_number(character)
        if state == "in_word":
            return self._in_word(character)
        if character in WHITE:
            return True
        if state in ("value", "item"):
            return self._begin(character)
        return self._between(character)

    def _between(self, character: str) -> bool:
        state = self.state
        if state in ("key", "first_key") and character == '"':
            self.state, self._part = "in_key", ""
            return True
        if state == "colon" and character == ":":
            self.state = "value"
            return True
        if state == "next" and character == ",":
            self.state = "key" if self._open[-1] == "}" else "value"
            return True
        return state in ("next", "first_key") and self._close(character)

    def _begin(self, character: str) -> bool:
        if character == "{":
            self._open.append("}")
            self.state = "first_key"
        elif character == "[":
            self._open.append("]")
            self.state = "item"
        elif character == '"':
            self.state, self._part = "in_text", ""
        elif character == "-" or character in DIGITS:
            part = {"-": "minus", "0": "zero"}.get(character, "whole")
            self.state, self._part = "in_number", part
        elif character in WORDS:
            self.state, self._part = "in_word", WORDS[character]
        else:
            return self.state == "item" and self._close(character)
        return True

    def _close(self, character: str) -> bool:
        if not self._open or character != self._open[-1]:
            return False
        self._open.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self.state = "next" if self._open else "done"

    def _in_string(self, character: str) -> bool:
        if self._part == "\\":
            self._part = "uuuu" if character == "u" else ""
            return character in '"\\/bfnrtu'
        if self._part:
            self._part = self._part[1:]
            return character in "0123456789abcdefABCDEF"
        if character == "\\":
            self._part = "\\"
        elif character == '"':
            if self.state == "in_key":
                self.state = "colon"
            else:
                self._end_value()
        return character >= " "

    def _in_number(self, character: str) -> bool:
        for accepted, part in NUMBER[self._part]:
            if character in accepted:
                self._part = part
                return True
        if self._part not in NUMBER_ENDS:
            return False
        self._end_value()
        return self.push(character)

    def _in_word(self, character: str) -> bool:
        if not self._part.startswith(character):
            return False
        self._part = self._part[1:]
        if not self._part:
            self._end_value()
        return True
