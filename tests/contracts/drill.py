"""Runs all hostile programs in one mode, as whatever user it is started as. In: argv: the mode.
Out: one JSON object {name: {"outcome", "stdout", "stderr", "detail", "wall_s", "refused", "left"}},
or {"unavailable": why}. Needs only what rewards.sandbox.executors imports."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hostile_programs import COUNTED, COUNTED_WALLED, HOSTILE, REFUSED, WALLED

from gyre.rewards.sandbox.executors import Cell, IsolationUnavailable
from gyre.rewards.sandbox.records import Limits, Program

LIMITS = Limits(
    wall_s=1.5,
    cpu_s=1.0,
    memory_bytes=96 << 20,
    processes=8,
    output_bytes=1 << 16,
    file_bytes=2 << 20,
)
# What ends by itself, or is ended by what it takes, must come to that on a busy machine too.
PATIENT = replace(LIMITS, wall_s=10.0)
CELLS = 6  # most programs sleep until their limit


def run(cell: Cell, names: list[str], programs: dict[str, str]) -> dict[str, dict]:
    found = {}
    for name in names:
        source = "import os\nprint(os.getcwd(), flush=True)\n" + programs[name]
        result = cell.run(
            Program(source=source),
            limits=PATIENT if name in {*REFUSED, *COUNTED, *COUNTED_WALLED} else LIMITS,
        )
        folder, _, stdout = result.stdout.partition("\n")
        left = folder if folder.startswith("/tmp/gyre-program-") and os.path.lexists(folder) else ""
        found[name] = {
            "outcome": result.outcome,
            "stdout": stdout[:2000],
            "stderr": result.stderr[-500:],
            "detail": result.detail,
            "wall_s": result.wall_s,
            "refused": dict(result.refused_calls),
            "left": left,
        }
    return found


def main(mode: str) -> None:
    programs = {**HOSTILE, **({} if mode == "weak" else WALLED)}
    cells = [Cell(mode) for _ in range(CELLS)]  # type: ignore[arg-type]
    try:
        for cell in cells:
            cell.start()
    except IsolationUnavailable as error:
        print(json.dumps({"unavailable": str(error)}))
        return
    names = sorted(programs)
    found: dict[str, dict] = {}
    with ThreadPoolExecutor(CELLS) as threads:
        for part in threads.map(lambda n: run(cells[n], names[n::CELLS], programs), range(CELLS)):
            found.update(part)
    for cell in cells:
        cell.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
