"""The sender against a collector in a process of its own, one that refuses, and none at all."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gyre.core.errors import ConfigError
from gyre.observability.tracing.otlp_sender import LastMessage, OtlpSender, read_endpoint
from gyre.observability.tracing.span_record import SpanMark, SpanRecord
from otlp_collector import collecting

TRACE, PARENT = (1 << 127) + 5, (1 << 63) + 7
SPANS = [
    SpanRecord(
        name="POST /a",
        trace_id=TRACE,
        span_id=2,
        parent_id=PARENT,
        is_parent_remote=True,
        kind="server",
        started_ns=1_700_000_000_000_000_001,
        ended_ns=1_700_000_000_000_000_009,
        attributes={"a.text": "ü", "a.int": 3, "a.float": 0.5, "a.bool": True, "a.list": ("x", "y")},
        marks=(SpanMark(name="mark", at_ns=1_700_000_000_000_000_002),),
        trace_state="vendor=1",
    ),
    SpanRecord(
        name="b", trace_id=TRACE, span_id=3, parent_id=2, started_ns=5, ended_ns=6, error="why"
    ),
]  # fmt: skip


def make(url: str, timeout_s: float = 10.0) -> OtlpSender:
    endpoint = read_endpoint(url, "--otlp-endpoint")
    return OtlpSender(endpoint, service="gyre", attributes={"host.name": "h"}, timeout_s=timeout_s)


def test_a_collector_reads_what_was_sent(tmp_path: Path) -> None:
    with collecting(tmp_path) as collector:
        sender = make(collector.url)
        assert sender.send(SPANS) is None
        sender.close()
        first, second = collector.spans()
    assert first.name == "POST /a" and first.kind == 2
    assert (first.trace_id, first.parent_id) == (f"{TRACE:032x}", f"{PARENT:016x}")
    assert first.started_ns == SPANS[0].started_ns and first.ended_ns == SPANS[0].ended_ns
    assert first.attributes == {**SPANS[0].attributes, "a.list": ["x", "y"]}
    assert first.state == "vendor=1" and first.error is None and first.flags & 0x200
    assert second.parent_id == first.span_id and second.error == "why" and second.kind == 1
    assert first.resource["service.name"] == "gyre" and first.resource["host.name"] == "h"
    assert first.resource["service.version"]


def test_a_refusal_says_why_and_its_log_stays_out_of_ours(tmp_path: Path) -> None:
    seen = LastMessage()
    logging.getLogger().addHandler(seen)
    try:
        with collecting(tmp_path, "400") as collector:
            sender = make(collector.url)
            reason = sender.send(SPANS)
            sender.close()
    finally:
        logging.getLogger().removeHandler(seen)
    assert reason is not None and "400" in reason
    assert seen.text == ""


def test_nobody_at_the_address_says_why(unused_port: int) -> None:
    sender = make(f"http://127.0.0.1:{unused_port}", timeout_s=0.2)
    reason = sender.send(SPANS)
    sender.close()
    assert reason


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://otel.example/v1/traces", "https://otel.example/v1/traces"),
        ("https://otel.example/tenant/a", "https://otel.example/tenant/a/v1/traces"),
    ],
)
def test_the_path_of_the_protocol_is_added(given: str, address: str) -> None:
    assert read_endpoint(given, "--otlp-endpoint") == address


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://a:4317", "http://", "a", ""])
def test_an_address_that_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="need http"):
        read_endpoint(url, "--otlp-endpoint")


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="password") as refused:
        read_endpoint("http://ann:secret@127.0.0.1:4318", "--otlp-endpoint")
    assert "secret" not in f"{refused.value}{refused.value.hint}"


def test_opentelemetry_is_not_imported_before_a_sender_is_made() -> None:
    code = (
        "import sys, gyre.observability.tracing.otlp_sender as sender\n"
        "import gyre.observability.tracing.span_queue, gyre.server.tracing.traced_app\n"
        "sender.read_endpoint('http://127.0.0.1:4318', '')\n"
        "sys.exit(any(name.startswith('opentelemetry.sdk.trace') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
