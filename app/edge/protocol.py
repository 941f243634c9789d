"""HTTP/1.1 as uvicorn speaks it, with bounds on what a client may send before anyone looks at it.

Bounded: bytes of request line and headers, time until they and the body are there, requests sent ahead of their
answers, trailers, what is read of a body that no route wants. Whatever is refused here is answered as a problem too,
after the answers to what came before it on the same connection.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import httptools
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.core.errors import (
    GatewayBusy,
    HeadersTooLarge,
    InputMalformed,
    RequestTimeout,
    ShuttingDown,
    TgaError,
    TooManyInFlight,
)
from app.core.limits import (
    BLOB_BODY_BYTES_MIN,
    BODY_WAIT_MS,
    CONNECTIONS_MAX,
    DISCARDED_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_WAIT_MS,
    KNOWN_HEAD_TRIES,
    LINGER_MS,
    LINGER_MS_MAX,
    PIPELINED_REQUESTS_MAX,
)
from app.edge.known_head import KnownHead
from app.edge.problems import problem

_VERSIONS = ("1.1", "1.0")
LONG_BODY: Final = "tga.long_body"  # in the scope, set by a route: its body may take longer, while it keeps coming
ANSWER_WHOLE: Final = "tga.answer_whole"  # in the scope: for an answer whose status, headers and body are all there
CONNECTION: Final = "tga.connection"  # in the scope: the BoundedProtocol, for code that is to be told when it is lost
TRANSPORT: Final = "tga.transport"  # in the scope: for code that must know whether its answer arrived
_HOP_BY_HOP = frozenset({b"connection", b"upgrade", b"http2-settings"})


class _AnswerFirst:
    """The transport as the framework sees it. Closing it while the client still sends would destroy the answer that was
    just written: a reset reaches the client before what it has not read yet.

    The framework writes an answer's head and then its body. They go out together, with one system call, and wake the
    client once, if the body comes before the loop turns; a head whose body comes later goes out by itself.
    """

    __slots__ = ("_close", "_head", "_later", "_loop", "_transport", "get_extra_info", "is_closing")

    def __init__(
        self, transport: asyncio.Transport, close: Callable[[], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        # Set here for good.
        self._transport = transport
        self._close = close
        self._loop = loop
        self.is_closing = transport.is_closing
        self.get_extra_info = transport.get_extra_info
        # A head that was given and is not written yet, and what writes it when the loop turns.
        self._head: bytes | None = None
        self._later: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        head = self._head
        if head is not None:
            self._forget()
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/"):
            self._head = data
            self._later = self._loop.call_soon(self._write_head)
        else:
            self._transport.write(data)

    def write_whole(self, data: bytes) -> None:
        """Head and body of an answer that was not begun; `100 Continue` may be given and not written yet."""
        self._write_head()
        self._transport.write(data)

    def close(self) -> None:
        self._write_head()
        self._close()

    def _write_head(self) -> None:
        head = self._head
        if head is not None:
            self._forget()
            self._transport.write(head)

    def _forget(self) -> None:
        self._head = None
        if self._later is not None:
            self._later.cancel()
            self._later = None


def _answer_whole(
    cycle: RequestResponseCycle,
    transport: _AnswerFirst,
    send: Send,
    status: int,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
) -> bool:
    """As the cycle's two messages do, at once, for headers of our own that need no looking at, Content-Length among
    them. False when nothing was written: tell `send`, which knows how to wait, or is a layer that adds to answers."""
    if send != cycle.send or cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    lines = [STATUS_LINE[status]]
    for name, value in (*cycle.default_headers, *headers):
        lines += (name, b": ", value, b"\r\n")
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    lines += (b"\r\n", body)
    transport.write_whole(b"".join(lines))
    cycle.message_event.set()
    if not cycle.keep_alive:
        transport.close()
    cycle.on_response()
    return True


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A request that arrives whole in one piece costs no timer and two comparisons."""

    # Class attributes: a subclass may have other times.
    headers_wait_ms = HEADERS_WAIT_MS
    body_wait_ms = BODY_WAIT_MS
    linger_ms = LINGER_MS
    linger_ms_max = LINGER_MS_MAX
    connections_max = CONNECTIONS_MAX
    # Of one process of several. `on_lost` is told of every connection that is gone; `take_over`, while it is set, takes
    # connections between two requests: the descriptor, and whether there was a request before.
    on_lost: Callable[[], None] | None = None
    take_over: Callable[[int, bool], None] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arrival: asyncio.TimerHandle | None = None
        self._is_arriving = False  # a message has begun and is not whole
        self._has_headers = False  # of that message
        self._head_bytes = 0  # received while headers were incomplete
        self._body_bytes = 0  # of a body, since its time was last looked at
        self._idle_bytes = 0  # received since the last byte of a body: trailers, and what stands between chunks
        self._discarded_bytes = 0
        self._discarded_at = 0.0  # when something was, last
        self._refusal: TgaError | None = None
        self._last_words: bytes | None = None
        self._is_over = False  # whatever still comes is not looked at
        self._goes_on = False  # set by `go_on`
        self._idle_since_s = math.inf  # since when the next request is waited for; not at all while it is infinite
        self._known_head: KnownHead | None = None  # of the last request that came in one piece
        self._tries_left = KNOWN_HEAD_TRIES  # to keep another one; given back by each request that has the kept one
        self._is_lost = False  # set by `connection_lost`, which tells these
        self._told_when_lost: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answer_first = _AnswerFirst(transport, self._close_after_answer, self.loop)
        beyond = len(self.connections) - self.connections_max
        if beyond > 0:
            self._refuse(GatewayBusy("the gateway has as many connections as it takes", expected=self.connections_max))
            if beyond > self.connections_max // 16:
                self._hang_up()  # connections that linger are bounded too
            return
        # Also for clients that connect and send nothing.
        self._watch(self.headers_wait_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._is_over = True
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        super().connection_lost(exc)
        self._is_lost = True
        while self._told_when_lost:
            self._told_when_lost.pop()()
        if self.on_lost is not None:
            self.on_lost()

    def tell_when_lost(self, callback: Callable[[], None]) -> None:
        """Call this when the client's connection is over, at once if it is; until `tell_no_more`. It may not raise."""
        if self._is_lost:
            callback()
        else:
            self._told_when_lost.add(callback)

    def tell_no_more(self, callback: Callable[[], None]) -> None:
        self._told_when_lost.discard(callback)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._discard(len(data))
            return
        is_first = self._is_between_requests()
        if is_first and self._known_head is not None:
            body = self._known_head.body_of(data)
            if body is not None:
                self._begin_known(self._known_head, data, body)
                return
        self._unset_keepalive_if_required()
        if self._has_headers:
            self._idle_bytes += len(data)
        else:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or _not_http())
            return
        if self._is_arriving:
            self._verify_arrival()
        elif self._arrival is None and not self._is_answering():
            self._watch(self.headers_wait_ms)  # empty lines are not a request, and end the keep-alive's wait
        elif is_first and self._tries_left > 0:
            self._tries_left -= 1
            self._known_head = KnownHead.of(data, self.cycle.body, self.scope)

    def _is_between_requests(self) -> bool:
        """Whether what comes now is the beginning of a request, which will be answered at once."""
        cycle: RequestResponseCycle | None = self.cycle
        return not self._is_arriving and (cycle is None or (cycle.response_complete and self._arrival is None))

    def _begin_known(self, known: KnownHead, data: bytes, body: bytes) -> None:
        """As the parser's callbacks do, of a request that is whole and whose head they have seen."""
        self._unset_keepalive_if_required()
        self._tries_left = KNOWN_HEAD_TRIES
        self.scope = scope = known.scope_for(body, data)  # type: ignore[assignment]
        self.cycle = cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self._answer_first,  # type: ignore[arg-type]
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.body += body
        cycle.more_body = False
        cycle.message_event.set()
        scope[ANSWER_WHOLE] = partial(_answer_whole, cycle, self._answer_first)
        self._start_asgi_task(cycle, self.app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[TRANSPORT] = self.transport  # type: ignore[typeddict-unknown-key]
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        self._is_arriving, self._has_headers = True, False

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body would be taken for another protocol's bytes: see _ignore_upgrade
        if self.parser.get_http_version() not in _VERSIONS:
            self._give_up(_not_http())
        self._verify_head()
        if len(self.pipeline) >= PIPELINED_REQUESTS_MAX:
            self._give_up(TooManyInFlight("too many requests ahead of their answers", expected=PIPELINED_REQUESTS_MAX))
        super().on_headers_complete()
        self.cycle.transport = self._answer_first  # type: ignore[assignment]
        self.scope[ANSWER_WHOLE] = partial(_answer_whole, self.cycle, self._answer_first)  # type: ignore[typeddict-unknown-key]
        self._has_headers = True
        self._head_bytes = self._idle_bytes = self._body_bytes = 0
        # Drop trailers: the parser reports them like headers, but the request was authenticated without them.
        self.headers = []
        if self._arrival is not None:
            self._unwatch()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > DISCARDED_BYTES_MAX:
                self._is_over = True
                self._hang_up()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_arriving = self._has_headers = False
        self._head_bytes = self._discarded_bytes = 0
        if self._arrival is not None:
            self._unwatch()
        if self.parser.should_upgrade():
            return
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._last_words is not None and not self.pipeline:
            self._say_last_words()
            return
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._await_next_request()
        if self.take_over is not None:
            # Not here: the answer that has just been completed may still be in the transport's buffer.
            self.loop.call_soon(self.hand_over_if_idle)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to be done here for a new request: an answer is under way, or it was the last one."""
        return self._is_over or self._is_answering()

    def go_on(self) -> None:
        """Of a connection that another process has served: the client may take its time until its next request."""
        self._goes_on = True
        if self.cycle is None and not self._is_arriving and not self._head_bytes and not self._is_over:
            self._unwatch()
            self._await_next_request()

    def hand_over_if_idle(self) -> None:
        """Give the connection to `take_over`, if not a byte of a request has been read and every answer is sent. What
        the client sends meanwhile stays in the kernel, for whoever reads next."""
        if self.take_over is None or self._is_over or self.transport.is_closing() or self._is_answering():
            return
        if self._is_arriving or self._head_bytes or self.pipeline or self.transport.get_write_buffer_size():
            return
        try:
            descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError:  # there is none to be had now; it is tried again
            return
        self._unwatch()
        self._unset_keepalive_if_required()
        self._is_over = True
        self.transport.pause_reading()
        self.take_over(descriptor, self.cycle is not None or self._goes_on)
        self.transport.abort()  # closes this descriptor alone: the connection has the other

    def shutdown(self) -> None:
        if self._is_answering() and self.cycle.more_body and not self._is_over:
            self._refuse(ShuttingDown("the gateway is stopping"))  # the rest of its request is not waited for
        else:
            super().shutdown()

    def _await_next_request(self) -> None:
        """The client may take its time from now on. The timer of an earlier wait goes on, and looks then how long it
        has really been: setting and cancelling one for every request would cost more than looking now and then."""
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_at_idleness_in(self.timeout_keep_alive)

    def _look_at_idleness_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since_s = math.inf

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s <= 0:
            self._is_over = True
            self._hang_up()
        elif left_s < math.inf:
            self._look_at_idleness_in(left_s)

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        return cycle is not None and not cycle.response_complete

    def _verify_arrival(self) -> None:
        if max(self._head_bytes, self._idle_bytes) > HEADER_BYTES_MAX:
            self._refuse(_headers_too_large())
        elif self._arrival is None:
            self._watch(self.body_wait_ms if self._has_headers else self.headers_wait_ms)

    def _watch(self, wait_ms: int) -> None:
        self._arrival = self.loop.call_later(wait_ms / 1000, self._arrived_too_late)

    def _unwatch(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _arrived_too_late(self) -> None:
        self._arrival = None
        wait_ms = self.body_wait_ms if self._has_headers else self.headers_wait_ms
        if self.flow.read_paused:
            self._watch(wait_ms)  # the gateway has paused reading; the client is not slow
        elif self._is_long_and_coming():
            self._body_bytes = 0
            self._watch(wait_ms)
        elif not self._is_arriving or (self._has_headers and self.cycle.response_complete):
            self._is_over = True
            self._hang_up()  # nothing was asked, or all of it is answered
        else:
            part = "body" if self._has_headers else "request line and headers"
            self._refuse(RequestTimeout(f"the {part} did not arrive in time", expected=f"within {wait_ms} ms"))

    def _is_long_and_coming(self) -> bool:
        return (
            self._is_arriving
            and self._has_headers
            and not self.cycle.response_complete
            and LONG_BODY in self.scope
            and self._body_bytes >= BLOB_BODY_BYTES_MIN
        )

    def _verify_head(self) -> None:
        """What others on the way may read differently is refused (RFC 9112, 3.2 and 6.1): no host or several, and a
        body in any coding but `chunked`, once. The parser takes codings that nobody here undoes. So is too much."""
        hosts, codings, size = 0, [], len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value.strip(b" \t").lower())
        if hosts != 1 and (hosts > 1 or self.parser.get_http_version() == "1.1"):
            self._give_up(InputMalformed("not one Host", expected="the header Host, once", found=hosts))
        if codings and codings != [b"chunked"]:
            self._give_up(InputMalformed("a transfer coding that is not known", expected="only `chunked`, once"))
        if size > HEADER_BYTES_MAX:
            self._give_up(_headers_too_large())

    def _give_up(self, error: TgaError) -> None:
        self._refusal = error
        raise error  # within a callback: the parser stops, and `feed_data` raises

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve the request as if it had not asked for another protocol: a server may (RFC 9110, 7.8). Some clients
        ask for HTTP/2 with every first request, and that request may have a body."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode("ascii")
        if method == b"CONNECT":
            self._refuse(InputMalformed("no tunnels here", remedy="See /openapi.json for what there is."))
            return
        head = [method, b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name not in _HOP_BY_HOP:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _refuse(self, error: TgaError) -> None:
        """Answer what cannot be a request with a problem, in its turn, and hang up."""
        self._unwatch()
        self._is_over = True
        self._last_words = _answer(error, self.server_state.default_headers)
        cycle = self.cycle
        if self._is_answering() and cycle.more_body:
            # The broken request is the last that was begun: do not wait for the rest of it.
            cycle.disconnected = True
            cycle.message_event.set()
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            elif cycle.response_started:
                self.transport.close()
                return
            else:
                self._say_last_words()
                return
        if not self._is_answering():
            self._say_last_words()

    def _say_last_words(self) -> None:
        """Write, say that no more comes, and listen a little longer: closing at once would destroy what was written
        if the client is still sending."""
        if self.transport.is_closing() or self._last_words is None:
            return
        self._unset_keepalive_if_required()
        self.transport.write(self._last_words)
        self._last_words = None
        self._discarded_bytes = 0
        self._linger()

    def _close_after_answer(self) -> None:
        """The answer is written and the connection is to end, but the client may still be sending its request."""
        if not self._is_arriving:
            self.transport.close()
            return
        self._unwatch()
        self._is_over = True
        self._linger()

    def _linger(self) -> None:
        """Say that no more comes, and read on without looking until the client closes, so that the answer arrives. It
        has as long as any body has to arrive, if it does not fall silent (`linger_ms`), and DISCARDED_BYTES_MAX."""
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._discarded_at = self.loop.time()
        self._listen_on(until=self._discarded_at + self.linger_ms_max / 1000)

    def _listen_on(self, *, until: float) -> None:
        at = min(self._discarded_at + self.linger_ms / 1000, until)
        if self.loop.time() >= at:
            self._hang_up()
        else:
            self._arrival = self.loop.call_at(at, partial(self._listen_on, until=until))

    def _hang_up(self) -> None:
        """Close; and a little later for good, also when the client does not take what is still buffered."""
        self._unwatch()
        self.transport.close()
        self._arrival = self.loop.call_later(LINGER_MS / 1000, self.transport.abort)

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        self._discarded_at = self.loop.time()
        if self._discarded_bytes > DISCARDED_BYTES_MAX:
            self._hang_up()


def _not_http() -> InputMalformed:
    return InputMalformed("not HTTP/1.1", remedy="Send well-formed HTTP/1.1.")


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge("request line and headers are too large", expected=f"at most {HEADER_BYTES_MAX} bytes")


def _answer(error: TgaError, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    response = problem(error, headers={"Connection": "close"})
    lines = [STATUS_LINE[response.status_code]]
    for name, value in [*default_headers, *response.raw_headers]:
        lines += [name, b": ", value, b"\r\n"]
    return b"".join([*lines, b"\r\n", bytes(response.body)])
