"""Finding: one line of `gyre doctor`. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "weaker", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    verdict: Verdict
    detail: str
    advice: str = ""
