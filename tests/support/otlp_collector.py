"""A collector of traces, in a process of its own: it reads OTLP over HTTP with the protobuf classes
of opentelemetry-proto. In: a folder. Out: a URL; each span that came, as plain values.

Run as a script it is that process: FOLDER, then how it answers: "ok", a status, or "hang".
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LONGEST_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    started_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    error: str | None
    flags: int
    state: str
    resource: dict[str, Any]


@dataclass
class TraceTree:
    """One trace, by the ids of parents."""

    spans: list[ReceivedSpan] = field(default_factory=list)

    @property
    def root(self) -> ReceivedSpan:
        own = {span.span_id for span in self.spans}
        (found,) = [span for span in self.spans if span.parent_id not in own]
        return found

    def named(self, name: str) -> list[ReceivedSpan]:
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.started_ns)

    def children(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.started_ns, span.ended_ns))

    def shape(self, parent: ReceivedSpan | None = None) -> Any:
        """The names of the tree, nested, in the order of their times."""
        parent = parent or self.root
        below = [self.shape(child) for child in self.children(parent)]
        return (parent.name, *below) if below else parent.name


@dataclass(frozen=True)
class Collector:
    url: str
    folder: Path

    def spans(self) -> list[ReceivedSpan]:
        path = self.folder / "spans.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text.rpartition("\n")[0]  # the last line may be half written
        return [ReceivedSpan(**json.loads(line)) for line in whole.splitlines()]

    def traces(self) -> dict[str, TraceTree]:
        found: dict[str, TraceTree] = {}
        for span in self.spans():
            found.setdefault(span.trace_id, TraceTree()).spans.append(span)
        return found

    def wait_for(self, true: Callable[[dict[str, TraceTree]], Any]) -> dict[str, TraceTree]:
        """The traces, once they are as asked for."""
        ends = time.monotonic() + LONGEST_S
        while not true(found := self.traces()):
            assert time.monotonic() < ends, [tree.shape() for tree in found.values()]
            time.sleep(0.05)
        return found

    def wait_for_answer(self, answer_id: str) -> TraceTree:
        """The trace of one answer. Its spans come in order, maybe in two batches: the write last."""

        def has(tree: TraceTree) -> bool:
            ids = {span.attributes.get("gen_ai.response.id") for span in tree.spans}
            return answer_id in ids and bool(
                tree.named("stream_write") or tree.named("response_write")
            )

        found = self.wait_for(lambda traces: any(has(tree) for tree in traces.values()))
        (tree,) = [tree for tree in found.values() if has(tree)]
        return tree


@contextlib.contextmanager
def collecting(folder: Path, answers: str = "ok") -> Iterator[Collector]:
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), answers], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Collector(f"http://127.0.0.1:{port}", folder)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(one) for one in value.array_value.values]
    return getattr(value, kind)


def decode(body: bytes) -> Iterator[dict[str, Any]]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        told = {pair.key: plain(pair.value) for pair in resource.resource.attributes}
        for span in (one for scope in resource.scope_spans for one in scope.spans):
            yield {
                "name": span.name,
                "trace_id": span.trace_id.hex(),
                "span_id": span.span_id.hex(),
                "parent_id": span.parent_span_id.hex(),
                "kind": span.kind,
                "started_ns": span.start_time_unix_nano,
                "ended_ns": span.end_time_unix_nano,
                "attributes": {pair.key: plain(pair.value) for pair in span.attributes},
                "error": span.status.message if span.status.code == 2 else None,
                "flags": span.flags,
                "state": span.trace_state,
                "resource": told,
            }


def serve(folder: Path, answers: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if answers == "hang":
                time.sleep(LONGEST_S)
            well = self.path == "/v1/traces" and (
                self.headers["content-type"] == "application/x-protobuf"
            )
            status = int(answers) if answers.isdigit() else 200 if well else 400
            if status == 200:
                lines = "".join(json.dumps(span) + "\n" for span in decode(body))
                with (folder / "spans.jsonl").open("a") as file:
                    file.write(lines)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
