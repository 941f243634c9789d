"""A client that sends exactly the bytes it is told to, and a gateway's edge on a real socket in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self, cast

import orjson

from app.clock import SystemClock
from app.config import LimitsConfig
from app.connectors.server_status import ServerStatus
from app.core.errors import TraceNotFound, Unauthenticated
from app.core.limits import SHUTDOWN_GRACE_MS
from app.domain.identity import Principal
from app.domain.tga.documents import JsonOutput, ToolEffect, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from app.edge.admission import Admission
from app.edge.protocol import BoundedProtocol
from app.edge.services import Services
from app.gateway.http_server import serve_http
from tests.log.standing import QuietLog
from tests.patience import HANG_S

AGENT = Principal(principal_id="agent-1", tenant="default", roles=["agent"])
AGENT_2 = Principal(principal_id="agent-2", tenant="default", roles=["agent"])
SUPERVISOR = Principal(principal_id="ada", tenant="default", roles=["supervisor"])
OPERATOR = Principal(principal_id="ops", tenant="default", roles=["operator"])
STRANGER = Principal(principal_id="agent-1", tenant="acme", roles=["agent"])
PRINCIPALS = {"agent": AGENT, "agent-2": AGENT_2, "supervisor": SUPERVISOR, "operator": OPERATOR, "stranger": STRANGER}

CALL = {"server_id": "crm", "tool_name": "create", "arguments": {"amount": 1}, "idempotency_key": "k-1"}
TRACE_ID = "0197c2a4-5f0e-7c3a-9d54-3a1f0b8e2c11"
TOOL_CALL_ID = "0197c2a4-5f10-7e1b-8a40-6c2d9e7f5b22"


ROOMY = LimitsConfig(requests_per_second=1_000_000, burst=1_000_000)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of a problem, checked for what every problem has."""
        assert self.headers["content-type"] == "application/problem+json", self.body
        document = self.document
        assert document["status"] == self.status
        assert document["type"] == f"/errors#{document['code'].lower()}"
        assert document["title"]
        assert document["detail"]
        assert document["remedy"]
        return str(document["code"])


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def reply(self, *, is_head: bool = False) -> Reply:
        async with asyncio.timeout(HANG_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *lines = head.rstrip("\r\n").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            assert status_line.startswith("HTTP/1.1 ")
            size = 0 if is_head else int(headers.get("content-length", "0"))
            body = await self.reader.readexactly(size)
            return Reply(int(status_line.split(" ")[1]), headers, body)

    async def is_closed(self) -> bool:
        """Whether the other side hangs up without another byte."""
        async with asyncio.timeout(HANG_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    async def ask(self, raw: bytes) -> Reply:
        await self.send(raw)
        return await self.reply()


def request(
    path: str = "/v1/tool-calls",
    body: bytes | dict[str, Any] | None = None,
    *,
    method: str = "POST",
    who: str | None = "agent",
    headers: dict[str, str] | None = None,
) -> bytes:
    raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", *(f"{n}: {v}" for n, v in (headers or {}).items())]
    if who is not None:
        lines.append(f"Authorization: Bearer {who}")
    if raw or method == "POST":
        lines.append(f"Content-Length: {len(raw)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def effect_of(trace_id: str = TRACE_ID, *, value: Any = "done") -> ToolEffect:
    return ToolEffect(
        trace_id=trace_id,
        tool_call_id=TOOL_CALL_ID,
        tool_call_digest="5f" * 32,
        outcome="SUCCESS",
        basis="answer",
        output=JsonOutput(encoding="json", value=value),
        error=None,
        attempts=[],
        resolution=None,
        recorded_at="2025-07-01T12:00:00.043Z",
    )


def completed(call: CheckedCall) -> Answer:
    trace_id = call.trace_id or TraceId(TRACE_ID)
    return Answer(trace_id, "COMPLETED", TOOL_CALL_ID, None, effect_of(trace_id))


@dataclass
class ScriptedRuntime:
    """Answers with what the test says; keeps what it was asked."""

    answering: Callable[[CheckedCall], Awaitable[Answer]] | None = None
    calls: list[CheckedCall] = field(default_factory=list)
    waits_ms: list[int | None] = field(default_factory=list)
    driving: int = 0

    async def call(self, call: CheckedCall, *, wait_ms: int | None = None) -> Answer:
        self.calls.append(call)
        self.waits_ms.append(wait_ms)
        return completed(call) if self.answering is None else await self.answering(call)

    def at_work(self, server_id: str) -> int:
        return self.driving


class Tokens:
    """The token is the name of a principal."""

    def __init__(self) -> None:
        self.asked = 0

    async def authenticate(self, authorization: str | None) -> Principal:
        self.asked += 1
        scheme, _, token = (authorization or "").partition(" ")
        if scheme != "Bearer" or token not in PRINCIPALS:
            raise Unauthenticated("the request is not authenticated")
        return PRINCIPALS[token]


class NoTraces:
    def executor_id(self) -> str:
        return TRACE_ID

    async def load_trace(self, trace_id: TraceId) -> Any:
        raise TraceNotFound("no such trace", stream=f"trace:{trace_id}")


class NoSessions:
    async def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        return []


class OneServer:
    """A registry with one tool server."""

    def __init__(self, *, max_in_flight: int = 1024) -> None:
        self.max_in_flight = max_in_flight

    def servers(self, tenant: str | None = None) -> list[Any]:
        status = ServerStatus("up", "2026-01-01T00:00:00.000Z")
        return [SimpleNamespace(server_id="crm", max_in_flight=self.max_in_flight, status=status)]


@dataclass
class Front:
    """A running edge, and all that it was given."""

    port: int
    services: Services
    runtime: ScriptedRuntime
    tokens: Tokens
    serving: asyncio.Task[None]

    async def open(self) -> Wire:
        return await Wire.open(self.port)

    async def ask(self, raw: bytes) -> Reply:
        async with await self.open() as wire:
            return await wire.ask(raw)


@asynccontextmanager
async def open_front(
    *,
    limits: LimitsConfig | None = None,
    registry: Any = None,
    traces: Any = None,
    grace_ms: int = SHUTDOWN_GRACE_MS,
    protocol: type[BoundedProtocol] = BoundedProtocol,
    **parts: Any,
) -> AsyncIterator[Front]:
    runtime, tokens = ScriptedRuntime(), Tokens()
    services = Services(
        runtime=parts.get("runtime", cast("Any", runtime)),
        traces=traces or cast("Any", NoTraces()),
        sessions=parts.get("sessions", cast("Any", NoSessions())),
        registry=registry or cast("Any", OneServer()),
        pins=parts.get("pins", cast("Any", None)),
        procedures=parts.get("procedures", cast("Any", None)),
        submissions=parts.get("submissions", cast("Any", None)),
        schedules=cast("Any", None),
        triggers=cast("Any", None),
        runs=parts.get("runs", cast("Any", None)),
        erasure=cast("Any", None),
        authenticator=tokens,
        admission=parts.get("admission", Admission(limits or ROOMY)),
        clock=SystemClock(),
        log=parts.get("log", QuietLog()),
        blobs=parts.get("blobs", cast("Any", None)),
    )
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve_http(
            services,
            host="127.0.0.1",
            port=parts.get("port", 0),
            on_ready=lambda _, port: listening.set_result(port),
            grace_ms=grace_ms,
            protocol=protocol,
        )
    )
    both: set[asyncio.Future[Any]] = {listening, serving}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        listening.cancel()
        serving.result()
    try:
        yield Front(listening.result(), services, runtime, tokens, serving)
    finally:
        services.stopping.set()
        await serving
