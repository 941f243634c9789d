"""An MCP server on the other end of two pipes: one JSON-RPC message a line.

Requests to it are concurrent; each is written once. Lines that are no message are passed over: many programs greet.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.connectors.mcp.child import Child
from app.connectors.mcp.wire import (
    CANCELLED,
    Heard,
    Inbox,
    NotAMessage,
    Outgoing,
    Oversize,
    Reply,
    Silence,
    read_message,
    written_notification,
)
from app.core.limits import MCP_LINE_BYTES_READ_MAX, MCP_MESSAGE_BYTES_MAX

_EDGE_BYTES = 4_096
_NUMBER = re.compile(rb"[0-9]+")


@dataclass(frozen=True, slots=True)
class HugeLine:
    """A line of which only the digest, the first bytes and the last are known."""

    sha256: str
    size_bytes: int
    edges: bytes


class Lines:
    """Bytes into lines, in bounded memory."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._kept = bytearray()
        self._head = b""
        self._hash: Any = None
        self._size_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | HugeLine]:
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._take(part)
            yield self._line()
        self._take(rest)

    @property
    def is_endless(self) -> bool:
        return self._size_bytes > MCP_LINE_BYTES_READ_MAX

    def _take(self, part: bytes) -> None:
        self._size_bytes += len(part)
        self._kept += part
        if self._hash is None and self._size_bytes > MCP_MESSAGE_BYTES_MAX:
            self._head, self._hash = bytes(self._kept[:_EDGE_BYTES]), hashlib.sha256()
        if self._hash is not None and len(self._kept) > _EDGE_BYTES:
            self._hash.update(self._kept[:-_EDGE_BYTES])
            del self._kept[:-_EDGE_BYTES]

    def _line(self) -> bytes | HugeLine:
        kept = bytes(self._kept)
        if self._hash is None:
            line: bytes | HugeLine = kept
        else:
            self._hash.update(kept)
            line = HugeLine(self._hash.hexdigest(), self._size_bytes, self._head + b"\n" + kept)
        self._begin()
        return line


class StdioLink:
    """Speaks to one child, from its start to its end."""

    def __init__(self, child: Child, inbox: Inbox) -> None:
        self._child = child
        self._inbox = inbox
        self._pending: dict[int, asyncio.Future[Heard]] = {}
        self._writing = asyncio.Lock()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())

    async def request(self, outgoing: Outgoing, *, timeout_s: float | None) -> Heard:
        line = outgoing.written() + b"\n"
        answer: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()
        may_be_sent = False
        self._inbox.watch(outgoing)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._writing:
                    # Until all before it has left this process, nothing of it has: giving up leaves nothing behind.
                    await self._child.drained()
                    if self._lost.done() or not self._child.is_writable:
                        return Silence("not_sent", f"the server is gone: {self._why()}")
                    self._pending[outgoing.request_id] = answer
                    may_be_sent = True
                    self._child.write(line)
                return await answer
        except TimeoutError:
            if not may_be_sent:
                return Silence("not_sent", f"the server took nothing for {_ms(timeout_s)}")
            self._tell_abandoned(outgoing.request_id)
            return Silence("timed_out", f"no answer within {_ms(timeout_s)}")
        except OSError as error:  # only `drained` raises it, before anything was written
            return Silence("not_sent", f"the server is gone: {type(error).__name__}")
        except asyncio.CancelledError:
            if may_be_sent:
                self._tell_abandoned(outgoing.request_id)
            raise
        finally:
            self._inbox.unwatch(outgoing)
            self._pending.pop(outgoing.request_id, None)

    async def notify(self, method: str, params: dict[str, Any] | None = None) -> None:
        self._write_now(written_notification(method, params))

    async def abandon(self, request_id: int) -> bool:
        self._tell_abandoned(request_id)
        return True

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        await self._child.stop()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._lose("it was stopped")

    def _tell_abandoned(self, request_id: int) -> None:
        self._write_now(written_notification(CANCELLED, {"requestId": request_id, "reason": "nobody waits for it"}))

    def _write_now(self, message: bytes) -> None:
        """For what may be left unsaid: nothing is added to what waits for a server that does not read."""
        if not self._lost.done() and self._child.is_writable and not self._child.has_unwritten:
            self._child.write(message + b"\n")

    async def _read(self) -> None:
        lines = Lines()
        try:
            while chunk := await self._child.read():
                for line in lines.feed(chunk):
                    self._take(line)
                if lines.is_endless:
                    self._lose("it wrote a line without an end")
                    return
            self._lose(await self._child.ended())
        except OSError as error:
            self._lose(type(error).__name__)

    def _take(self, line: bytes | HugeLine) -> None:
        if isinstance(line, HugeLine):
            # Ids are numbers that occur nowhere else. Some servers write the id first, others last.
            for number in _NUMBER.findall(line.edges):
                if len(number) < 20 and (answer := self._pending.get(int(number))) and not answer.done():
                    answer.set_result(Oversize(line.sha256, line.size_bytes))
                    return
            return
        try:
            message = read_message(line)
        except NotAMessage:
            return
        if message.is_answer:
            request_id = message.members.get("id")
            pending = self._pending.get(request_id) if type(request_id) is int else None
            if pending is not None and not pending.done():
                pending.set_result(Reply(message))
        elif (said := self._inbox.take(message)) is not None:
            self._write_now(said)

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(Silence("disconnected", f"the server is gone: {why}"))

    def _why(self) -> str:
        return self._lost.result() if self._lost.done() else "it does not read"


def _ms(timeout_s: float | None) -> str:
    return f"{int((timeout_s or 0) * 1000)} ms"
