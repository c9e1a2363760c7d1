"""A server beside a huge prompt and a template that loops: others are answered meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from system_models import QWEN_CHAT, save_checkpoint

from served import Served, serving

pytestmark = pytest.mark.slow

HUGE = "9 bananas, " * 710_000  # 7.8 MB: below the limit of a body
LONG = HUGE[: 1 << 20]  # the longest text that is tokenized
LOOPS = (
    "{%- if 'turn round' in messages[-1].content %}{%- for a in range(99999) %}"
    "{%- for b in range(99999) %}{%- endfor %}{%- endfor %}{%- endif %}"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = save_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    (folder / "chat_template.jinja").write_text(LOOPS + QWEN_CHAT, encoding="utf-8")
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text(encoding="utf-8"))
    told.pop("chat_template", None)
    config.write_text(json.dumps(told), encoding="utf-8")
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(folder, log, "--set", "run.threads=1") as found:
        yield found


def beside(served: Served, path: str, body: Any, play: Callable[[httpx.Client], None]) -> Any:
    """The answer to a request that takes long, and how often `play` was done before it came."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{served.url}{path}", json=body, timeout=120))

    thread = threading.Thread(target=ask)
    with httpx.Client(base_url=served.url, timeout=120) as client:
        thread.start()
        rounds = 0
        while thread.is_alive():
            play(client)
            time.sleep(0.01)
            rounds += thread.is_alive()
        thread.join()
    return answers[0], rounds


def test_a_stream_goes_on_while_a_huge_text_is_tokenized(served: Served) -> None:
    body = {"model": served.model, "prompt": "9 ba", "max_tokens": 20, "ignore_eos": True}

    def play(client: httpx.Client) -> None:
        assert client.get("/health/live").status_code == 200
        stream = client.post("/v1/completions", json=body | {"stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")

    answer, rounds = beside(served, "/tokenize", {"prompt": LONG}, play)
    assert answer.status_code == 200, answer.text[:300]
    found = answer.json()
    assert found["count"] == len(found["tokens"]) > 200_000
    assert rounds >= 3, "whole streams ended while it was tokenized"


def test_a_huge_prompt_is_refused_in_the_shape_of_the_api(served: Served) -> None:
    bodies = {
        "/v1/completions": {"model": served.model, "prompt": HUGE},
        "/tokenize": {"prompt": HUGE},
        "/v1/chat/completions": {
            "model": served.model,
            "messages": [{"role": "user", "content": HUGE}],
        },
    }
    for path, body in bodies.items():
        error = httpx.post(f"{served.url}{path}", json=body, timeout=120).json()["error"]
        assert error["code"] == "context_length_exceeded", error
        assert error["param"] == ("messages" if "messages" in body else "prompt")


def test_others_are_answered_while_a_template_loops(served: Served) -> None:
    chat = {
        "model": served.model,
        "messages": [{"role": "user", "content": "turn round"}],
        "max_tokens": 1,
    }

    def play(client: httpx.Client) -> None:
        assert client.get("/health/live").status_code == 200

    answer, rounds = beside(served, "/v1/chat/completions", chat, play)
    assert answer.status_code == 400, answer.text
    assert "CPU time" in answer.json()["error"]["message"]
    assert rounds >= 3, "it was live while the template ran"
    chat["messages"] = [{"role": "user", "content": "9 bananas"}]
    assert httpx.post(f"{served.url}/v1/chat/completions", json=chat).status_code == 200
