"""Server-sent events: a stream that beats while it is quiet, and ends when it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, ClassVar, Final, TypeAlias

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.core.errors import TgaError, Unauthenticated
from app.core.limits import EVENTS_HEARTBEAT_MS, EVENTS_SEND_WAIT_MS
from app.domain.identity import Principal
from app.domain.runs.engine.leasing import Gone
from app.edge.permissions import may, scope_of
from app.edge.problems import document_of
from app.edge.protocol import CONNECTION, TRANSPORT, BoundedProtocol
from app.edge.services import Services, header_of

Events: TypeAlias = AsyncGenerator[bytes, None]
# What a stream is made of, for a principal that is admitted; None when there is nothing to come, now or later.
Opens: TypeAlias = Callable[[Principal], Awaitable[Events | None]]

MEDIA_TYPE: Final = "text/event-stream"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects an answer before it passes it on would pass on nothing
]
_COMES_BACK_MS: Final = 1_000
_BEAT: Final = b":\n\n"


def event(name: str, data: Any, *, identity: str | None = None) -> bytes:
    """One event, in one piece: it arrives whole or not at all. JSON as it is written here has no line breaks."""
    head = f"event: {name}\n" if identity is None else f"id: {identity}\nevent: {name}\n"
    return head.encode("ascii") + b"data: " + orjson.dumps(data) + b"\n\n"


def mark(identity: str) -> bytes:
    """Moves the client's last event id, and is no event."""
    return f"id: {identity}\n\n".encode("ascii")


def problem_event(error: TgaError) -> bytes:
    return event("problem", document_of(error))


class EventStream(Response):
    """Holds a subscriber's place for as long as it lasts.

    Nothing is queued: the next event is made when the last one is sent. It ends when its events do, when the client is
    gone or takes nothing for `send_wait_ms`, when the gateway stops, and when the credential no longer admits it,
    which is looked at with every beat.
    """

    beat_bytes: ClassVar[bytes] = _BEAT

    def __init__(
        self,
        services: Services,
        request: Request,
        opens: Opens,
        *,
        heartbeat_ms: int = EVENTS_HEARTBEAT_MS,
        send_wait_ms: int = EVENTS_SEND_WAIT_MS,
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._services = services
        self._request = request
        self._opens = opens
        self._heartbeat_s = heartbeat_ms / 1000
        self._send_wait_s = send_wait_ms / 1000
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._services.subscribed(self._request) as principal:
            events = await self._opens(principal)
            if events is None:
                # 204 tells an EventSource not to reconnect.
                await Response(status_code=204)(scope, receive, send)
                return
            try:
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await self._write(send, f"retry: {_COMES_BACK_MS}\n\n".encode())
                await self._last(events, principal, receive, send)
            finally:
                await events.aclose()

    async def _last(self, events: Events, principal: Principal, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_is_gone(receive))
        pump = asyncio.create_task(self._pump(events, principal, send))
        beat = asyncio.create_task(self._beat(principal, send))
        stop = asyncio.create_task(self._services.stopping.wait())
        tasks = (gone, pump, beat, stop)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_gone = gone.done()
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception) and not isinstance(error, TimeoutError):
                raise error
        if any(isinstance(error, TimeoutError) for error in ended):
            await self._cut(receive)
        elif not is_gone:
            await self._write(send, b"", is_last=True)

    async def _cut(self, receive: Receive) -> None:
        """Closing would wait for the client to take what is buffered, and it takes nothing."""
        self._request.scope[TRANSPORT].abort()
        await _is_gone(receive)  # for the protocol to notice: an answer that is cut off is no defect then

    async def _pump(self, events: Events, principal: Principal, send: Send) -> None:
        try:
            async for written in events:
                if not await self._is_still_admitted(principal):
                    return  # revoked or expired meanwhile: it hears nothing more
                await self._write(send, written)
                del written  # only the connection's buffer holds it now
                await self._write(send, b"")  # when that is empty enough the next one is made, and not before
        except TgaError as error:
            await self._write(send, problem_event(error))

    async def _beat(self, principal: Principal, send: Send) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not await self._is_still_admitted(principal):
                return
            await self._write(send, self.beat_bytes)

    async def _is_still_admitted(self, principal: Principal) -> bool:
        try:
            authorization = header_of(self._request.scope, b"authorization")
            fresh = await self._services.authenticator.authenticate(authorization)
        except Unauthenticated:
            return False
        except TgaError:  # the store does not answer: the next beat asks again
            return True
        return may(fresh, "read") and scope_of(fresh) == scope_of(principal)

    async def _write(self, send: Send, written: bytes, *, is_last: bool = False) -> None:
        """TimeoutError when the client takes nothing: the server's buffer is full, and has been for too long."""
        async with asyncio.timeout(self._send_wait_s), self._sending:
            await send({"type": "http.response.body", "body": written, "more_body": not is_last})


async def _is_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class GoneWith:
    """`with GoneWith(request) as gone:`: it is set when the client has closed its connection; its body was read before.

    The connection itself tells it. Only where there is none, in process, a task waits for the message that says so.
    """

    __slots__ = ("_connection", "_gone", "_receive", "_watching")

    def __init__(self, request: Request) -> None:
        self._connection: BoundedProtocol | None = request.scope.get(CONNECTION)
        self._receive = request.receive
        self._gone = Gone()
        self._watching: asyncio.Task[None] | None = None

    def __enter__(self) -> Gone:
        if self._connection is not None:
            self._connection.tell_when_lost(self._gone.set)
        else:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self._gone

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.tell_no_more(self._gone.set)
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        await _is_gone(self._receive)
        self._gone.set()
