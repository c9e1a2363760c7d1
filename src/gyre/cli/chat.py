"""gyre chat. In: a run or model folder, and what a person types. Out: the model's words as they come.
Caller: cli.main."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.loading import loading
from gyre.wire.folders import find_model


def run_chat(
    target: Path, prompt: str | None, *, max_tokens: int, temperature: float, seed: int, quiet: bool
) -> Mapping[str, Any]:
    model, config = find_model(target, None, [])  # refused before torch is loaded
    with loading():
        from gyre.wire.chat import chat

    def write(piece: str) -> None:
        if not quiet:
            print(piece, end="", flush=True)

    turns = iter([prompt]) if prompt is not None else _typed()
    return chat(model, config, turns, write, max_tokens=max_tokens, temperature=temperature, seed=seed)


def _typed():
    """Yield what is typed until the end of input. /new forgets the conversation."""
    if sys.stdin.isatty():
        print("type a question; /new begins again, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
