"""The environment's folder: whole, half-made, or somebody else's. The packages are an index in a
folder, so that nothing is downloaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from gyre.core.errors import ConfigError
from gyre.launch.sidecar import ensure_environment
from gyre.runconfig.run_config import RunConfig
from gyre.sidecars.vllm import environment
from gyre.sidecars.vllm.environment import (
    HALF_MADE,
    RECORD,
    EnvironmentRecord,
    default_folder,
    find_environment,
    install,
    process_variables,
    verify,
)
from gyre.sidecars.vllm.versions import build_for

CPU = build_for("cpu")
SAID = EnvironmentRecord(
    distribution="vllm-cpu", version=CPU.version, torch="2.13.0", python="3.11", made_s=1.0
)


def silent(text: str) -> None: ...


def fake(folder: Path, record: EnvironmentRecord | None = SAID) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    if record is not None:
        (folder / RECORD).write_text(json.dumps(asdict(record)))
    return folder


def test_an_environment_is_there_once_its_record_is(tmp_path: Path) -> None:
    assert find_environment(tmp_path / "none") is None
    assert find_environment(fake(tmp_path / "half", None)) is None
    assert find_environment(fake(tmp_path / "whole")) == SAID


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("kept")
    with pytest.raises(ConfigError, match="exists and is no environment of ours"):
        install(CPU, tmp_path / "theirs", say=silent)
    assert (tmp_path / "theirs" / "file").read_text() == "kept"


@pytest.mark.slow
def test_a_half_made_one_is_removed_and_a_failure_is_named(tmp_path: Path, monkeypatch) -> None:
    """pip finds an empty index: the folder stays half-made, and the next try begins anew."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(environment, "ROOM_BYTES", {"cpu": 0})
    folder = fake(tmp_path / "env", None)
    (folder / HALF_MADE).touch()
    (folder / "left").write_text("of an earlier try")
    with pytest.raises(
        ConfigError, match=r"installing vllm-cpu==.* failed .*Could not find a version"
    ):
        install(CPU, folder, say=silent)
    assert (folder / HALF_MADE).exists() and not (folder / "left").exists()
    assert find_environment(folder) is None


def test_a_full_disk_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(environment, "ROOM_BYTES", {"cpu": 1 << 60})
    with pytest.raises(ConfigError, match="GiB free, and vLLM's environment needs"):
        install(CPU, tmp_path / "env", say=silent)
    assert not (tmp_path / "env").exists()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    """An environment with Python alone."""
    import venv

    venv.create(tmp_path / "bare", with_pip=False)
    with pytest.raises(ConfigError, match="No module named 'vllm'") as raised:
        verify(tmp_path / "bare")
    assert "gyre sidecar install vllm" in raised.value.hint


def test_packages_that_are_gone_since_it_was_made_are_named(tmp_path: Path) -> None:
    """Its record is there, and its Python: a run asks for it anew and does not import it."""
    import venv

    venv.create(tmp_path / "bare", with_pip=False)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    (tmp_path / "bare" / RECORD).write_text(json.dumps(asdict(SAID)))
    for name in ("vllm", "torch", "transformers", "numpy", "psutil", "pydantic"):
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    vllm = {"environment": str(tmp_path / "bare")}
    config = RunConfig.model_validate(
        {"model": {"path": "nowhere"}, "objective": {"kind": "sft"}, "engine": {"vllm": vllm}}
    )
    with pytest.raises(ConfigError, match="is not whole: it lacks msgspec") as raised:
        ensure_environment(config, CPU, lambda kind, **fields: None)
    assert "gyre sidecar install vllm" in raised.value.hint
    (site / "msgspec.py").touch()
    assert ensure_environment(config, CPU, lambda kind, **fields: None) == tmp_path / "bare"
    (tmp_path / "bare" / "bin" / "python").unlink()
    (tmp_path / "bare" / "bin" / "python").write_text("no program")
    with pytest.raises(ConfigError, match="cannot be started: Permission denied"):
        ensure_environment(config, CPU, lambda kind, **fields: None)


def test_it_is_beside_those_of_other_tools(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder(CPU) == tmp_path / "gyre" / "sidecars" / "vllm-cpu-0.30.0"


def test_nothing_is_reported_to_anybody() -> None:
    for device in ("cpu", "cuda"):
        variables = process_variables(build_for(device), threads=2, eager=True)
        assert variables["VLLM_NO_USAGE_STATS"] == "1"
