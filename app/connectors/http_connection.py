"""One connection to an HTTP/1.1 server, and one answer at a time on it. Everything that a server sends is bounded.

| what a server may send without end                | bound                                                          |
|---------------------------------------------------|----------------------------------------------------------------|
| informational answers (1xx)                       | RESPONSE_INFORMATIONAL_MAX, and the bytes of the head          |
| status line and headers                           | RESPONSE_HEADER_BYTES_MAX, RESPONSE_HEADERS_MAX                |
| chunk sizes, chunk extensions, trailers           | RESPONSE_FRAMING_BYTES_MAX and some bytes for each of the body |
| the body                                          | its reader bounds it; what is not read is not fetched          |
| all of it, as fast or as slowly as it likes       | the caller's time; its share of the loop (app.connectors.intake) |

httptools (llhttp, strict) parses. Bytes that come while nothing was asked spoil the connection: HTTP/1.1 has no ids, so
they would pass for the next request's answer.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from typing import Final, Protocol, cast

import httptools

from app.connectors.intake import Intake, Stream
from app.core.limits import (
    READ_AHEAD_BYTES_MAX,
    READ_STEP_BYTES,
    RESPONSE_FRAMING_BYTES_MAX,
    RESPONSE_FRAMING_BYTES_PER_BYTE,
    RESPONSE_HEADER_BYTES_MAX,
    RESPONSE_HEADERS_MAX,
    RESPONSE_INFORMATIONAL_MAX,
)

_BEGINNING: Final = b"HTTP/"
_BODILESS: Final = frozenset({204, 304})


class HttpFailure(Exception):
    """No answer, or no whole one, in words that hold nothing of what was sent."""


class NotConnected(HttpFailure):
    """There is no connection: certainly nothing was sent."""


class SendingWithheld(HttpFailure):
    """The caller did not want it sent after all: certainly nothing was."""


class Disconnected(HttpFailure):
    """The server ended the connection."""


class NotHttp(HttpFailure):
    """What the server sent is not HTTP/1.1, or more of it than is read."""


class Sending(Protocol):
    """Told before the first byte of a request is given to the socket: until then, certainly nothing was sent."""

    may_be_sent: bool


class Connection(asyncio.Protocol):
    """Owned by one request at a time. `answering` is set from the request to the end of its answer."""

    def __init__(self) -> None:
        self.answering: Answer | None = None
        self.idle_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._readable: select.poll | None = None
        self._received: deque[bytes | memoryview] = deque()
        self._received_bytes = 0
        self._is_paused = False
        self._end: str | None = None
        self._arrival: asyncio.Future[None] | None = None

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if transport.get_extra_info("ssl_object") is None:
            # Records of TLS (a new ticket) may wait in a sound connection; of plain TCP, only an end or unasked bytes.
            self._readable = select.poll()
            self._readable.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self.answering is None:
            self._end = self._end or "the server spoke unasked"
            self.drop()
            return
        self._received.append(data)
        self._received_bytes += len(data)
        if self._received_bytes >= READ_AHEAD_BYTES_MAX:
            self.pause()
        self._wake()

    def eof_received(self) -> None:
        self._ended("the server closed the connection")

    def connection_lost(self, error: Exception | None) -> None:
        self._ended("the server closed the connection" if error is None else type(error).__name__)

    # What requests do.

    def is_fresh(self) -> bool:
        """Whether a request may be written: it is open, and nothing came without a request."""
        if self._transport is None or self._end is not None or self._transport.is_closing() or self._received:
            return False
        return self._readable is None or not self._readable.poll(0)

    def ask(self, request: bytes, sending: Sending | None, intake: Intake) -> Answer:
        """Write the request, once; its answer is to be read. Raises NotConnected when nothing was written."""
        if self._transport is None or self._end is not None or self._transport.is_closing():
            raise NotConnected(self._end or "the connection is closed")
        self.answering = Answer(self, intake.stream())
        if sending is not None:
            sending.may_be_sent = True
        self._transport.write(request)
        return self.answering

    def is_reusable(self) -> bool:
        """Whether the answer is over, and the connection as it was before the request."""
        transport, answer = self._transport, self.answering
        if transport is None or answer is None or self._end is not None or transport.is_closing():
            return False
        answer.read_on_without_waiting()
        is_clean = answer.is_complete and answer.keeps_alive and not self._received
        return is_clean and transport.get_write_buffer_size() == 0

    def rest(self) -> None:
        """Nothing is asked any more."""
        self.answering = None
        self.resume()

    def drop(self) -> None:
        """Close at once; what was not yet written is not."""
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    async def arrival(self) -> None:
        """Return as soon as there are bytes, or none will come."""
        if self._received or self._end is not None:
            return
        self.resume()
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            await self._arrival
        finally:
            self._arrival = None

    def take(self) -> bytes | memoryview:
        """The next bytes, at most READ_STEP_BYTES; empty when there are none now."""
        if not self._received:
            return b""
        first = self._received.popleft()
        if len(first) > READ_STEP_BYTES:
            whole = memoryview(first)
            first = whole[:READ_STEP_BYTES]
            self._received.appendleft(whole[READ_STEP_BYTES:])
        self._received_bytes -= len(first)
        return first

    @property
    def end(self) -> str | None:
        """How the connection ended; None while it lasts or bytes are left."""
        return None if self._received else self._end

    def _ended(self, why: str) -> None:
        self._end = self._end or why
        self._wake()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class Answer:
    """The answer to one request, as far as it was read. Its `on_...` methods are called by the parser."""

    def __init__(self, connection: Connection, stream: Stream) -> None:
        self.stream = stream  # its reader accounts here for the work on what was read
        self.status = 0
        self.reason = ""
        self.headers: dict[str, str] = {}  # the first of each name, in lower case
        self.is_complete = False
        self.keeps_alive = False
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._beginning = self._reason = b""
        self._has_head = False
        self._header_count = self._informational_count = 0
        self._head_bytes = self._framing_bytes = self._body_bytes = 0
        self._body: list[bytes] = []
        self._failure: HttpFailure | None = None

    async def head(self) -> None:
        """Read until status and headers are known. Raises HttpFailure."""
        while not self._has_head:
            if self._failure is not None:
                raise self._failure
            await self._read_on()

    async def read_some(self) -> bytes:
        """The next bytes of the body; empty at its end. Raises HttpFailure after the last that came."""
        while not self._body:
            if self.is_complete:
                return b""
            if self._failure is not None:
                raise self._failure
            await self._read_on()
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def read_on_without_waiting(self) -> None:
        """Take one step of what has already come: most answers whose reader has left are over with it."""
        if not self.is_complete and self._failure is None:
            self._parse(self._connection.take())

    async def _read_on(self) -> None:
        connection = self._connection
        if self.stream.must_rest():
            connection.pause()
        await self.stream.turn()
        await connection.arrival()
        with self.stream:
            if (end := connection.end) is not None:
                self._conclude(end)
            else:
                self._parse(connection.take())

    def _conclude(self, end: str) -> None:
        # A body that is framed by nothing but the end of the connection is complete when that ends, in whatever way.
        if self._has_head and not self._is_framed():
            self.is_complete = True
        else:
            self._failure = Disconnected(end)

    def _is_framed(self) -> bool:
        coding = self.headers.get("transfer-encoding")
        if coding is not None:
            return coding.rpartition(",")[2].strip().lower() == "chunked"
        return "content-length" in self.headers or self.status in _BODILESS

    def _parse(self, data: bytes | memoryview) -> None:
        body_bytes = self._body_bytes
        if len(self._beginning) < len(_BEGINNING):
            self._beginning += bytes(data[: len(_BEGINNING) - len(self._beginning)])
            if not _BEGINNING.startswith(self._beginning):  # the parser would also take RTSP and ICE
                self._failure = NotHttp("not HTTP")
                return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # After the end of the answer: bytes that belong to no request.
            self.keeps_alive = False
            cause = error.__context__
            if not self.is_complete:
                self._failure = cause if isinstance(cause, NotHttp) else NotHttp(f"not HTTP: {_worded(error)}")
            return
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > RESPONSE_HEADER_BYTES_MAX:
                self._failure = NotHttp(f"more than {RESPONSE_HEADER_BYTES_MAX} bytes before the body")
            return
        self._framing_bytes += len(data) - (self._body_bytes - body_bytes)
        framing_max = RESPONSE_FRAMING_BYTES_MAX + RESPONSE_FRAMING_BYTES_PER_BYTE * self._body_bytes
        if self._framing_bytes > framing_max + RESPONSE_HEADER_BYTES_MAX:  # the head's last bytes are among them
            self._failure = NotHttp("more framing than body")

    # What the parser calls; what is raised ends the parsing.

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise NotHttp("more than one answer")

    def on_status(self, part: bytes) -> None:
        self._reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > RESPONSE_HEADERS_MAX:
            raise NotHttp(f"more than {RESPONSE_HEADERS_MAX} headers")
        if not self._has_head:  # else a trailer, which nothing asks for
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._informational_count += 1
            if self._informational_count > RESPONSE_INFORMATIONAL_MAX:
                raise NotHttp(f"more than {RESPONSE_INFORMATIONAL_MAX} informational answers")
            self.headers.clear()
            self._reason = b""
            return
        if status < 200:
            raise NotHttp("the server wanted to switch protocols" if status == 101 else f"not HTTP: status {status}")
        self.status = status
        self.reason = self._reason.decode("latin-1")
        self._has_head = True

    def on_body(self, part: bytes) -> None:
        self._body.append(part)
        self._body_bytes += len(part)

    def on_message_complete(self) -> None:
        if self._has_head:
            self.is_complete = True
            self.keeps_alive = self._parser.should_keep_alive()


def _worded(error: Exception) -> str:
    return type(error).__name__ if not error.args else f"{error.args[0]}"
