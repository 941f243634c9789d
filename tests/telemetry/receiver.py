"""A collector: OTLP over HTTP, protobuf, as the specification says it; nothing of the gateway's reads here."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    resource: dict[str, Any]


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    status: int = 200

    def of(self, **wanted: Any) -> list[Span]:
        return [one for one in self.spans if all(one.attributes.get(name) == value for name, value in wanted.items())]

    def until(self, condition: Callable[[], object], *, patience_s: float = 60) -> None:
        ends = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < ends, [span.name for span in self.spans]
            time.sleep(0.02)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def _attributes(found: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in found}


def read(raw: bytes) -> list[Span]:
    request = ExportTraceServiceRequest.FromString(raw)
    return [
        Span(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code == 2,
            _attributes(span.attributes),
            [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
            _attributes(of_resource.resource.attributes),
        )
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raw = gzip.decompress(raw)
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            if collector.status == 200:
                collector.bodies.append(raw)
                collector.spans += read(raw)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return None

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
