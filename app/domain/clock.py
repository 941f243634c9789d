"""The port of time and ids: the domain has no clock and no chance of its own."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Time, ids and chance. Tests give another one."""

    def now(self) -> str:
        """RFC 3339, UTC, milliseconds."""
        ...

    def after(self, milliseconds: int) -> str:
        """As `now`, so much later."""
        ...

    def new_id(self) -> str:
        """UUIDv7."""
        ...

    def jitter(self) -> float:
        """Between 0 and 1."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds since some moment. They never go back, and run on while process or machine is stopped."""
        ...

    async def sleep(self, seconds: float) -> None: ...
