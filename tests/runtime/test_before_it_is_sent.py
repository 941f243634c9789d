"""I6, right before a call is sent: the executor is still the owner, or asks the store, and sends nothing in doubt.

Time is what the test says: a process that was stopped finds that it is later. Whole processes are stopped in
tests/crash/test_frozen.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from app.core.errors import StoreUnavailable
from app.core.limits import OWNERSHIP_BELIEVED_MS
from app.domain.ledger.plans import Plan
from app.domain.tga.documents import ToolCall
from app.domain.tga.ports import Dispatched, MaySend, Withheld
from app.postgres import owner, ownership
from app.postgres.database import Database
from app.postgres.ownership import Executor
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces
from tests.conftest import Admin
from tests.connectors.servers import until
from tests.patience import HANG_S
from tests.runtime.relay import Relay, open_relay
from tests.runtime.scripted import SUCCESS, TIMED_OUT, FakeClock, Scripted, call, new_key, open_scripted


class HandClock(FakeClock):
    """Stands still but when it is told."""

    now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.now_ms


@dataclass
class Asked:
    """What is_alive was asked, and what it said; `takes_ms`: how much later it is then."""

    clock: HandClock
    takes_ms: float = 0.0
    answers: list[bool] = field(default_factory=list)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    hand = HandClock()
    monkeypatch.setattr("tests.runtime.scripted.FakeClock", lambda: hand)
    return hand


@pytest.fixture
async def asked(clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked, is_alive = Asked(clock), PostgresTraces.is_alive

    async def noted(self: PostgresTraces, executor_id: str) -> bool:
        said = await is_alive(self, executor_id)
        asked.answers.append(said)
        clock.now_ms += asked.takes_ms
        return said

    monkeypatch.setattr(PostgresTraces, "is_alive", noted)
    return asked


@pytest.fixture
async def relay(database: Database) -> AsyncIterator[Relay]:
    async with open_relay(database.gateway_url) as opened:
        yield opened


async def end_owner_session(admin: Admin, executor_id: str) -> None:
    ended = await admin.fetch(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND mode = 'ExclusiveLock' AND (classid::bigint << 32 | objid::bigint) = tga.executor_lock_key($1::uuid)",
        executor_id,
    )
    assert len(ended) == 1


# When the store is asked


@pytest.mark.parametrize(("commit_takes_ms", "asks"), [(OWNERSHIP_BELIEVED_MS, 0), (OWNERSHIP_BELIEVED_MS + 1, 1)])
async def test_a_call_is_sent_without_asking_unless_its_commit_was_slow(
    database: Database, clock: HandClock, asked: Asked, commit_takes_ms: float, asks: int
) -> None:
    async with open_scripted(database.gateway_url) as scripted:

        async def later(_: Plan) -> None:
            clock.now_ms += commit_takes_ms

        scripted.ledger.after = later
        assert (await scripted.runtime.call(call(key=new_key()))).state == "COMPLETED"
        assert asked.answers == [True] * asks
        assert len(scripted.connector.sent) == 1


async def test_every_attempt_is_proven_by_the_commit_of_its_own(
    database: Database, clock: HandClock, asked: Asked
) -> None:
    async def slow(_: ToolCall) -> Dispatched:
        clock.now_ms += 60_000
        return TIMED_OUT

    async with open_scripted(database.gateway_url, slow, slow, SUCCESS) as scripted:
        assert (await scripted.runtime.call(call(key=new_key()))).state == "COMPLETED"
        assert len(scripted.connector.sent) == 3
        assert asked.answers == []


async def test_a_store_that_is_always_slow_does_not_keep_a_call_from_being_sent(
    database: Database, clock: HandClock, asked: Asked
) -> None:
    """An answer is as old as its question. Each that comes late is believed for twice as long as the one before."""
    asked.takes_ms = 3 * OWNERSHIP_BELIEVED_MS
    async with open_scripted(database.gateway_url) as scripted:

        async def later(_: Plan) -> None:
            clock.now_ms += 10_000

        scripted.ledger.after = later
        async with asyncio.timeout(HANG_S):
            assert (await scripted.runtime.call(call(key=new_key()))).state == "COMPLETED"
        assert asked.answers == [True] * 3
        assert len(scripted.connector.sent) == 1


async def test_however_many_wait_for_an_answer_they_ask_together(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, fetchrow = 0, asyncpg.Connection.fetchrow

    async def counted(*arguments: Any) -> Any:
        nonlocal asks
        asks += 1
        return await fetchrow(*arguments)

    async with await Executor.open(database.gateway_url) as executor:
        monkeypatch.setattr(asyncpg.Connection, "fetchrow", counted)
        for _ in range(3):
            await asyncio.gather(*(executor.verify() for _ in range(200)))
    # The first asks at once, and all that come while it does ask once more.
    assert asks == 6


# What is not sent


async def test_an_owner_whose_session_was_lost_without_a_word_asks_before_it_sends_and_does_not(
    database: Database, admin: Admin, clock: HandClock, relay: Relay
) -> None:
    """As after a machine was asleep: neither the process nor its kernel knows that PostgreSQL has ended the session."""
    key = new_key()
    async with open_scripted(relay.url) as first, open_scripted(database.gateway_url) as second:
        executor_id = first.traces.executor_id()

        async def sleep_and_be_recovered(_: Plan) -> None:
            first.ledger.after = None
            relay.lines[1].silence(until_the_client_speaks=True)  # the pool's first session is 0, the executor's own 1
            await end_owner_session(admin, executor_id)
            assert first.traces.executor_id() == executor_id, "nobody has told it"
            (recovered,) = [one async for one in second.runtime.recover_all()]
            assert recovered.answer is not None
            assert recovered.answer.state == "COMPLETED"
            clock.now_ms += 60_000

        first.ledger.after = sleep_and_be_recovered
        answer = await first.runtime.call(call(key=key))
        assert answer.state == "COMPLETED"
        assert (len(first.connector.sent), len(second.connector.sent)) == (0, 1)
        assert first.traces.executor_id() != executor_id


async def test_an_executor_is_lost_as_soon_as_its_kernel_knows_it(database: Database) -> None:
    """Before the event loop has come to read it: a process that was stopped goes on where it was."""
    async with (
        await Sessions.open(database.gateway_url) as sessions,
        await PostgresTraces.open(sessions, database.gateway_url) as opened,
    ):
        executor_id = opened.executor_id()

        async def end() -> None:
            session = await asyncpg.connect(database.admin_url)
            await end_owner_session(session, executor_id)
            await session.close()

        elsewhere = threading.Thread(target=lambda: asyncio.run(end()))
        elsewhere.start()
        elsewhere.join()  # and this event loop does nothing meanwhile
        with pytest.raises(StoreUnavailable):
            opened.executor_id()
        await until(lambda: _id_of(opened) not in (None, executor_id))


async def test_an_owner_whose_session_has_gone_silent_sends_nothing_until_it_is_answered(
    database: Database, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits go through on other sessions, so nothing but asking would tell. Its calls in flight stay its own."""
    monkeypatch.setattr(owner, "OWNER_BEAT_MS", 20)
    monkeypatch.setattr(ownership, "OWNER_OVERDUE_MS", 50)
    async with open_scripted(relay.url, real_time=True) as scripted:
        executor_id = scripted.traces.executor_id()

        async def go_silent(plan: Plan) -> None:
            scripted.ledger.after = None
            relay.lines[1].silence()
            await until(lambda: _id_of(scripted.traces) is None)

        scripted.ledger.after = go_silent
        answering = asyncio.create_task(scripted.runtime.call(call(key=new_key())))
        await until(lambda: scripted.ledger.after is None and _id_of(scripted.traces) is None)
        await _looked_again(scripted, answering)
        assert scripted.connector.sent == []
        with pytest.raises(StoreUnavailable):
            await scripted.runtime.call(call(key=new_key()))
        relay.lines[1].is_open.set()
        assert (await answering).state == "COMPLETED"
        assert len(scripted.connector.sent) == 1
        assert scripted.traces.executor_id() == executor_id


async def _looked_again(scripted: Scripted, answering: asyncio.Task[object]) -> None:
    """Wait until the call has looked more than once whether it may be sent."""
    looks, executor_id = 0, scripted.traces.executor_id

    def counted() -> str:
        nonlocal looks
        looks += 1
        return executor_id()

    scripted.traces.executor_id = counted  # type: ignore[method-assign]
    await until(lambda: looks > 2 or answering.done())
    scripted.traces.executor_id = executor_id  # type: ignore[method-assign]
    assert not answering.done()


def _id_of(opened: PostgresTraces) -> str | None:
    try:
        return opened.executor_id()
    except StoreUnavailable:
        return None


async def test_what_is_withheld_is_no_attempt(database: Database) -> None:
    """Neither counted nor waited for: the call goes out as soon as it may."""
    async with open_scripted(database.gateway_url) as scripted:
        dispatch, refusals = scripted.connector.dispatch, 2

        async def unsure(*arguments: object, may_send: MaySend, **how: object) -> Dispatched:
            nonlocal refusals
            refusals -= 1
            return Withheld() if refusals >= 0 else await dispatch(*arguments, may_send=may_send, **how)  # type: ignore[arg-type]

        scripted.connector.dispatch = unsure  # type: ignore[assignment, method-assign]
        answer = await scripted.runtime.call(call(key=new_key()))
        assert answer.effect is not None
        assert [attempt.result for attempt in answer.effect.attempts] == ["answered"]
        assert scripted.clock.slept_s == []
