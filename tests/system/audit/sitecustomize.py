"""Notes which processes of a run import Ray, and which classes they unpickle. Python imports this file at
its start where the folder is on PYTHONPATH. In: GYRE_AUDIT, a file. Out: a line of it for each note."""

from __future__ import annotations

import os
import sys


def note(event: str, args: tuple) -> None:
    if event == "import" and args[0] == "ray":
        write("ray")
    elif event == "pickle.find_class":
        write(f"pickle {args[0]}.{args[1]}")


def write(what: str) -> None:
    handle = os.open(os.environ["GYRE_AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, f"{os.getpid()} {what}\n".encode())
    os.close(handle)


if os.environ.get("GYRE_AUDIT"):
    write("begins")
    sys.addaudithook(note)
