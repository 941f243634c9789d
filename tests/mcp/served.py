"""A gateway that is spoken to over MCP: worlds with one, and clients for it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from tests.cli.world import World, open_world

FIXTURE = Path(__file__).parent / "conformance" / "fixture_server.py"
MODERN = "2026-07-28"
LEGACY = "2025-11-25"
MODES = {MODERN: MODERN, LEGACY: "legacy"}
TASKS = "io.modelcontextprotocol/tasks"


@contextmanager
def mcp_world(more: str = "") -> Iterator[World]:
    """With the suite's fixture server beside the bank; its gateway is for the test to start."""
    with open_world() as world:
        command = json.dumps([sys.executable, str(FIXTURE), str(world.home / "fixture.book")])
        fixture = f'[servers.fixture]\ntransport = "mcp-stdio"\ncommand = {command}\ntrust_annotations = true\n'
        world.config.write_text(world.config.read_text() + fixture + more)
        yield world


def executions(world: World, tool: str = "charge") -> list[dict[str, Any]]:
    """What the bank has done, not what it was asked."""
    lines = [json.loads(line) for line in world.book.read_text().splitlines()] if world.book.exists() else []
    return [line for line in lines if line["event"] == "execution" and line["tool"] == tool]


@asynccontextmanager
async def client_of(world: World, version: str, *, key: str | None = None, path: str = "/mcp") -> AsyncIterator[Client]:
    """The official client, over HTTP."""
    headers = {"Authorization": f"Bearer {key or world.admin_key()}"}
    async with create_mcp_http_client(headers=headers) as http:
        transport = streamable_http_client(world.url + path, http_client=http)
        async with Client(transport, mode=MODES[version]) as client:
            yield client


class Raw:
    """JSON-RPC over HTTP, as the test says it; headers that 2026-07-28 asks for are added."""

    def __init__(self, world: World, session: aiohttp.ClientSession, key: str, version: str) -> None:
        self.world = world
        self.session = session
        self.version = version
        self.headers = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}

    async def post(self, body: Any, *, path: str = "/mcp", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status, and the answer: the last message of a stream."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {**self.headers, "Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.world.url + path, data=raw, headers=sent) as response:
            text = await response.text()
            if response.content_type == "text/event-stream":
                lines = [line for line in text.splitlines() if line.startswith("data: ")]
                return response.status, json.loads(lines[-1].removeprefix("data: "))
            return response.status, json.loads(text) if text else None

    async def get(self, path: str) -> Any:
        """Of the HTTP API."""
        async with self.session.get(self.world.url + path, headers=self.headers) as response:
            return await response.json()

    def request(
        self, method: str, params: dict[str, Any] | None = None, *, tasks: bool = False, meta: Any = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The message and its headers."""
        params = dict(params or {})
        headers = {"MCP-Protocol-Version": self.version}
        said = dict(meta or {})
        if self.version == MODERN:
            capabilities: dict[str, Any] = {"extensions": {TASKS: {}}} if tasks else {}
            said |= {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": capabilities,
            }
            headers["Mcp-Method"] = method
            named = params.get("name", params.get("taskId"))
            if named is not None:
                headers["Mcp-Name"] = named
        if said:
            params["_meta"] = said
        return {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}, headers

    async def ask(self, method: str, params: dict[str, Any] | None = None, **how: Any) -> Any:
        """The result; an error fails the test."""
        path = how.pop("path", "/mcp")
        message, headers = self.request(method, params, **how)
        status, answer = await self.post(message, headers=headers, path=path)
        assert status == 200, answer
        assert "result" in answer, answer
        return answer["result"]

    async def call(self, tool: str, arguments: dict[str, Any], **how: Any) -> Any:
        task = how.pop("task", None)
        params = {"name": tool, "arguments": arguments, **({"task": task} if task is not None else {})}
        return await self.ask("tools/call", params, **how)

    async def refused(self, method: str, params: dict[str, Any] | None = None, **how: Any) -> Any:
        message, headers = self.request(method, params, **how)
        _, answer = await self.post(message, headers=headers)
        return answer["error"]


@asynccontextmanager
async def raw_of(world: World, version: str = MODERN, *, key: str | None = None) -> AsyncIterator[Raw]:
    async with aiohttp.ClientSession() as session:
        yield Raw(world, session, key or str(world.admin_key()), version)
