"""While operations of a run are with others: its worker goes on with other branches, asks for answers, or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from tga_sdk import guard
from tga_sdk.endings import Over
from tga_sdk.journal import Begun, Ended

if TYPE_CHECKING:
    from tga_sdk.attempt import Attempt

HOLDS: Final = {"tool": 20_000, "child": 20_000, "sleep": 2_000, "signal": 0, "ask": 0}  # milliseconds
FIRST_LOOK: Final = 0.02  # seconds; a look for answers while other branches go on
LONGEST_LOOK: Final = 1.0
HELD_TIMEOUT: Final = 60.0  # seconds; a body with a longer time-out does not keep the worker while it waits


class Waiting:
    """The operations of one attempt that others will end, and the branches that can go on meanwhile. Where none can,
    the run is suspended."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._active = 1  # branches that are not blocked
        self._timed = 0  # bodies under way whose time-out this worker stays for
        self._blocked: dict[str, tuple[str, asyncio.Event]] = {}  # by path: kind, and what wakes it
        self._looking: asyncio.Task[None] | None = None
        self._suspending: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def wake(self) -> None:
        """The journal has news: branches go on whose operation is not under way any more."""
        for path, (_, event) in self._blocked.items():
            if not isinstance(self._attempt.journal.look(path), Begun):
                event.set()

    @contextmanager
    def timed(self, timeout: float | None) -> Iterator[None]:
        """A body runs inside, with this time-out in seconds."""
        is_held = timeout is not None and timeout <= HELD_TIMEOUT
        self._timed += is_held
        try:
            yield
        finally:
            self._timed -= is_held

    @property
    def is_alone(self) -> bool:
        """Whether nothing else of the program could go on while this branch waits."""
        return self._active == 1 and not self._blocked

    def count_branches(self, more: int) -> None:
        self._active += more
        if self._active == 0:
            self._suspend_soon()

    async def blocked(self, path: str, kind: str) -> None:
        """Until others have ended what has begun at this address."""
        if isinstance(self._attempt.journal.look(path), Ended):
            return
        self._attempt.verify_going()
        event = asyncio.Event()
        self._blocked[path] = (kind, event)
        self.count_branches(-1)
        if self._active > 0:
            self._look_meanwhile()
        try:
            await event.wait()
        finally:
            self._active += 1
            self._blocked.pop(path, None)
        self._attempt.verify_going()

    @property
    def _is_timed(self) -> bool:
        return self._timed > 0 and not self._attempt.host.is_draining

    def _suspend_soon(self) -> None:
        if self._blocked and self._attempt.over is None:
            if self._is_timed:  # who leaves takes the clock of the time-out along: stay, and ask for answers
                self._look_meanwhile()
                return
            with guard.off():
                self._suspending = self._loop.create_task(self._suspend())

    async def _suspend(self) -> None:
        """Nothing of the program can go on: wait at the gateway for a while, then leave."""
        try:
            while self._active == 0 and self._blocked and self._attempt.over is None:
                if any(event.is_set() for _, event in self._blocked.values()):
                    return
                awaits = sorted(self._blocked)
                held = 0 if self._attempt.host.is_draining else max(HOLDS[kind] for kind, _ in self._blocked.values())
                then = {"type": "suspend", "awaits": awaits, "wake": "ANY", "wait_ms": held}
                await self._attempt.pipe.put((), then)
        except Over as over:
            self._attempt.give_up(over)

    def _look_meanwhile(self) -> None:
        if self._looking is None or self._looking.done():
            with guard.off():
                self._looking = self._loop.create_task(self._look())

    async def _look(self) -> None:
        """Some branches wait, and others go on or have their time-out: ask from time to time whether something was
        answered."""
        pause = FIRST_LOOK
        try:
            while self._blocked and self._attempt.over is None:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_LOOK)
                if self._active == 0 and not self._is_timed:  # the worker is to end
                    self._suspend_soon()
                    return
                if self._blocked and self._attempt.pipe.is_idle and self._attempt.over is None:
                    before = len(self._blocked)
                    await self._attempt.pipe.put()
                    if len(self._blocked) != before:
                        pause = FIRST_LOOK
        except Over as over:
            self._attempt.give_up(over)
