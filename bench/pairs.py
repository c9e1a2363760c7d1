"""Two trees of the project, timed by the same script, turn by turn in one call. In: the folder of
the older tree, command lines of scripts in bench/. Out: each tree's results and newer / older by
their medians. Run: python bench/pairs.py --old FOLDER --name engine --turns 3 "engine.py --shape
0.6b --runs 1" [--record].

Each turn is a process of its own with its own tree's `src` and `bench`; the order of the trees
changes from turn to turn, so that a drift of the machine counts for both. A script ends its turn
with the JSON line of `--json`.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import circumstances, parser

NEW = Path(__file__).parent.parent


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--old", type=Path, required=True, help="folder of the older tree")
    options.add_argument(
        "--old-commit", default="", help="commit of the older tree, for the record"
    )
    options.add_argument("--name", required=True, help="behind pairs_ in the record's name")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--turn-s", type=float, default=300.0, help="longest that a turn may take")
    options.add_argument("--wall-s", type=float, default=540.0, help="no turn begins after this")
    options.add_argument("lines", nargs="+", metavar="SCRIPT", help='"engine.py --shape 8b"')
    args = options.parse_args()
    ends_at = time.monotonic() + args.wall_s
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in args.lines:
        results[line] = {"old": [], "new": []}
        for turn in range(args.turns):
            for side in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                if time.monotonic() > ends_at:
                    print(f"{line}: no time for turn {turn + 1} of the {side} tree", flush=True)
                    continue
                tree = args.old if side == "old" else NEW
                results[line][side].append(run_line(line, tree, args.turn_s))
                print(f"{side} {line}: {results[line][side][-1]['ours']:.5g}", flush=True)
        write(args, results)


def run_line(line: str, tree: Path, turn_s: float) -> dict[str, Any]:
    """The result that the script printed. `RuntimeError` where it failed, with what it said."""
    script, *options = shlex.split(line)
    theirs = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(tree.resolve() / "src")]
    paths += [path for path in theirs if path and Path(path).resolve() != NEW.resolve() / "src"]
    ran = subprocess.run(
        [sys.executable, script, *options, "--json"],
        cwd=tree / "bench",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=turn_s,
    )
    found = [text for text in ran.stdout.splitlines() if text.startswith("{")]
    if ran.returncode or not found:
        raise RuntimeError(f"{line} in {tree} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    result = json.loads(found[-1])
    if "ours" not in result:
        raise RuntimeError(f"{line} in {tree} has no result; it said: {found[-1][:3000]}")
    return {key: result[key] for key in ("name", "unit", "ours", "limit", "settings", "detail")}


def write(args: Any, results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Print the comparison so far, and keep it where a record is asked for."""
    rows = [compare(line, sides) for line, sides in results.items() if all(sides.values())]
    for row in rows:
        print(f"{row['script']}: newer / older = {row['new_by_old']:.4f} ({row['unit']})")
        print(f"  older: {row['old']}\n  newer: {row['new']}", flush=True)
    if args.record:
        args.folder.mkdir(parents=True, exist_ok=True)
        about = {"old_commit": args.old_commit, **circumstances(args.commit)}
        (args.folder / f"pairs_{args.name}.json").write_text(
            json.dumps({"name": f"pairs_{args.name}", "rows": rows, **about}, indent=2) + "\n"
        )


def compare(line: str, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    old, new = ([result["ours"] for result in sides[side]] for side in ("old", "new"))
    some = sides["new"][0]
    return {
        "script": line,
        "unit": some["unit"],
        "old": old,
        "new": new,
        "new_by_old": statistics.median(new) / statistics.median(old),
        "settings": some["settings"],
        "detail": {side: results[-1]["detail"] for side, results in sides.items()},
    }


if __name__ == "__main__":
    main()
