"""Owned streams and executions serve a kind that they have never heard of, whoever tells that an owner lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.core.chain import Head
from app.core.errors import (
    ConcurrentExecution,
    LockAcquireFailed,
    OutcomeUnknown,
    RecoveryFailed,
    StoreUnavailable,
    TgaError,
)
from app.domain.ledger.owned_stream import OwnedStream, StreamPorts
from app.domain.ledger.plans import Plan
from app.postgres.database import Database
from app.postgres.ownership import acquire_stream, release_stream
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.connectors.servers import until
from tests.ledger.counter import (
    COUNTER,
    GOAL,
    Count,
    Counters,
    Counting,
    Number,
    make_kind,
    new_identity,
    open_counters,
    planned_on,
)
from tests.runtime.scripted import FakeClock

DONE = Count("DONE", GOAL)


@pytest.fixture
async def counting(database: Database, admin: Admin) -> str:
    await make_kind(admin)
    return database.gateway_url


async def head_of(admin: Admin, stream: str) -> tuple[Any, ...]:
    row = await admin.fetchrow("SELECT state, sequence_number, owner FROM tga.heads WHERE stream = $1", stream)
    assert row is not None
    return tuple(row)


async def lose_session(admin: Admin, counters: Counters) -> None:
    """PostgreSQL ends the session whose lock says that this executor lives."""
    lost = counters.owner.executor_id()
    ended = await admin.fetchval(
        "SELECT bool_or(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND mode = 'ExclusiveLock' AND (classid::bigint << 32 | objid::bigint) = tga.executor_lock_key($1::uuid)",
        lost,
    )
    assert ended

    def is_replaced() -> bool:
        try:
            return counters.owner.executor_id() != lost
        except StoreUnavailable:
            return False

    await until(is_replaced)


async def test_a_stream_is_started_waited_for_and_given_back(counting: str, admin: Admin) -> None:
    async with open_counters(counting) as counters:
        identity = new_identity()
        stream = COUNTER.stream(identity)
        assert await counters.count(identity) == DONE
        assert await head_of(admin, stream) == ("DONE", GOAL, None)
        assert counters.executor.touched == [(stream, number) for number in range(1, GOAL)]
        assert counters.executions.at_work("counters") == 0
        assert not counters.executions.is_busy_with(stream)


async def test_a_stream_whose_id_is_taken_is_left_alone(counting: str, admin: Admin) -> None:
    async with open_counters(counting) as counters:
        identity = new_identity()
        await counters.count(identity)
        with pytest.raises(ConcurrentExecution, match="a counter with this id exists"):
            await counters.count(identity)
        assert await head_of(admin, COUNTER.stream(identity)) == ("DONE", GOAL, None)


@pytest.mark.parametrize("number", range(1, GOAL + 1))
@pytest.mark.parametrize("fault", ["and_not_persisted", "but_persisted"])
async def test_an_unknown_commit_is_settled_and_nothing_is_counted_twice(
    fault: str, number: int, counting: str, admin: Admin
) -> None:
    async def lose(plan: Plan) -> None:
        if len(counters.ledger.plans) == number:
            raise OutcomeUnknown("the answer was lost")

    async with open_counters(counting) as counters:
        if fault == "but_persisted":
            counters.ledger.after = lose
        else:
            counters.ledger.before = lose
        identity = new_identity()
        assert await counters.count(identity) == DONE
        assert await head_of(admin, COUNTER.stream(identity)) == ("DONE", GOAL, None)
        assert len(counters.ledger.plans) == (GOAL if fault == "but_persisted" else GOAL + 1)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("error", [StoreUnavailable, LockAcquireFailed])
async def test_while_the_store_does_not_answer_a_birth_is_refused_and_the_rest_waits(
    error: type[TgaError], number: int, counting: str
) -> None:
    async def refuse(plan: Plan) -> None:
        if number <= len(counters.ledger.plans) < number + 3:
            raise error("not now")

    async with open_counters(counting) as counters:
        counters.ledger.before = refuse
        if number == 1:
            with pytest.raises(error):
                await counters.count(new_identity())
            assert len(counters.ledger.plans) == 1
        else:
            assert await counters.count(new_identity()) == DONE
            assert len(counters.ledger.plans) == GOAL + 3


def paused() -> tuple[Callable[[Counting], Awaitable[None]], asyncio.Event, asyncio.Event]:
    reached, release = asyncio.Event(), asyncio.Event()

    async def touch(_: Counting) -> None:
        reached.set()
        await release.wait()

    return touch, reached, release


async def test_an_executor_that_was_thought_dead_does_nothing_more(counting: str, admin: Admin) -> None:
    async with open_counters(counting) as first, open_counters(counting) as second:
        identity = new_identity()
        first.executor.touch, reached, release = paused()
        counted = asyncio.create_task(first.count(identity))
        await reached.wait()
        with pytest.raises(ConcurrentExecution):  # its executor lives
            async with second.executions.taken(COUNTER.stream(identity)):
                pass
        await lose_session(admin, first)
        assert [recovery async for recovery in second.executions.recover_all()] == [
            (COUNTER.stream(identity), "COUNTING", DONE, None)
        ]
        release.set()
        with pytest.raises(ConcurrentExecution):
            await counted
        assert first.executor.touched == []
        assert await head_of(admin, COUNTER.stream(identity)) == ("DONE", GOAL, None)


async def test_an_executor_that_nobody_replaced_goes_on_under_a_new_id(counting: str, admin: Admin) -> None:
    async with open_counters(counting) as counters:
        identity = new_identity()
        counters.executor.touch, reached, release = paused()
        counted = asyncio.create_task(counters.count(identity))
        await reached.wait()
        await lose_session(admin, counters)
        release.set()
        assert await counted == DONE
        assert len({plan.executor_id for plan in counters.ledger.plans}) == 2


async def leave_behind(url: str, count: int) -> list[str]:
    """Counters that were begun by an executor that is gone."""
    identities = [new_identity() for _ in range(count)]
    async with open_counters(url) as gone:

        async def die(_: Counting) -> None:
            raise asyncio.CancelledError

        gone.executor.touch = die
        for identity in identities:
            with pytest.raises(asyncio.CancelledError):
                await gone.count(identity)
    return [COUNTER.stream(identity) for identity in identities]


async def test_recovery_executes_a_bounded_number_at_once_and_one_that_is_broken_stops_no_other(counting: str) -> None:
    streams = await leave_behind(counting, 7)
    async with open_counters(counting) as counters:
        at_once = []

        async def touch(execution: Counting) -> None:
            at_once.append(counters.executions.at_work("counters"))
            await asyncio.sleep(0)
            if execution.owned.stream == streams[3]:
                raise ZeroDivisionError("a defect")

        counters.executor.touch = touch
        recoveries = [recovery async for recovery in counters.executions.recover_all(at_once=2)]
        assert sorted(recovery.stream for recovery in recoveries) == sorted(streams)
        assert max(at_once) == 2
        (broken,) = [recovery for recovery in recoveries if recovery.error is not None]
        assert (broken.stream, broken.found, type(broken.error)) == (streams[3], "COUNTING", RecoveryFailed)
        assert [recovery.answer for recovery in recoveries if recovery.error is None] == [DONE] * 6


async def test_who_follows_a_stream_waits_for_it_or_executes_it(counting: str) -> None:
    (stream,) = await leave_behind(counting, 1)
    async with open_counters(counting) as one, open_counters(counting) as other:
        one.executor.touch, reached, release = paused()
        following = asyncio.create_task(one.executions.follow(stream, one.executions.patience(None)))
        await reached.wait()
        assert await other.executions.follow(stream, other.executions.patience(0)) is None
        assert await one.executions.follow(stream, one.executions.patience(0)) is None
        release.set()
        assert await following == DONE
        assert await other.executions.follow(stream, other.executions.patience(0)) == DONE
        assert other.executor.touched == []


class Leased:
    """A StreamOwner without a session: the id is a token that somebody was given, and may lose."""

    def __init__(self, sessions: Sessions, token: str) -> None:
        self._sessions = sessions
        self._token = token
        self.is_lost = False

    def executor_id(self) -> str:
        if self.is_lost:
            raise StoreUnavailable("the lease is lost")
        return self._token

    async def is_alive(self, executor_id: str) -> bool:
        return not self.is_lost and executor_id == self._token

    async def acquire(self, stream: str) -> str:
        rows = await self._sessions.fetch("SELECT owner::text FROM tga.heads WHERE stream = $1", stream)
        if self.is_lost or not rows or rows[0]["owner"] not in (None, self._token):
            raise ConcurrentExecution("the lease is another's", stream=stream)
        await acquire_stream(self._sessions, stream, self._token)
        return self._token

    async def release(self, stream: str, executor_id: str) -> None:
        await release_stream(self._sessions, stream, executor_id)

    async def list_recoverable(self, kind: str, *, after: str | None, limit: int) -> list[str]:
        return []


async def test_a_lease_serves_as_well_as_a_session(counting: str, admin: Admin) -> None:
    """The token is the head's owner: the fence is the same, and a worker that lost its lease appends nothing."""

    def number(value: int) -> Number:
        return Number.made(counter_id=identity, tenant="default", change="more", value=value)

    async def count(owned: OwnedStream) -> None:
        planned, head, _ = planned_on(owned, number(owned.head.sequence_number + 1), recorded_at=FakeClock().now())
        owned.append(planned, head)
        await owned.commit(Plan(owned.stream, owned.executor_id, owned.executor_id, owned.pending))

    async with open_counters(counting) as counters:
        identity, token, later_token = new_identity(), new_identity(), new_identity()
        lost = 0

        async def lose(plan: Plan) -> None:
            nonlocal lost
            lost += 1
            if lost == 2:
                raise OutcomeUnknown("the answer was lost")

        counters.ledger.after = lose
        lease = Leased(counters.sessions, token)
        load_position = counters.executor.ports.load_position
        ports = StreamPorts(COUNTER, counters.ledger, lease, FakeClock(), load_position)
        owned = OwnedStream(ports, identity, executor_id=token, head=Head.unborn(COUNTER))
        for _ in range(2):
            await count(owned)
        assert await owned.is_still_ours()
        state, sequence_number, owner = await head_of(admin, owned.stream)
        assert (state, sequence_number, str(owner)) == ("COUNTING", 2, token)

        await acquire_stream(counters.sessions, owned.stream, later_token)
        with pytest.raises(ConcurrentExecution):  # it does not know yet: the database refuses it
            await count(owned)
        lease.is_lost = True
        assert not await owned.is_still_ours()
        with pytest.raises(ConcurrentExecution):
            await owned.verify_owned()
        assert (await head_of(admin, owned.stream))[1] == 2


async def test_the_database_judges_the_kind_by_its_rows(counting: str, admin: Admin) -> None:
    """What the tests above rely on: without its rows there is no such kind."""
    async with open_counters(counting) as counters:
        await admin.execute("DELETE FROM tga.transitions WHERE kind = 'counter' AND verdict = 'end'")
        with pytest.raises(TgaError) as refused:
            await counters.count(new_identity())
        assert refused.value.code == "STATE_INVALID_TRANSITION"
