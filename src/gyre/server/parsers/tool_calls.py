"""Tool calls: the calls in an answer's text, as it comes. In: pieces of text. Out: spans.

    text ──marker──▶ held ──it is a call──▶ call ──its object ends──▶ after ──▶ text
      ▲                └──it is none: the marker is content──┐          │
      └──────────────────────────────────────────────────────┴──────────┘

Text is held until it is known to be a call: its name is there, and its arguments begin. Then these
leave as they come. What turns out to be no call is content. A call that breaks off
ends with its arguments as they are, and what follows is content. White space around calls is
markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gyre.server.parsers.call_scanner import CallScanner
from gyre.server.parsers.spans import MOST_BLANK, Kind, TextSpan, find_blank_end, held_chars


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes its calls."""

    opener: str
    closer: str  # "" where nothing follows a call
    is_bare: bool  # a call's object may stand anywhere by itself, and `;` parts the calls
    is_xml: bool = False  # xml_calls.py reads it

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opener, self.closer) if self.closer else (self.opener,)


FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": CallFormat(opener="<tool_call>", closer="</tool_call>", is_bare=False),
        "llama3_json": CallFormat(opener="<|python_tag|>", closer="", is_bare=True),
    }
)
Run = tuple[Kind, int]  # the kind of a run of text, and the place where it begins
_PARTED = re.compile(r"\s*(;\s*)?")


class ToolCallParser:
    """The calls of one completion."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        openers = (form.opener, "{") if form.is_bare else (form.opener,)
        self._openers = re.compile("|".join(map(re.escape, openers)))
        self._text = ""  # the end of the text so far; no span has what is from `_at` on
        self._at = 0
        self._start = 0  # characters before `_text`
        self._step = self._seek
        self._at_begin = True  # nothing but calls came so far, or since the last one
        self._has_call = False
        self._scanner = CallScanner()
        self._head = 0  # end of the held text that is content if it is no call
        self._scanned = 0  # end of the held text that the scanner has
        self._runs: list[Run] = []  # of the held object

    def push(self, text: str) -> list[TextSpan]:
        """Add text; return the spans that are certain now."""
        return self._go(text, is_last=False)

    def flush(self) -> list[TextSpan]:
        """Return the spans of what was held back. Ends the text."""
        return self._go("", is_last=True)

    def _go(self, text: str, *, is_last: bool) -> list[TextSpan]:
        self._text += text
        spans: list[TextSpan] = []
        while self._at < len(self._text) and self._step(spans, is_last):
            pass
        self._text, taken = self._text[self._at :], self._at
        self._start, self._at = self._start + taken, 0
        self._head, self._scanned = self._head - taken, self._scanned - taken
        self._runs = [(kind, place - taken) for kind, place in self._runs]
        return spans

    def _seek(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Look for the beginning of a call; return whether to go on."""
        end, lead = len(self._text), self._find_lead()
        if lead == end and not is_last:
            return False
        opener = self._openers.search(self._text, self._at)
        if opener is not None and opener.start() <= lead:
            return self._hold(opener)
        place = end if opener is None else opener.start()
        if opener is None and not is_last:
            place -= held_chars(self._text[self._at :], [self._form.opener])
        if place <= lead and not is_last:
            return False
        is_blank = self._has_call and lead == end and self._text[self._at :].isspace()
        self._at_begin = is_blank
        self._take(spans, "markup" if is_blank else "content", place)
        return True

    def _find_lead(self) -> int:
        """Return the place up to which the text is markup if a call begins there."""
        if not self._at_begin:
            return self._at
        if self._form.is_bare and self._has_call:
            found = _PARTED.match(self._text, self._at)
            assert found is not None  # it matches nothing at all, too
            lead = found.end()
        else:
            lead = find_blank_end(self._text, self._at)
        return lead if lead - self._at <= MOST_BLANK else self._at

    def _hold(self, opener: re.Match[str]) -> bool:
        self._scanner, self._runs = CallScanner(), []
        self._head = opener.end()
        self._scanned = opener.start() if opener[0] == "{" else opener.end()
        self._step = self._try
        return True

    def _try(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Scan held text until it is a call, or is none."""
        while self._scanned < len(self._text):
            kind = self._scanner.push(self._text[self._scanned])
            if kind is None:
                return self._give_up(spans)
            if not self._runs or self._runs[-1][0] != kind:
                self._runs.append((kind, self._scanned))
            self._scanned += 1
            if self._scanner.is_call:
                return self._begin_call(spans)
        return self._give_up(spans) if is_last else False

    def _give_up(self, spans: list[TextSpan]) -> bool:
        self._take(spans, "content", self._head)
        self._at_begin, self._step = False, self._seek
        return True

    def _begin_call(self, spans: list[TextSpan]) -> bool:
        found: list[TextSpan] = []
        ends = [*(place for _, place in self._runs[1:]), self._scanned]
        for (kind, place), end in zip(self._runs, ends, strict=True):
            self._take(found, "markup", place)
            self._take(found, kind, end)
        # the name leaves first, wherever it stood
        spans += sorted(found, key=lambda span: span.kind != "name")
        self._has_call = self._at_begin = True
        self._runs = []
        self._step = self._end_call if self._scanner.is_done else self._go_on
        return True

    def _go_on(self, spans: list[TextSpan], is_last: bool) -> bool:
        """Give out a call's arguments as they come."""
        sent = self._at  # what stands after the arguments waits for the end of the object
        while self._scanned < len(self._text) and not self._scanner.is_done:
            kind = self._scanner.push(self._text[self._scanned])
            if kind is None:  # it breaks off
                self._step = self._seek
                break
            self._scanned += 1
            if kind == "arguments":
                self._scanned = sent = self._scanner.skip(self._text, self._scanned)
        self._take(spans, "arguments", sent)
        if self._scanner.is_done:
            self._take(spans, "markup", self._scanned)
            self._step = self._end_call
        elif is_last:
            self._step = self._seek
        return self._step != self._go_on

    def _end_call(self, spans: list[TextSpan], is_last: bool) -> bool:
        closer, blank = self._form.closer, find_blank_end(self._text, self._at)
        if closer and blank - self._at <= MOST_BLANK:
            if self._text.startswith(closer, blank):
                self._take(spans, "markup", blank + len(closer))
            elif closer.startswith(self._text[blank : blank + len(closer)]) and not is_last:
                return False
        self._step = self._seek
        return True

    def _take(self, spans: list[TextSpan], kind: Kind, end: int) -> None:
        """Make the text up to a place a span, where there is any."""
        if end > self._at:
            text, start = self._text[self._at : end], self._start + self._at
            spans.append(TextSpan(kind=kind, text=text, start=start))
            self._at = end
