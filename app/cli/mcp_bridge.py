"""Messages of one MCP client, carried to the gateway over HTTP and its answers back.

Every message is an HTTP request of its own, so a restart of the gateway is only a pause. What may be executed is sent
under a key that stays the same in every try; what the client itself makes again is recognised by the gateway.

A client of the handshake cannot listen for changes of the tools; the bridge listens in its place, and tells it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final
from urllib.parse import quote

import uuid_utils

from app.cli.client import Exchange, GatewayClient
from app.cli.event_stream import events_in
from app.core.errors import GatewayUnreachable, InputTooLarge, SettingInvalid, TgaError
from app.core.limits import (
    BACKOFF_FIRST_MS,
    MCP_BRIDGE_TRIES_MAX,
    MCP_PING_EVERY_MS,
    RESPONSE_BYTES_READ_MAX,
)

logger = logging.getLogger("tga")

Write = Callable[[bytes], Awaitable[None]]

_PROPOSED_KEY: Final = "tga/proposed-key"
_OWN_KEY: Final = "tga/idempotency-key"
_VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"
_NAMED: Final = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}
_PLAIN: Final = re.compile(r"[!-~]([ -~]*[!-~])?")
_QUIET_S: Final = 3 * MCP_PING_EVERY_MS / 1000
_PAUSE_MAX_S: Final = 2.0
_GREETINGS: Final = frozenset({"initialize", "server/discover"})  # by protocol: up to 2025-11-25, and since 2026-07-28
_GREETING_S: Final = 5.0
_AGAIN: Final = frozenset({429, 502, 503, 504})
_HEADER_MISMATCH: Final = -32020
_TOOLS_CHANGED: Final = "notifications/tools/list_changed"
_ACKNOWLEDGED: Final = "notifications/subscriptions/acknowledged"
_LISTEN_PAUSE_MAX_S: Final = 30.0
_LISTEN: Final[dict[str, Any]] = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "subscriptions/listen",
    "params": {
        "notifications": {"toolsListChanged": True},
        "_meta": {_VERSION_KEY: "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}},
    },
}


class Bridge:
    """`take` each line that the client sent; `write` gets each line for it, one at a time."""

    def __init__(self, client: GatewayClient, write: Write, *, server: str | None = None) -> None:
        self._client = client
        self._write = write
        self._writing = asyncio.Lock()
        self._path = "/mcp" if server is None else f"/mcp/{quote(server, safe='')}"
        self._version: str | None = None  # of the handshake, when the client makes one
        self._running: dict[Any, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._schemas: dict[str, Any] = {}  # of tools that want arguments in headers, too
        self._listening: asyncio.Task[None] | None = None

    def take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            self._start(self._tell(_error(None, -32700, "not JSON")))
            return
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            if not (isinstance(message, dict) and ("result" in message or "error" in message)):
                self._start(self._tell(_error(None, -32600, "not one JSON-RPC request or notification")))
            return
        params = message.get("params")
        if "id" not in message:
            if message["method"] == "notifications/cancelled" and isinstance(params, dict):
                self._cancel(params.get("requestId"))
            elif message["method"] == "notifications/initialized" and self._listening is None:
                self._listening = self._start(self._listen())
            return
        request_id = message["id"]
        task = self._start(self._ask(message))
        if isinstance(request_id, (str, int)):
            self._running[request_id] = task
            task.add_done_callback(lambda done: self._forget(request_id, done))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _forget(self, request_id: Any, done: asyncio.Task[None]) -> None:
        if self._running.get(request_id) is done:
            del self._running[request_id]

    def _cancel(self, request_id: Any) -> None:
        """The client does not wait any more. Its connection ends here; what was sent goes on and is on the record."""
        task = self._running.pop(request_id, None) if isinstance(request_id, (str, int)) else None
        if task is not None:
            task.cancel()

    async def _ask(self, message: dict[str, Any]) -> None:
        """The answer to one request, whatever it takes, or an error that says what is not known.

        A greeting is tried once: a client that connects wants to hear at once that there is no gateway, and to show it.
        """
        if message["method"] == "tools/call":
            _propose_key(message)
        tried, pause_s = 0, BACKOFF_FIRST_MS / 1000
        tries_max = 1 if message["method"] in _GREETINGS else MCP_BRIDGE_TRIES_MAX
        while True:
            tried += 1
            try:
                if await self._exchanged(message):
                    return
                found = "the gateway is busy, or about to stop"
            except TgaError as error:
                found = str(error)
                if not isinstance(error, GatewayUnreachable):
                    tried = tries_max
            if tried >= tries_max:
                await self._tell(_unanswered(message, found))
                return
            if tried == 1:
                logger.warning("%s is tried again: %s", message["method"], found)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    async def _listen(self) -> None:
        """Tell the client when its tools change, until the bridge ends. While the gateway is away anything may change,
        so its return counts as a change."""
        pause_s, has_heard = BACKOFF_FIRST_MS / 1000, False
        while True:
            with contextlib.suppress(TgaError):
                body = json.dumps(_LISTEN).encode()
                async with self._client.exchange(
                    self._path, body, self._headers(_LISTEN), quiet_s=_QUIET_S
                ) as exchange:
                    async for event in _messages(exchange):
                        is_return = event.get("method") == _ACKNOWLEDGED and has_heard
                        if is_return or event.get("method") == _TOOLS_CHANGED:
                            await self._tell({"jsonrpc": "2.0", "method": _TOOLS_CHANGED})
                        if event.get("method") == _ACKNOWLEDGED:
                            pause_s, has_heard = BACKOFF_FIRST_MS / 1000, True
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LISTEN_PAUSE_MAX_S)

    async def _exchanged(self, message: dict[str, Any]) -> bool:
        """Whether it was answered. False: the gateway says to come back; it has done nothing."""
        body = json.dumps(message).encode()
        quiet_s = _GREETING_S if message["method"] in _GREETINGS else _QUIET_S
        async with self._client.exchange(self._path, body, self._headers(message), quiet_s=quiet_s) as exchange:
            if exchange.status in _AGAIN:
                return False
            async for answer in _messages(exchange):
                if "method" in answer:
                    await self._tell(answer)
                    continue
                if answer.get("id") is None:
                    answer["id"] = message["id"]
                if await self._must_name_arguments(message, answer):
                    return False
                self._learn(message, answer)
                await self._tell(answer)
                return True
        raise GatewayUnreachable("the gateway ended its answer before it was whole")

    def _headers(self, message: dict[str, Any]) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream"}
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        meta = params.get("_meta")
        version = meta.get(_VERSION_KEY) if isinstance(meta, dict) else None
        if not isinstance(version, str):
            if self._version is not None:
                headers["MCP-Protocol-Version"] = self._version
            return headers
        headers["MCP-Protocol-Version"] = _header(version)
        headers["Mcp-Method"] = _header(message["method"])
        named = params.get(_NAMED.get(message["method"], ""))
        if isinstance(named, str):
            headers["Mcp-Name"] = _header(named)
            headers |= self._argument_headers(named, params.get("arguments"))
        return headers

    def _argument_headers(self, tool: str, arguments: Any) -> dict[str, str]:
        schema = self._schemas.get(tool)
        if schema is None or not isinstance(arguments, dict):
            return {}
        from mcp.shared.inbound import mcp_param_headers, x_mcp_header_map  # a second to import, and rarely needed

        return mcp_param_headers(x_mcp_header_map(schema), arguments)

    async def _must_name_arguments(self, message: dict[str, Any], answer: dict[str, Any]) -> bool:
        """Whether the call was refused only because this bridge did not know which arguments go into headers."""
        error = answer.get("error")
        name = message["params"].get("name") if message["method"] == "tools/call" else None
        if not isinstance(error, dict) or error.get("code") != _HEADER_MISMATCH or name in self._schemas:
            return False
        meta = message["params"]["_meta"]
        cursor: str | None = None
        while True:
            params = {"_meta": meta, **({"cursor": cursor} if cursor else {})}
            listing = {"jsonrpc": "2.0", "id": 0, "method": "tools/list", "params": params}
            body = json.dumps(listing).encode()
            async with self._client.exchange(self._path, body, self._headers(listing), quiet_s=_QUIET_S) as exchange:
                found = [one async for one in _messages(exchange)]
            self._learn(listing, found[-1] if found else {})
            result = found[-1].get("result") if found else None
            cursor = result.get("nextCursor") if isinstance(result, dict) else None
            if not isinstance(cursor, str):
                return name in self._schemas

    def _learn(self, message: dict[str, Any], answer: dict[str, Any]) -> None:
        result = answer.get("result")
        if not isinstance(result, dict):
            return
        if message["method"] == "initialize" and isinstance(result.get("protocolVersion"), str):
            self._version = result["protocolVersion"]
            result["capabilities"]["tools"] = {"listChanged": True}
        tools = result.get("tools") if message["method"] == "tools/list" else None
        for tool in tools if isinstance(tools, list) else ():
            if "x-mcp-header" in json.dumps(tool.get("inputSchema")):
                self._schemas[tool["name"]] = tool["inputSchema"]

    async def _tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        async with self._writing:
            # Once begun, a line is written whole.
            await asyncio.shield(asyncio.ensure_future(self._write(line)))


async def _messages(exchange: Exchange) -> AsyncIterator[dict[str, Any]]:
    """Everything of the answer that is a JSON-RPC message; GatewayUnreachable when it is none of ours."""
    try:
        if exchange.content_type == "text/event-stream":
            async for event in events_in(exchange.chunks(), bytes_max=RESPONSE_BYTES_READ_MAX):
                yield _read(event.data)
            return
        raw = bytearray()
        async for chunk in exchange.chunks():
            raw += chunk
            if len(raw) > RESPONSE_BYTES_READ_MAX:
                raise InputTooLarge("an answer without end")
    except InputTooLarge as error:
        raise GatewayUnreachable("the gateway's answer is larger than this bridge takes", found=error.what) from None
    yield _read(raw)


def _read(raw: bytes | bytearray | str) -> dict[str, Any]:
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        # To ask it again would not help.
        raise SettingInvalid("what answers at TGA_URL is no gateway of this kind")
    return message


def _propose_key(message: dict[str, Any]) -> None:
    """A key for this call in all its tries; the gateway takes it unless it knows the call already."""
    params = message.get("params")
    if not isinstance(params, dict):
        return
    meta = params.setdefault("_meta", {})
    if isinstance(meta, dict) and _OWN_KEY not in meta:
        meta.setdefault(_PROPOSED_KEY, str(uuid_utils.uuid7()))


def _unanswered(message: dict[str, Any], found: str) -> dict[str, Any]:
    if message["method"] != "tools/call":
        return _error(message["id"], -32000, found, {"code": GatewayUnreachable.code})
    text = (
        f"{GatewayUnreachable.code}: no gateway answered. Found: {found}\n"
        "Whether the call was executed is not known. What to do: call the tool again with exactly the same arguments; "
        "if the gateway has the call on its record, it is recognised and not executed twice."
    )
    result = {"content": [{"type": "text", "text": text}], "isError": True, "resultType": "complete"}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _error(request_id: Any, code: int, text: str, data: Any = None) -> dict[str, Any]:
    error = {"code": code, "message": text, **({} if data is None else {"data": data})}
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


def _header(value: str) -> str:
    """As it is, or wrapped as the protocol says where a header cannot carry it."""
    if _PLAIN.fullmatch(value) and not value.startswith("=?base64?"):
        return value
    return f"=?base64?{base64.b64encode(value.encode('utf-8', 'surrogatepass')).decode('ascii')}?="
