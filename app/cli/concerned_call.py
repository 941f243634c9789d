"""Which call a finding concerns, in words: the tool, who called it, and under which key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from app.cli.bundle_files import FolderFiles
from app.core.errors import TgaError
from app.domain.log.bundle import ENTRIES, EntryLine
from app.domain.tga.documents import ActionRequest
from app.domain.tga.transitions import TRACE

_LOOKED_FOR_MAX: Final = 100


class ConcernedCall(NamedTuple):
    """As the trace says, unverified: something is wrong with it."""

    server_id: str
    tool_name: str
    principal_id: str
    idempotency_key: str | None

    def in_words(self) -> str:
        key = "without a key" if self.idempotency_key is None else f"with key {self.idempotency_key}"
        return f"{self.tool_name} of {self.server_id}, called by {self.principal_id} {key}"


class BundledCalls:
    """The calls of a bundle's traces, from their first lines. The file is read again for each trace that has findings,
    so only for the first hundred of them."""

    def __init__(self, files: FolderFiles) -> None:
        self._files = files
        self._known: dict[str, ConcernedCall | None] = {}

    def of(self, error: TgaError) -> ConcernedCall | None:
        stream = error.stream
        if stream is None or not TRACE.has(stream):
            return None
        if stream not in self._known and len(self._known) < _LOOKED_FOR_MAX:
            self._known[stream] = next(self._found(stream), None)
        return self._known.get(stream)

    def _found(self, stream: str) -> Iterator[ConcernedCall]:
        named = stream.encode()
        try:
            for raw in self._files.lines(ENTRIES):
                if named not in raw:
                    continue
                line = EntryLine.from_line(raw)
                if (line.stream, line.sequence_number) == (stream, 1) and line.artifact is not None:
                    said = ActionRequest.from_bytes(line.artifact)
                    yield ConcernedCall(
                        said.server_id, said.tool_name, said.principal.principal_id, said.idempotency_key
                    )
        except TgaError:
            return  # a line that cannot be read is a finding of its own
