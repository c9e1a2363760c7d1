"""gyre.Engine: the same answers as transformers and as the server, on threads and event loops, and
nothing left behind. The examples of docs/python.md run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from system_models import save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

import gyre
from gyre.core.errors import ConfigError, DeadlineError, EngineRefused, InputError
from reference_pages import DOCS
from served import Served, serving

pytestmark = pytest.mark.slow  # `make test` has the servers of test_serve.py

ASKED = [{"role": "user", "content": "How many apples are left?"}]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
EXAMPLES = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.S)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[gyre.Engine]:
    with gyre.Engine(folder, threads=1, dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(folder, log, "--set", "run.threads=1", "--set", "run.dtype=float32") as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer(folder) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def until(is_so: Callable[[], Any], what: Callable[[], Any]) -> None:
    ends = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < ends, what()
        time.sleep(0.01)


def until_free(engine: gyre.Engine) -> None:
    """Wait until the engine holds no page: what was aborted is gone."""
    until(lambda: engine.stats().pages_used == 0 and engine.stats().waiting == 0, engine.stats)


def greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    """What transformers chooses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return whole[0, len(tokens) :].tolist()


# -- answers


def test_greedy_answers_are_those_of_transformers(engine, folder, tokenizer) -> None:
    texts = ["How many apples", "Anna has 3"]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    found = engine.generate(texts, temperature=0, max_tokens=24)
    for row, one in zip(rows, found, strict=True):
        expected = greedy(folder, row, 24)
        (completion,) = one.completions
        assert one.prompt_tokens == tuple(row)
        assert completion.tokens == tuple(expected)
        assert one.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert completion.finish_reason in ("stop", "length")
    assert engine.generate(rows, temperature=0, max_tokens=24) == found
    assert engine.generate(np.asarray(rows[0]), temperature=0, max_tokens=24) == found[0]
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)
    reply = engine.chat(ASKED, temperature=0, max_tokens=24)
    assert reply.completions[0].tokens == tuple(greedy(folder, prompt["input_ids"], 24))


@pytest.mark.parametrize("stop", [None, ["s", "ab"]])
def test_a_seed_gives_the_answer_of_the_server(engine, served, stop) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "n": 2,
        "max_tokens": 40,
        "stop": stop,
    }
    text, chat = (
        httpx.post(f"{served.url}/v1/{route}", json={"model": served.model, **body}, timeout=60)
        for route, body in (
            ("completions", {**asked, "prompt": "How many", "logprobs": 2}),
            ("chat/completions", {**asked, "messages": ASKED, "logprobs": True}),
        )
    )
    found = engine.generate("How many", logprobs=2, **asked)
    for choice, one in zip(text.json()["choices"], found.completions, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (one.text, one.finish_reason)
        assert choice["logprobs"]["token_logprobs"] == list(one.logprobs)
        assert all(len(best) == 2 for best in one.top_logprobs)
        assert text.json()["usage"]["prompt_tokens"] == len(found.prompt_tokens)
    reply = engine.chat(ASKED, logprobs=True, **asked)
    for choice, one in zip(chat.json()["choices"], reply.completions, strict=True):
        assert (choice["message"]["content"], choice["finish_reason"]) == (
            one.text,
            one.finish_reason,
        )
        told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert told == list(one.logprobs) and one.top_logprobs is None


def test_a_stream_says_what_the_whole_answer_says(engine) -> None:
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 40, "stop": ["s"], "logprobs": 1}
    whole = engine.generate("How many", **asked)
    stream = engine.stream("How many", **asked)
    assert stream.completion is None
    texts = list(stream)
    assert "".join(texts) == whole.text and all(texts)
    assert stream.completion == whole.completions[0]
    assert list(stream) == []
    reply = engine.chat(ASKED, seed=3, max_tokens=10)
    assert "".join(engine.stream(ASKED, seed=3, max_tokens=10)) == reply.text


def test_lists_are_answered_in_order_whatever_their_length(folder) -> None:
    """Four completions fit; forty are asked for, by two callers at once."""
    with gyre.Engine(folder, threads=1, max_running=2, max_queued=2, token_budget=64) as engine:
        texts = [f"Anna has {number}" for number in range(20)]
        alone = [engine.generate(text, seed=2, max_tokens=3).text for text in texts]
        with ThreadPoolExecutor(2) as callers:
            both = list(
                callers.map(lambda _: engine.generate(texts, seed=2, max_tokens=3), range(2))
            )
        assert [[one.text for one in found] for found in both] == [alone, alone]
        assert engine.generate([]) == [] and engine.chat([]) == []
        assert engine.stats().refused == 0
        with pytest.raises(DeadlineError):  # while further ones wait for room
            engine.generate(texts, deadline_s=0.05, **LONG)
        until_free(engine)


def test_room_that_an_unread_stream_leaves_is_found(folder) -> None:
    """It ends in the engine while nobody reads it."""
    with gyre.Engine(folder, threads=1, max_running=1, max_queued=1) as engine:
        unread = engine.stream("How many", max_tokens=60, ignore_eos=True)
        next(unread)
        found = engine.generate(["Anna", "Weng"], max_tokens=3, n=2)
        assert [len(one.completions) for one in found] == [2, 2]
        unread.close()


def test_a_run_is_asked_by_its_own_template(folder, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "export").symlink_to(folder)
    (run / "events.jsonl").touch()
    (run / "stage.txt").write_text("all")
    (run / "overrides.json").write_text(json.dumps(['data.system="be brief"']))
    (run / "config.toml").write_text(
        '[model]\npath = "m"\n[objective]\nkind = "sft"\n[data]\ntemplate = "{system} Q {prompt} A"\n'
    )
    with gyre.Engine(run, threads=1) as engine:
        found = engine.chat([{"role": "user", "content": "is it?"}], max_tokens=2)
        said = AutoTokenizer.from_pretrained(folder).decode(list(found.prompt_tokens))
        assert said == "be brief Q is it? A"
        with pytest.raises(InputError, match="one question"):
            engine.chat(ASKED * 2)


def test_a_hub_name_is_found_in_the_cache(folder, tmp_path, monkeypatch) -> None:
    from huggingface_hub import constants

    copy = tmp_path / "models--owner--model"
    (copy / "refs").mkdir(parents=True)
    (copy / "refs" / "main").write_text("abc")
    (copy / "snapshots").mkdir()
    (copy / "snapshots" / "abc").symlink_to(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with gyre.Engine("owner/model", threads=1) as engine:
        assert engine.generate("Anna", max_tokens=2).text is not None
    with pytest.raises(InputError, match="owner/other"):
        gyre.Engine("owner/other")


# -- refusals


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tempratur": 1}, "unknown argument 'tempratur'; did you mean 'temperature'"),
        ({"stream": True}, "unknown argument 'stream'"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"temperature": -1}, "temperature = -1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"n": 0}, "n = 0"),
        ({"logprobs": 21}, "need 0 to 20"),
        ({"max_tokens": 4000}, "the context is 256 tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias key 'x'"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_what_the_api_refuses_is_refused_before_anything_runs(engine, asked, said) -> None:
    before = engine.stats().generated_tokens
    with pytest.raises(InputError, match=re.escape(said)):
        engine.generate(["How many", "Anna"], **asked)
    with pytest.raises(InputError, match=re.escape(said)):
        list(engine.stream("How many", **asked))
    assert engine.stats().generated_tokens == before


def test_one_bad_prompt_of_a_list_runs_none(engine) -> None:
    before = engine.stats().generated_tokens
    with pytest.raises(InputError, match="an empty prompt"):
        engine.generate(["How many", []])
    with pytest.raises(InputError, match="messages"):
        engine.chat([ASKED, []])
    with pytest.raises(InputError, match="a stream has one completion"):
        engine.stream("How many", n=2)
    with pytest.raises(InputError, match="need logprobs = True"):
        engine.chat(ASKED, top_logprobs=2)
    assert engine.stats().generated_tokens == before


def test_a_deadline_that_passes_is_an_error(engine) -> None:
    with pytest.raises(DeadlineError):
        engine.generate("How many", deadline_s=1e-6, **LONG)
    until_free(engine)


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"max_runing": 3}, "did you mean 'max_running'"), ({"device": "gpu"}, "run.device = 'gpu'")],
)
def test_a_setting_that_there_is_not_is_refused(folder, settings, said) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        gyre.Engine(folder, **settings)


def test_a_folder_that_is_no_model_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="neither a run folder nor a model folder"):
        gyre.Engine(tmp_path)


# -- event loops


def test_async_calls_give_the_same_answers(engine) -> None:
    async def go() -> None:
        one, several, reply = await asyncio.gather(
            engine.agenerate("How many", seed=1, max_tokens=5),
            engine.agenerate(["Anna", "Weng"], seed=1, max_tokens=5),
            engine.achat(ASKED, seed=1, max_tokens=5),
        )
        # a blocking call where a loop runs, as in a notebook
        assert engine.generate("How many", seed=1, max_tokens=5) == one
        assert engine.generate(["Anna", "Weng"], seed=1, max_tokens=5) == several
        assert engine.chat(ASKED, seed=1, max_tokens=5) == reply
        async with engine.astream("How many", seed=1, max_tokens=5) as stream:
            assert "".join([text async for text in stream]) == one.text
        assert stream.completion == one.completions[0]
        with pytest.raises(InputError, match="the context is 256 tokens"):
            await engine.agenerate("How many", max_tokens=4000)

    asyncio.run(go())


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "timeout"])
def test_whoever_stops_reading_frees_the_pages(engine, way) -> None:
    async def read(started: asyncio.Event) -> None:
        async for _ in engine.astream("How many", **LONG):
            started.set()

    async def go() -> None:
        if way == "break":
            async for _ in engine.astream("How many", **LONG):
                assert (await engine.astats()).pages_used > 0
                break
        elif way == "aclose":
            stream = engine.astream("How many", **LONG)
            await anext(stream)
            await stream.aclose()
            assert (await engine.astats()).pages_used == 0
            assert [text async for text in stream] == []
        elif way == "cancel":
            started = asyncio.Event()
            reader = asyncio.create_task(read(started))
            await started.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.agenerate(["How many"] * 300, n=8, **LONG)

    before = engine.stats().generated_tokens
    asyncio.run(go())
    until_free(engine)
    assert engine.stats().generated_tokens - before < 300 * 8 * 200 / 2


# -- threads, Ctrl-C, the end


def test_threads_share_an_engine(engine) -> None:
    def ask(number: int) -> str:
        if number % 2:
            return "".join(engine.stream("How many", seed=number % 4, max_tokens=12))
        return engine.generate("How many", seed=number % 4, max_tokens=12).text

    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(ask, range(32)))
    for number in range(4):
        assert len(set(texts[number::4])) == 1
    assert len(set(texts)) == 4


def test_ctrl_c_aborts_a_blocking_call(engine) -> None:
    def press() -> None:
        until(lambda: engine.stats().running, engine.stats)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["How many"] * 500, **LONG)
    pressing.join(WAIT_S)
    until_free(engine)
    assert engine.generate("How many", max_tokens=2).completions


def test_the_end_leaves_no_thread_and_later_calls_are_refused(folder) -> None:
    before = set(threading.enumerate())
    with gyre.Engine(folder, threads=1) as engine:
        stream = engine.stream("How many", **LONG)
        next(stream)
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) - before == set()
    engine.close()
    for call in (engine.stats, lambda: engine.generate("a"), lambda: next(stream)):
        with pytest.raises(InputError, match="closed"):
            call()
    with pytest.raises(InputError, match="closed"):
        asyncio.run(engine.agenerate("a"))
    asyncio.run(engine.aclose())


def test_calls_under_way_are_told_that_the_engine_is_closed(folder) -> None:
    engine = gyre.Engine(folder, threads=1)
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(engine.generate, ["How many"] * 300, n=8, **LONG)
        until(lambda: engine.stats().running, engine.stats)
        engine.close()
        with pytest.raises(EngineRefused, match="terminated"):
            call.result(WAIT_S)


def test_an_engine_that_nobody_has_ends(folder) -> None:
    before = set(threading.enumerate())
    engine = gyre.Engine(folder, threads=1)
    stream = engine.stream("How many", **LONG)
    del engine  # its stream has it
    assert next(stream)
    del stream
    gc.collect()
    until(lambda: set(threading.enumerate()) <= before, threading.enumerate)


def test_a_program_that_closes_nothing_ends_well(folder) -> None:
    code = f"""
import gyre
engine = gyre.Engine({str(folder)!r}, threads=1)
stream = engine.stream("How many", max_tokens=200, ignore_eos=True)
print(bool(next(stream)))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "Traceback" not in done.stderr and "never awaited" not in done.stderr


def test_a_model_that_cannot_be_loaded_leaves_no_thread(folder, tmp_path) -> None:
    before = set(threading.enumerate())
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InputError):
        gyre.Engine(tmp_path, threads=1)
    until(lambda: set(threading.enumerate()) <= before, threading.enumerate)


def test_events_go_to_the_logger_or_where_they_are_sent(folder, caplog) -> None:
    found: list[str] = []
    with (
        caplog.at_level("DEBUG", logger="gyre.engine"),
        gyre.Engine(folder, threads=1) as plain,
        gyre.Engine(folder, threads=1, emit=lambda kind, **fields: found.append(kind)) as sent,
        contextlib.suppress(DeadlineError),
    ):
        for engine in (plain, sent):
            with contextlib.suppress(DeadlineError):
                engine.generate("How many", deadline_s=1e-6, **LONG)
    assert "engine.deadline" in found
    assert any("engine.deadline" in record.getMessage() for record in caplog.records)


# -- the page


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page_run(example, folder, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "my_model").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/python.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


def test_the_page_names_every_argument() -> None:
    from gyre.launch.python.requests import ChatArgs, GenerateArgs

    page = (DOCS / "python.md").read_text()
    names = ChatArgs.__optional_keys__ | GenerateArgs.__optional_keys__
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
