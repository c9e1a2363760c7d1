"""Trial: the process in which a user's reward function is tried before a run. In (stdin): Setup,
then Items, framed. Out (stdout): one Verdict each, the first (index -1) for the import. Caller:
rewards.pool.validate, as `python -m`."""

from __future__ import annotations

import os
import sys

from gyre.core.errors import InputError
from gyre.rewards.checks import Tools, build_check
from gyre.rewards.function import load_function
from gyre.rewards.messages import READY, Verdict, decode_item, decode_setup, frame
from gyre.rewards.pool.worker import judge


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what the function prints must not get among the answers
    part = decode_setup(_read_frame() or b"").parts[0]
    try:
        load_function(part["path"])
    except InputError as error:
        os.write(answers, frame(Verdict(READY, 0.0, error.message, "error")))
        return
    os.write(answers, frame(Verdict(READY)))
    check = build_check(part, Tools())
    index = 0
    while (body := _read_frame()) is not None:
        os.write(answers, frame(judge(index, check, decode_item(body))))
        index += 1


def _read_frame() -> bytes | None:
    head = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(int.from_bytes(head, "little")) if len(head) == 4 else None


if __name__ == "__main__":
    main()
