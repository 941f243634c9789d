"""Server-sent events as they come in (the format of the HTML standard, section 9.2.6)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from app.core.errors import InputTooLarge


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: str
    last_id: str | None


async def events_in(chunks: AsyncIterator[bytes], *, bytes_max: int) -> AsyncIterator[Event]:
    """Every whole event, in order. What a broken connection leaves half is no event; InputTooLarge for one without
    an end."""
    name, data, last_id = "", list[str](), None
    data_chars = 0
    async for line in _lines(chunks, bytes_max=bytes_max):
        if not line:
            if data:
                yield Event(name or "message", "\n".join(data), last_id)
            name, data, data_chars = "", [], 0
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
            data_chars += len(value) + 1
            if data_chars > bytes_max:
                raise InputTooLarge("an event without end", expected=f"at most {bytes_max} bytes")
        elif field == "id" and "\0" not in value:
            last_id = value


async def _lines(chunks: AsyncIterator[bytes], *, bytes_max: int) -> AsyncIterator[str]:
    pending = bytearray()
    async for chunk in chunks:
        pending += chunk
        *whole, rest = pending.split(b"\n")
        if len(rest) > bytes_max:
            raise InputTooLarge("an event without end", expected=f"at most {bytes_max} bytes")
        for line in whole:
            yield line.removesuffix(b"\r").decode("utf-8", "replace")
        pending = bytearray(rest)
