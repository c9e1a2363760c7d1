"""gyre serve with --otlp-endpoint: what a collector in a process of its own has of each request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Lock
from typing import Any

import httpx
import openai
import psutil
import pytest
from system_models import save_checkpoint

from otlp_collector import Collector, ReceivedSpan, TraceTree, collecting
from scraped import read_samples
from served import Served, serving

pytestmark = pytest.mark.slow  # `make test` has the servers of test_serve.py

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = [{"role": "user", "content": "How many apples? " * 28}]
CHAT = "POST /v1/chat/completions"
BUDGET = 64  # tokens of a step: these prompts have three chunks
ENGINE = ("engine", "admission", "prefill", "prefill", "prefill", "decode")


@pytest.fixture(scope="module")
def collector(tmp_path_factory) -> Iterator[Collector]:
    with collecting(tmp_path_factory.mktemp("collector")) as found:
        yield found


@pytest.fixture(scope="module")
def served(collector, tmp_path_factory) -> Iterator[Served]:
    folder = save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")
    options = ["--replicas", "2", "--access-log", "--otlp-endpoint", collector.url]
    for setting in (
        "run.threads=1",
        f"engine.token_budget={BUDGET}",
        "engine.max_running=16",
        "engine.prefix_cache=false",
    ):
        options += ["--set", setting]
    with serving(folder, tmp_path_factory.mktemp("log") / "stderr", *options) as found:
        yield found


def ask(served: Served, path: str = "/v1/chat/completions", **changed: Any) -> httpx.Response:
    headers = changed.pop("headers", None)
    asked = {"messages": ASKED} if path.endswith("chat/completions") else {}
    body = {"model": "qwen", "max_tokens": 8, "ignore_eos": True, **asked, **changed}
    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=60)


def logged(served: Served, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in served.log.read_text().splitlines() if line[:1] == "{"]
    return [row for row in rows if row["kind"] == kind]


def accesses(served: Served, path: str, number: int) -> list[dict[str, Any]]:
    """The first so many accesses of a path. One is logged once its answer has gone."""
    ends = time.monotonic() + 60
    while True:
        rows = [row for row in logged(served, "serve.access") if row["path"] == path]
        if len(rows) >= number:
            return rows[:number]
        assert time.monotonic() < ends
        time.sleep(0.05)


def check_times(tree: TraceTree, span: ReceivedSpan | None = None) -> None:
    """Every span lies within its parent."""
    span = span or tree.root
    assert span.started_ns <= span.ended_ns, span
    for child in tree.children(span):
        assert span.started_ns <= child.started_ns and child.ended_ns <= span.ended_ns, child
        check_times(tree, child)


def check_order(*spans: ReceivedSpan) -> None:
    """Each ends before the next begins."""
    for before, after in pairwise(spans):
        assert before.ended_ns <= after.started_ns, (before, after)


def test_a_stream_is_one_trace_within_that_of_its_client(collector, served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        events = list(
            client.chat.completions.create(
                model="qwen",
                messages=ASKED,
                max_tokens=8,
                temperature=0.5,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
                extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"},
            )
        )
    tree, usage = collector.wait_for_answer(events[0].id), events[-1].usage
    root, (request,) = tree.root, tree.named("llm_request")
    assert {span.trace_id for span in tree.spans} == {TRACE}
    assert {span.state for span in tree.spans} == {"a=b"}
    assert root.parent_id == PARENT and root.kind == 2  # server
    assert root.flags & 0x200 and not request.flags & 0x200  # the parent is of another process
    assert tree.shape() == (CHAT, "gateway", ("llm_request", "queue", ENGINE), "stream_write")
    check_times(tree)
    assert root.attributes["http.response.status_code"] == 200
    assert request.attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert request.attributes["gen_ai.usage.output_tokens"] == usage.completion_tokens == 8
    assert request.attributes["gen_ai.request.temperature"] == 0.5
    assert request.attributes["gen_ai.request.model"] == "qwen"
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert tree.named("stream_write")[0].attributes["gyre.write.num_messages"] == len(events) + 2
    assert root.resource["service.name"] == "gyre"
    assert all(span.error is None for span in tree.spans)


def test_the_pieces_of_a_prompt_follow_each_other(collector, served) -> None:
    answer = ask(served, messages=[{"role": "user", "content": "How many apples? " * 20}]).json()
    tree, length = collector.wait_for_answer(answer["id"]), answer["usage"]["prompt_tokens"]
    check_times(tree)
    pieces, (decode,) = tree.named("prefill"), tree.named("decode")
    check_order(
        *tree.named("gateway"), *tree.named("queue"), *tree.named("admission"), *pieces, decode
    )
    spans = [
        (piece.attributes["gyre.prefill.start"], piece.attributes["gyre.prefill.num_tokens"])
        for piece in pieces
    ]
    assert len(spans) == -(-length // BUDGET) >= 2
    assert spans == [(at, min(BUDGET, length - at)) for at in range(0, length, BUDGET)]
    request = tree.named("llm_request")[0].attributes
    assert request["gen_ai.latency.time_to_first_token"] == pytest.approx(
        request["gen_ai.latency.time_in_queue"] + request["gen_ai.latency.time_in_model_prefill"]
    )


def test_a_list_of_prompts_is_one_trace(collector, served) -> None:
    answer = ask(served, "/v1/completions", prompt=["one", "two", "three"], n=2).json()
    tree = collector.wait_for_answer(answer["id"])
    one = ("engine", "admission", "prefill", "decode", "decode")
    assert tree.shape()[1:] == ("gateway", *[("llm_request", "queue", one)] * 3, "response_write")
    assert {span.attributes["gen_ai.request.id"] for span in tree.named("llm_request")} == {
        f"{answer['id']}-{number}" for number in range(3)
    }
    check_times(tree)


def test_what_is_malformed_begins_a_trace_and_what_is_not_sampled_has_none(
    collector, served
) -> None:
    for header in (f"00-{TRACE[::-1]}-{PARENT}-00", f"00-{'0' * 32}-{PARENT}-01"):
        body = {"prompt": "a", "params": {"max_tokens": 2}}
        url, headers = f"{served.url}/generate", {"traceparent": header}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
    rows = accesses(served, "/generate", 2)
    assert rows[0]["trace_id"] == TRACE[::-1]
    tree = collector.wait_for(lambda found: rows[1]["trace_id"] in found)[rows[1]["trace_id"]]
    assert TRACE[::-1] not in collector.traces()
    assert tree.root.parent_id == "" and tree.root.name == "POST /generate"


def test_a_refusal_is_a_trace_without_an_engine(collector, served) -> None:
    assert ask(
        served, temperature=-1, headers={"traceparent": f"00-{'a' * 32}-{PARENT}-01"}
    ).is_error
    tree = collector.wait_for(lambda traces: "a" * 32 in traces)["a" * 32]
    assert tree.shape() == (CHAT, "gateway", "response_write")
    assert tree.root.attributes["http.response.status_code"] == 400
    assert tree.root.error is None  # of the client's, not of the server's
    check_times(tree)


def test_a_client_that_hangs_up_is_seen(collector, served) -> None:
    body = {"model": "qwen", "messages": ASKED, "max_tokens": 100, "stream": True}
    with httpx.stream(
        "POST",
        f"{served.url}/v1/chat/completions",
        json={**body, "ignore_eos": True, "n": 4},
        headers={"traceparent": f"00-{'b' * 32}-{PARENT}-01"},
        timeout=60,
    ) as answer:
        next(line for line in answer.iter_lines() if "content" in line)
    tree = collector.wait_for(lambda traces: "b" * 32 in traces)["b" * 32]
    (request,) = tree.named("llm_request")
    assert request.attributes["error.type"] == "client_disconnected" and request.error is None
    assert "abort" in request.attributes["gen_ai.response.finish_reasons"]
    assert request.attributes["gen_ai.usage.output_tokens"] < 400
    check_times(tree)


def test_events_of_a_request_have_its_trace(collector, served) -> None:
    answer = ask(served).json()
    tree = collector.wait_for_answer(answer["id"])
    (row,) = [row for row in logged(served, "serve.access") if row["request_id"] == answer["id"]]
    assert row["trace_id"] == tree.root.trace_id and abs(row["t"] - time.time()) < 600
    assert httpx.get(f"{served.url}/health/live").status_code == 200
    assert "trace_id" not in accesses(served, "/health/live", 1)[0]


def test_the_metrics_count_what_the_collector_has(collector, served) -> None:
    collector.wait_for_answer(ask(served).json()["id"])
    samples = read_samples(httpx.get(f"{served.url}/metrics", timeout=60).text)
    sent = {key: value for key, value in samples.items() if key[0] == "gyre_trace_spans_sent_total"}
    assert list(sent.values()) == [len(collector.spans())]
    dropped = [value for key, value in samples.items() if "spans_dropped" in key[0]]
    assert len(dropped) == 3 and not any(dropped)


LONG, N = (
    100,
    8,
)  # tokens and completions: six of these are three times what the engines run at once


def stream(served: Served, question: str, begun: Callable[[], None]) -> str:
    """Read a long answer; say when it has begun. Its id."""
    asked = [{"role": "user", "content": question}]
    body = {"model": "qwen", "messages": asked, "max_tokens": LONG, "n": N, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{served.url}/v1/chat/completions", json={**body, "stream": True}, timeout=60
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first = json.loads(next(lines)[6:])
        begun()
        assert list(lines)[-1] == "data: [DONE]"
    return first["id"]


def test_a_request_that_another_engine_goes_on_with_is_one_trace(collector, served) -> None:
    """An engine at work is killed once an answer has begun, with others that wait."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    engines = [one for one in children if "gyre.cluster.worker.process" in one.cmdline()]
    before_s, one_at_a_time = [used_s(one) for one in engines], Lock()

    def kill_busy() -> None:
        with one_at_a_time:
            if all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in engines):
                spent_s = [used_s(one) - at for one, at in zip(engines, before_s, strict=True)]
                engines[spent_s.index(max(spent_s))].kill()

    questions = ["Apples?", "How many pears?", "What is left?", "Who earns?", "Why?", "When is it?"]
    with ThreadPoolExecutor(len(questions)) as threads:
        ids = list(threads.map(lambda one: stream(served, one, kill_busy), questions))
    trees = {one: collector.wait_for_answer(one) for one in ids}
    rows = {row["request_id"]: row for row in logged(served, "retry.request_requeued")}
    assert rows
    for answer_id, tree in trees.items():
        check_times(tree)
        (request,) = tree.named("llm_request")
        assert request.error is None
        assert request.attributes["gen_ai.usage.output_tokens"] == LONG * N
        if answer_id in rows:
            assert rows[answer_id]["trace_id"] == tree.root.trace_id
            check_failover(tree, has_begun=rows[answer_id]["kept_tokens"] > 0)
        else:
            assert len(tree.named("engine")) == 1


def used_s(process: psutil.Process) -> float:
    """Seconds of a processor that it has used."""
    found = process.cpu_times()
    return found.user + found.system


def check_failover(tree: TraceTree, *, has_begun: bool) -> None:
    """The second engine computes the prompt again, and the tokens that had come."""
    lost, second = tree.named("engine")
    assert (lost.error, second.error) == ("engine_lost", None)
    assert len(tree.named("queue")) == 2
    check_order(tree.named("queue")[0], lost, tree.named("queue")[1], second)
    below = [tree.children(one) for one in (lost, second)]
    whole = {"admission", "prefill", "decode"}
    assert {child.name for child in below[0]} == (whole if has_begun else {"admission"})
    assert {child.name for child in below[1]} == whole
    known = [
        sum(child.attributes.get("gyre.prefill.num_tokens", 0) for child in children)
        for children in below
    ]
    prompt = tree.named("llm_request")[0].attributes["gen_ai.usage.input_tokens"]
    assert known[0] == (prompt if has_begun else 0)
    assert known[1] >= prompt + has_begun  # more where siblings found no room beside the first


def test_what_ended_last_is_sent_before_the_server_ends(collector, served) -> None:
    answer = ask(served).json()
    served.process.terminate()
    served.process.wait(60)
    collector.wait_for_answer(answer["id"])
    assert logged(served, "drop.spans") == []
