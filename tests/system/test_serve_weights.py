"""Weights that change while clients are answered: by the admin route, over engines in processes of
their own."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from system_models import save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

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
        folder = base / str(number)
        shutil.copytree(first, folder)
        tensors = load_file(first / "model.safetensors")
        generator = torch.Generator().manual_seed(number)
        for tensor in tensors.values():
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
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
    found = [greedy_reference(folder) for folder in folders]
    assert len(set(found)) == len(found), "the versions cannot be told apart"
    return found


def greedy_reference(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    whole = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(whole[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def change(served: Served, folder: Path, **more: Any) -> httpx.Response:
    body = {"path": str(folder), **more}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{served.url}/admin/weights", json=body, headers=headers, timeout=60)


class Clients:
    """Ask without a pause until they are stopped. Every answer must come."""

    def __init__(self, served: Served, count: int, expected: list[str]) -> None:
        self._served, self._expected = served, expected
        self._stop = threading.Event()
        self.versions: list[str] = []
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                text, version = greedy(self._served.url, self._served.model)
            except Exception as error:  # noqa: BLE001  whatever it is, the test names it
                self.faults.append(repr(error))
                return
            self.versions.append(version)
            # one that began on a version and ended on another has parts of both
            if "," not in version and text != self._expected[int(version.rpartition("-")[2])]:
                self.faults.append(f"{version}: {text!r}")

    @contextmanager
    def asking(self) -> Iterator[Clients]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
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


def test_weights_change_under_requests_and_none_fails(folders, expected, tmp_path) -> None:
    """On two replicas; the answers of each version are those of a fresh model. A replica that is
    lost afterwards comes back with the newest version."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    options = "--replicas", "2", *EXACT, "--admin-key-file", str(key)
    with serving(folders[0], tmp_path / "log", *options) as served:
        with Clients(served, 3, expected).asking() as clients:
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
        assert last == (expected[2], "version-2")
        refused, updated = events_of(served, "serve.weights_refused", "serve.weights_updated")
        assert [event["serving"] for event in refused] == [2]
        assert [event["version"] for event in updated] == [1, 2]
        assert KEY not in served.log.read_text()


def engines_of(served: Served) -> list[psutil.Process]:
    """The worker processes that are there."""
    tree = psutil.Process(served.process.pid).children(recursive=True)
    return [one for one in tree if "gyre.cluster.worker.process" in one.cmdline()]


def events_of(served: Served, *kinds: str) -> list[list[dict[str, Any]]]:
    rows = [json.loads(line) for line in served.log.read_text().splitlines() if line[:1] == "{"]
    return [[row for row in rows if row["kind"] == kind] for kind in kinds]
