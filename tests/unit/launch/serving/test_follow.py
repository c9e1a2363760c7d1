"""Following a folder: what is taken, in which order, and what is never tried twice."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import InputError, RankError
from gyre.launch.serving.follow import Follower, FollowState, choose, written_ns
from gyre.launch.serving.served_weights import ServedFolder, Signature, find_signature
from gyre.models.hub.folders import CHECKSUMS_FILE

PATHS = [Path(f"/run/exports/version-{number}") for number in range(4)]


def signature(number: int, ns: int, *, whole: bool = True) -> Signature:
    names = ["model.safetensors"] if whole else []
    return tuple((name, number, 8, ns) for name in [CHECKSUMS_FILE, *names])


SIGNATURES = st.builds(signature, st.integers(0, 3), st.integers(1, 5), whole=st.booleans())
SEEN = st.dictionaries(st.sampled_from(PATHS), SIGNATURES)


@given(SEEN, SEEN, SIGNATURES, st.sets(SIGNATURES), st.booleans())
def test_what_is_taken_is_whole_stable_unknown_and_the_newest(
    before: dict[Path, Signature],
    seen: dict[Path, Signature],
    served: Signature,
    known: set[Signature],
    in_order: bool,
) -> None:
    state = FollowState(known=frozenset(known | {served}), served=served, last=before)
    chosen = choose(state, seen, in_order=in_order)
    may = [
        path
        for path, found in seen.items()
        if before.get(path) == found
        and len(found) == 2
        and found not in state.known
        and (not in_order or written_ns(found) >= written_ns(served))
    ]
    assert (chosen is None) == (not may)
    if chosen is not None:
        assert chosen in may
        assert written_ns(seen[chosen]) == max(written_ns(seen[path]) for path in may)
        after = state.after(seen, served=served).refuse(seen[chosen])
        assert choose(after, seen, in_order=in_order) != chosen


class Weights:
    """Takes every folder that has no file "bad"."""

    def __init__(self, folder: Path) -> None:
        self.served = ServedFolder(folder)
        self.asked: list[str] = []
        self.error: Exception | None = None

    async def change(self, folder: Path, policy: str) -> int:
        self.asked.append(folder.name)
        if self.error is not None:
            raise self.error
        if (folder / "bad").exists():
            raise InputError("it is bad")
        version = self.served.version + 1
        self.served.move_to(folder, version, find_signature(folder))
        return version


def write(folder: Path, *, at_s: int, bad: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", CHECKSUMS_FILE, *(["bad"] if bad else [])):
        (folder / name).write_text(f"{at_s}")
        os.utime(folder / name, (at_s, at_s))
    return folder


def follow(weights: Weights, target: Path) -> Any:
    """A look, as often as it is called."""
    follower = Follower(weights, target, poll_s=1.0)  # type: ignore[arg-type]

    def look(count: int = 2) -> list[str]:
        weights.asked.clear()
        for _ in range(count):
            asyncio.run(follower._look())
        return list(weights.asked)

    return look


def test_a_run_is_followed_forward_and_past_a_bad_export(tmp_path) -> None:
    run = tmp_path / "run"
    (run / "exports").mkdir(parents=True)
    (run / "events.jsonl").touch()
    write(run / "exports" / "version-00000002", at_s=20)
    first = write(run / "exports" / "version-00000004", at_s=40)
    weights = Weights(first)
    look = follow(weights, run)
    assert look(3) == [], "it went back to an older one"
    write(run / "exports" / "version-00000006", at_s=60)
    assert look(1) == [], "it may be half written"
    assert look(3) == ["version-00000006"]
    write(run / "exports" / "version-00000008", at_s=80)
    write(run / "exports" / "version-00000010", at_s=100, bad=True)
    write(run / "exports" / ".version-00000012.unverified", at_s=120)
    assert look(6) == ["version-00000010", "version-00000008"]
    (run / "exports" / "version-00000010" / "bad").unlink()
    write(run / "exports" / "version-00000010", at_s=110)
    assert look(4) == ["version-00000010"]
    write(run / "export", at_s=130)
    assert look(4) == ["export"] and weights.served.version == 4


def test_a_model_folder_is_followed_whatever_its_times(tmp_path) -> None:
    folder = write(tmp_path / "model", at_s=50)
    weights = Weights(folder)
    look = follow(weights, folder)
    assert look(3) == []
    write(folder, at_s=20)
    assert look(4) == ["model"]
    other = write(tmp_path / "other", at_s=10)
    weights.served.move_to(other, 2, find_signature(other))  # by the admin route
    assert look(3) == [], "it undid what an administrator did"
    write(folder, at_s=30)
    assert look(4) == ["model"]


def test_what_passes_by_itself_is_tried_again(tmp_path) -> None:
    folder = write(tmp_path / "model", at_s=1)
    weights = Weights(folder)
    look = follow(weights, folder)
    look(1)
    write(folder, at_s=2)
    weights.error = RankError("no engine is up")
    assert look(3) == ["model", "model"]
    weights.error = None
    assert look(3) == ["model"]
