"""Time that a test can move."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta


class Clock:
    """The gateway's time: it goes on as the machine's does, and `move` moves it on from there.

    Sleeps, expiries, retries and leases follow this clock, so nothing has to be waited for. It never goes back.
    """

    def __init__(self, start: datetime | None = None) -> None:
        begin = start or datetime.now(UTC)
        self._start_ms = begin.timestamp() * 1000
        self._origin_s = time.monotonic()
        self._moved_ms = 0.0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return int(self._start_ms + (time.monotonic() - self._origin_s) * 1000 + self._moved_ms)

    def now(self) -> datetime:
        """The time, in UTC: the machine's, and what it was moved."""
        return datetime.fromtimestamp(self.now_ms() / 1000, UTC)

    def move(self, delta: timedelta | None = None, **parts: float) -> None:
        """Move it on: `clock.move(hours=3)`, with the names of `timedelta`. What is due then happens at once."""
        by = (delta or timedelta()) + timedelta(**parts)
        if by < timedelta():
            raise ValueError("time does not go back")
        self.move_ms(by.total_seconds() * 1000)

    def move_to(self, at: datetime) -> None:
        """Move it on to this moment; a moment that is over already changes nothing."""
        self.move_ms(max(0.0, at.timestamp() * 1000 - self.now_ms()))

    def move_ms(self, milliseconds: float) -> None:
        """Move it on by so many milliseconds; what is due then happens at once."""
        with self._lock:
            self._moved_ms += milliseconds
        for heard in list(self._listeners):
            heard()

    def on_move(self, heard: Callable[[], None]) -> None:
        """Have this called after every move."""
        self._listeners.append(heard)


def written(milliseconds: float) -> str:
    """A time as the gateway's documents write it."""
    at = datetime.fromtimestamp(int(milliseconds) / 1000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read(text: str) -> int:
    """The reverse of `written`: milliseconds since 1970."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)
