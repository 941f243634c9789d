"""How much of the event loop tool servers may take with what they send.

Whatever a server sends costs the gateway time: reading it, parsing it, looking through it. Each stream (an answer, a
child's output) has a little time of its own, enough for any ordinary answer at once. A stream that needs more waits
for turns that all such streams share, one after another, and rests between them: together they never take more than
INTAKE_SHARE of the loop. A stream that rests is not read, so its sender is held back by its full socket or pipe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Final, TypeVar

from app.core.limits import INTAKE_BURST_MS, INTAKE_REFILL_SHARE, INTAKE_SHARE, INTAKE_TURN_MS

T = TypeVar("T")
Seconds = Callable[[], float]

_BURST_S: Final = INTAKE_BURST_MS / 1000
_TURN_S: Final = INTAKE_TURN_MS / 1000


class Intake:
    """Gives turns to the streams of one process. `cpu` is the time that this thread has worked, `clock` what passed."""

    def __init__(self, *, cpu: Seconds = time.thread_time, clock: Seconds = time.monotonic) -> None:
        self.cpu = cpu
        self.clock = clock
        self._first = asyncio.Lock()  # first come, first served
        self._next_turn_at = 0.0

    def stream(self) -> Stream:
        return Stream(self)

    async def turn(self) -> None:
        """Wait for a turn of INTAKE_TURN_MS."""
        async with self._first:
            now = self.clock()
            # Never less than a look at the loop's other work, however long no server has wanted a turn.
            await asyncio.sleep(max(0.0, self._next_turn_at - now))
            self._next_turn_at = max(now, self._next_turn_at) + _TURN_S / INTAKE_SHARE


class Stream:
    """The account of one stream: `with stream:` around each small step of work, `await stream.turn()` between steps.

    Steps must be small (some 100 microseconds): one that has begun is not interrupted.
    """

    __slots__ = ("_began_s", "_credit_s", "_filled_at_s", "_intake", "_since_yield_s")

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._credit_s = _BURST_S
        self._filled_at_s = intake.clock()
        self._since_yield_s = 0.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = self._intake.cpu()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        used_s = self._intake.cpu() - self._began_s
        self._credit_s -= used_s
        self._since_yield_s += used_s

    def forgive(self) -> None:
        """What was just read had been asked for: it costs nothing of the stream's own time."""
        self._credit_s = max(self._credit_s, _BURST_S)

    def must_rest(self) -> bool:
        """Whether it has used up its time; some of it comes back as time passes."""
        if self._credit_s > 0:
            return False
        now = self._intake.clock()
        self._credit_s = min(self._credit_s + (now - self._filled_at_s) * INTAKE_REFILL_SHARE, _BURST_S)
        self._filled_at_s = now
        return self._credit_s <= 0

    async def turn(self) -> None:
        """Return when the stream may be read on; the loop's other work goes first from time to time."""
        while self.must_rest():
            await self._intake.turn()
            self._credit_s += _TURN_S
            self._since_yield_s = 0.0
        if self._since_yield_s > _TURN_S:
            self._since_yield_s = 0.0
            await asyncio.sleep(0)

    async def paced(self, steps: Iterator[T | None]) -> AsyncIterator[T]:
        """What `steps` gives, with a turn after each step. None is a step that gave nothing yet."""
        while True:
            with self:
                try:
                    given = next(steps)
                except StopIteration:
                    return
            if given is not None:
                yield given
            await self.turn()
