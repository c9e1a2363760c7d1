"""Weights that change within an answer, with the policy "continue": the answer names the version of
each of its tokens, and each token is what that version chooses after the KV of the one before."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from system_models import save_changed, save_own_checkpoint
from transformers import AutoModelForCausalLM

from gyre.text.tokenizer import load_tokenizer
from served import Served, serving

pytestmark = pytest.mark.slow

KEY = "a-key-for-the-tests"
PROMPT = [5, 9, 11, 7]  # ids
LONG = 2000  # tokens: a second or more, while clients pause for milliseconds
CHANGES = 3  # at most, until one has come in the midst of an answer of each kind
NEAR = 1e-3  # between logits of two computations of the same: their best tokens may differ
ASKED = {"temperature": 0, "max_tokens": LONG, "ignore_eos": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What an answer says of its tokens."""

    versions: list[int]
    named: set[int]  # versions that the answer names as a whole
    text: str
    tokens: list[int] | None = None  # of /generate

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Each version and how many tokens in a row it chose."""
        return [(version, len(list(run))) for version, run in itertools.groupby(self.versions)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("models")
    first = save_own_checkpoint(base / "first", context_tokens=4096)
    return [first, save_changed(first, base / "second")]


@pytest.fixture
def served(folders, tmp_path) -> Iterator[Served]:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    exact = "--set", "run.threads=1", "--set", "run.dtype=float32"  # as the reference computes
    with serving(folders[0], tmp_path / "log", *exact, "--admin-key-file", str(key)) as found:
        yield found


def stream(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream."""
    body = body | {"stream": True}
    with httpx.stream("POST", f"{served.url}{path}", json=body, timeout=120) as answer:
        *rows, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert last == "[DONE]"
    return [json.loads(row) for row in rows]


def generate(served: Served) -> Told:
    """A stream of /generate, whose events have text, tokens and versions that belong together."""
    rows = stream(served, "/generate", {"prompt": PROMPT, "params": ASKED})
    assert all(len(row["tokens"]) == len(row["versions"]) for row in rows)
    newest = [row["weights_version"] for row in rows]
    assert newest == sorted(newest)
    assert rows[-1]["usage"]["completion_tokens"] == LONG
    return Told(
        versions=[one for row in rows for one in row["versions"]],
        named={newest[0], newest[-1]},
        text="".join(row["text"] for row in rows),
        tokens=[one for row in rows for one in row["tokens"]],
    )


def complete(served: Served) -> Told:
    """A stream of /v1/completions."""
    body = {"model": served.model, "prompt": PROMPT, "logprobs": 0}
    rows = stream(served, "/v1/completions", body | ASKED)
    return told_by(rows)


def complete_whole(served: Served) -> Told:
    """An answer of /v1/completions in one body."""
    body = {"model": served.model, "prompt": PROMPT, "logprobs": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body | ASKED, timeout=120).json()
    assert answer["usage"]["completion_tokens"] == LONG
    return told_by([answer])


def told_by(rows: list[dict[str, Any]]) -> Told:
    choices = [row["choices"][0] for row in rows]
    names = rows[-1]["system_fingerprint"].removeprefix("version-").split(",")
    return Told(
        versions=[one for choice in choices for one in choice["logprobs"]["versions"]],
        named={int(name) for name in names},
        text="".join(choice["text"] for choice in choices),
    )


KINDS: list[Callable[[Served], Told]] = [generate, complete, complete_whole]


def change_amid(served: Served, folder: Path, version: int) -> list[list[Told]]:
    """The answers to a client of each kind, which ask until the weights have changed."""
    done = threading.Event()

    def ask(kind: Callable[[Served], Told]) -> list[Told]:
        answers = []
        while not done.is_set():
            answers.append(kind(served))
        return answers

    with ThreadPoolExecutor(len(KINDS)) as threads:
        asked = [threads.submit(ask, kind) for kind in KINDS]
        try:
            changed = httpx.post(
                f"{served.url}/admin/weights",
                json={"path": str(folder), "policy": "continue"},
                headers={"authorization": f"Bearer {KEY}"},
                timeout=120,
            )
        finally:
            done.set()
        assert changed.status_code == 200 and changed.json()["version"] == version, changed.text
        return [one.result(120) for one in asked]


def test_an_answer_that_goes_on_names_the_version_of_each_token(served, folders) -> None:
    """All of its tokens are named, once and in order; what was streamed is their text."""
    gone_on: list[list[Told]] = [[] for _ in KINDS]
    for version in range(1, CHANGES + 1):
        before, after = folders[(version - 1) % 2], folders[version % 2]
        answers = change_amid(served, after, version)
        for told, found in zip(answers, gone_on, strict=True):
            found += [one for one in told if len(one.spans) > 1]
        for one in itertools.chain(*answers):
            check_versions(one, version)
        if all(gone_on):
            break
    assert all(gone_on), "each change came between two answers"
    one = gone_on[0][-1]
    assert one.tokens is not None
    assert one.text == load_tokenizer(folders[0]).decode(one.tokens, skip_special=True)
    check_chosen(before, after, one.tokens, one.spans[0][1])


def check_versions(one: Told, newest: int) -> None:
    assert len(one.versions) == LONG == sum(number for _, number in one.spans)
    order = [version for version, _ in one.spans]
    assert order in ([newest - 1], [newest], [newest - 1, newest])
    assert one.named == set(order)
    assert one.tokens is None or len(one.tokens) == LONG


def furthest(logits_TV: torch.Tensor, tokens: list[int]) -> float:
    """How far the logit of any of the tokens is below the best one at its place."""
    chosen_T = logits_TV.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    return float((logits_TV.max(1).values - chosen_T).max())


def check_chosen(before: Path, after: Path, tokens: list[int], count: int) -> None:
    """The first `count` tokens are the old version's choice; the others are the new one's, which
    reads the KV that the old one has made of all but the last of the first."""
    old, new = (
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval()
        for one in (before, after)
    )
    read, rest = [*PROMPT, *tokens[: count - 1]], tokens[count - 1 : -1]
    with torch.no_grad():
        found = old(torch.tensor([read]), use_cache=True)
        assert furthest(found.logits[0, len(PROMPT) - 1 :], tokens[:count]) < NEAR
        logits_TV = new(torch.tensor([rest]), past_key_values=found.past_key_values).logits[0]
        assert furthest(logits_TV, tokens[count:]) < NEAR
        alone_TV = old(torch.tensor([[*read, *rest]])).logits[0, len(read) :]
        assert furthest(alone_TV, tokens[count:]) > NEAR, "the versions cannot be told apart"
