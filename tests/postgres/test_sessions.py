"""Sessions at hand: none is lost, handed out twice, or handed out dead; and nobody waits while one is idle."""

from __future__ import annotations

import asyncio

import pytest

from app.core.errors import StoreUnavailable
from app.postgres.database import Database
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.patience import HANG_S

PID = "SELECT pg_backend_pid() AS pid"


async def pid_of(sessions: Sessions) -> int:
    return int((await sessions.fetch(PID))[0]["pid"])


async def sessions_of_gateway(admin: Admin) -> int:
    counted = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'tga'"
    return int(await admin.fetchval(counted))


async def test_one_after_the_other_is_one_session(database: Database) -> None:
    async with await Sessions.open(database.gateway_url) as sessions:
        assert len({await pid_of(sessions) for _ in range(5)}) == 1


@pytest.mark.parametrize("sessions_max", [1, 2, 3, 8])
async def test_no_session_is_used_by_two_at_once_and_everybody_gets_one(sessions_max: int, database: Database) -> None:
    async with await Sessions.open(database.gateway_url, sessions_max=sessions_max) as sessions:
        in_use: set[int] = set()
        seen: set[int] = set()

        async def use(number: int) -> None:
            async with sessions.reading() as connection:
                pid = int(await connection.fetchval("SELECT pg_backend_pid()"))
                assert pid not in in_use
                in_use.add(pid)
                await connection.fetchval("SELECT pg_sleep($1)", 0.001 * (number % 3))
                in_use.discard(pid)
                seen.add(pid)

        for _ in range(5):
            await asyncio.wait_for(asyncio.gather(*(use(number) for number in range(40))), timeout=HANG_S)
        assert 1 <= len(seen) <= sessions_max


async def test_whoever_waits_is_served_before_a_session_is_put_by(database: Database) -> None:
    """The last one to come must not wait for ever at the pool while the others pass sessions on among themselves."""
    async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
        stop = asyncio.Event()

        async def busy() -> None:
            while not stop.is_set():
                await sessions.fetch(PID)

        greedy = [asyncio.create_task(busy()) for _ in range(4)]
        for _ in range(20):
            await asyncio.wait_for(sessions.fetch(PID), timeout=HANG_S)
        stop.set()
        await asyncio.gather(*greedy)


async def test_a_session_that_died_at_hand_is_not_handed_out(database: Database, admin: Admin) -> None:
    async with await Sessions.open(database.gateway_url) as sessions:
        before = await pid_of(sessions)
        await admin.execute("SELECT pg_terminate_backend($1)", before)
        for _ in range(100):
            if not await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", before):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # until the goodbye has been read
        assert await pid_of(sessions) != before
        assert await sessions.commit(PID)


async def test_a_session_that_dies_in_use_fails_once(database: Database, admin: Admin) -> None:
    async with await Sessions.open(database.gateway_url) as sessions:
        pid = await pid_of(sessions)
        reading = asyncio.create_task(sessions.fetch("SELECT pg_sleep(30)"))
        await asyncio.sleep(0.2)
        await admin.execute("SELECT pg_terminate_backend($1)", pid)
        with pytest.raises(StoreUnavailable):
            await reading
        assert await pid_of(sessions) != pid


async def test_whoever_gives_up_leaves_a_sound_session_behind(database: Database, admin: Admin) -> None:
    async with await Sessions.open(database.gateway_url, sessions_max=2) as sessions:
        for _ in range(6):
            reading = asyncio.create_task(sessions.fetch("SELECT pg_sleep(30)"))
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert (await sessions.fetch("SELECT 1 AS one"))[0]["one"] == 1
        assert await sessions_of_gateway(admin) <= 2


async def test_closing_leaves_no_session(database: Database, admin: Admin) -> None:
    before = await sessions_of_gateway(admin)
    async with await Sessions.open(database.gateway_url) as sessions:
        await asyncio.gather(*(sessions.fetch(PID) for _ in range(5)))
        assert await sessions_of_gateway(admin) > before
    for _ in range(100):
        if await sessions_of_gateway(admin) == before:
            break
        await asyncio.sleep(0.02)
    assert await sessions_of_gateway(admin) == before


async def test_a_session_that_comes_back_while_closing_is_not_put_by(database: Database) -> None:
    """The pool would wait for it, in vain."""
    sessions = await Sessions.open(database.gateway_url)
    async with sessions._session() as connection:
        await connection.fetchval("SELECT 1")
        closing = asyncio.create_task(sessions.close())
        await asyncio.sleep(0)  # so far that it looks for those at hand, and no further
    started = asyncio.get_running_loop().time()
    await closing
    assert sessions._at_hand == []
    assert asyncio.get_running_loop().time() - started < 5
