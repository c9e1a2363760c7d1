"""Record: the one shape in which every bench speaks. In: our number, the peer's, the limit,
settings. Out: a printed line or JSON, and with --record a file under bench/records/ with commit,
date, hardware, versions. Callers: bench/*.py.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

from gyre.observability.hardware import describe_hardware

RECORDS = Path(__file__).parent / "records"


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--record", action="store_true", help="write NAME.json")
    made.add_argument("--folder", type=Path, default=RECORDS, help="where; left out, bench/records")
    made.add_argument(
        "--commit", default="", help="for a copy without git: the commit that it is of"
    )
    return made


def kept_peer(name: str) -> dict[str, Any] | None:
    """The peer of an earlier record, marked as such: what else ran then, and on which machine, is
    not what runs beside ours."""
    path = RECORDS / f"{name}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    peer = record.get("peer")
    return {**peer, "kept_from": peer.get("kept_from", record["date"])} if peer else None


def say(
    args: argparse.Namespace,
    *,
    name: str,
    unit: str,
    ours: float,
    peer: dict[str, Any] | None,
    limit: float | None,
    settings: dict[str, Any],
    detail: dict[str, Any] | None = None,
) -> None:
    result = {
        "name": name,
        "unit": unit,
        "ours": ours,
        "peer": peer,
        "limit": limit,
        "settings": settings,
    }
    result["detail"] = detail or {}
    show(result, args)
    if args.record:
        args.folder.mkdir(parents=True, exist_ok=True)
        (args.folder / f"{name}.json").write_text(
            json.dumps({**result, **circumstances(args.commit)}, indent=2) + "\n"
        )


def show(result: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(result))
        return
    name, unit, ours, peer = (result[key] for key in ("name", "unit", "ours", "peer"))
    print(f"{name}: ours {ours:.4g} {unit}")
    if peer is not None:
        against = f"ours / peer = {ours / peer['value']:.3f}"
        if "kept_from" in peer:
            against = (
                f"not comparable: kept from {peer['kept_from']}, of another run and "
                "perhaps another machine"
            )
        print(f"  peer {peer['name']}: {peer['value']:.4g} {unit}; {against}")
    if result["limit"] is not None:
        print(f"  limit: {result['limit']:.4g} {unit}")
    for key, value in result["detail"].items():
        print(f"  {key}: {value}")


def circumstances(commit: str) -> dict[str, Any]:
    """Commit, date, hardware, versions: what a number means nothing without."""
    if not commit:
        ran = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        commit = ran.stdout.strip()
    facts = describe_hardware()
    packages = ("torch", "numpy", "transformers")
    return {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "hardware": {
            key: facts[key]
            for key in ("cpu", "cores", "flags", "memory_bytes", "gpus", "kernel", "python")
        },
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
