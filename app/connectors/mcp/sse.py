"""Server-sent events, read in bounded memory (the WHATWG rules for `text/event-stream`).

Nothing but the data of the event at hand is kept, and that only up to a bound (app.connectors.mcp.large); comments,
unknown fields and what is too long for its field are counted and dropped as they come.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from app.connectors.http_connection import Answer
from app.connectors.mcp.large import Arriving, Large, Unasked
from app.core.limits import (
    MCP_UNASKED_BYTES_PER_MINUTE_MAX,
    MCP_UNASKED_PER_MINUTE_MAX,
    RESPONSE_BYTES_READ_MAX,
    URL_CHARS_MAX,
)

_LINE_END: Final = re.compile(rb"[\r\n]")
_LINE_ENDS: Final = re.compile(rb"[\r\n]*+")
_RETRY: Final = re.compile(rb"[0-9]{1,9}")
_SMALL_FIELDS: Final = (b"event", b"id", b"retry")
_FIELD_BYTES_MAX: Final = 7  # "event: ", "retry: "
_SMALL_BYTES_MAX: Final = URL_CHARS_MAX + _FIELD_BYTES_MAX
_LINES_PER_STEP: Final = 64


class _Line(Enum):
    """What the line at hand is."""

    UNKNOWN = 0  # too short to tell
    DATA = 1
    SMALL = 2
    DROPPED = 3


@dataclass(frozen=True, slots=True)
class Event:
    """`data` is empty for an event that only moves the position, or the advice on retrying. One that is not whole ends
    the stream: there was no end of it within the bytes that are read."""

    name: str
    data: bytes | Large
    event_id: str | None
    retry_ms: int | None


class TooMuchUnasked(Exception):
    """The server sent more than it may without being asked."""


async def events(answer: Answer, unasked: Unasked) -> AsyncIterator[Event]:
    """The events, to the end of the stream or to the first that does not end. What breaks the source is raised.

    The caller notes in `unasked` which events were not asked for; comments and the like are noted here. Raises
    TooMuchUnasked.
    """
    reader = EventReader()
    while chunk := await answer.read_some():
        async for event in answer.stream.paced(reader.feed(chunk)):
            yield event
            if isinstance(event.data, Large) and not event.data.is_whole:
                return
        if unasked.note(reader.pop_dropped_bytes(), messages=0):
            raise TooMuchUnasked(
                f"the server sent more than {MCP_UNASKED_PER_MINUTE_MAX} messages or "
                f"{MCP_UNASKED_BYTES_PER_MINUTE_MAX} bytes in a minute that nobody asked for"
            )


class EventReader:
    """Bytes into events."""

    def __init__(self) -> None:
        self._data = Arriving()
        self._dropped_bytes = 0
        self._after_cr = False
        self._line, self._kind = b"", _Line.UNKNOWN
        self._begin_event()

    def _begin_event(self) -> None:
        self._name = "message"
        self._event_id: str | None = None
        self._retry_ms: int | None = None
        self._has_fields = self._has_data = False

    def pop_dropped_bytes(self) -> int:
        """How many bytes were no data since this was asked last."""
        dropped, self._dropped_bytes = self._dropped_bytes, 0
        return dropped

    def feed(self, chunk: bytes) -> Iterator[Event | None]:
        """In small steps; each is over when it yields."""
        at = 1 if self._after_cr and chunk.startswith(b"\n") else 0
        self._after_cr = False
        lines = 0
        while at < len(chunk):
            if not (self._has_fields or self._line or self._kind is not _Line.UNKNOWN):
                # Between events an empty line ends nothing, nor do a thousand of them.
                at, empty_from = _end(_LINE_ENDS, chunk, at), at
                self._dropped_bytes += at - empty_from
                self._after_cr = chunk.endswith(b"\r", empty_from, at) and at == len(chunk)
            found = _LINE_END.search(chunk, at)
            end = len(chunk) if found is None else found.start()
            yield from self._take(chunk[at:end])
            at = end + 1
            if found is None:
                break
            if chunk.startswith(b"\r", end):
                self._after_cr = at == len(chunk)
                at += chunk.startswith(b"\n", at)
            event = self._end_line()
            lines += 1
            if event is not None or lines % _LINES_PER_STEP == 0:
                yield event
        if self._data.size_bytes > RESPONSE_BYTES_READ_MAX and self._data.large is not None:
            yield self._event(self._data.large)

    def _take(self, part: bytes) -> Iterator[None]:
        """More of the line at hand."""
        if self._kind is _Line.UNKNOWN:
            self._line += part
            if len(self._line) < _FIELD_BYTES_MAX:
                return
            part = self._tell_kind()
        if self._kind is _Line.DATA:
            yield from self._data.take(part)
        elif self._kind is _Line.SMALL and len(self._line) + len(part) <= _SMALL_BYTES_MAX:
            self._line += part
            self._dropped_bytes += len(part)
        else:
            self._kind = _Line.DROPPED
            self._dropped_bytes += len(part)

    def _tell_kind(self) -> bytes:
        """By the beginning of the line, or by all of it; what of its value has come."""
        field, colon, value = self._line.partition(b":")
        begun, self._line = self._line, b""
        if field == b"data":
            self._kind = _Line.DATA
            value = value.removeprefix(b" ")
            value = b"\n" + value if self._has_data else value
            self._has_fields = self._has_data = True
            return value
        is_small = field in _SMALL_FIELDS and bool(colon)
        self._kind = _Line.SMALL if is_small else _Line.DROPPED
        return begun

    def _end_line(self) -> Event | None:
        if self._kind is _Line.UNKNOWN:
            if not self._line:
                return self._end_event()
            for _ in self._take_whole():
                pass
        if self._kind is _Line.SMALL:
            self._note_field(self._line)
        self._line, self._kind = b"", _Line.UNKNOWN
        return None

    def _take_whole(self) -> Iterator[None]:
        value = self._tell_kind()
        return self._take(value)

    def _note_field(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        self._has_fields = True
        if field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id" and 0 < len(value) <= URL_CHARS_MAX and value.isascii() and value.decode().isprintable():
            self._event_id = value.decode()
        elif field == b"retry" and _RETRY.fullmatch(value):
            self._retry_ms = int(value)

    def _end_event(self) -> Event | None:
        if not self._has_fields:
            return None
        event = self._event(self._data.end())
        self._begin_event()
        return event

    def _event(self, data: bytes | Large) -> Event:
        return Event(self._name, data, self._event_id, self._retry_ms)


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
