"""Frames between the gateway and a child: a length, a fixed head, two texts of JSON.

The same bytes in both directions, so that one codec is tried by one set of tests. A child may be hostile (its Lua may
be broken into): the decoder bounds every length before it waits for it, and raises FrameRefused, nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

_HEAD: Final = struct.Struct(">IcIIQI")  # length of what follows it, kind, state, thread, memory, length of notes
_LENGTH: Final = struct.Struct(">I")
_REST: Final = _HEAD.size - _LENGTH.size

INIT, OPEN, RESUME, CLOSE = b"I", b"O", b"R", b"C"  # the gateway says
READY, OPENED, YIELDED, RETURNED, FAILED, CLOSED = b"H", b"o", b"Y", b"r", b"F", b"c"  # the child answers, each once


class FrameRefused(Exception):
    """These bytes are no frame."""


class Frame(NamedTuple):
    kind: bytes
    state: int = 0
    thread: int = 0
    memory: int = 0  # bytes that the state holds now; from the child only
    notes: bytes = b""  # warnings, a JSON array, or nothing; from the child only
    payload: bytes = b""


def write_frame(frame: Frame) -> bytes:
    length = _REST + len(frame.notes) + len(frame.payload)
    head = _HEAD.pack(length, frame.kind, frame.state, frame.thread, frame.memory, len(frame.notes))
    return b"".join((head, frame.notes, frame.payload))


class FrameReader:
    """Bytes in, whole frames out. Holds at most one frame's bytes and what came in with its end."""

    def __init__(self, *, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length < _REST or length > self._frame_bytes_max + _REST:
                raise FrameRefused(
                    f"expected a frame of {_REST} to {self._frame_bytes_max + _REST} bytes, found {length}"
                )
            end = _LENGTH.size + length
            if len(buffer) < end:
                return
            _, kind, state, thread, memory, notes = _HEAD.unpack_from(buffer)
            if notes > length - _REST:
                raise FrameRefused(f"expected notes inside the frame of {length} bytes, found {notes} bytes of them")
            body = _HEAD.size + notes
            frame = Frame(kind, state, thread, memory, bytes(buffer[_HEAD.size : body]), bytes(buffer[body:end]))
            del buffer[:end]
            yield frame
