"""Messages of MCP servers while they arrive, in bounded memory, and how much a server may say without being asked.

What is too large to be read whole is still looked through for what it says of the outcome.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from app.connectors.json_scanner import JsonScanner, ScanState
from app.core.limits import (
    DOCUMENT_BYTES_MAX,
    JSON_SCAN_STEP_BYTES,
    MCP_MESSAGE_BYTES_MAX,
    MCP_READ_AT_ONCE_BYTES_MAX,
    MCP_UNASKED_BYTES_PER_MINUTE_MAX,
    MCP_UNASKED_PER_MINUTE_MAX,
    READ_STEP_BYTES,
)

_WANTED: Final = frozenset(
    {
        ("id",),
        ("method",),
        ("result",),
        ("result", "isError"),
        ("result", "resultType"),
        ("error",),
        ("error", "code"),
        ("error", "message"),
    }
)


class Large:
    """A message that is too large to be read at once. Until `is_whole`, only its beginning is known."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.is_whole = False
        self.raw: bytes | None = None  # all of it, where it may be read
        self._hash = hashlib.sha256()
        self._scanner = JsonScanner(_WANTED, hashed="result", kept_bytes_max=DOCUMENT_BYTES_MAX)

    @property
    def is_message(self) -> bool:
        """Whether it may be one, as far as it was looked at."""
        return self._scanner.state is not ScanState.MALFORMED

    @property
    def is_told(self) -> bool:
        """Whether what it says can be believed: all of it was seen, and nothing that matters is there twice."""
        return self.is_whole and self._scanner.state is ScanState.COMPLETE and not self._scanner.is_ambiguous

    @property
    def is_answer(self) -> bool:
        """Whether it is one, if it is told; else whether it may be one."""
        found = self._scanner.found
        return ("method",) not in found and (("result",) in found or ("error",) in found or not self.is_told)

    def has(self, *path: str) -> bool:
        return path in self._scanner.found

    def member(self, *path: str) -> Any:
        """A scalar or a Kind; None also where there is none."""
        return self._scanner.found.get(path)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    @property
    def result_sha256(self) -> str:
        return self._scanner.hashed_sha256

    @property
    def result_size_bytes(self) -> int:
        return self._scanner.hashed_bytes

    @property
    def result_bytes(self) -> bytes | None:
        """The result as it stands, where it is not larger than an output may be."""
        return bytes(self._scanner.kept) or None

    def take(self, piece: bytes | memoryview) -> Iterator[None]:
        """In small steps; each is over when it yields."""
        view = memoryview(piece)
        while view:
            is_read = self._scanner.state is ScanState.READING
            step_bytes = JSON_SCAN_STEP_BYTES if is_read else READ_STEP_BYTES
            step, view = view[:step_bytes], view[step_bytes:]
            self._hash.update(step)
            self.size_bytes += len(step)
            self._scanner.feed(step)
            yield

    def end(self, raw: bytes | None) -> None:
        self._scanner.finish()
        self.raw, self.is_whole = raw, True


class Arriving:
    """One message after another. What is small is kept; what grows large is looked through from there on."""

    def __init__(self) -> None:
        self.large: Large | None = None
        self._kept = bytearray()

    @property
    def size_bytes(self) -> int:
        return len(self._kept) if self.large is None else self.large.size_bytes

    def take(self, piece: bytes | memoryview) -> Iterator[None]:
        """In small steps; each is over when it yields."""
        if self.large is None and len(self._kept) + len(piece) <= MCP_READ_AT_ONCE_BYTES_MAX:
            self._kept += piece
            return
        if self.large is None:
            self.large = Large()
            yield from self.large.take(bytes(self._kept))
        if self.large.size_bytes + len(piece) <= MCP_MESSAGE_BYTES_MAX:
            self._kept += piece
        else:
            self._kept.clear()
        yield from self.large.take(piece)

    def end(self) -> bytes | Large:
        """The message; the next one begins."""
        kept, large = bytes(self._kept), self.large
        self._kept.clear()
        self.large = None
        if large is None:
            return kept
        large.end(kept or None)
        return large


class Unasked:
    """Counts what a server says without being asked, in messages and bytes of the last minute or less."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._count = self._size_bytes = 0

    def note(self, size_bytes: int, *, messages: int = 1) -> bool:
        """Whether it is too much."""
        self._count += messages
        self._size_bytes += size_bytes
        if self._count <= MCP_UNASKED_PER_MINUTE_MAX and self._size_bytes <= MCP_UNASKED_BYTES_PER_MINUTE_MAX:
            return False
        now = self._clock()
        if now - self._began_s < 60:
            return True
        self._began_s, self._count, self._size_bytes = now, messages, size_bytes
        return False
