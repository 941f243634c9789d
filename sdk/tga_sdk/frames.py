"""Where an operation stands: its scope, what is around it, and the state as it sees it.

The frame of the moment is in a context variable. So `ctx` is one object for the whole run and is right in nested bodies
and in the branches of a gather; threads and tasks that a body starts have its frame.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from tga_sdk.draws import Draws
from tga_sdk.journal import Operation, Scope
from tga_sdk.state import State
from tga_sdk.times import time_text

if TYPE_CHECKING:
    from tga_sdk.attempt import Attempt


@dataclass(slots=True)
class Frame:
    """`logs` wait for the next checkpoint. `is_kept`: the operations here are performed again if the one around is
    retried, so their records are kept until it has ended."""

    attempt: Attempt
    scope: Scope
    around: Operation | None
    state: State
    draws: Draws
    logs: list[dict[str, Any]] = field(default_factory=list)
    is_kept: bool = False
    is_over: bool = False  # its body has ended or was given up: a thread or task that goes on performs nothing more

    @property
    def next_path(self) -> str:
        """The address of the operation that comes next."""
        position = self.scope.performed + 1
        return f"{self.scope.address}.{position}" if self.scope.address else str(position)

    def inside(self, path: str, operation: Operation) -> Frame:
        """The frame of this operation's body."""
        draws = self.attempt.reader.draws(path)
        return Frame(self.attempt, Scope(path), operation, self.state, draws, is_kept=True)

    def branch(self, path: str, number: int, operation: Operation) -> Frame:
        """The frame of one branch of this gather, with a copy of the state."""
        scope = self.scope.branch(path, number)
        draws = self.attempt.reader.draws(scope.address)
        return Frame(self.attempt, scope, operation, self.state.branch(), draws, is_kept=self.is_kept)


_source: ContextVar[str | None] = ContextVar("tga_sdk_source", default=None)  # of who asked from a thread
_SDK: Final = str(Path(__file__).parent)
_ASYNCIO: Final = str(Path(asyncio.__file__).parent)
_frame: ContextVar[Frame | None] = ContextVar("tga_sdk_frame", default=None)


def current_frame() -> Frame | None:
    """The frame in which this code runs; None outside of a run."""
    return _frame.get()


def enter(frame: Frame | None) -> None:
    """From here on, in this task or thread and what it starts, operations are of this frame."""
    _frame.set(frame)


def log_line(level: str, text: str) -> dict[str, Any]:
    """A line for `Frame.logs`."""
    return {"level": level, "text": text[:1_024], "at": time_text(time.time())}


def caller() -> str | None:
    """The line of the program that asked: the first one outside of the SDK; None where the SDK itself did."""
    told = _source.get()
    if told is not None:
        return told
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SDK):
            if file.startswith(_ASYNCIO):
                return None
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def remember_caller(source: str | None) -> None:
    """What `caller` says from here on, in this task: the operation runs elsewhere than in the program's thread."""
    _source.set(source)
