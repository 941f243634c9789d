"""An MCP server over streamable HTTP: every request is one POST, answered by JSON or by a stream of events.

A POST is never repeated: neither by a redirect, nor after a broken connection. When the stream of its answer breaks off
and the server numbers its events (2025-11-25), the rest is asked for with a GET that names the last event: that reads
the answer on, and sends nothing again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from yarl import URL

from app.connectors.answers import DETAIL_CHARS_MAX, plain, retry_after_ms
from app.connectors.credentials import Credentials, CredentialUnavailable
from app.connectors.http import HttpPool
from app.connectors.mcp.sse import Event, HugeEvent, events
from app.connectors.mcp.wire import (
    CANCELLED,
    Heard,
    Inbox,
    Message,
    NotAMessage,
    Outgoing,
    Oversize,
    Refusal,
    Reply,
    Silence,
    read_message,
    written_notification,
)
from app.core.limits import MCP_ANSWER_MS, MCP_MESSAGE_BYTES_MAX, MCP_RETRY_MS_MAX

SESSION: Final = "Mcp-Session-Id"
_ACCEPT: Final = {"Accept": "application/json, text/event-stream"}
_RETRY_MS: Final = 1_000
_SESSION_CHARS_MAX: Final = 1_024


class HttpLink:
    """Speaks to one address. With a session (protocols until 2025-11-25) it is lost when the server forgets it."""

    def __init__(self, url: str, inbox: Inbox, *, pool: HttpPool, credentials: Credentials) -> None:
        self._url = URL(url, encoded=True)
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
        except Exception as error:  # aiohttp and the codecs beneath raise more than ClientError for what a server sends
            return self._silence(outgoing, exchange, error, timeout_s)
        finally:
            self._inbox.unwatch(outgoing)

    async def listen(self) -> int:
        """Read what the server says of its own accord (a GET) until it ends; the status with which it began."""
        async with self._get({}) as response:
            if response.status == HTTPStatus.OK and _is_events(response):
                async for event in events(response.content):
                    if isinstance(event, HugeEvent):
                        break
                    self._take_event(event)
            return response.status

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
                async with (
                    asyncio.timeout(1),
                    self._pool.session().delete(self._url, headers=self._headers({}), allow_redirects=False),
                ):
                    pass

    async def _exchange(self, outgoing: Outgoing, body: bytes, exchange: _Exchange) -> Heard:
        async with self._pool.session().post(
            self._url,
            data=body,
            headers=self._headers(outgoing.headers),
            allow_redirects=False,  # a redirect that is followed is a second POST
            trace_request_ctx=exchange,
        ) as response:
            exchange.status = response.status
            if response.status == HTTPStatus.OK:
                self._note_session(outgoing, response)
                if _is_events(response):
                    heard = await self._read_events(response, outgoing, exchange)
                else:
                    heard = await self._read_body(response, outgoing)
            elif response.status >= 400:
                heard = await self._read_body(response, outgoing)
            else:
                heard = _refusal(response)
        while heard is None:
            heard = await self._read_on(outgoing, exchange)
        return heard

    async def _read_body(self, response: aiohttp.ClientResponse, outgoing: Outgoing) -> Heard:
        body = bytearray()
        while chunk := await response.content.readany():
            body += chunk
            if len(body) > MCP_MESSAGE_BYTES_MAX:
                if response.status != HTTPStatus.OK:
                    return _refusal(response)
                return Oversize(hashlib.sha256(body).hexdigest(), len(body))
        try:
            message = read_message(bytes(body))
        except NotAMessage:
            return _refusal(response)
        if not _answers(message, outgoing) or (response.status != HTTPStatus.OK and message.error is None):
            return _refusal(response)
        return Reply(message, response.status, retry_after_ms(response))

    async def _read_events(
        self, response: aiohttp.ClientResponse, outgoing: Outgoing, exchange: _Exchange
    ) -> Heard | None:
        """The answer among the events; None when they ended without it and can be asked for again."""
        try:
            async for event in events(response.content):
                if isinstance(event, HugeEvent):
                    return Oversize(event.sha256, event.size_bytes)
                exchange.last_event_id = event.event_id or exchange.last_event_id
                exchange.retry_ms = event.retry_ms if event.retry_ms is not None else exchange.retry_ms
                answer = self._take_event(event)
                if answer is not None and _answers(answer, outgoing):
                    return Reply(answer)
        except (aiohttp.ClientError, OSError) as error:
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
            async with self._get({"Last-Event-ID": exchange.last_event_id or ""}) as response:
                if response.status == HTTPStatus.OK and _is_events(response):
                    exchange.failures = 0
                    return await self._read_events(response, outgoing, exchange)
                if 400 <= response.status < 500:
                    return Silence("disconnected", f"the rest of the answer was refused with {response.status}")
        except (aiohttp.ClientError, OSError):
            pass
        exchange.failures += 1
        if exchange.failures > 3:
            return Silence("disconnected", "the rest of the answer could not be had")
        return None

    def _take_event(self, event: Event) -> Message | None:
        """The answer in it, if it is one; everything else is dealt with."""
        if not event.data or event.name != "message":
            return None
        try:
            message = read_message(event.data)
        except NotAMessage:
            return None
        if message.is_answer:
            return message
        if (said := self._inbox.take(message)) is not None:
            self._aside(said)
        return None

    @asynccontextmanager
    async def _get(self, headers: dict[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        accept = {"Accept": "text/event-stream"}
        async with self._pool.session().get(
            self._url, headers=self._headers(headers) | accept, allow_redirects=False, trace_request_ctx=_Exchange()
        ) as response:
            yield response

    def _headers(self, own: dict[str, str]) -> dict[str, str]:
        session = {} if self.session_id is None else {SESSION: self.session_id}
        return self._credentials.headers() | _ACCEPT | self.headers | session | own

    def _note_session(self, outgoing: Outgoing, response: aiohttp.ClientResponse) -> None:
        given = response.headers.get(SESSION)
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
                self._pool.session().post(
                    self._url,
                    data=message,
                    headers=self._headers({}),
                    allow_redirects=False,
                    trace_request_ctx=_Exchange(),
                ),
            ):
                pass

    def _silence(self, outgoing: Outgoing, exchange: _Exchange, error: Exception, timeout_s: float | None) -> Heard:
        is_late = isinstance(error, TimeoutError)
        within = f"within {int((timeout_s or 0) * 1000)} ms"
        reason = plain(f"{type(error).__name__}: {error}", DETAIL_CHARS_MAX)
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


def _answers(message: Message, outgoing: Outgoing) -> bool:
    request_id = message.members.get("id")
    # An error without an id answers the only request that the connection carries.
    is_unnamed = request_id is None and message.error is not None
    return message.is_answer and (is_unnamed or (type(request_id) is int and request_id == outgoing.request_id))


def _is_events(response: aiohttp.ClientResponse) -> bool:
    written = response.headers.get("Content-Type", "").partition(";")[0]
    return written.strip().lower() == "text/event-stream"


def _refusal(response: aiohttp.ClientResponse) -> Refusal:
    said = plain(f"the server answered {response.status} {response.reason or ''}".rstrip())
    return Refusal(response.status, f"{said}, without JSON-RPC", retry_after_ms(response))
