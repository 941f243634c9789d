"""A gateway whose clock is not the database's says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.core.instruments import Instruments
from app.gateway.background import BackgroundWork
from app.postgres.clock_difference import load_ahead_ms
from app.postgres.sessions import Sessions
from tests.runs.gateways import TestClock

HOUR_MS = 3_600_000


class SlowSessions:
    """The answer takes so long that the clock has moved on."""

    def __init__(self, sessions: Sessions, clock: TestClock, *, ms: int) -> None:
        self._sessions = sessions
        self._clock = clock
        self._ms = ms

    async def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        self._clock.ahead_ms -= self._ms
        rows = await self._sessions.fetch(statement, *arguments)
        self._clock.ahead_ms += 2 * self._ms
        return rows


@pytest.mark.parametrize("ahead_ms", [HOUR_MS, -HOUR_MS])
async def test_the_difference_has_its_sign(sessions: Sessions, ahead_ms: int) -> None:
    clock = TestClock()
    clock.ahead_ms = ahead_ms
    found_ms = await load_ahead_ms(sessions, clock)
    assert (found_ms > 0) == (ahead_ms > 0)
    # A slow answer hides a part of the difference, and never adds to it.
    assert 0 < abs(found_ms) <= HOUR_MS + 1


async def test_the_time_that_the_question_takes_is_no_difference(sessions: Sessions) -> None:
    clock = TestClock()
    assert await load_ahead_ms(SlowSessions(sessions, clock, ms=60_000), clock) == 0


async def test_it_is_told_of_once_and_once_when_it_is_right_again(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    clock, instruments = TestClock(), Instruments()
    services = SimpleNamespace(stopping=asyncio.Event(), sessions=sessions, instruments=instruments)
    gateway = SimpleNamespace(services=services, policy=SimpleNamespace(digest="d"), clock=clock)
    work = BackgroundWork(cast("Any", gateway))

    async def told(ahead_ms: int) -> str:
        clock.ahead_ms = ahead_ms
        caplog.clear()
        await work.compare_clocks()
        return " ".join(record.message for record in caplog.records)

    assert await told(0) == ""
    assert "ahead of the database's" in await told(HOUR_MS)
    assert await told(HOUR_MS) == ""
    assert "agrees" in await told(0)
    assert "behind the database's" in await told(-HOUR_MS)
    ((_, _, shown_s),) = instruments.clock_ahead.samples()
    assert -3_601 < shown_s < -2
