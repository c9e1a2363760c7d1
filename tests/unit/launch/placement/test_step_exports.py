"""Exports between the steps: a name only for what was verified, and the newest few."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import SnapshotError
from gyre.launch.placement.step_exports import StepExports


class Bench:
    """Exports whose weights are a number."""

    def __init__(self, run: Path, *, keep: int = 2) -> None:
        self.run, self.version, self.fault = run, 0, ""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.exports = StepExports(
            run,
            self.write,
            lambda: self.version,
            keep=keep,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
        )

    async def write(self, folder: Path, tokenizer: Path) -> None:
        assert tokenizer == self.run / "tokenizer"
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"{self.version}")
        if self.fault:
            raise SnapshotError(self.fault)

    def export(self, version: int) -> None:
        self.version = version
        asyncio.run(self.exports.export())

    def found(self) -> dict[str, str]:
        paths = self.run.glob("exports/version-*")
        return {path.name: (path / "weights").read_text() for path in sorted(paths)}


def test_the_newest_stay_and_each_has_its_version(tmp_path) -> None:
    bench = Bench(tmp_path)
    for version in (3, 6, 9):
        bench.export(version)
    assert bench.found() == {"version-00000006": "6", "version-00000009": "9"}
    assert bench.events[-1] == ("export.verified", {"folder": "exports/version-00000009"})


def test_what_is_not_verified_gets_no_name(tmp_path) -> None:
    bench = Bench(tmp_path)
    bench.export(3)
    bench.fault = "content of a tensor is not that of the model"
    with pytest.raises(SnapshotError, match="not that of the model"):
        bench.export(6)
    assert bench.found() == {"version-00000003": "3"} and len(bench.events) == 1
    bench.fault = ""
    bench.export(6)  # past what the failed attempt left
    assert list(bench.found()) == ["version-00000003", "version-00000006"]
    assert not list(tmp_path.glob("exports/.*"))


def test_a_version_that_a_resume_does_again_replaces_its_export(tmp_path) -> None:
    bench = Bench(tmp_path)
    bench.export(3)
    (tmp_path / "exports" / "version-00000003" / "weights").write_text("old")
    bench.export(3)
    assert bench.found() == {"version-00000003": "3"}
