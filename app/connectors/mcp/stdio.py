"""An MCP server on the other end of two pipes: one JSON-RPC message a line.

Requests to it are concurrent; each is written once. Lines that are no message are passed over: many programs greet.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from app.connectors.intake import Intake
from app.connectors.mcp.child import Child
from app.connectors.mcp.large import Arriving, Large, Unasked
from app.connectors.mcp.wire import (
    CANCELLED,
    WITHHELD,
    Heard,
    Inbox,
    NotAMessage,
    Outgoing,
    Oversize,
    Reply,
    Silence,
    read_large,
    read_message,
    written_notification,
)
from app.core.limits import MCP_LINE_BYTES_READ_MAX

_EDGE_BYTES = 4_096
_NUMBER = re.compile(rb"[0-9]+")


class _Pending(NamedTuple):
    method: str
    answer: asyncio.Future[Heard]


class Lines:
    """Bytes into lines, in bounded memory."""

    def __init__(self) -> None:
        self._arriving = Arriving()
        self.edges = b""  # of the line that was given last: its first bytes and its last
        self._first = self._last = b""

    def feed(self, chunk: bytes) -> Iterator[bytes | Large | None]:
        """In small steps; each is over when it yields."""
        at = 0
        while (end := chunk.find(b"\n", at)) >= 0:
            yield from self._take(chunk[at:end])
            at = end + 1
            self.edges = self._first + b"\n" + self._last
            self._first = self._last = b""
            yield self._arriving.end()
        yield from self._take(chunk[at:])

    @property
    def is_endless(self) -> bool:
        return self._arriving.size_bytes > MCP_LINE_BYTES_READ_MAX

    def _take(self, part: bytes) -> Iterator[None]:
        if len(self._first) < _EDGE_BYTES:
            self._first += part[: _EDGE_BYTES - len(self._first)]
        self._last = (self._last + part[-_EDGE_BYTES:])[-_EDGE_BYTES:]
        yield from self._arriving.take(part)


class StdioLink:
    """Speaks to one child, from its start to its end."""

    def __init__(self, child: Child, inbox: Inbox, *, intake: Intake) -> None:
        self._child = child
        self._inbox = inbox
        self._stream = intake.stream()
        self._unasked = Unasked()
        self._pending: dict[int, _Pending] = {}
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
                    if not await self._may_write(outgoing):
                        return WITHHELD
                    if self._lost.done() or not self._child.is_writable:
                        return Silence("not_sent", f"the server is gone: {self._why()}")
                    self._pending[outgoing.request_id] = _Pending(outgoing.method, answer)
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

    async def _may_write(self, outgoing: Outgoing) -> bool:
        """Wait until all before it has left this process: giving up leaves nothing behind. Then the last word on it."""
        await self._child.drained()
        if outgoing.may_send is None:
            return True
        while await outgoing.may_send():
            if not self._child.has_unwritten:
                return True  # what is written now leaves at once
            await self._child.drained()
        return False

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
                given: AsyncIterator[bytes | Large] = self._stream.paced(lines.feed(chunk))
                async for line in given:
                    with self._stream:
                        is_asked = self._take(line, lines)
                    if is_asked:
                        self._stream.forgive()
                    elif self._unasked.note(len(line) if isinstance(line, bytes) else line.size_bytes):
                        self._lose("it says too much that nobody asked for")
                        return
                if lines.is_endless:
                    self._lose("it wrote a line without an end")
                    return
            self._lose(await self._child.ended())
        except OSError as error:
            self._lose(type(error).__name__)

    def _take(self, line: bytes | Large, lines: Lines) -> bool:
        """Whether it was asked for: an answer that a request waits for."""
        try:
            if isinstance(line, Large):
                return self._take_large(line, lines.edges)
            message = read_message(line)
        except NotAMessage:
            return False
        if message.is_answer:
            return self._answer(message.members.get("id"), lambda _: Reply(message))
        if (said := self._inbox.take(message)) is not None:
            self._write_now(said)
        return False

    def _take_large(self, large: Large, edges: bytes) -> bool:
        if not large.is_message or not large.is_answer:
            return False
        if large.is_told:
            return self._answer(large.member("id"), lambda method: read_large(large, method))
        # Ids are numbers that occur nowhere else. Some servers write the id first, others last.
        numbers = [int(number) for number in _NUMBER.findall(edges) if len(number) < 20]
        return any(self._answer(number, lambda _: Oversize(large)) for number in numbers)

    def _answer(self, request_id: Any, heard: Callable[[str], Heard]) -> bool:
        """`heard` makes the answer, given the request's method."""
        pending = self._pending.get(request_id) if type(request_id) is int else None
        if pending is None or pending.answer.done():
            return False
        pending.answer.set_result(heard(pending.method))
        return True

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_result(Silence("disconnected", f"the server is gone: {why}"))

    def _why(self) -> str:
        return self._lost.result() if self._lost.done() else "it does not read"


def _ms(timeout_s: float | None) -> str:
    return f"{int((timeout_s or 0) * 1000)} ms"
