"""XML calls: the calls of Qwen3-Coder in an answer's text, as it comes. In: pieces of text, the
tools' schemas. Out: spans, whose arguments are the JSON that the parameters make.

A call is `<tool_call><function=NAME>`, parameters as `<parameter=KEY>value</parameter>`, and the
closing tags, with a line end after each tag.

    seek ──▶ head ──▶ between ──▶ value
      ▲               │     ▲───────┘
      └──── close ◀───┘

A text leaves as it comes; a value of another type leaves whole. A closing tag ends a value where
another tag, or the end, follows: otherwise it is part of the value. A missing one is made up for by
the next parameter that the tool has, or by the function's end. `<function=…>` without `<tool_call>`
is a call, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gyre.server.parsers.spans import MOST_BLANK, Kind, TextSpan, find_blank_end, held_chars
from gyre.server.parsers.tool_calls import CallFormat
from gyre.server.parsers.xml_values import TEXT, as_json, find_type
from gyre.text.messages import Tool

QWEN3_CODER = "qwen3_coder"
XML_FORMAT = CallFormat(opener="<tool_call>", closer="</tool_call>", is_bare=False, is_xml=True)
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
OPENERS = (XML_FORMAT.opener, FUNCTION)
AFTER_VALUE = (PARAMETER, FUNCTION_END, XML_FORMAT.closer)
VALUE_ENDS = (PARAMETER_END, FUNCTION_END, f"\n{PARAMETER}")
_OPENER = re.compile("|".join(map(re.escape, OPENERS)))
_NAME = re.compile(r"[^{}<>\"'\s]{0,256}")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>")
_PARAMETER_BEGUN = re.compile(r"<parameter=[^<>\n]{0,256}")
_VALUE_END = re.compile("|".join(map(re.escape, VALUE_ENDS)))


class XmlCallParser:
    """The calls of one completion."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool.parameters.get("properties") for tool in tools}
        self._text = ""  # what no span has yet
        self._start = 0  # the characters before it
        self._step = self._seek
        self._at_begin = True  # nothing but calls came so far, or since the last one
        self._has_call = False
        self._schemas: Mapping[str, Any] = {}  # of the parameters of the open call
        self._seen: set[str] = set()  # its parameters so far
        self._type = TEXT
        self._parts: list[str] = []  # of an open value that leaves whole
        self._at_value = False  # before the first character of a value

    def push(self, text: str) -> list[TextSpan]:
        """Add text; return the spans that are certain now."""
        return self._go(text, is_last=False)

    def flush(self) -> list[TextSpan]:
        """Return the spans of what was held back. Ends the text."""
        spans = self._go("", is_last=True)
        if self._step == self._between:
            self._say(spans, "arguments", "}")
        return spans

    def _go(self, text: str, *, is_last: bool) -> list[TextSpan]:
        self._text += text
        spans: list[TextSpan] = []
        while self._text and self._step(spans, is_last):
            pass
        return spans

    def _seek(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Look for the beginning of a call; return whether to go on."""
        text, lead = self._text, find_blank_end(self._text, 0) if self._at_begin else 0
        lead = lead if lead <= MOST_BLANK else 0
        if lead == len(text) and not is_last:
            return False
        opener = _OPENER.search(text)
        if opener is not None and opener.start() <= lead:
            self._step = self._head
            return True
        place = len(text) if opener is None else opener.start()
        if opener is None and not is_last:
            place -= held_chars(text, OPENERS)
        if place <= lead and not is_last:
            return False
        is_blank = self._has_call and self._at_begin and text.isspace()
        self._say(spans, "markup" if is_blank else "content", text[:place])
        self._drop(place)
        self._at_begin = is_blank
        return True

    def _head(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Hold the text until its function's name is there, or it is no call."""
        text, place = self._text, find_blank_end(self._text, 0)
        end = place + len(FUNCTION)
        if text.startswith(XML_FORMAT.opener, place):
            end = place + len(XML_FORMAT.opener)
            place = find_blank_end(text, end)
        name = _NAME.match(text, place + len(FUNCTION))
        if name is not None and text.startswith(FUNCTION, place):
            if name[0] and text.startswith(">", name.end()):
                self._begin_call(spans, name)
                return True
            is_open = name.end() == len(text)
        else:
            is_open = FUNCTION.startswith(text[place:]) and place - end <= MOST_BLANK
        if is_open and not is_last:
            return False
        self._say(spans, "content", text[:end])
        self._drop(end)
        self._at_begin, self._step = False, self._seek
        return True

    def _begin_call(self, spans: list[TextSpan], name: re.Match[str]) -> None:
        schemas = self._tools.get(name[0])
        self._schemas = schemas if isinstance(schemas, dict) else {}
        self._seen = set()
        self._say(spans, "name", name[0])
        self._say(spans, "arguments", "{")
        self._drop(name.end() + 1)
        self._has_call, self._step = True, self._between

    def _between(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Look for the next parameter, or the end of the call. Much white space ends it too."""
        blank = find_blank_end(self._text, 0)
        rest, is_broken = self._text[blank:], blank > MOST_BLANK
        if not is_broken and (found := _PARAMETER.match(rest)) is not None:
            self._drop(blank + found.end())
            self._begin_value(spans, found[1])
            return True
        is_end = not is_broken and rest.startswith((FUNCTION_END, XML_FORMAT.closer))
        may_go_on = any(tag.startswith(rest) for tag in AFTER_VALUE)
        may_go_on = may_go_on or _PARAMETER_BEGUN.fullmatch(rest) is not None
        if not (is_broken or is_end or is_last) and may_go_on:
            return False
        self._say(spans, "arguments", "}")  # also where it breaks off: what follows is content
        self._drop(blank + len(FUNCTION_END) if is_end and rest.startswith(FUNCTION_END) else 0)
        self._at_begin, self._step = True, self._close if is_end else self._seek
        return True

    def _begin_value(self, spans: list[TextSpan], name: str) -> None:
        comma = ", " if self._seen else ""
        self._seen.add(name)
        self._type, self._parts = find_type(self._schemas.get(name)), []
        quote = '"' if self._type.is_plain_text else ""
        key = json.dumps(name, ensure_ascii=False)
        self._say(spans, "arguments", f"{comma}{key}: {quote}")
        self._at_value, self._step = True, self._value

    def _value(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Give out a value as it comes, or gather it, up to its end."""
        if self._at_value and self._text[0] == "\n":
            self._drop(1)
        self._at_value = False
        end, is_certain, after = self._find_end(is_last)
        if is_certain or not is_last:  # a line end before the closing tag is markup
            end -= self._text.endswith("\n", 0, end)
        self._parts.append(self._text[:end])
        if self._type.is_plain_text:
            escaped = json.dumps(self._parts.pop(), ensure_ascii=False)[1:-1]
            self._say(spans, "arguments", escaped)
        if not is_certain:
            self._drop(end)
            return False
        whole = "".join(self._parts)
        closing = '"' if self._type.is_plain_text else as_json(whole, self._type)
        self._say(spans, "arguments", closing)
        self._drop(after)
        self._step = self._between
        return True

    def _find_end(self, is_last: bool) -> tuple[int, bool, int]:
        """Return where the value ends at least, whether it ends there, and where its tag ends."""
        text = self._text
        for found in _VALUE_END.finditer(text):
            place, tag = found.span()[0], found[0]
            after = place + len(tag) if tag == PARAMETER_END else place
            is_end = self._is_end(tag, place, found.end(), is_last)
            if is_end or is_end is None:
                return place, bool(is_end), after
        return len(text) - (0 if is_last else held_chars(text, VALUE_ENDS)), False, 0

    def _is_end(self, tag: str, place: int, end: int, is_last: bool) -> bool | None:
        """Return whether a tag within a value ends it; None where what follows has to come."""
        text = self._text
        if tag.endswith(PARAMETER):
            named = _PARAMETER.match(text, place + 1)
            if named is not None:
                return named[1] in self._schemas and named[1] not in self._seen
            is_open = _PARAMETER_BEGUN.fullmatch(text, place + 1) is not None
            return None if is_open and not is_last else False
        follows = AFTER_VALUE if tag == PARAMETER_END else (XML_FORMAT.closer,)
        blank_end = find_blank_end(text, end)
        rest = text[blank_end:]
        if blank_end - end > MOST_BLANK:
            return False
        if rest.startswith(follows):
            return True
        if not rest and is_last:
            return True
        return None if not is_last and any(one.startswith(rest) for one in follows) else False

    def _close(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Take the closing tag of a call, which may be missing."""
        closer, blank = XML_FORMAT.closer, find_blank_end(self._text, 0)
        rest = self._text[blank : blank + len(closer)]
        if rest == closer and blank <= MOST_BLANK:
            self._drop(blank + len(closer))
        elif closer.startswith(rest) and blank <= MOST_BLANK and not is_last:
            return False
        self._step = self._seek
        return True

    def _say(self, spans: list[TextSpan], kind: Kind, text: str) -> None:
        if text:
            spans.append(TextSpan(kind=kind, text=text, start=self._start))

    def _drop(self, length: int) -> None:
        self._text, self._start = self._text[length:], self._start + length
