"""Call scanner: the JSON object of one tool call, a character at a time. In: characters. Out: what
each belongs to, and from when on they are a call.

    {"name": "weather", "arguments": {"city": "Paris"}}
     markup   name       markup       arguments        markup

`parameters` is another name of `arguments`, in either order with `name`. Members `type` and `id`
are texts that say nothing; an object with any other member is no call.
"""

from __future__ import annotations

import re

from gyre.server.parsers.json_scanner import WHITE, JsonScanner
from gyre.server.parsers.spans import Kind

MEMBERS = {"name": "name", "arguments": "arguments", "parameters": "arguments"}
OTHERS = ("type", "id")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')


class CallScanner:
    """The place in one call."""

    def __init__(self) -> None:
        self._json = JsonScanner()
        self._key = ""
        self._member = ""  # whose value is open
        self._found: set[str] = set()  # members whose value has begun
        self._name_chars = 0
        self._has_name = False

    @property
    def is_call(self) -> bool:
        """Return whether it is a call: the name is known, and an argument has come."""
        return self._has_name and "arguments" in self._found

    @property
    def is_done(self) -> bool:
        return self._json.state == "done"

    def push(self, character: str) -> Kind | None:
        """Return what the character belongs to; None when the text is no call, or can no longer
        become one. After None the scanner is of no use."""
        json = self._json
        depth, before = json.depth, json.state
        if before == "done" or not json.push(character):
            return None
        if depth == 0:
            return "markup" if json.depth == 1 or character in WHITE else None
        if self._member:
            return self._in_value(character)
        if before == "value" and json.state != "value":  # depth 1: the first character of a value
            return self._begin_value(character)
        if before == "in_key":
            return self._in_key(character)
        if json.state == "in_key":
            self._key = ""
        return None if self.is_done and not self.is_call else "markup"

    def skip(self, text: str, place: int) -> int:
        """Go on over what is only more of a string of the arguments; return where that ends."""
        if self._member != "arguments" or not self._json.in_plain_text:
            return place
        found = _PLAIN.match(text, place)
        assert found is not None  # it matches nothing at all, too
        return found.end()

    def _in_key(self, character: str) -> Kind | None:
        if self._json.state == "in_key":
            self._key += character
            return "markup"
        known = self._key in MEMBERS or self._key in OTHERS
        return "markup" if known and MEMBERS.get(self._key, self._key) not in self._found else None

    def _begin_value(self, character: str) -> Kind | None:
        self._member = MEMBERS.get(self._key, self._key)
        self._found.add(self._member)
        if self._member == "arguments":
            return "arguments" if character == "{" else None
        return "markup" if character == '"' else None

    def _in_value(self, character: str) -> Kind | None:
        member = self._member
        is_over = self._json.depth == 1 and self._json.state == "next"
        if is_over:
            self._member = ""
        if member == "arguments":
            return "arguments"
        if member != "name":
            return "markup"
        if not is_over:
            # names are [A-Za-z0-9_-] in OpenAI's API; no function's needs an escape
            self._name_chars += 1
            return None if character == "\\" else "name"
        self._has_name = self._name_chars > 0
        return "markup" if self._has_name else None
