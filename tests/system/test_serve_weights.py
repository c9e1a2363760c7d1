"""Weights that change while clients are answered: by the admin route, over engines in processes of
their own."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from system_models import (
    greedy_reference,
    save_changed,
    save_checkpoint,
    save_own_checkpoint,
)
from system_runs import gyre, write_config
from transformers import AutoModelForCausalLM

from gyre.text.tokenizer import load_tokenizer
from served import Served, serving

KEY = "a-key-for-the-tests"
EXACT = "--set", "run.threads=1", "--set", "run.dtype=float32"  # as the reference computes
ASKED = [{"role": "user", "content": "How many apples are left?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    """Versions of one model: each by another factor on its weights."""
    base = tmp_path_factory.mktemp("models")
    first = save_checkpoint(base / "0", "qwen3")
    for number in (1, 2):
        save_changed(first, base / str(number), number)
    return [base / str(number) for number in range(3)]


def greedy(url: str, model: str, **more: Any) -> tuple[str, str]:
    """The answer, and the version that it names."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=ASKED, temperature=0, max_tokens=24, **more
        )
    return answer.choices[0].message.content or "", answer.system_fingerprint or ""


@pytest.fixture(scope="module")
def expected(folders) -> list[str]:
    """What transformers answers with each."""
    found = [greedy_reference(folder, ASKED) for folder in folders]
    assert len(set(found)) == len(found), "the versions cannot be told apart"
    return found


def change(served: Served, folder: Path, **more: Any) -> httpx.Response:
    body = {"path": str(folder), **more}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{served.url}/admin/weights", json=body, headers=headers, timeout=60)


class Clients:
    """Ask without a pause until they are stopped. Every answer must come."""

    def __init__(self, ask: Callable[[], tuple[str, str]], count: int) -> None:
        """`ask` gives an answer and the version that it names."""
        self._ask = ask
        self._stop = threading.Event()
        self.answers: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self._ask())
            except Exception as error:  # noqa: BLE001  whatever it is, the test names it
                self.faults.append(repr(error))
                return

    @property
    def versions(self) -> list[str]:
        return [version for _, version in list(self.answers)]

    def find_wrong(self, expected: Mapping[str, str]) -> list[tuple[str, str]]:
        """Answers of one version that are not those of a fresh model on it. One that began on a
        version and ended on another has parts of both."""
        return [
            (text, version)
            for text, version in self.answers
            if "," not in version and text != expected[version]
        ]

    @contextmanager
    def asking(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60)

    def until(self, version: str) -> None:
        """Until an answer of that version has come."""
        ends = time.monotonic() + 60
        while version not in self.versions and not self.faults:
            assert time.monotonic() < ends, self.versions[-5:]
            time.sleep(0.02)


@pytest.mark.slow
def test_weights_change_under_requests_and_none_fails(folders, expected, tmp_path) -> None:
    """On two replicas; the answers of each version are those of a fresh model. A replica that is
    lost afterwards comes back with the newest version."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    options = "--replicas", "2", *EXACT, "--admin-key-file", str(key)
    with serving(folders[0], tmp_path / "log", *options) as served:
        clients = Clients(lambda: greedy(served.url, served.model), 3)
        with clients.asking():
            clients.until("version-0")
            for number, policy in ((1, "drain"), (2, "continue")):
                assert not any("," in version for version in clients.versions)
                answer = change(served, folders[number], policy=policy)
                assert answer.status_code == 200, answer.text
                assert answer.json() == {"version": number, "model": served.model}
                clients.until(f"version-{number}")
            bad = tmp_path / "bad"
            shutil.copytree(folders[1], bad)
            (bad / "model.safetensors").write_bytes(b"x" * 100)
            answer = change(served, bad)
            assert answer.status_code == 400 and "cannot read" in answer.text
            (model,) = httpx.get(f"{served.url}/v1/models").json()["data"]
            assert model["version"] == 2
            engines = engines_of(served)
            engines[0].kill()
            ends = time.monotonic() + 60
            while "engine.rejoined" not in served.log.read_text():
                assert time.monotonic() < ends
                time.sleep(0.05)
            engines[1].kill()  # so that only the one that came back can answer
            last = greedy(served.url, served.model)
        assert not clients.faults
        assert not clients.find_wrong({f"version-{n}": text for n, text in enumerate(expected)})
        assert last == (expected[2], "version-2")
        refused, updated = events_of(served, "serve.weights_refused", "serve.weights_updated")
        assert [event["serving"] for event in refused] == [2]
        assert [event["version"] for event in updated] == [1, 2]
        assert KEY not in served.log.read_text()


@pytest.mark.slow
def test_a_server_follows_a_run_that_trains_on(tmp_path) -> None:
    """Each export is taken while clients ask, and answers as a fresh model does. A bad one is
    refused once."""
    keys = {
        "snapshot.export_every_steps": 1,
        "snapshot.keep_exports": 20,
        "trainer.steps": 1,
        "cold_start.steps": 1,
        "trainer.learning_rate": 0.05,  # so that versions answer differently
    }
    config = write_config(tmp_path, keys)
    run = Path(train(tmp_path, config)["run"])
    *_, last_export = sorted((run / "exports").iterdir())
    written = [path / "model.safetensors" for path in (last_export, run / "export")]
    assert written[0].read_bytes() == written[1].read_bytes()
    expected = {"version-0": complete_reference(run / "export")}
    options = "--follow", "--poll-s", "0.2"
    with serving(run, tmp_path / "log", *options) as served:
        clients = Clients(lambda: complete(served), 2)
        with clients.asking():
            clients.until("version-0")
            train(tmp_path, "--resume", run, "--set", "trainer.steps=3")
            until(lambda: last_folder(served) == str(run / "export"))
            # the steps may be too short to see an export between them: one more, by hand
            good = add_export(run, run / "export", "version-00000098")
            until(lambda: last_folder(served) == str(good))
            add_export(run, run / "export", "version-00000099", weights=b"x" * 100)
            until(lambda: events_of(served, "serve.weights_refused")[0])
            clients.until(f"version-{len(events_of(served, 'serve.weights_updated')[0])}")
            time.sleep(1.0)  # five looks
            last = complete(served)
        assert not clients.faults
        updated, refused = events_of(served, "serve.weights_updated", "serve.weights_refused")
        assert len(refused) == 1 and "version-00000099" in refused[0]["folder"]
        folders = {f"version-{event['version']}": Path(event["folder"]) for event in updated}
        expected |= {version: complete_reference(path) for version, path in folders.items()}
        assert len(set(expected.values())) > 1, "the versions cannot be told apart"
        assert last == (expected[f"version-{len(updated)}"], f"version-{len(updated)}")
        assert not clients.find_wrong(expected)


@pytest.mark.slow
def test_a_server_follows_a_model_folder_and_drops_no_request(tmp_path) -> None:
    """Another folder is renamed into its place while clients ask."""
    target = save_own_checkpoint(tmp_path / "followed")
    newer = save_changed(target, tmp_path / "newer")
    expected = {
        f"version-{number}": complete_reference(path) for number, path in enumerate((target, newer))
    }
    assert len(set(expected.values())) == 2, "the versions cannot be told apart"
    options = *EXACT, "--follow", "--poll-s", "0.2"
    with serving(target, tmp_path / "log", *options) as served:
        clients = Clients(lambda: complete(served), 2)
        with clients.asking():
            clients.until("version-0")
            target.rename(tmp_path / "old")
            newer.rename(target)
            clients.until("version-1")
        assert not clients.faults
        assert not clients.find_wrong(expected)
        assert set(clients.versions) == expected.keys()
        updated, refused = events_of(served, "serve.weights_updated", "serve.weights_refused")
        assert [event["version"] for event in updated] == [1] and not refused


def add_export(run: Path, source: Path, name: str, *, weights: bytes | None = None) -> Path:
    """Put a folder among a run's exports, whole at once, as training does."""
    hidden = run / "exports" / f".{name}"
    shutil.copytree(source, hidden)
    if weights is not None:
        (hidden / "model.safetensors").write_bytes(weights)
    for path in hidden.iterdir():
        os.utime(path)
    return hidden.rename(run / "exports" / name)


def train(folder: Path, *argv: str | Path) -> dict[str, Any]:
    answer = gyre("train", *argv, "--json", folder=folder)
    assert answer.code == 0, answer.err
    return answer.json


PROMPT = [5, 9, 11, 7]  # ids


def complete(served: Served) -> tuple[str, str]:
    """The greedy completion, and the version that it names."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=served.model, prompt=PROMPT, temperature=0, max_tokens=12
        )
    return answer.choices[0].text, answer.system_fingerprint or ""


def complete_reference(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    return load_tokenizer(folder).decode(whole[0, len(PROMPT) :].tolist(), skip_special=True)


def last_folder(served: Served) -> str:
    (updated,) = events_of(served, "serve.weights_updated")
    return updated[-1]["folder"] if updated else ""


def until(true: Callable[[], Any]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def engines_of(served: Served) -> list[psutil.Process]:
    """The worker processes that are there."""
    tree = psutil.Process(served.process.pid).children(recursive=True)
    return [one for one in tree if "gyre.cluster.worker.process" in one.cmdline()]


def events_of(served: Served, *kinds: str) -> list[list[dict[str, Any]]]:
    rows = [json.loads(line) for line in served.log.read_text().splitlines() if line[:1] == "{"]
    return [[row for row in rows if row["kind"] == kind] for kind in kinds]
