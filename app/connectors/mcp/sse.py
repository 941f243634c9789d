"""Server-sent events, read in bounded memory (the WHATWG rules for `text/event-stream`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from app.core.limits import MCP_MESSAGE_BYTES_MAX, URL_CHARS_MAX

_LINE_END = re.compile(rb"\r\n|\n|\r")
_RETRY = re.compile(rb"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Event:
    """`data` is empty for an event that only moves the position, or the advice on retrying."""

    name: str
    data: bytes
    event_id: str | None
    retry_ms: int | None


@dataclass(frozen=True, slots=True)
class HugeEvent:
    """The beginning of an event that is too large to be read."""

    sha256: str
    size_bytes: int


class Source(Protocol):
    async def readany(self) -> bytes: ...


async def events(source: Source) -> AsyncIterator[Event | HugeEvent]:
    """The events, to the end of the stream or to the first that is too large. What breaks the source is raised."""
    buffer = bytearray()
    lines: list[bytes] = []
    size_bytes = 0
    while chunk := await source.readany():
        buffer += chunk
        # A CR at the very end may be half of a CRLF.
        complete = len(buffer) - 1 if buffer.endswith(b"\r") else len(buffer)
        start = 0
        for end in _LINE_END.finditer(buffer, 0, complete):
            line = bytes(buffer[start : end.start()])
            start = end.end()
            if line:
                lines.append(line)
                size_bytes += len(line)
            elif lines:
                yield _event(lines)
                lines, size_bytes = [], 0
        del buffer[:start]
        if size_bytes + len(buffer) > MCP_MESSAGE_BYTES_MAX:
            read = b"\n".join([*lines, bytes(buffer)])
            yield HugeEvent(hashlib.sha256(read).hexdigest(), len(read))
            return


def _event(lines: list[bytes]) -> Event:
    name, event_id, retry_ms = "message", None, None
    data: list[bytes] = []
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"id" and 0 < len(value) <= URL_CHARS_MAX and value.isascii() and value.decode().isprintable():
            event_id = value.decode()
        elif field == b"retry" and _RETRY.fullmatch(value):
            retry_ms = int(value)
    return Event(name, b"\n".join(data), event_id, retry_ms)
