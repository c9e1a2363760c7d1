"""Prompts: a `DrawnRequest` to a request's body. In: what was drawn, how the server is asked. Out:
JSON bytes. Pure.

On the completions endpoint units become token ids, so the prompt has exactly as many tokens. On the
chat endpoint they become words, and how many make so many tokens is asked of the server first: its
`usage` for two probes gives the tokens of its template and of a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gyre.benchmark.loads import NUM_UNITS
from gyre.benchmark.records import DrawnRequest, Endpoint
from gyre.core.errors import InputError

FEW_WORDS, MORE_WORDS, MOST_WORDS = 8, 24, 256  # of the probes
# with NUM_UNITS ids from here every vocabulary has them all; many begin with special tokens
FIRST_TOKEN_ID = 10

# common ones, each one token of most vocabularies
_TEXT = """
the of and to in is it you that he was for on are as with his they at be this have from or one
had by word but not what all were we when your can said there use an each which she do how their
if will up other about out many then them these so some her would make like him into time has
look two more write go see number no way could people my than first water been call who oil its
now find long down day did get come made may part over new sound take only little work know
place year live me back give most very after thing our just name good man think say great where
help much before line right too mean old any same tell boy follow came want show also around
form three small set put end does well large must big even such because turn here why ask went
men read need land home us move try kind hand picture again change off play air away house point
page letter mother answer found study still learn should world high every near add food between
own below country plant last school father keep tree never start city earth eye light thought
head under story saw left late run few group often side feet car mile night walk white sea began
grow river four carry state once book hear stop second later miss idea enough eat face watch far
real almost let above girl color
"""
WORDS = tuple(f" {word}" for word in _TEXT.split())
assert len(WORDS) == NUM_UNITS


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFit:
    """Tokens of a text of words, by a server's own count: overhead + words * tokens_per_word."""

    overhead_tokens: float
    tokens_per_word: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTemplate:
    """How each request of a benchmark is put."""

    endpoint: Endpoint
    model: str
    stream: bool
    temperature: float
    ignore_eos: bool

    @property
    def path(self) -> str:
        """Return the route, below the server's base URL."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, drawn: DrawnRequest, fit: TextFit | None) -> bytes:
        """Return the JSON. `fit` is needed where units become words."""
        asked: dict[str, object] = {"model": self.model, "max_tokens": drawn.max_tokens}
        asked |= {"temperature": self.temperature, "stream": self.stream}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            text = drawn.text or as_text(drawn, fit)
            asked["messages"] = [{"role": "user", "content": text}]
        else:
            units = (*drawn.prefix, *drawn.units)
            asked["prompt"] = drawn.text or [FIRST_TOKEN_ID + unit for unit in units]
        return msgspec.json.encode(asked)


def as_text(drawn: DrawnRequest, fit: TextFit | None) -> str:
    """Return words of about as many tokens as there are units. Prompts of one prefix begin with the
    same words."""
    per_word = 1.0 if fit is None else fit.tokens_per_word
    overhead = 0.0 if fit is None else fit.overhead_tokens
    num_prefix = round(len(drawn.prefix) / per_word)
    total = round((len(drawn.prefix) + len(drawn.units) - overhead) / per_word)
    words = [*_words(drawn.prefix, num_prefix), *_words(drawn.units, max(1, total - num_prefix))]
    return "".join(words).strip()


def _words(units: tuple[int, ...], count: int) -> list[str]:
    """Return `count` words; the units repeat where they are fewer."""
    return [WORDS[units[at % len(units)]] for at in range(count)]


def probe_words(num_tokens: int) -> tuple[int, int]:
    """Return words of two probes, which a server takes that takes a prompt of so many tokens. The
    longer one has every word, where it may."""
    return FEW_WORDS, min(MOST_WORDS, max(MORE_WORDS, num_tokens // 4))


def fit_text(words: tuple[int, int], tokens: tuple[int, int]) -> TextFit:
    """Return the fit through a server's counts for two texts. InputError where they are none of a
    text."""
    per_word = (tokens[1] - tokens[0]) / (words[1] - words[0])
    if per_word <= 0.0:
        raise InputError(
            f"the server counts {tokens[0]} prompt tokens for {words[0]} words and {tokens[1]} "
            f"for {words[1]}",
            hint="its usage is no count of the prompt; take --endpoint completions",
        )
    return TextFit(
        overhead_tokens=max(0.0, tokens[0] - words[0] * per_word), tokens_per_word=per_word
    )
