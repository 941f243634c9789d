"""The HTTP server: the application put together, and run until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api import (
    actions,
    acts,
    approvals,
    blobs,
    callers,
    events,
    finding,
    health,
    keys,
    log,
    log_verification,
    metrics,
    pages,
    policy,
    procedures,
    run_reading,
    runs,
    schedules,
    servers,
    statistics,
    tool_calls,
    traces,
    verification,
    worker,
)
from app.api.openapi import TITLE, document_of, tool_call_operation
from app.core.limits import KEEP_ALIVE_S, SHUTDOWN_GRACE_MS, SHUTDOWN_LAST_MS
from app.edge.direct_routes import DirectRoutes
from app.edge.middleware import GatewayMiddleware, add_exception_handlers
from app.edge.protocol import BoundedProtocol
from app.edge.services import Services
from app.gateway.serving_process import ServingProcess
from app.gateway.sockets import bind

logger = logging.getLogger("tga")

_BACKLOG: Final = 2048
_POLL_S: Final = 0.02


def build_app(services: Services, routers: Iterable[APIRouter]) -> FastAPI:
    """All routes on one set of services, behind one middleware."""
    app = FastAPI(
        title=TITLE,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,  # `decide`, not `decide_v1_traces__trace_id__...`
        # It would look for a collector at every request, and could show it what callers sent.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.router.routes += tool_calls.routes(services)
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            unseen = {tool_calls.PATH: {"post": tool_call_operation(tool_calls.ToolCallBody)}}
            made.update(document_of(app, unseen))
        return made

    for router in (*routers, pages.router(document)):
        app.include_router(router)
    add_exception_handlers(app)
    app.add_middleware(GatewayMiddleware, services=services)
    app.openapi = document  # type: ignore[method-assign]
    return app


def routers_of(services: Services) -> list[APIRouter]:
    """What the OpenAPI document lists, but for the hot route of tool calls."""
    writing = (actions, log_verification, blobs, procedures, runs, schedules, worker, health, metrics)
    reading = (
        traces,
        run_reading,
        events,
        approvals,
        log,
        servers,
        keys,
        callers,
        finding,
        acts,
        statistics,
        policy,
        verification,
    )
    of_reading = services.for_reading()
    return [*(noun.router(services) for noun in writing), *(noun.router(of_reading) for noun in reading)]


class Router:
    """The application, with a short way to its routes: routing and the framework's layers cost as much as all
    that a route does. By either way a request meets the same middleware and the same endpoint."""

    def __init__(self, services: Services, mounted: Mapping[str, ASGIApp] | None = None) -> None:
        routers = routers_of(services)
        self._app = build_app(services, routers)
        self._calls = GatewayMiddleware(tool_calls.ToolCalls(services), services)
        self._direct = DirectRoutes(route for router in routers for route in router.routes)
        self._short = GatewayMiddleware(self._direct, services)
        # By the first part of the path: what speaks another protocol than /v1, behind the same middleware.
        self._mounted = {prefix: GatewayMiddleware(app, services) for prefix, app in (mounted or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == tool_calls.PATH and scope["method"] == "POST":
            await self._calls(scope, receive, send)
        elif (middleware := self._mounted.get("/" + path[1:].partition("/")[0])) is not None:
            await middleware(scope, receive, send)
        elif self._direct.finds(scope):
            await self._short(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn's, in a loop that is ours: signals are handled by the process's own code."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self._receiving: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    def receive(self, descriptor: int, had_requests: bool) -> None:
        """Serve a connection that another process has accepted."""
        task = asyncio.get_running_loop().create_task(self._receive(socket.socket(fileno=descriptor), had_requests))
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)

    async def _receive(self, connection: socket.socket, had_requests: bool) -> None:
        connection.setblocking(False)
        try:
            _, protocol = await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client is gone already
            connection.close()
        else:
            if had_requests and isinstance(protocol, BoundedProtocol):
                protocol.go_on()

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve_http(
    services: Services,
    *,
    host: str,
    port: int,
    on_ready: Callable[[str, int], None],
    grace_ms: int = SHUTDOWN_GRACE_MS,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    mounted: Mapping[str, ASGIApp] | None = None,
    process: ServingProcess | None = None,
) -> None:
    """Serve until `services.stopping` is set, then end well: nothing new is taken, what is in flight is answered,
    what is still being executed after `grace_ms` is answered with 202, since it is durable. Returns when all are gone.

    `on_ready` is told where it listens. The runtime must be closed after this, not before. One process of several
    listens nowhere: its supervisor hands it connections, and takes back the idle ones before it stops.
    """
    sockets = bind(host, port) if process is None else []
    config = uvicorn.Config(
        Router(services, mounted),
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_LAST_MS // 1000,
        # What is accepted in one turn of the loop comes on top of what is bounded: a part of it, then.
        backlog=min(_BACKLOG, max(1, protocol.connections_max // 4)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets))
    try:
        await _either(server.listens, serving)
        if not serving.done():
            if process is None:
                on_ready(host, sockets[0].getsockname()[1])
            else:
                process.take_connections(server.receive)
                on_ready(host, port)
                await _either(process.leaving, serving)
                if not process.is_told_to_stop:
                    await _hand_over(services, process, server, protocol, grace_ms)
                services.stopping.set()
            await _either(services.stopping, serving)
            await _drain(services, grace_ms)
    finally:
        server.should_exit = True
        await serving


async def _either(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Until the event is set, or the task has ended."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _hand_over(
    services: Services, process: ServingProcess, server: _Server, protocol: type[BoundedProtocol], grace_ms: int
) -> None:
    """Give every connection back between two requests, so that no client notices: until only those are left whose
    answers do not end by themselves (streams of events, workers that wait), or the time is over. Requests that are
    here, or arriving, are served as ever."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_ms / 1000
    process.give_back_connections()
    protocol.take_over = process.give_back
    while loop.time() < deadline and not process.is_told_to_stop:
        connections = [one for one in server.server_state.connections if isinstance(one, BoundedProtocol)]
        for connection in connections:
            connection.hand_over_if_idle()
        if not services.admission.in_flight and all(one.is_settled for one in connections):
            return
        await asyncio.sleep(_POLL_S)
    if process.is_told_to_stop:
        protocol.take_over = None  # no other process is there to go on with them


async def _drain(services: Services, grace_ms: int) -> None:
    """Until nothing is in flight; meanwhile new clients are told to come back later. Streams of events end by
    themselves."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_ms / 1000
    # Looked at now and then: an event would have to be set and cleared by every request.
    while services.admission.in_flight and loop.time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    if services.admission.in_flight:
        logger.info("%d requests are answered before their calls have ended", services.admission.in_flight)
        services.handover.break_off()
