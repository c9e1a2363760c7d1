"""Resume: what may change, what was edited, what a damaged run folder is told, and how many steps
were lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from system_runs import Answer, Fault, digest_of, events_of, gyre, read_story, write_config

pytestmark = pytest.mark.slow

QUICK = {"cold_start": None, "trainer.steps": 3, "snapshot.every_steps": 2, "eval.num_problems": 4}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in step 3, after the snapshot of step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    fault = Fault(point="event", match="phase.started train", number=3)
    answer = gyre("train", write_config(folder, QUICK), "--plain", folder=folder, fault=fault)
    assert answer.code == -9, answer.err
    return folder / "runs" / "tiny"


@pytest.fixture
def run(tmp_path: Path, stopped: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "tiny", symlinks=True)


def resume(run: Path, *more: str) -> Answer:
    return gyre("train", "--resume", run, *more, "--plain", folder=run.parent)


def refused(run: Path, *words: str, more: tuple[str, ...] = ()) -> None:
    before = contents(run)
    answer = resume(run, *more)
    assert answer.code == 2, answer.err
    assert f"\n{answer.err}".count("\nerror: ") == answer.err.count("\n hint: ") == 1, answer.err
    assert "Traceback" not in answer.err, answer.err
    for word in words:
        assert word in answer.err, answer.err
    after = contents(run)
    assert {name: after.get(name) for name in before} == before, "what was there is there"


def contents(run: Path) -> dict[str, str]:
    """Files and links by name; the log and the lock belong to any attempt."""
    own = ("events.jsonl", "lock", "samples.jsonl")
    return {
        str(path.relative_to(run)): f"link to {os.readlink(path)}"
        if path.is_symlink()
        else path.read_bytes().hex()
        for path in sorted(run.rglob("*"))
        if (path.is_symlink() or path.is_file()) and path.name not in own
    }


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_by_file(path: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name(f"{path.name}.away"))
    else:
        path.unlink(missing_ok=True)
    path.write_text("mine")


def replace_by_link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.mkdir()
    (target / "precious").write_text("mine")
    path.symlink_to(target)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no log": ("events.jsonl", Path.unlink),
    "a folder as log": ("events.jsonl", make_folder),
    "a folder as samples": ("samples.jsonl", make_folder),
    "a folder as lock": ("lock", make_folder),
    "half the overrides": ("overrides.json", lambda path: path.write_text('["trainer.st')),
    "overrides of another kind": ("overrides.json", lambda path: path.write_text("[1]")),
    "no overrides": ("overrides.json", Path.unlink),
    "half the resolved config": ("resolved.json", tear),
    "no stage": ("stage.txt", lambda path: path.write_text("")),
    "bytes as stage": ("stage.txt", lambda path: path.write_bytes(b"\xff\xfe")),
    "half a plan": ("plan.json", tear),
    "a folder as plan": ("plan.json", make_folder),
    "a link that a save would leave": ("snapshots/main/writing-step-00000004-x", replace_by_link),
    "a file that a save would leave": ("snapshots/main/writing-step-00000004-x", replace_by_file),
    "a file as snapshots": ("snapshots", replace_by_file),
    "a file as a stage's snapshots": ("snapshots/main", replace_by_file),
    "a file as attempts": ("attempts", replace_by_file),
    "half a config": ("config.toml", tear),
}


# One of each kind; the others differ in the file.
QUICK_DAMAGES = (
    "no log",
    "a folder as samples",
    "half the overrides",
    "no stage",
    "half a plan",
    "a link that a save would leave",
    "half a config",
)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=() if name in QUICK_DAMAGES else pytest.mark.slow)
        for name in DAMAGES
    ],
)
def test_a_damaged_run_folder_is_told_in_a_sentence(run: Path, damage: str) -> None:
    name, break_it = DAMAGES[damage]
    break_it(run / name)
    refused(run, name.partition("/")[0])


def test_half_a_log_is_told(run: Path) -> None:
    tear(run / "events.jsonl")
    refused(run, "events.jsonl", "step 2")


def test_what_the_disk_refuses_is_told(run: Path) -> None:
    (run / "plan.json.partial").mkdir()
    refused(run, "plan.json.partial", "--resume")


def test_a_read_only_disk_is_told(run: Path) -> None:
    """The run's folder is mounted read-only in a namespace of the command's own."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap, which mounts the folder read-only, is not installed")
    mounted = [
        "bwrap",
        "--die-with-parent",
        "--dev-bind",
        "/",
        "/",
        "--ro-bind",
        str(run),
        str(run),
    ]
    if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespace can be made here")
    words = [
        sys.executable,
        "-c",
        "from gyre.cli.main import main; main()",
        "train",
        "--resume",
        str(run),
        "--plain",
    ]
    ran = subprocess.run(
        [*mounted, *words], capture_output=True, text=True, cwd=run.parent, timeout=120, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert (
        "Read-only file system" in ran.stderr
        and " hint: " in ran.stderr
        and "Traceback" not in ran.stderr
    )


def test_samples_that_are_gone_are_told_and_the_run_goes_on(run: Path) -> None:
    (run / "samples.jsonl").unlink()
    answer = resume(run)
    assert answer.code == 0, answer.err
    assert len(events_of(run, "warn.samples_gone")) == 1 and "warn.samples_gone" in answer.err


def test_lost_steps_are_counted(tmp_path: Path, run: Path) -> None:
    fault = Fault(point="event", match="step.done", number=1)
    first = gyre("train", "--resume", run, "--plain", folder=run.parent, fault=fault)
    assert first.code == -9
    answer = resume(run)
    assert answer.code == 0, answer.err
    (row,) = events_of(run, "warn.steps_lost")
    assert (row["count"], row["stage"], row["resumed_step"]) == (1, "main", 2)
    assert "warn.steps_lost: count=1" in answer.err
    assert [row["lost_steps"] for row in events_of(run, "run.resumed")] == [1]


def test_a_run_is_lengthened(tmp_path: Path, run: Path) -> None:
    """The same numbers as a run that was to be so long from the start, since its learning rate is
    constant."""
    whole = gyre(
        "train", write_config(tmp_path, {**QUICK, "trainer.steps": 6}), "--plain", folder=tmp_path
    )
    assert whole.code == 0, whole.err
    assert resume(run).code == 0
    answer = resume(run, "--set", "trainer.steps=5", "--set", "observe.sample_groups_per_step=4")
    assert answer.code == 0, answer.err
    assert resume(run, "--set", "trainer.steps=6", "--json").json["step"] == 6
    assert resume(run, "--json").json["step"] == 6, (
        "what an attempt changed holds for those after it"
    )
    straight, lengthened = read_story(tmp_path / "runs" / "tiny"), read_story(run)
    assert (lengthened.steps, lengthened.samples) == (straight.steps, straight.samples)
    assert lengthened.weights == straight.weights == digest_of(run / "export" / "model.safetensors")
    kept = {path.name: json.loads(path.read_text()) for path in (run / "attempts").iterdir()}
    assert (
        kept["3.json"]["changed"] == {"trainer.steps": [3, 5]}
        and kept["3.json"]["config"]["trainer"]["steps"] == 5
    )
    assert kept["4.json"]["set"] == ["trainer.steps=6"] and len(kept) == 2
    assert [row["changed"] for row in events_of(run, "run.resumed") if row["changed"]][-1] == {
        "trainer.steps": [5, 6]
    }


def test_a_schedule_that_is_stretched_is_told(tmp_path: Path) -> None:
    sets = {**QUICK, "trainer.schedule": "linear", "eval.num_problems": 0}
    assert gyre("train", write_config(tmp_path, sets), "--plain", folder=tmp_path).code == 0
    run = tmp_path / "runs" / "tiny"
    answer = resume(run, "--set", "trainer.steps=6")
    assert answer.code == 0 and "warn.learning_rate_moved" in answer.err
    (row,) = events_of(run, "warn.learning_rate_moved")
    assert (row["step"], row["before"], row["after"]) == (4, 0.0, pytest.approx(1e-3 * 0.5))
    rates = [step["metrics"]["learning_rate"] for step in read_story(run).steps]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3, 1e-3 / 2, 1e-3 / 3, 1e-3 / 6])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "trainer.learning_rate=0.5",
            ("trainer.learning_rate = 0.001, given 0.5", "trainer.steps"),
        ),
        ("run.seed=4", ("run.seed = 3, given 4",)),
        ("goal.margin=0.1", ("goal",)),
        ("trainer.steps=1", ("trainer.steps = 1", "2 or more")),
        ("trainer.stepz=9", ("trainer", "stepz", "steps")),
    ],
)
def test_what_a_run_may_not_change_is_refused_by_name(
    run: Path, override: str, words: tuple[str, ...]
) -> None:
    refused(run, *words, more=("--set", override))
    assert not (run / "attempts").exists()


def test_an_edited_config_is_noticed(run: Path) -> None:
    config = run / "config.toml"
    text = config.read_text()
    config.write_text(text.replace('"learning_rate" = 0.001', '"learning_rate" = 0.002'))
    refused(run, "config.toml was edited", "trainer.learning_rate was 0.001 and is 0.002")
    config.write_text(text.replace('"steps" = 3', '"steps" = 9'))
    refused(run, "trainer.steps was 3 and is 9", "--set KEY=VALUE")
    config.write_text(f"# a remark changes nothing\n{text}")
    assert resume(run).code == 0
