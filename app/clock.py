"""Time and chance of the real world: the runtime's Clock."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime
from typing import Final

import uuid_utils

_SECONDS_KEPT: Final = 64
# Both run on while the process is stopped; only the first, where there is one, while the machine sleeps.
_STEADY_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_MILLISECONDS: Final = tuple(f".{millisecond:03}Z" for millisecond in range(1000))


class SystemClock:
    """A call asks for the time a dozen times: it is written once a millisecond, its seconds once a second."""

    def __init__(self) -> None:
        self._millisecond = -1
        self._now = ""
        self._seconds: dict[int, str] = {}

    def now(self) -> str:
        millisecond = time.time_ns() // 1_000_000
        if millisecond != self._millisecond:
            self._millisecond, self._now = millisecond, self._written(millisecond)
        return self._now

    def after(self, milliseconds: int) -> str:
        return self._written(time.time_ns() // 1_000_000 + milliseconds)

    def _written(self, millisecond: int) -> str:
        second, rest = divmod(millisecond, 1000)
        written = self._seconds.get(second)
        if written is None:
            if len(self._seconds) >= _SECONDS_KEPT:
                self._seconds.clear()
            written = self._seconds[second] = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return written + _MILLISECONDS[rest]

    def new_id(self) -> str:
        return str(uuid_utils.uuid7())

    def jitter(self) -> float:
        return random.random()  # noqa: S311 - spreads retries; nothing depends on it being unguessable

    def monotonic_ms(self) -> float:
        return time.clock_gettime_ns(_STEADY_CLOCK) / 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
