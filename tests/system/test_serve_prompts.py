"""Log-probs over HTTP, against transformers: prompts of several prefill chunks, hits of the prefix
cache, several completions, streams. The model's own beginning (BOS) is part of a text prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from system_models import save_checkpoint
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

from served import serving

pytestmark = pytest.mark.slow

CHUNK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = save_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")
    place = str(made / "tokenizer.json")
    vocabulary = Tokenizer.from_file(place)
    begin = "<|begin_of_text|>"
    vocabulary.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary.token_to_id(begin))]
    )
    vocabulary.save(place)
    return made


@pytest.fixture(scope="module")
def client(folder, tmp_path_factory) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    options = (
        "run.threads=1",
        "run.dtype=float32",
        f"engine.token_budget={CHUNK}",
        "engine.max_running=8",
    )
    sets = [word for option in options for word in ("--set", option)]
    with (
        serving(folder, log, *sets) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def oracle(folder) -> Any:
    """Token ids to log-probs of each next token: float32 [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logprobs(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()

    return logprobs


def some_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 200, count).tolist()


def check(told: Any, tokens: list[int], oracle: Any, best: int) -> None:
    """`told` is of all these tokens."""
    expected = oracle(tokens)
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert len(told["tokens"]) == len(told["text_offset"]) == len(tokens)
    own = [expected[place - 1, tokens[place]] for place in range(1, len(tokens))]
    np.testing.assert_allclose(told["token_logprobs"][1:], own, atol=2e-5)
    for place in range(1, len(tokens)):
        values = sorted(told["top_logprobs"][place].values(), reverse=True)
        # tokens of the same text share an entry; the prompt's own is told beside the best
        assert 1 <= len(values) <= best + 1
        highest = np.sort(expected[place - 1])[::-1][:best]
        allowed = np.append(highest, own[place - 1])
        np.testing.assert_allclose(values[0], highest[0], atol=2e-5)
        assert all(np.abs(allowed - value).min() < 2e-5 for value in values)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_prompt_of_several_chunks(client, oracle, max_tokens) -> None:
    tokens = some_ids(5 * CHUNK - 3, 1)
    assert len(tokens) > 4 * CHUNK
    for _ in range(2):  # the second time from the prefix cache
        answer = client.completions.create(
            model="llama",
            prompt=tokens,
            echo=True,
            logprobs=3,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        told = answer.choices[0].logprobs.model_dump()
        assert answer.usage.completion_tokens == max_tokens
        assert len(told["tokens"]) == len(tokens) + max_tokens
        chosen = []
        for _ in range(max_tokens):
            chosen.append(int(oracle([*tokens, *chosen])[-1].argmax()))
        check(told, [*tokens, *chosen], oracle, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_with_a_beginning_in_common_and_two_completions(client, oracle, stream) -> None:
    begin = some_ids(3 * CHUNK, 2)
    prompts = [begin + some_ids(10 + 7 * number, 3 + number) for number in range(3)]
    asked: dict[str, Any] = {"model": "llama", "prompt": prompts, "echo": True, "logprobs": 2}
    asked |= {"max_tokens": 0, "n": 2}
    told: dict[int, dict[str, Any]] = {}
    if stream:
        for event in client.completions.create(**asked, stream=True):
            for choice in event.choices:
                if choice.logprobs.tokens:  # they come once
                    assert choice.index not in told
                    told[choice.index] = choice.logprobs.model_dump()
    else:
        answer = client.completions.create(**asked)
        told = {choice.index: choice.logprobs.model_dump() for choice in answer.choices}
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert sorted(told) == list(range(6))
    for index, one in told.items():
        check(one, prompts[index // 2], oracle, 2)


def test_a_text_prompt_begins_with_the_models_own_token(client, folder, oracle) -> None:
    text = "Weng earns 12 dollars an hour; how many in a week?"
    answer = client.completions.create(
        model="llama", prompt=text, echo=True, logprobs=1, max_tokens=0
    )
    told = answer.choices[0].logprobs.model_dump()
    tokens = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert answer.choices[0].text == text and answer.usage.prompt_tokens == len(tokens)
    check(told, tokens, oracle, 1)
    assert told["text_offset"][:2] == [0, 0]
    for token, place in list(zip(told["tokens"], told["text_offset"], strict=True))[1:]:
        assert text[place : place + len(token)] == token


def test_likelihoods_as_evaluation_harnesses_ask_for_them(client, oracle) -> None:
    """A batch of contexts with continuations; the token chosen after each is cut off."""
    pairs = [(some_ids(20, seed), some_ids(4, 50 + seed)) for seed in range(4)]
    answer = client.completions.create(
        model="llama",
        prompt=[context + rest for context, rest in pairs],
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        seed=1234,
    )
    for choice, (context, rest) in zip(answer.choices, pairs, strict=True):
        found = sum(choice.logprobs.token_logprobs[len(context) : -1])
        whole, table = context + rest, oracle(context + rest)
        expected = sum(table[place - 1, whole[place]] for place in range(20, 24))
        assert abs(found - expected) < 1e-4


@pytest.mark.parametrize("stream", [False, True])
def test_generate_tells_tokens_and_their_log_probs(client, oracle, stream) -> None:
    prompt = some_ids(40, 9)
    params = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    url = str(client.base_url).replace("/v1/", "/generate")
    body = {"prompt": prompt, "params": params, "stream": stream}
    answer = httpx.post(url, json=body, timeout=60)
    rows = [answer.json()] if not stream else []
    if stream:
        *lines, last = [line[6:] for line in answer.text.splitlines() if line]
        assert last == "[DONE]" and len(lines) > 1
        rows = [json.loads(line) for line in lines]
    tokens = [token for row in rows for token in row["tokens"]]
    logprobs = [value for row in rows for value in row["logprobs"]]
    for place in range(8):
        expected = oracle([*prompt, *tokens[:place]])[-1]
        assert tokens[place] == expected.argmax()
        assert abs(logprobs[place] - expected.max()) < 2e-5
    assert len(tokens) == 8 and rows[-1]["finish_reason"] == "length"
    assert rows[-1]["weights_version"] == 0
    assert rows[-1]["usage"]["completion_tokens"] == 8
