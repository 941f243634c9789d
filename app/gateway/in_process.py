"""Requests of the gateway to itself, without a socket: the same application, routes and middleware, as a principal of
its own.

Who asks stands in the scope of the request, where nothing that is sent over a network can put it.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import httpx2
from starlette.types import ASGIApp

from app.domain.identity import Principal
from app.edge.services import IN_PROCESS
from app.lua.host import OwnTransport


class InProcessTransport(OwnTransport):
    """What is cancelled here is cancelled there."""

    def __init__(self, app: ASGIApp, principal: Principal) -> None:
        self._app = app
        self._principal = principal
        self._left = asyncio.Event()  # set, and replaced, when those that wait are to be answered

    def hang_up(self) -> None:
        self._left.set()
        self._left = asyncio.Event()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        left = self._left  # what was asked before the next `hang_up`, also when it is still on its way
        body = await request.aread()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": None,
            "server": ("127.0.0.1", 0),
            IN_PROCESS: self._principal,
        }
        is_read, status, headers, pieces = False, 500, list[tuple[bytes, bytes]](), list[bytes]()

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await left.wait()
                return {"type": "http.disconnect"}
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message.get("headers", ()))
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return httpx2.Response(status, headers=headers, content=b"".join(pieces), request=request)
