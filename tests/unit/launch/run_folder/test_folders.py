"""Run folders: what the command line changed comes back as it was, and runs that are made at once
get a name each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import InputError, SnapshotError
from gyre.launch.run_folder.run_folder import find_model, hold, make_run_folder, read_overrides
from gyre.launch.train_args import read_train_args
from gyre.runconfig.run_config import RunConfig, load_run_config
from gyre.runconfig.toml_tree import apply_overrides

BASE = '[model]\npath = "x"\n'


def config_at(folder: Path, *overrides: str) -> tuple[RunConfig, Path]:
    path = folder / "run.toml"
    path.write_text(BASE)
    return load_run_config(path, [f"run.folder={folder / 'runs'}", *overrides]), path


@pytest.mark.parametrize(
    "text",
    [
        "{system}\n{prompt}\n",
        "\n{prompt}",
        "{prompt}\u2028answer:",
        "{prompt}\r\n",
        "{prompt}\x85",
        "{prompt}\x0b\x0c",
    ],
)
def test_a_value_with_line_breaks_is_the_same_when_the_run_goes_on(
    tmp_path: Path, text: str
) -> None:
    overrides = [f"data.template={text}", "trainer.steps=3"]
    config, path = config_at(tmp_path, *overrides)
    assert config.data.template == text
    folder = make_run_folder(config, path, overrides, "all")
    assert read_overrides(folder) == overrides
    again = read_train_args(None, [], resume=folder, stage="all").config
    assert (again.data.template, again.trainer.steps) == (text, 3)
    (folder / "events.jsonl").touch()
    (folder / "export").mkdir()
    assert find_model(folder, None, [])[1].data.template == text


def test_a_run_that_has_not_ended_is_served_from_its_newest_export(tmp_path: Path) -> None:
    config, path = config_at(tmp_path)
    run = make_run_folder(config, path, [], "all")
    (run / "events.jsonl").touch()
    with pytest.raises(InputError, match="has no export yet"):
        find_model(run, None, [])
    for name in ("version-00000009", "version-100000000", ".version-200000000.unverified"):
        (run / "exports" / name).mkdir(parents=True)
    assert find_model(run, None, [])[0] == run / "exports" / "version-100000000"
    (run / "export").mkdir()
    assert find_model(run, None, [])[0] == run / "export"


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_that_is_no_toml_is_taken_as_it_is(text: str) -> None:
    value = f"a text: {text}."
    assert apply_overrides({}, [f"data.system={value}"]) == {"data": {"system": value}}


def test_runs_of_one_name_that_are_made_at_once_get_a_folder_each(tmp_path: Path) -> None:
    config, path = config_at(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_run_folder(config, path, [], "all"), range(24)))
    assert {folder.name for folder in made} == {
        "run",
        *(f"run-{number}" for number in range(2, 25)),
    }
    assert sorted(folder.name for folder in (tmp_path / "runs").iterdir()) == sorted(
        folder.name for folder in made
    )
    assert all((folder / "config.toml").read_text() == BASE for folder in made)


def test_somebody_else_takes_the_name_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = config_at(tmp_path)
    first = make_run_folder(config, path, [], "all")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self, **more: self != first and exists(self, **more))
    assert make_run_folder(config, path, [], "all").name == "run-2"


def test_a_run_folder_is_one_attempts_at_a_time(tmp_path: Path) -> None:
    config, path = config_at(tmp_path)
    folder = make_run_folder(config, path, [], "all")
    assert hold(folder) is not None
    with pytest.raises(SnapshotError, match="still running") as refused:
        hold(folder)
    assert "Ctrl-C" in refused.value.hint
