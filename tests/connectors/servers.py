"""Servers of raw bytes for tests of connectors, and a tool call to send them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from app.connectors.http import HttpConnector
from app.core.limits import ATTEMPTS_LISTED_MAX
from app.domain.tga.documents import ToolCall, ToolEffect
from app.domain.tga.ports import Answered, Dispatched, Withheld
from tests.patience import HANG_S
from tests.traces import time_at, uuid7

Answer: TypeAlias = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


def tool_call(**overrides: Any) -> ToolCall:
    fields: dict[str, Any] = {
        "trace_id": uuid7(1),
        "tool_call_id": uuid7(1, role="tool_call"),
        "supervisor_decision_digest": "0" * 64,
        "server_id": "pay",
        "tool_name": "charge",
        "tool_class": "write",
        "tool_definition_digest": None,
        "arguments": {"b": 1, "amount": 5},
        "idempotency_key": "key-1",
        "on_unknown_outcome": "redispatch",
        "reconcile_tool": None,
        "prepared_at": time_at(0),
        **overrides,
    }
    return ToolCall.model_validate(fields)


def effect_of(answer: Dispatched) -> ToolEffect:
    """The effect that the runtime would record, with as many attempts as there may be: it must always be storable."""
    call = tool_call()
    if isinstance(answer, Answered):
        outcome, output = answer.outcome, answer.output
        error = None
        if answer.error_code is not None:
            error = {"code": answer.error_code, "message": answer.error_message}
    else:
        assert not isinstance(answer, Withheld), "that is no attempt, and has no effect"
        outcome, output, error = "FAILURE", None, {"code": "UNKNOWN", "message": answer.detail}
    attempt = {"attempt": 1, "started_at": time_at(0), "ended_at": time_at(1), "result": "answered"}
    fields = {
        "trace_id": call.trace_id,
        "tool_call_id": call.tool_call_id,
        "tool_call_digest": call.digest(),
        "outcome": outcome,
        "basis": "answer",
        "output": None if output is None else output.to_json(),
        "error": error,
        "attempts": [attempt] * ATTEMPTS_LISTED_MAX,
        "resolution": None,
        "recorded_at": time_at(2),
    }
    effect = ToolEffect.model_validate(fields)
    assert ToolEffect.from_bytes(effect.to_bytes()) == effect
    return effect


@dataclass
class Raw:
    """A server of raw bytes: reads one request after another and lets `answer` write what it likes."""

    answer: Answer
    url: str = ""
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = [int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")]
                size = sizes[0] if sizes else 0
                self.requests.append(head + await reader.readexactly(size))
                await self.answer(writer, len(self.requests))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def raw_server(answer: Answer | bytes) -> AsyncIterator[Raw]:
    """`answer` as bytes: written, then the connection is closed."""

    async def write_and_close(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(answer if isinstance(answer, bytes) else b"")
        await writer.drain()
        writer.close()

    raw = Raw(write_and_close if isinstance(answer, bytes) else answer)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(raw.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=2**20)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def always(answer: bytes) -> Answer:
    """The same answer to every request, on a connection that stays open."""

    async def write(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(answer)

    return write


def endless(first: bytes, unit: bytes, sent: list[int] | None = None) -> Answer:
    """The first once, the unit as long as it is taken; `sent` counts the bytes."""

    async def write(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(first)
        piece = unit * (1 + 16_384 // len(unit))
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            if sent is not None:
                sent.append(len(piece))

    return write


async def dispatched(answer: Answer | bytes, **how: Any) -> Dispatched:
    """What one dispatch to such a server gives. However it ends, the server saw one request, once."""
    timeout_ms = how.pop("timeout_ms", 5000)
    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        try:
            result = await connector.dispatch(tool_call(**how), timeout_ms=timeout_ms)
        finally:
            await connector.close()
    assert len(raw.requests) == 1
    effect_of(result)
    return result


def response(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def digest_output(body: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(body).hexdigest()
    return {"encoding": "digest", "sha256": sha256, "size_bytes": len(body), "truncated": True}


def output_of(result: Dispatched) -> dict[str, Any] | None:
    assert isinstance(result, Answered), result
    return None if result.output is None else result.output.to_json()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.01)
