"""A chaos run: faults at random on runs in a pod. Each run ends with the weights and the numbers of
an undisturbed one, to the bit.

    python tests/system/chaos/chaos_run.py --seconds 3600 --seed 7 --output chaos.json

Rounds follow each other until the time is over; one seed plans the same faults again. A round is a
run of real processes that meet at a real etcd. This process strikes them, and starts what a
supervisor would start again: the run with `--resume`, a member. As root it has a small /dev/shm of
its own. In: how long, a seed, the shape of the run. Out: the faults and what told of them; exit code
1 where a run ended otherwise, a fault was not told of, or anything is left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    tests = Path(__file__).parents[2]
    sys.path[1:1] = [str(tests / "system"), str(tests / "support")]

from chaos_plan import KIND_BY_NAME, RunShape, find_teller, find_untold, plan_round
from chaos_round import ChaosRound, Found
from system_runs import Story, gyre, read_story, write_config

OWN_MEMORY = 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"'
FAULTS = 5  # in a round
STEPS = 9


def can_mount() -> bool:
    """Return whether a process here may have a /dev/shm of its own."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    words = ["unshare", "-m", "sh", "-c", OWN_MEMORY, "sh", "true"]
    return subprocess.run(words, capture_output=True).returncode == 0


def find_abilities(*, inside: bool, has_etcd: bool) -> frozenset[str]:
    """Return what can be played on this machine."""
    has = {"own shared memory"} if inside else set()
    return frozenset(has | ({"etcd"} if has_etcd and shutil.which("etcd") else set()))


def run_undisturbed(folder: Path, shape: RunShape) -> Story:
    """Return the story of the same run, without an etcd, members or faults."""
    folder.mkdir()
    (folder / "gate").touch()
    config = write_config(folder, settings(folder, shape, {}))
    answer = gyre("train", config, "--plain", folder=folder)
    assert answer.code == 0 and not answer.left_behind, answer.err
    return read_story(folder / "runs" / "tiny")


def settings(folder: Path, shape: RunShape, rendezvous: dict[str, Any]) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "kind": "pod",
        "num_workers": shape.ranks,
        "engine_workers": shape.engines,
        "progress_tokens": 2,
        "max_restarts": 30,
        "hang_s": 6.0,
        "colocated": shape.colocated,
    }
    if rendezvous:
        cluster["rendezvous"] = rendezvous
    if shape.members:
        cluster["members_address"] = "127.0.0.1:0"
    part = {
        "kind": "function",
        "path": "system_rewards:varied_at_gate",
        "options": {"gate": str(folder / "gate")},
        "limit_s": 100.0,
    }
    return {
        "cold_start": None,
        "trainer.steps": shape.steps,
        "snapshot.every_steps": 1,
        "rollout.max_tokens": 48,
        "rollout.ignore_eos": True,
        "cluster": cluster,
        "rewards": {"workers": 1, "parts": [part]},
        "eval": {"num_problems": 4, "metric": {"part": "function", "threshold": 1.0}},
    }


def judge(found: Found, run: Path, undisturbed: Story) -> list[str]:
    """Return what should not be."""
    said = list(found.said)
    said += [
        f"nothing told of: {one.fault.kind} (step {one.fault.step}, {one.note})"
        for one in find_untold(found.struck, found.rows)
    ]
    if not (run / "export" / "model.safetensors").exists():
        return [*said, "no weights were exported, so nothing says that they are the same"]
    story = read_story(run)
    said += [
        f"{name} differ"
        for name in ("weights", "steps", "evals", "samples")
        if getattr(story, name) != getattr(undisturbed, name)
    ]
    return said


def play(seed: int, seconds: float, shape: RunShape, *, faults: int, keep: Path | None) -> dict:
    """Play rounds until the time is over, one at least."""
    rounds, stories = [], {}
    began_s = time.monotonic()
    while not rounds or time.monotonic() - began_s < seconds:
        number = len(rounds)
        with tempfile.TemporaryDirectory(prefix="gyre-chaos-") as temporary:
            base = Path(temporary)
            if shape not in stories:
                stories[shape] = run_undisturbed(base / "undisturbed", shape)
            round_s = time.monotonic()
            plan = plan_round(seed, number, shape, faults=faults)
            folder = base / "disturbed"
            folder.mkdir()
            one = ChaosRound(folder, shape, plan, settings)
            found = one.play()
            said = judge(found, folder / "runs" / "tiny", stories[shape])
            if said and keep is not None:
                shutil.copytree(folder, keep / f"round-{number}", dirs_exist_ok=True)
        rounds.append(tell_round(number, found, said, time.monotonic() - round_s))
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began_s),
        "shape": {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in asdict(shape).items()
        },
        "faults": sum(len(one["faults"]) for one in rounds),
        "verdict": [text for one in rounds for text in one["verdict"]],
        "rounds": rounds,
    }


def tell_round(number: int, found: Found, said: list[str], seconds: float) -> dict[str, Any]:
    return {
        "round": number,
        "seconds": round(seconds, 1),
        "verdict": said,
        "ends": found.ends,
        "members": found.num_members,
        "missed": [fault.kind for fault in found.missed],
        "faults": [
            {
                "kind": one.fault.kind,
                "action": KIND_BY_NAME[one.fault.kind].action,
                "step": one.fault.step,
                "moment": one.fault.moment,
                "note": one.note,
                "told_by": find_teller(one, found.rows),
            }
            for one in found.struck
        ],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    options.add_argument("--seconds", type=float, default=300.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--engines", type=int, default=2)
    options.add_argument("--members", type=int, default=0)
    options.add_argument("--apart", action="store_true", help="engines have own devices")
    options.add_argument("--store", action="store_true", help="meet without an etcd")
    options.add_argument("--steps", type=int, default=STEPS)
    options.add_argument("--faults", type=int, default=FAULTS, help="in a round")
    options.add_argument("--only", nargs="*", default=[], metavar="KIND", choices=KIND_BY_NAME)
    options.add_argument("--output", type=Path, default=None, help="JSON")
    options.add_argument("--keep", type=Path, default=None, help="for what went wrong")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if not args.inside and can_mount():
        words = ["unshare", "-m", "sh", "-c", OWN_MEMORY, "sh", sys.executable, *sys.argv]
        os.execvp(words[0], [*words, "--inside"])
    shape = RunShape(
        steps=args.steps,
        ranks=args.ranks,
        engines=args.engines,
        members=args.members,
        colocated=not args.apart,
        abilities=find_abilities(inside=args.inside, has_etcd=not args.store),
        only=frozenset(args.only),
    )
    result = play(args.seed, args.seconds, shape, faults=args.faults, keep=args.keep)
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: result[name] for name in ("seed", "seconds", "faults", "verdict")}))
    return 1 if result["verdict"] else 0


if __name__ == "__main__":
    sys.exit(main())
