"""Standard output and standard error whose reader may leave, as in `tga doctor | head -n 3`.

That is no error of the command: it goes on to its end, in silence, and exits as it would have. So no change is left
half made, and `tga verify --all | head -n 1` still exits 1 when something is wrong.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class _Pipe(io.FileIO):
    """A descriptor to write to. When its reader is gone, what is still written goes nowhere."""

    reader_is_gone = False

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            self.reader_is_gone = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def forgive_closed_pipes() -> None:
    """From here on, for everything that this process writes to standard output and standard error."""
    sys.stdout, sys.stderr = _forgiving(sys.stdout), _forgiving(sys.stderr)
    # Kept here too: who puts another stream in their place would else close the descriptor with the last reference.
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr  # type: ignore[assignment,misc]


def reader_is_gone() -> bool:
    """Whether the reader of standard output is gone: a command that follows something for ever can stop."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return isinstance(raw, _Pipe) and raw.reader_is_gone


def _forgiving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed before we started, or replaced by who runs us
        return stream
    stream.flush()
    raw = _Pipe(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
