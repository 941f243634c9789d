"""An MCP server over HTTP in the test's own process that answers as it is told, and keeps every request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Heard:
    method: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class HttpMcp:
    """`call` answers tools/call; `get` answers GET. Everything else is as the protocol wants it."""

    era: str
    call: Handler
    get: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    url: str = ""
    session: str = "s-1"
    description: str = "Does as it is told."
    requests: list[Heard] = field(default_factory=list)
    gets: list[dict[str, str]] = field(default_factory=list)
    deleted: list[str | None] = field(default_factory=list)
    schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})

    def calls(self, method: str = "tools/call") -> list[Heard]:
        return [heard for heard in self.requests if heard.body.get("method") == method]

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append(Heard(request.method, headers, body))
        method, request_id = body.get("method"), body.get("id")
        if request_id is None or method is None:
            return web.Response(status=202)
        if method == "server/discover":
            if self.era == "modern":
                found = {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "resultType": "complete"}
                return answer(request_id, found)
            return web.json_response(error(request_id, -32000, "no session"), status=400)
        if method == "initialize":
            agreed = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "h"}}
            return answer(request_id, agreed, {"Mcp-Session-Id": self.session})
        if self.era == "legacy" and headers.get("mcp-session-id") != self.session:
            return web.json_response(error(request_id, -32001, "Session not found"), status=404)
        if method == "tools/list":
            tool = {"name": "does", "description": self.description, "inputSchema": self.schema}
            return answer(request_id, {"tools": [tool]})
        return await self.call(request, body)

    async def get_stream(self, request: web.Request) -> web.StreamResponse:
        self.gets.append({name.lower(): value for name, value in request.headers.items()})
        return await self.get(request) if self.get is not None else web.Response(status=405)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        self.deleted.append(request.headers.get("Mcp-Session-Id"))
        return web.Response(status=204)


def answer(request_id: Any, result: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"jsonrpc": "2.0", "id": request_id, "result": result}, headers=headers)


def error(request_id: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}


def event(message: Any, *, event_id: str | None = None, retry: int | None = None) -> bytes:
    lines = [] if event_id is None else [f"id: {event_id}"]
    lines += [] if retry is None else [f"retry: {retry}"]
    lines.append("data: " + ("" if message is None else json.dumps(message)))
    return ("\n".join(lines) + "\n\n").encode()


async def stream(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return answer(body["id"], {"content": [], "structuredContent": body["params"]["arguments"]})


@asynccontextmanager
async def http_mcp(era: str, call: Handler = echo, **how: Any) -> AsyncIterator[HttpMcp]:
    server = HttpMcp(era, call, **how)
    application = web.Application()
    application.router.add_post("/mcp", server.post)
    application.router.add_get("/mcp", server.get_stream)
    application.router.add_delete("/mcp", server.delete)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    try:
        yield server
    finally:
        await runner.cleanup()
