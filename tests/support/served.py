"""A server of the API, started as a user starts it. In: a model folder, options. Out: its URL and
process; it is stopped at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_S = 120.0
# a server that has used its restarts up, without the half minute that five of them take
NO_RESTARTS = "from gyre.launch.serving import server; server.RESTARTS = server.RestartPolicy()"


@dataclass(frozen=True)
class Served:
    url: str
    model: str
    process: subprocess.Popen[str]
    log: Path  # its stderr


@contextlib.contextmanager
def serving(folder: Path, log: Path, *options: str, first: str = "") -> Iterator[Served]:
    """`gyre serve` on a free port. `first`: Python that its process runs before."""
    argv = [sys.executable, "-c", f"{first}\nfrom gyre.cli.main import main; main()"]
    argv += ["serve", str(folder), "--port", "0", "--json", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()
        yield Served(**json.loads(line), process=process, log=log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError("the server did not end on SIGTERM") from None
        finally:
            if process.stdout is not None:
                process.stdout.close()
