"""/mcp and /mcp/{server}: MCP over streamable HTTP. Every request stands alone: any gateway answers any of them.

2026-07-28 has no sessions. To 2025-11-25 and older none is given, which that protocol admits: the handshake is answered
and forgotten. There is no stream to resume and none for the server's own messages (GET: 405).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from app import __version__
from app.core.errors import InternalError, MethodNotAllowed, RouteNotFound, TgaError, Unauthenticated
from app.core.limits import (
    EVENTS_SEND_WAIT_MS,
    MCP_HOLD_MS,
    MCP_PING_EVERY_MS,
    MCP_PROGRESS_QUEUED_MAX,
    MCP_STREAM_AFTER_MS,
    MCP_TASK_AFTER_MS,
)
from app.domain.identity import Principal
from app.edge.body import ClientGone, read_bytes
from app.edge.middleware import problem_is_ours
from app.edge.problems import problem
from app.edge.services import Services, header_of
from app.mcp_server.calling import Asked, Called, Calling
from app.mcp_server.delivery import Delivery
from app.mcp_server.envelope import (
    HANDSHAKES,
    LATEST_HANDSHAKE,
    MODERN,
    SERVER_INFO_KEY,
    TASKS,
    client_of,
    headers_of,
    speaks_modern,
    unsupported,
)
from app.mcp_server.key_reservations import Intents
from app.mcp_server.listening import Listening
from app.mcp_server.origins import Origins
from app.mcp_server.tasks import Tasks
from app.mcp_server.tool_catalogue import ToolCatalogue
from app.mcp_server.tool_visibility import ToolVisibility
from app.mcp_server.wire import (
    METHOD_NOT_FOUND,
    Message,
    RequestId,
    RpcError,
    Unreadable,
    error_bytes,
    event_bytes,
    notification_bytes,
    read_message,
    result_bytes,
)

logger = logging.getLogger("tga")

PATH: Final = "/mcp"
_INFO: Final = {"name": "tga", "title": "TGA Gateway", "version": __version__}
_INSTRUCTIONS: Final = (
    "Every tool call here is decided on by a policy or a person, and recorded. A call may have to wait for a person: "
    "if the answer says so, call the tool again later with exactly the same arguments; it is recognised as the same "
    "call. If a tool's answer is lost, the gateway does what the operator chose for that tool: it sends the call again "
    "with the same key (a tool that remembers keys executes it once, one that ignores them may execute it twice), or "
    "asks the tool's server what became of it, or waits for an operator and sends nothing. An error result says "
    "whether the call was executed, as far as that is known, and what to do."
)
_EVENT_STREAM: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_PING: Final = b": ping\n\n"

Handler = Callable[[Asked], Awaitable[dict[str, Any]]]


def is_mcp(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


@dataclass(frozen=True, slots=True)
class _Request:
    scope: Scope
    receive: Receive
    send: Send


class McpEndpoint:
    """Plain ASGI, behind the middleware that counts every request."""

    def __init__(
        self,
        services: Services,
        intents: Intents,
        visibility: ToolVisibility,
        *,
        origins: Origins | None = None,
        hold_ms: int = MCP_HOLD_MS,
        task_after_ms: int = MCP_TASK_AFTER_MS,
    ) -> None:
        self._services = services
        self._visibility = visibility
        self._origins = origins or Origins()
        self._calling = Calling(services, intents, hold_ms=hold_ms, task_after_ms=task_after_ms)
        self._tasks = Tasks(services)
        self._hold_ms = hold_ms
        self._modern: dict[str, Handler] = {
            "server/discover": self._discover,
            "tools/list": self._list_tools,
            "tasks/get": self._get_task,
            "tasks/update": self._update_task,
            "tasks/cancel": self._cancel_task,
        }
        self._legacy: dict[str, Handler] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tools/list": self._list_tools,
            "tasks/get": self._get_task,
            "tasks/cancel": self._cancel_task,
            "tasks/result": self._task_result,
            "tasks/list": self._list_tasks,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, receive, send)
        message: Message | None = None
        try:
            headers = headers_of(scope["headers"])
            self._origins.verify(headers)
            async with self._services.admitted(request) as principal:
                if scope["method"] != "POST":
                    raise MethodNotAllowed("MCP is spoken with POST here", expected="POST")
                catalogue = ToolCatalogue(
                    self._services.registry, self._visibility, principal, _server_in(scope["path"])
                )
                catalogue.verify()
                message = read_message(await read_bytes(scope, receive))
                await self._answer(request, message, headers, catalogue)
        except Unreadable as error:
            await self._refuse(request, error, error.request_id)
        except RpcError as error:
            await self._refuse(request, error, message.id if message is not None else None)
        except TgaError as error:
            await self._refuse(request, error, message.id if message is not None else None)

    async def _answer(
        self, request: _Request, message: Message, headers: dict[str, str], catalogue: ToolCatalogue
    ) -> None:
        if message.is_notification:
            version = headers.get("mcp-protocol-version", MODERN)
            if speaks_modern(headers) and version != MODERN:
                raise unsupported(version)
            # Nothing waits for one here: what a client cancels by its id could be another client's of the same id.
            await _send(request, 202, b"")
            return
        client = client_of(message, headers)
        exchange = _Exchange(request, accepts_stream=_accepts_stream(headers), is_modern=client.is_modern)
        asked = Asked(message, client, catalogue.principal, catalogue, headers, exchange.notify)
        if message.method == "subscriptions/listen" and client.is_modern:
            await self._listen(request, asked)
        else:
            await exchange.run(message.id or 0, self._called(asked), on_defect=self._defect)

    async def _called(self, asked: Asked) -> Called:
        message = asked.message
        if message.method == "tools/call":
            return await self._calling.call(asked)
        handler = (self._modern if asked.client.is_modern else self._legacy).get(message.method)
        if handler is None:
            raise RpcError(METHOD_NOT_FOUND, "no such method", status=404 if asked.client.is_modern else 200)
        result = await handler(asked)
        if asked.client.is_modern:
            meta = result.get("_meta")
            result = {**result, "_meta": {**(meta or {}), SERVER_INFO_KEY: _INFO}}
        return Called(result)

    async def _discover(self, asked: Asked) -> dict[str, Any]:
        return {
            "supportedVersions": [MODERN],
            "capabilities": {"tools": {"listChanged": True}, "extensions": {TASKS: {}}},
            "instructions": _INSTRUCTIONS,
            "resultType": "complete",
            "ttlMs": 60_000,
            "cacheScope": "public",
        }

    async def _initialize(self, asked: Asked) -> dict[str, Any]:
        wanted = asked.message.params.get("protocolVersion")
        return {
            "protocolVersion": wanted if wanted in HANDSHAKES else LATEST_HANDSHAKE,
            "capabilities": {
                "tools": {"listChanged": False},
                "tasks": {"list": {}, "cancel": {}, "requests": {"tools": {"call": {}}}},
            },
            "serverInfo": _INFO,
            "instructions": _INSTRUCTIONS,
        }

    async def _ping(self, asked: Asked) -> dict[str, Any]:
        return {}

    async def _list_tools(self, asked: Asked) -> dict[str, Any]:
        return await asked.catalogue.page(asked.client, asked.message.params.get("cursor"))

    async def _get_task(self, asked: Asked) -> dict[str, Any]:
        if asked.client.is_modern:
            asked.client.require_tasks()
        return await self._tasks.get(asked.principal, asked.client, asked.message.params.get("taskId"))

    async def _update_task(self, asked: Asked) -> dict[str, Any]:
        asked.client.require_tasks()
        return await self._tasks.update(asked.principal, asked.message.params.get("taskId"))

    async def _cancel_task(self, asked: Asked) -> dict[str, Any]:
        if asked.client.is_modern:
            asked.client.require_tasks()
        return await self._tasks.cancel(asked.principal, asked.client, asked.message.params.get("taskId"))

    async def _task_result(self, asked: Asked) -> dict[str, Any]:
        return await self._tasks.result(
            asked.principal, asked.client, asked.message.params.get("taskId"), wait_ms=self._hold_ms
        )

    async def _list_tasks(self, asked: Asked) -> dict[str, Any]:
        return await self._tasks.list_page(asked.principal, asked.client, asked.message.params.get("cursor"))

    async def _listen(self, request: _Request, asked: Asked) -> None:
        listening = Listening(self._services, self._tasks, asked)
        with self._services.admission.subscription(asked.principal):
            await request.send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
            gone = asyncio.create_task(_disconnected(request.receive))
            events = listening.events()
            try:
                while not gone.done():
                    step = asyncio.ensure_future(anext(events, None))
                    await asyncio.wait({step, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not step.done():
                        step.cancel()
                        await asyncio.gather(step, return_exceptions=True)
                        break
                    event = step.result()
                    if event is not None and not await self._is_still_admitted(request, asked.principal):
                        event = None  # revoked or expired meanwhile: it hears nothing more
                    async with asyncio.timeout(EVENTS_SEND_WAIT_MS / 1000):
                        await _send_part(request.send, event or b"", is_last=event is None)
                    if event is None:
                        break
            except TimeoutError:
                pass  # a client that takes nothing keeps no place
            finally:
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                await events.aclose()  # type: ignore[attr-defined]

    async def _is_still_admitted(self, request: _Request, principal: Principal) -> bool:
        try:
            fresh = await self._services.authenticator.authenticate(header_of(request.scope, b"authorization"))
        except Unauthenticated:
            return False
        except TgaError:  # it cannot be told now: the next event asks again
            return True
        return fresh == principal

    def _defect(self, error: Exception) -> RpcError:
        incident = self._services.clock.new_id()
        logger.error("incident %s at %s", incident, PATH, exc_info=error)
        refused = RpcError.of(InternalError("the gateway failed to answer"))
        refused.data = {**refused.data, "incident": incident}
        refused.status = 500
        return refused

    async def _refuse(self, request: _Request, error: RpcError | TgaError, request_id: RequestId | None) -> None:
        """As a JSON-RPC error, with the status and headers that the problem has over HTTP."""
        headers: list[tuple[bytes, bytes]] = []
        if isinstance(error, TgaError):
            if problem_is_ours(error):
                logger.error("%s: %s", PATH, error)
            allow = {"Allow": "POST"} if isinstance(error, MethodNotAllowed) else None
            response = problem(error, headers=allow)
            headers = [pair for pair in response.raw_headers if pair[0] not in (b"content-length", b"content-type")]
            status = response.status_code
            refused = RpcError.of(error)
        else:
            status, refused = error.status, error
        await _send(request, status, error_bytes(request_id, refused), *headers)


class _Exchange:
    """One request and its answer: plain JSON if it comes soon and nothing comes before it, else a stream of events.

    When the client goes away, waiting for the call ends; the call does not.
    """

    def __init__(self, request: _Request, *, accepts_stream: bool, is_modern: bool) -> None:
        self._request = request
        self._is_modern = is_modern
        self._accepts_stream = accepts_stream
        self._queued: asyncio.Queue[bytes] = asyncio.Queue(MCP_PROGRESS_QUEUED_MAX)
        self._is_streaming = False

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Told in between, if the client can hear it; one that does not keep up misses some."""
        if self._accepts_stream and not self._queued.full():
            self._queued.put_nowait(event_bytes(notification_bytes(method, params)))

    async def run(
        self, request_id: RequestId, calling: Awaitable[Called], *, on_defect: Callable[[Exception], RpcError]
    ) -> None:
        answering = asyncio.ensure_future(calling)
        called: Called | None = None
        gone = asyncio.create_task(_disconnected(self._request.receive))
        try:
            await self._wait(answering, gone)
            if not answering.done():
                raise ClientGone
            called = _outcome(answering, on_defect)
            await self._finish(request_id, called, is_gone=gone.done())
        finally:
            gone.cancel()
            answering.cancel()
            ended, _ = await asyncio.gather(answering, gone, return_exceptions=True)
            if called is None and isinstance(ended, Called) and ended.intent is not None:
                await ended.intent.conclude(None)  # it came when the client did not wait any more

    async def _wait(self, answering: asyncio.Future[Called], gone: asyncio.Task[None]) -> None:
        pause_s = MCP_STREAM_AFTER_MS / 1000
        while not answering.done() and not gone.done():
            telling = asyncio.create_task(self._queued.get())
            try:
                waited: set[asyncio.Future[Any]] = {answering, gone, telling}
                await asyncio.wait(waited, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if telling.done():
                    await self._stream(telling.result())
                elif not answering.done() and not gone.done() and self._accepts_stream:
                    await self._stream(_PING)
            finally:
                telling.cancel()
            pause_s = MCP_PING_EVERY_MS / 1000

    async def _stream(self, event: bytes) -> None:
        if not self._is_streaming:
            self._is_streaming = True
            await self._request.send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        await _send_part(self._request.send, event, is_last=False)

    async def _finish(self, request_id: RequestId, called: Called, *, is_gone: bool) -> None:
        result = called.result
        # The older protocol knows errors of JSON-RPC and errors of HTTP; its clients read no message in the latter.
        status = result.status if isinstance(result, RpcError) and self._is_modern else 200
        body = error_bytes(request_id, result) if isinstance(result, RpcError) else result_bytes(request_id, result)
        delivery = Delivery.of(self._request.scope) if called.intent is not None and called.is_final else None
        try:
            while not self._queued.empty():
                await self._stream(self._queued.get_nowait())
            if self._is_streaming:
                await _send_part(self._request.send, event_bytes(body), is_last=True)
            else:
                await _send(self._request, status, body)
        except BaseException:
            if delivery is not None:
                delivery.close()
            delivery = None
            raise
        finally:
            if called.intent is not None:
                await called.intent.conclude(None if is_gone else delivery)
                if delivery is not None:
                    delivery.close()


def _outcome(answering: asyncio.Future[Called], on_defect: Callable[[Exception], RpcError]) -> Called:
    try:
        return answering.result()
    except RpcError as error:
        return Called(error)
    except TgaError as error:
        return Called(RpcError.of(error))
    except Exception as error:
        return Called(on_defect(error))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(request: _Request, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    sent = [(b"content-length", b"%d" % len(body)), *headers]
    if body:
        sent.append((b"content-type", b"application/json"))
    await request.send({"type": "http.response.start", "status": status, "headers": sent})
    await request.send({"type": "http.response.body", "body": body})


async def _send_part(send: Send, body: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def _accepts_stream(headers: dict[str, str]) -> bool:
    accepted = headers.get("accept", "").lower()
    return "text/event-stream" in accepted


def _server_in(path: str) -> str | None:
    """The server in `/mcp/{server}`."""
    if path == PATH:
        return None
    server = unquote(path.removeprefix(f"{PATH}/"))
    if not server or "/" in server:
        raise RouteNotFound("nothing here but /mcp and /mcp/{server}")
    return server
