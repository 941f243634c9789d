"""A child whose Lua is broken into: honest until a program's source names an attack, then its frames are forged.

Started by `test_hostile_child.py` in place of the honest one, which it is in all else.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from typing import Any

from app.lua import child, confine, frames
from app.lua.frames import Frame, write_frame

_resume = child.Child._resume


def _frame(frame: Frame, payload: bytes, *, kind: bytes = frames.RETURNED, notes: bytes = b"") -> bytes:
    return write_frame(Frame(kind, frame.state, frame.thread, 0, notes, payload))


def _close_output() -> None:
    os.close(1)
    while True:
        time.sleep(3600)


ATTACKS: dict[str, Any] = {
    "garbage": lambda frame: os.urandom(4096),
    "a frame of four gigabytes": lambda frame: struct.pack(">I", 2**32 - 1) + b"x" * 100,
    "a frame of nothing": lambda frame: struct.pack(">I", 0),
    "notes longer than the frame": lambda frame: (
        struct.pack(">IcIIQI", 22, b"r", frame.state, frame.thread, 0, 999) + b"1"
    ),
    "the answer of another state": lambda frame: _frame(frame._replace(state=frame.state - 1), b"1"),
    "the answer of another thread": lambda frame: _frame(frame._replace(thread=7), b"1"),
    "two answers to one request": lambda frame: _frame(frame, b"1") * 2,
    "a kind that nobody knows": lambda frame: _frame(frame, b"1", kind=b"?"),
    "the kind of a ready child": lambda frame: _frame(frame, b'{"confinement": []}', kind=frames.READY),
    "no JSON": lambda frame: _frame(frame, b"{"),
    "JSON that is deep": lambda frame: _frame(frame, b"[" * 100_000 + b"]" * 100_000),
    "a number that is not safe": lambda frame: _frame(frame, b"1" * 4000),
    "NaN": lambda frame: _frame(frame, b"NaN"),
    "a repeated key": lambda frame: _frame(frame, b'{"a": 1, "a": 2}'),
    "bytes that are no text": lambda frame: _frame(frame, b'"\xff\xfe"'),
    "a failure without a shape": lambda frame: _frame(frame, b"[]", kind=frames.FAILED),
    "a failure whose message is a number": lambda frame: _frame(frame, b'{"message": 1}', kind=frames.FAILED),
    "a failure whose line is true": lambda frame: _frame(frame, b'{"message": "", "line": true}', kind=frames.FAILED),
    "a limit that does not exist": lambda frame: _frame(frame, b'{"message": "", "limit": "X"}', kind=frames.FAILED),
    "warnings that are no list": lambda frame: _frame(frame, b"1", notes=b'{"a": 1}'),
    "warnings of numbers": lambda frame: _frame(frame, b"1", notes=b"[1]"),
    "warnings that are no JSON": lambda frame: _frame(frame, b"1", notes=b"]"),
    "the end": lambda frame: os._exit(0),
    "a crash": lambda frame: os._exit(139),
    "standard output closed": lambda frame: _close_output(),
}


def _attack(self: child.Child, frame: Frame) -> Frame:
    state = self._states[frame.state]
    name = getattr(state, "attack", None)
    if name is None:
        return _resume(self, frame)
    if name in ATTACKS:
        os.write(1, ATTACKS[name](frame))
    while True:  # says nothing more, and takes no time: only the parent can end it
        time.sleep(3600)


def _open(self: child._State, settings: dict[str, Any], open_honestly: Any = child._State.open) -> None:
    open_honestly(self, settings)
    source = settings["chunks"][0][1]
    if source.startswith("-- attack: "):
        self.attack = source.removeprefix("-- attack: ")  # type: ignore[attr-defined]


def main() -> None:
    child.Child._resume = _attack  # type: ignore[method-assign]
    child._State.open = _open  # type: ignore[method-assign]
    confine._prctl(confine._PR_SET_PDEATHSIG, signal.SIGKILL)  # it outlives no test
    child.confine = lambda **_: []  # type: ignore[attr-defined]  # native code that got past that too
    child.main()
