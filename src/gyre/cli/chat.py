"""gyre chat. In: a run or model folder, and the user's input. Out: the model's streamed answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.core.errors import InputError
from gyre.launch.run_folder.run_folder import find_model


def run_chat(
    target: Path, prompt: str | None, *, max_tokens: int, temperature: float, seed: int, quiet: bool
) -> Mapping[str, Any]:
    model, config = find_model(target, None, [])  # refused before torch is loaded
    with loading():
        from gyre.launch.chat import chat

    def write(piece: str) -> None:
        if not quiet:
            print(piece, end="", flush=True)

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return chat(
        model,
        config,
        iter([prompt]) if prompt is not None else _typed(),
        write,
        note,
        interactive=prompt is None and sys.stdin.isatty(),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
    )


def _typed() -> Iterator[str]:
    """Yield the user's lines until the end of input. The prompt goes to stderr: stdout has only
    answers."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(
            "type a question; /new begins again, Ctrl-C ends an answer, Ctrl-D the chat",
            file=sys.stderr,
        )
    while True:
        if at_terminal:
            print("\n> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError(
                f"what was typed is no {error.encoding} text: {error.reason}",
                hint="send text in the terminal's encoding",
            ) from error
        if not line:
            if at_terminal:
                print(file=sys.stderr)  # so that the shell begins on a line of its own
            return
        if line.strip():
            yield line.rstrip("\r\n")
