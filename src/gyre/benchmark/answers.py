"""Answers: bytes of a server to what they say. In: the body of an answer, in parts, with the time
of each. Out: when text came, the usage, and what failed. Pure.

It runs once for each chunk of each stream, so it decodes only the fields that it needs.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gyre.benchmark.records import TokenCounts

DONE = b"[DONE]"
MOST_DETAIL_CHARS = 200
MOST_BUFFERED_BYTES = 64 << 20  # of a whole answer, or of one event
_SHORT_CODE = re.compile(r"[A-Za-z0-9_.-]{1,48}")


class _Said(msgspec.Struct):
    """A message, or a part of one."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Body(msgspec.Struct):
    """A whole answer, a chunk of a stream, or an error."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str = ""


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_error_body = msgspec.json.Decoder(_ErrorBody).decode


class EventReader:
    """Cuts server-sent events out of bytes, wherever those are split."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def buffered_bytes(self) -> int:
        """Return the size of the event that is not whole."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that is now whole. Comments and other fields are left
        out."""
        data = self._rest + data
        held = b""
        if b"\r" in data:
            held = b"\r" if data.endswith(b"\r") else b""  # its line feed may come next
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [found for event in events if (found := _event_data(event))]


class AnswerReader:
    """What one answer says, as it comes."""

    def __init__(self, *, stream: bool) -> None:
        self._events = EventReader() if stream else None
        self._whole = bytearray()
        self._done = self._finished = False
        self.text_times_s: list[float] = []
        self.usage: TokenCounts | None = None
        self.failure = self.detail = ""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take a part of the body, which came at `now_s`. After a failure nothing is read."""
        if self.failure:
            return
        if self._events is None:
            self._whole += data
            self._check_size(len(self._whole))
            return
        for event in self._events.feed(data):
            if event == DONE:
                self._done = True
            elif self._read(event):
                self.text_times_s.append(now_s)
            elif self.failure:
                return
        self._check_size(self._events.buffered_bytes)

    def end(self) -> None:
        """Take the end of the body, and say what it lacked."""
        if self._events is None and not self.failure:
            self._read(bytes(self._whole))
        if not self.failure and not (self._done or self._finished):
            self.failure = "incomplete"
            self.detail = "the answer ended without a finish reason"

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > MOST_BUFFERED_BYTES:
            self.failure = "malformed"
            self.detail = f"more than {MOST_BUFFERED_BYTES} bytes without an end"

    def _read(self, data: bytes) -> bool:
        """Return whether the chunk carries text."""
        try:
            body = _decode_body(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failure, self.detail = "malformed", str(error)[:MOST_DETAIL_CHARS]
            return False
        if body.error is not None or body.object == "error":
            code, detail = describe_error(data)
            self.failure, self.detail = f"error event {code}".strip(), detail
            return False
        if body.usage is not None:
            cached = body.usage.prompt_tokens_details
            self.usage = TokenCounts(
                prompt_tokens=body.usage.prompt_tokens,
                completion_tokens=body.usage.completion_tokens or 0,
                cached_tokens=(cached.cached_tokens or 0) if cached is not None else 0,
            )
        has_text = False
        for choice in body.choices:
            said = choice.delta or choice.message
            has_text = has_text or bool(choice.text) or (said is not None and said.has_text)
            self._finished = self._finished or choice.finish_reason is not None
        return has_text


def describe_error(body: bytes) -> tuple[str, str]:
    """Return a short code of an error body, and its message; both may be empty. Codes come from the
    server: one that is no short word is left out, so that failures can be counted by it."""
    try:
        error = _decode_error_body(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", body[:MOST_DETAIL_CHARS].decode("utf-8", "replace")
    if isinstance(error, str):
        return "", error[:MOST_DETAIL_CHARS]
    code = "" if error.code is None else str(error.code)
    return (code if _SHORT_CODE.fullmatch(code) else ""), error.message[:MOST_DETAIL_CHARS]


def _event_data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:  # what all servers of the API send
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines)
