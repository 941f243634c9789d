"""Spans as bytes: what protobuf's own classes read from them is what was said; and where they are sent."""

from __future__ import annotations

import random
import socket
import threading
import time
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from app import __version__
from app.core.errors import SettingInvalid
from app.core.instruments import Instruments
from app.edge.otlp import CLIENT, CONSUMER, INTERNAL, SERVER, OtlpSender, OtlpSettings, Place, Span, Value, encoded
from app.edge.spans import SpanQueue, Spans, spans_over_otlp
from tests.telemetry.receiver import collecting

KINDS = {
    INTERNAL: SpanKind.INTERNAL,
    SERVER: SpanKind.SERVER,
    CLIENT: SpanKind.CLIENT,
    CONSUMER: SpanKind.CONSUMER,
}
RESOURCE: dict[str, Any] = {"service.name": "tga-gateway", "a": "ä€𝄞", "n": 7, "is": True}
TEXTS = ["", "x", "ä€𝄞", "a\nb", "\x00", "z" * 127, "z" * 128, "é" * 70_000]
NUMBERS = [0, 1, 127, 128, 2**31, 2**63 - 1, -1, -(2**63)]


def _value(chance: random.Random) -> Value:
    values: list[Value] = [*TEXTS, *NUMBERS, True, False]
    return chance.choice(values)


def _drawn(chance: random.Random) -> Span:
    def place(*, is_remote: bool = False) -> Place:
        return Place(chance.randrange(1, 2**128), chance.randrange(1, 2**64), chance.randrange(2), is_remote)

    start = chance.randrange(2**62)
    return Span(
        chance.choice(TEXTS),
        place(),
        chance.choice([None, place(), place(is_remote=True)]),
        chance.choice(list(KINDS)),
        start,
        start + chance.randrange(10**12),
        {chance.choice(TEXTS) + str(n): _value(chance) for n in range(chance.randrange(9))},
        [place(is_remote=chance.random() < 0.5) for _ in range(chance.randrange(3))],
        chance.random() < 0.5,
    )


def _as_the_sdk_says_it(span: Span) -> ReadableSpan:
    def context(place: Place) -> SpanContext:
        return SpanContext(place.trace_id, place.span_id, place.is_remote, TraceFlags(place.flags))

    return ReadableSpan(
        span.name,
        context(span.place),
        None if span.parent is None else context(span.parent),
        Resource(RESOURCE),
        span.attributes,
        links=[Link(context(one)) for one in span.links],
        kind=KINDS[span.kind],
        status=Status(StatusCode.ERROR) if span.is_error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("tga_gateway", __version__),
    )


def test_the_bytes_say_what_the_sdks_own_exporter_would() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    spans = [_drawn(chance) for _ in range(60)]
    ours = ExportTraceServiceRequest.FromString(encoded(spans, RESOURCE, "tga_gateway"))
    theirs: Any = encode_spans([_as_the_sdk_says_it(span) for span in spans])
    # The SDK leaves the flags of W3C out of `flags`, whose first byte trace.proto says they are.
    for said, span in zip(theirs.resource_spans[0].scope_spans[0].spans, spans, strict=True):
        said.flags |= span.place.flags
        if not span.is_error:
            said.ClearField("status")  # empty: as good as none
        for link, place in zip(said.links, span.links, strict=True):
            link.flags |= place.flags
    assert ours == theirs


def test_what_cannot_be_written_as_utf8_is_replaced_and_loses_nothing_else() -> None:
    span = Span("half \ud800", Place(1, 2), None, INTERNAL, 1, 2, {"a": "\udfff", "b": "whole"})
    read = ExportTraceServiceRequest.FromString(encoded([span], {}, "tga_gateway"))
    (found,) = read.resource_spans[0].scope_spans[0].spans
    assert found.name == "half ?"
    assert {one.key: one.value.string_value for one in found.attributes} == {"a": "?", "b": "whole"}


def test_a_connection_that_ended_meanwhile_is_made_anew_and_a_refusal_is_told() -> None:
    body = encoded([Span("one", Place(1, 2), None, INTERNAL, 1, 2, {})], {}, "tga_gateway")
    with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_HEADERS": "x-team=a%20b, authorization=Bearer%20k"}
        sender = OtlpSender(OtlpSettings.of(collector.url, environment), timeout_s=60)
        assert sender.send(body)
        connection: Any = sender._connection
        assert connection is not None, "each batch would make a connection of its own"
        connection.sock.shutdown(socket.SHUT_RDWR)
        assert sender.send(body)
        assert [one.name for one in collector.spans] == ["one", "one"]
        collector.status = 503
        assert not sender.send(body)
        sender.close()
    assert not sender.send(body), "nobody listens any more"


@pytest.mark.parametrize(
    ("endpoint", "environment", "url"),
    [
        (None, {}, "http://localhost:4318/v1/traces"),
        ("http://c:1/", {}, "http://c:1/v1/traces"),
        ("http://c:1", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/x"}, "http://c:1/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://e/base"}, "https://e/base/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/x"}, "http://d/x"),
    ],
)
def test_where_it_goes_is_said_as_for_other_exporters(
    endpoint: str | None, environment: dict[str, str], url: str
) -> None:
    settings = OtlpSettings.of(endpoint, {**environment, "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=b%2Cc,=x,d"})
    assert settings.url == url
    assert settings.headers == {"a": "b,c"}
    assert (settings.tls is not None) == url.startswith("https")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "grpc://h:4317", "http://h:x"])
def test_what_is_no_address_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(SettingInvalid):
        OtlpSettings.of(None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url})


class Silent:
    """A receiver that takes connections and never says a word."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        self._listening.close()


def test_a_receiver_that_never_answers_holds_neither_who_puts_nor_who_closes() -> None:
    silent, instruments, clock = Silent(), Instruments(), Any
    _, queue = spans_over_otlp(silent.url, clock, instruments)  # type: ignore[arg-type]
    span = Span("one", Place(1, 2), None, INTERNAL, 1, 2, {})
    began = time.thread_time()
    for _ in range(1000):
        queue.put([span] * 8)
    assert time.thread_time() - began < 5, "putting waits for the receiver"
    ending = threading.Thread(target=queue.close, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive(), "the end of the gateway waits for the receiver"
    silent.close()


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_of_calls_without_a_callers_trace_the_ratio_is_kept(ratio: float) -> None:
    """Their ids are UUIDs, of whose last 64 bits the first two are always the same."""
    spans, queue = spans_over_otlp("http://127.0.0.1:9", Any, Instruments(), ratio=ratio)  # type: ignore[arg-type]
    chance = random.Random(7)
    ids = [chance.randrange(2**128) & ~(3 << 62) | (2 << 62) for _ in range(4000)]
    kept = sum(spans._is_sampled(one, None, "x") for one in ids)
    assert abs(kept / len(ids) - ratio) < 0.05, kept
    told = [Place(one, 1, flags, is_remote=True) for one in ids[:50] for flags in (0, 1)]
    assert [spans._is_sampled(one.trace_id, one, "x") for one in told] == [bool(one.flags) for one in told]
    queue.close()


def test_the_environments_sampler_counts_without_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    spans: Spans
    queue: SpanQueue
    spans, queue = spans_over_otlp("http://127.0.0.1:9", Any, Instruments())  # type: ignore[arg-type]
    assert not spans._is_sampled(1, None, "x")
    assert spans._is_sampled(1, Place(1, 2, 1, is_remote=True), "x")
    queue.close()
