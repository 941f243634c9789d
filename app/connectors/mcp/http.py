"""An MCP server over streamable HTTP: every request is one POST, answered by JSON or by a stream of events.

A POST is never repeated: neither by a redirect, nor after a broken connection. When the stream of its answer breaks off
and the server numbers its events (2025-11-25), the rest is asked for with a GET that names the last event: that reads
the answer on, and sends nothing again.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, Final

from yarl import URL

from app.connectors.answers import DETAIL_CHARS_MAX, plain, retry_after_ms
from app.connectors.credentials import Credentials, CredentialUnavailable
from app.connectors.http_client import HttpPool, Origin
from app.connectors.http_connection import Answer, HttpFailure, NotConnected, SendingWithheld
from app.connectors.mcp.large import Arriving, Large, Unasked
from app.connectors.mcp.sse import Event, TooMuchUnasked, events
from app.connectors.mcp.wire import (
    CANCELLED,
    WITHHELD,
    Heard,
    Inbox,
    NotAMessage,
    Outgoing,
    Oversize,
    Refusal,
    Reply,
    Silence,
    bytes_read_whole,
    read_large,
    read_message,
    written_notification,
)
from app.core.limits import MCP_ANSWER_MS, MCP_RETRY_MS_MAX, RESPONSE_BYTES_READ_MAX
from app.domain.tga.ports import MaySend

SESSION: Final = "Mcp-Session-Id"
_ACCEPT: Final = {"Accept": "application/json, text/event-stream"}
_JSON: Final = {"Content-Type": "application/json"}
_RETRY_MS: Final = 1_000
_SESSION_CHARS_MAX: Final = 1_024


class HttpLink:
    """Speaks to one address. With a session (protocols until 2025-11-25) it is lost when the server forgets it."""

    def __init__(self, url: str, inbox: Inbox, *, pool: HttpPool, credentials: Credentials) -> None:
        address = URL(url, encoded=True)
        self._origin = Origin.of(address)
        self._target = address.raw_path_qs
        self._inbox = inbox
        self._pool = pool
        self._credentials = credentials
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asides: set[asyncio.Task[None]] = set()
        self.session_id: str | None = None
        self.headers: dict[str, str] = {}  # on everything that is sent
        self.is_cancelled_by_closing = False  # 2026-07-28: there are no notifications to the server

    async def request(self, outgoing: Outgoing, *, timeout_s: float | None) -> Heard:
        body = outgoing.written()
        exchange = _Exchange()
        self._inbox.watch(outgoing)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(outgoing, body, exchange)
        except asyncio.CancelledError:
            if exchange.may_be_sent:
                self._tell_abandoned(outgoing.request_id)
            raise
        except CredentialUnavailable as error:
            return Silence("not_sent", f"no credential: {error}")
        except SendingWithheld:
            return WITHHELD
        except Exception as error:  # whatever a server made of it, what is known must be told
            return self._silence(outgoing, exchange, error, timeout_s)
        finally:
            self._inbox.unwatch(outgoing)

    async def listen(self) -> int:
        """Read what the server says of its own accord (a GET) until it ends; the status with which it began."""
        async with self._get({}) as answer:
            if answer.status == HTTPStatus.OK and _is_events(answer):
                unasked = Unasked()
                async for event in events(answer, unasked):
                    self._take_event(event)
                    if unasked.note(_size(event)):
                        break
            return answer.status

    async def notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        await self._post_aside(written_notification(method, params))

    async def abandon(self, request_id: int) -> bool:
        self._tell_abandoned(request_id)
        return not self.is_cancelled_by_closing

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    def lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)

    async def close(self) -> None:
        self.lose("it was stopped")
        for task in list(self._asides):
            task.cancel()
        await asyncio.gather(*self._asides, return_exceptions=True)
        if self.session_id is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(1), self._send("DELETE", self._headers({})):
                    pass

    async def _exchange(self, outgoing: Outgoing, body: bytes, exchange: _Exchange) -> Heard:
        # A redirect is not followed: that would be a second POST.
        sent = self._send("POST", self._headers(outgoing.headers) | _JSON, body, exchange, outgoing.may_send)
        async with sent as answer:
            exchange.status = answer.status
            if answer.status == HTTPStatus.OK:
                self._note_session(outgoing, answer)
                if _is_events(answer):
                    heard = await self._read_events(answer, outgoing, exchange)
                else:
                    heard = await self._read_body(answer, outgoing)
            elif answer.status >= 400:
                heard = await self._read_body(answer, outgoing)
            else:
                heard = _refusal(answer)
        while heard is None:
            heard = await self._read_on(outgoing, exchange)
        return heard

    async def _read_body(self, answer: Answer, outgoing: Outgoing) -> Heard:
        arriving = Arriving()
        bytes_max = RESPONSE_BYTES_READ_MAX if answer.status == HTTPStatus.OK else bytes_read_whole(outgoing.method)
        while chunk := await answer.read_some():
            async for _ in answer.stream.paced(arriving.take(chunk)):
                pass
            if arriving.size_bytes > bytes_max:
                large = arriving.large
                return Oversize(large) if large is not None and answer.status == HTTPStatus.OK else _refusal(answer)
        try:
            heard = _read(arriving.end(), outgoing)
        except NotAMessage:
            return _refusal(answer)
        if isinstance(heard, Oversize):
            return heard if answer.status == HTTPStatus.OK else _refusal(answer)
        if heard is None or (answer.status != HTTPStatus.OK and heard.message.error is None):
            return _refusal(answer)
        return Reply(heard.message, answer.status, retry_after_ms(answer.headers))

    async def _read_events(self, answer: Answer, outgoing: Outgoing, exchange: _Exchange) -> Heard | None:
        """The answer among the events; None when they ended without it and can be asked for again."""
        try:
            async for event in events(answer, exchange.unasked):
                exchange.last_event_id = event.event_id or exchange.last_event_id
                exchange.retry_ms = event.retry_ms if event.retry_ms is not None else exchange.retry_ms
                heard = self._take_event(event, outgoing)
                if heard is not None:
                    return heard
                if exchange.unasked.note(_size(event)):
                    return Silence("disconnected", "the server said too much before it gave an answer")
        except TooMuchUnasked as error:
            return Silence("disconnected", str(error))
        except HttpFailure as error:
            if exchange.last_event_id is None or self.session_id is None:
                raise
            exchange.why = plain(f"{type(error).__name__}: {error}")
        if exchange.last_event_id is None or self.session_id is None:
            return Silence("disconnected", "the server ended the answer before it gave one")
        return None

    async def _read_on(self, outgoing: Outgoing, exchange: _Exchange) -> Heard | None:
        """Ask for the events after the last one that was read. Nothing is sent again."""
        await asyncio.sleep(min(exchange.retry_ms, MCP_RETRY_MS_MAX) / 1000)
        try:
            async with self._get({"Last-Event-ID": exchange.last_event_id or ""}) as answer:
                if answer.status == HTTPStatus.OK and _is_events(answer):
                    exchange.failures = 0
                    return await self._read_events(answer, outgoing, exchange)
                if 400 <= answer.status < 500:
                    return Silence("disconnected", f"the rest of the answer was refused with {answer.status}")
        except HttpFailure:
            pass
        exchange.failures += 1
        if exchange.failures > 3:
            return Silence("disconnected", "the rest of the answer could not be had")
        return None

    def _take_event(self, event: Event, outgoing: Outgoing | None = None) -> Reply | Oversize | None:
        """The answer to the request, if it is that; everything else is dealt with."""
        if event.name != "message" or not event.data:
            return None
        try:
            if outgoing is not None and (heard := _read(event.data, outgoing)) is not None:
                return heard
            message = None if isinstance(event.data, Large) else read_message(event.data)
        except NotAMessage:
            return None
        if message is not None and not message.is_answer and (said := self._inbox.take(message)) is not None:
            self._aside(said)
        return None

    def _get(self, headers: dict[str, str]) -> AbstractAsyncContextManager[Answer]:
        return self._send("GET", self._headers(headers) | {"Accept": "text/event-stream"})

    def _send(
        self,
        method: str,
        headers: dict[str, str],
        body: bytes | None = None,
        sending: _Exchange | None = None,
        may_send: MaySend | None = None,
    ) -> AbstractAsyncContextManager[Answer]:
        return self._pool.request(
            method, self._origin, self._target, headers=headers, body=body, sending=sending, may_send=may_send
        )

    def _headers(self, own: dict[str, str]) -> dict[str, str]:
        session = {} if self.session_id is None else {SESSION: self.session_id}
        return self._credentials.headers() | _ACCEPT | self.headers | session | own

    def _note_session(self, outgoing: Outgoing, answer: Answer) -> None:
        given = answer.headers.get(SESSION.lower())
        if outgoing.method == "initialize" and given and len(given) <= _SESSION_CHARS_MAX:
            self.session_id = given

    def _tell_abandoned(self, request_id: int) -> None:
        # Where closing the stream says it, the request's end has said it.
        if not self.is_cancelled_by_closing:
            self._aside(written_notification(CANCELLED, {"requestId": request_id, "reason": "nobody waits for it"}))

    def _aside(self, message: bytes) -> None:
        """Send beside everything else; whether it arrives changes nothing."""
        if len(self._asides) < 64 and not self._lost.done():
            task = asyncio.create_task(self._post_aside(message))
            self._asides.add(task)
            task.add_done_callback(self._asides.discard)

    async def _post_aside(self, message: bytes) -> None:
        with contextlib.suppress(Exception):
            async with (
                asyncio.timeout(MCP_ANSWER_MS / 1000),
                self._send("POST", self._headers({}) | _JSON, message),
            ):
                pass

    def _silence(self, outgoing: Outgoing, exchange: _Exchange, error: Exception, timeout_s: float | None) -> Heard:
        is_late = isinstance(error, TimeoutError)
        within = f"within {int((timeout_s or 0) * 1000)} ms"
        reason = plain(f"{type(error).__name__}: {error}", DETAIL_CHARS_MAX)
        if not exchange.may_be_sent and isinstance(error, NotConnected):
            return Silence("not_sent", plain(f"no connection: {error}", DETAIL_CHARS_MAX))
        if not exchange.may_be_sent:
            return Silence("not_sent", f"no connection {within}" if is_late else f"no request: {reason}")
        if is_late:
            self._tell_abandoned(outgoing.request_id)
            return Silence("timed_out", f"no answer {within}")
        if exchange.status is not None and exchange.status != HTTPStatus.OK:
            return Refusal(exchange.status, f"the server answered {exchange.status}")  # the status line decides
        return Silence("disconnected", f"no answer: {reason}")


class _Exchange:
    """How far a request came. `may_be_sent` is set by the pool before the first byte goes to the socket."""

    def __init__(self) -> None:
        self.may_be_sent = False
        self.status: int | None = None
        self.last_event_id: str | None = None
        self.retry_ms = _RETRY_MS
        self.failures = 0
        self.why = ""
        self.unasked = Unasked()


def _read(raw: bytes | Large, outgoing: Outgoing) -> Reply | Oversize | None:
    """The answer to the request, if it is one. Raises NotAMessage."""
    if isinstance(raw, bytes):
        message = read_message(raw)
        request_id, is_error = message.members.get("id"), message.error is not None
        is_answer = message.is_answer
        heard: Reply | Oversize = Reply(message)
    else:
        if not raw.is_message:
            raise NotAMessage("not JSON")
        is_answer = raw.is_answer
        if is_answer and not raw.is_told:
            # Whose answer it is may not be known either; the connection carries only this request.
            return Oversize(raw)
        request_id, is_error = raw.member("id"), raw.member("error") is not None
        heard = read_large(raw, outgoing.method) if is_answer else Oversize(raw)
    # An error without an id answers the only request that the connection carries.
    is_unnamed = request_id is None and is_error
    is_ours = type(request_id) is int and request_id == outgoing.request_id
    return heard if is_answer and (is_unnamed or is_ours) else None


def _size(event: Event) -> int:
    return event.data.size_bytes if isinstance(event.data, Large) else len(event.data)


def _is_events(answer: Answer) -> bool:
    written = answer.headers.get("content-type", "").partition(";")[0]
    return written.strip().lower() == "text/event-stream"


def _refusal(answer: Answer) -> Refusal:
    said = plain(f"the server answered {answer.status} {answer.reason}".rstrip())
    return Refusal(answer.status, f"{said}, without JSON-RPC", retry_after_ms(answer.headers))
