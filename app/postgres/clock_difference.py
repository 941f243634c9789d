"""How far the clock of this process is from the store's.

Entries are dated by the gateway that makes them, and the deadline of a run counts from these dates; the store says by
its own clock what is due. Where the two differ, a deadline comes too early or too late by as much.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from app.domain.clock import Clock
from app.postgres.tree import Fetches

CLOCKS_APART_MS_MAX: Final = 2_000


async def load_ahead_ms(source: Fetches, clock: Clock) -> float:
    """By how many milliseconds this clock is ahead of the store's; below 0 it is behind.

    The question takes its time: what lies within it is no difference.
    """
    before = datetime.fromisoformat(clock.now())
    (row,) = await source.fetch("SELECT clock_timestamp() AS now")
    after = datetime.fromisoformat(clock.now())
    there: datetime = row["now"]
    ahead_s, behind_s = (before - there).total_seconds(), (there - after).total_seconds()
    return (max(ahead_s, 0.0) - max(behind_s, 0.0)) * 1000
