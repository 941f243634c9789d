"""OTLP over HTTP: spans as bytes (opentelemetry-proto 1.x, `trace.proto` and `common.proto`), and where they go.

Written out here because the usual way (an object of the SDK, an object of protobuf, then bytes) takes four times as
long as the gateway needs for the call itself. tests/telemetry/test_otlp.py reads these bytes with protobuf's classes.
"""

from __future__ import annotations

import functools
import gzip
import http.client
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from app import __version__
from app.core.errors import SettingInvalid

Value = str | bool | int | float
INTERNAL, SERVER, CLIENT, CONSUMER = 1, 2, 3, 5  # SpanKind of trace.proto
_ERROR: Final = b"\x7a\x02\x18\x02"  # field 15, a Status: its field 3, the code, is STATUS_CODE_ERROR
_REMOTE_KNOWN, _REMOTE = 0x100, 0x200  # SpanFlags: whether the parent is of another process is known; it is
_DEFAULT_URL: Final = "http://localhost:4318"


class Place(NamedTuple):
    """A span's place: its trace and itself. `is_remote`: it is of another process."""

    trace_id: int
    span_id: int
    flags: int = 1
    is_remote: bool = False


class Span(NamedTuple):
    """A span that has ended. Times are nanoseconds since 1970."""

    name: str
    place: Place
    parent: Place | None
    kind: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    links: Sequence[Place] = ()
    is_error: bool = False


def encoded(spans: Sequence[Span], resource: Mapping[str, object], scope: str) -> bytes:
    """An ExportTraceServiceRequest."""
    about = b"".join(_attribute(b"\x0a", name, _plain(value)) for name, value in resource.items())
    made = _text(b"\x0a", scope) + _text(b"\x12", __version__)
    listed = [_part(b"\x0a", made)]
    listed += [_part(b"\x12", _span(span)) for span in spans]
    scoped = _part(b"\x12", b"".join(listed))
    return _part(b"\x0a", _part(b"\x0a", about) + scoped)


def _span(span: Span) -> bytes:
    place, parent = span.place, span.parent
    parts = [b"\x0a\x10", place.trace_id.to_bytes(16), b"\x12\x08", place.span_id.to_bytes(8)]
    flags = place.flags & 0xFF | _REMOTE_KNOWN
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8))
        flags |= _REMOTE if parent.is_remote else 0
    parts.append(_named(span.name))
    parts += (b"\x30", _SMALL[span.kind], b"\x39", span.start_ns.to_bytes(8, "little"))
    parts += (b"\x41", max(span.start_ns, span.end_ns).to_bytes(8, "little"))
    for name, value in span.attributes.items():
        parts.append(_attribute(b"\x4a", name, value))
    for link in span.links:
        linked = b"\x0a\x10" + link.trace_id.to_bytes(16) + b"\x12\x08" + link.span_id.to_bytes(8)
        marks = (link.flags & 0xFF | _REMOTE_KNOWN | (_REMOTE if link.is_remote else 0)).to_bytes(4, "little")
        parts.append(_part(b"\x6a", linked + b"\x35" + marks))
    if span.is_error:
        parts.append(_ERROR)
    parts += (b"\x85\x01", flags.to_bytes(4, "little"))
    return b"".join(parts)


def _attribute(tag: bytes, name: str, value: Value) -> bytes:
    if type(value) is str:
        raw = value.encode("utf-8", "replace")
        written = b"\x0a" + _length(len(raw)) + raw
    elif type(value) is bool:
        written = b"\x10\x01" if value else b"\x10\x00"
    elif type(value) is int:
        written = b"\x18" + _length(value & 0xFFFF_FFFF_FFFF_FFFF)
    else:
        written = _text(b"\x0a", str(value))
    pair = _key(name) + b"\x12" + _length(len(written)) + written
    return tag + _length(len(pair)) + pair


@functools.cache  # the gateway's own names: a few dozen
def _key(name: str) -> bytes:
    return _text(b"\x0a", name)


@functools.lru_cache(1024)  # phases, and the tools that are called much
def _named(name: str) -> bytes:
    return _text(b"\x2a", name)


def _text(tag: bytes, text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    return tag + _length(len(raw)) + raw


def _part(tag: bytes, raw: bytes) -> bytes:
    return tag + _length(len(raw)) + raw


def _length(number: int) -> bytes:
    if number < 128:
        return _SMALL[number]
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


_SMALL: Final = [bytes([number]) for number in range(128)]


def _plain(value: object) -> Value:
    return value if isinstance(value, str | bool | int | float) else str(value)


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """Where spans go, and how: the standard environment of OTLP exporters, and an endpoint that comes before it."""

    url: str
    headers: Mapping[str, str]
    is_compressed: bool
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, endpoint: str | None, environment: Mapping[str, str] | None = None) -> OtlpSettings:
        values = os.environ if environment is None else environment

        def said(name: str) -> str | None:
            return values.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or values.get(f"OTEL_EXPORTER_OTLP_{name}")

        url = values.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        if endpoint is not None or not url:
            base = endpoint or values.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_URL
            url = base.rstrip("/") + "/v1/traces"
        parts = urlsplit(url)
        try:
            is_fit = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_fit = False
        if not is_fit:
            raise SettingInvalid("the OTLP endpoint is no address", expected="http://host[:port][/path] or https://")
        return cls(url, _headers(said("HEADERS") or ""), said("COMPRESSION") == "gzip", _tls(parts.scheme, said))


class OtlpSender:
    """Sends a request at a time, over one connection that is kept. For one thread."""

    def __init__(self, settings: OtlpSettings, *, timeout_s: float) -> None:
        parts = urlsplit(settings.url)
        self._target = parts.path + (f"?{parts.query}" if parts.query else "")
        self._settings = settings
        self._host, self._port = parts.hostname or "", parts.port
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None

    def send(self, body: bytes) -> bool:
        """Whether the collector took it. It is sent once, but for a kept connection that had ended meanwhile."""
        headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": f"tga-gateway/{__version__}",
            **self._settings.headers,
        }
        if self._settings.is_compressed:
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        was_kept = self._connection is not None
        try:
            return self._sent(body, headers)
        except (OSError, http.client.HTTPException):
            self.close()
            if not was_kept:
                return False
        try:
            return self._sent(body, headers)
        except (OSError, http.client.HTTPException):
            self.close()
            return False

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _sent(self, body: bytes, headers: Mapping[str, str]) -> bool:
        if self._connection is None:
            self._connection = self._connected()
        self._connection.request("POST", self._target, body, dict(headers))
        with self._connection.getresponse() as answer:
            answer.read(65_536)
            if not answer.isclosed():  # more than any collector says: not read to its end
                self.close()
            return 200 <= answer.status < 300

    def _connected(self) -> http.client.HTTPConnection:
        if self._settings.tls is not None:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._settings.tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _headers(written: str) -> dict[str, str]:
    """`name=value,name=value`, values encoded as in URLs."""
    found = {}
    for pair in written.split(","):
        name, equals, value = pair.partition("=")
        if name.strip() and equals:
            found[unquote(name).strip()] = unquote(value).strip()
    return found


def _tls(scheme: str, said: object) -> ssl.SSLContext | None:
    if scheme != "https" or not callable(said):
        return None
    try:
        context = ssl.create_default_context(cafile=said("CERTIFICATE"))
        if said("CLIENT_CERTIFICATE"):
            context.load_cert_chain(said("CLIENT_CERTIFICATE"), said("CLIENT_KEY"))
    except OSError as error:  # ssl.SSLError is one
        raise SettingInvalid(
            "a certificate for the OTLP endpoint cannot be read", found=error.strerror or type(error).__name__
        ) from None
    return context
