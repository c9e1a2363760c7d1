"""The benches' peers: a kept figure is marked as not comparable, and an environment is made again
when its recipe or the packages that it sees are others."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("record")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    found = importlib.import_module("peers.environment")
    monkeypatch.setattr(found, "FOLDER", tmp_path)
    return found


def shown(record: ModuleType, peer: dict, capsys: pytest.CaptureFixture[str]) -> str:
    result = {"name": "a", "unit": "s", "ours": 1.0, "peer": peer, "limit": None, "detail": {}}
    record.show(result, argparse.Namespace(json=False))
    return capsys.readouterr().out


def test_a_kept_figure_is_not_comparable(
    record: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = {"name": "other", "value": 2.0}
    assert "ours / peer = 0.500" in shown(record, peer, capsys)
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    (tmp_path / "a.json").write_text(json.dumps({"date": "2026-01-02", "peer": peer}))
    kept = record.kept_peer("a")
    text = shown(record, kept, capsys)
    assert "not comparable: kept from 2026-01-02" in text and "ours / peer" not in text
    (tmp_path / "a.json").write_text(json.dumps({"date": "2026-03-04", "peer": kept}))
    assert record.kept_peer("a")["kept_from"] == "2026-01-02", (
        "a kept figure that is kept again keeps its date"
    )


def test_an_environment_is_made_once_for_a_recipe(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(folder: Path, recipe: object) -> None:
        folder.mkdir(exist_ok=True)
        made.append(folder.name)

    monkeypatch.setattr(environment, "make", make)
    assert environment.peer_python("trl") == environment.peer_python("trl")
    assert made == ["bench_trl"]
    monkeypatch.setitem(environment.RECIPES, "trl", environment.Recipe(("trl==9",)))
    environment.peer_python("trl")
    assert made == ["bench_trl"] * 2


def test_without_the_package_index_it_is_said(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        environment.RECIPES, "trl", environment.Recipe(("--no-index", "no-such-package-of-ours"))
    )
    with pytest.raises(
        SystemExit, match=r"(?s)needs the package index.*no-such-package-of-ours.*--kept-peer"
    ):
        environment.peer_python("trl")
    assert not (environment.FOLDER / "bench_trl" / environment.STAMP).exists()


def test_torchs_packages_and_extras_are_left_out(environment: ModuleType) -> None:
    needs = [
        "torch==2.13.0",
        "torchvision; platform_machine != 'x'",
        "regex",
        'pandas; extra == "bench"',
        "six>=1",
    ]
    assert [need for need in needs if environment.is_plain_need(need)] == ["regex", "six>=1"]
