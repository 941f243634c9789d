"""`wait_ms` holds, whatever the store does: the answer comes by then, and says no more than what is known.

A table is locked, or PostgreSQL falls silent. Nothing is lost or executed twice when that is over. What "by then" means
is not measured with a watch: the store does not move until the caller has been answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from app.core.errors import LockAcquireFailed, OutcomeUnknown, StoreUnavailable, TgaError, TraceNotFound
from app.core.limits import BATCH_PLANS_MAX, SINGLE_LOCK_FAILURES_MAX, SINGLE_LOCK_TIMEOUT_MS, STORE_ANSWER_MS
from app.domain.ledger.plans import Plan
from app.domain.tga.documents import ToolCall, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.ports import Dispatched
from app.domain.tga.runtime import TgaRuntime
from app.domain.tga.supervision import Ruling
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.connectors.servers import until
from tests.crash.gateway import PERSON
from tests.invariants.plans import plan_of
from tests.runtime.relay import Relay, open_relay
from tests.runtime.scripted import SUCCESS, Scripted, call, new_key, open_scripted
from tests.traces import pending_trace

WAIT_MS = 200
# Far beyond what may be waited, and far below what PostgreSQL and its client would.
PATIENCE_S = 15.0


@pytest.fixture
async def relay(database: Database) -> AsyncIterator[Relay]:
    async with open_relay(database.gateway_url) as opened:
        yield opened


@asynccontextmanager
async def locked(database: Database, *tables: str) -> AsyncIterator[None]:
    session = await asyncpg.connect(database.admin_url)
    try:
        async with session.transaction():
            await session.execute(
                f"LOCK TABLE {', '.join(f'tga.{table}' for table in tables)} IN ACCESS EXCLUSIVE MODE"
            )
            yield
    finally:
        await session.close()


@asynccontextmanager
async def silent(relay: Relay) -> AsyncIterator[None]:
    """PostgreSQL takes nothing and says nothing, on sessions old and new."""
    for line in relay.lines:
        line.silence()
    relay.is_silent = True
    try:
        yield
    finally:
        relay.is_silent = False
        for line in relay.lines:
            line.is_open.set()


@asynccontextmanager
async def open_warm(url: str) -> AsyncIterator[Scripted]:
    """A runtime whose tool is pinned already: to pin it is a commit of its own, before the first call."""
    async with open_scripted(url, real_time=True) as scripted:
        await scripted.runtime.call(call(key=new_key()))
        yield scripted


async def error_of(asked: Coroutine[Any, Any, Answer]) -> TgaError:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(TgaError) as raised:
            await asked
    return raised.value


async def finished(scripted: Scripted, trace: TraceId) -> str:
    async def state() -> str:
        try:
            return (await scripted.traces.load_trace(trace)).state.state
        except (TraceNotFound, StoreUnavailable):  # not yet
            return ""

    async with asyncio.timeout(PATIENCE_S + 10):
        while (found := await state()) not in TRACE.terminal_states:
            await asyncio.sleep(0.02)
    return found


def trace_in(error: TgaError) -> TraceId:
    assert isinstance(error, OutcomeUnknown), error
    assert error.stream is not None
    return TraceId(TRACE.identity_of(error.stream))


# A call that is not durable yet


async def test_a_call_that_cannot_be_made_durable_is_unknown_by_then_and_executed_once_later(
    database: Database,
) -> None:
    async with open_warm(database.gateway_url) as scripted:
        key = new_key()
        async with locked(database, "entries"):
            trace = trace_in(await error_of(scripted.runtime.call(call(key=key), wait_ms=WAIT_MS)))
            assert scripted.connector.sends_of_key[key] == 0
        assert await finished(scripted, trace) == "COMPLETED"
        again = await scripted.runtime.call(call(key=key))
        assert (again.trace_id, again.state) == (trace, "COMPLETED")
        assert scripted.connector.sends_of_key[key] == 1


async def test_a_caller_that_does_not_want_to_wait_is_answered_when_the_call_is_durable(database: Database) -> None:
    ended = asyncio.Event()

    async def slow(_: ToolCall) -> Dispatched:
        await ended.wait()
        return SUCCESS

    async with open_scripted(database.gateway_url, slow, real_time=True) as scripted:

        async def slow_commit(_: Plan) -> None:
            scripted.ledger.before = None
            await asyncio.sleep(STORE_ANSWER_MS / 4000)

        scripted.ledger.before = slow_commit
        answer = await scripted.runtime.call(call(key=new_key()), wait_ms=0)
        assert answer.state == "EXECUTING"
        ended.set()


async def test_many_calls_at_once_on_a_locked_table_are_all_answered_and_pile_up_no_sessions(
    database: Database, admin: Admin
) -> None:
    async with open_warm(database.gateway_url) as scripted:
        keys = [new_key() for _ in range(3 * BATCH_PLANS_MAX)]
        async with locked(database, "entries"):
            errors = await asyncio.gather(
                *(error_of(scripted.runtime.call(call(key=key), wait_ms=WAIT_MS)) for key in keys)
            )
            sessions = await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tga'")
        assert {type(error) for error in errors} <= {OutcomeUnknown, LockAcquireFailed}
        assert sessions <= 9  # the pool's, and the executor's own
        answers = await asyncio.gather(*(scripted.runtime.call(call(key=key)) for key in keys))
        assert {answer.state for answer in answers} == {"COMPLETED"}
        assert [scripted.connector.sends_of_key[key] for key in keys] == [1] * len(keys)


# Repeats, and what people ask for


async def test_a_repeat_that_cannot_be_read_is_told_so_by_then(database: Database) -> None:
    async with open_scripted(database.gateway_url, real_time=True) as scripted:
        done = await scripted.runtime.call(call(key="k"))
        async with locked(database, "entries", "claims"):
            error = await error_of(scripted.runtime.call(call(key="k"), wait_ms=WAIT_MS))
        assert isinstance(error, (StoreUnavailable, OutcomeUnknown, LockAcquireFailed)), error
        again = await scripted.runtime.call(call(key="k"))
        assert (again.trace_id, again.effect, again.replayed) == (done.trace_id, done.effect, True)
        assert len(scripted.connector.sent) == 1


async def waiting(scripted: Scripted) -> tuple[TraceId, str]:
    scripted.supervisor.answer = "ask"
    asked = await scripted.runtime.call(call(key=new_key()))
    assert asked.waiting == "supervisor"
    stored = await scripted.traces.load_trace(asked.trace_id)
    return asked.trace_id, stored.state.action_request_digest


def approve(runtime: TgaRuntime, trace: TraceId, digest: str, wait_ms: int) -> Coroutine[Any, Any, Answer]:
    return runtime.decide(trace, Ruling("APPROVE", PERSON, digest), wait_ms=wait_ms)


async def test_a_decision_that_cannot_be_taken_in_has_changed_nothing(database: Database) -> None:
    """The trace cannot even be read, so nothing was decided; when it can, the decision is made as ever."""
    async with open_scripted(database.gateway_url, real_time=True) as scripted:
        trace, digest = await waiting(scripted)
        async with locked(database, "entries", "heads"):
            error = await error_of(approve(scripted.runtime, trace, digest, WAIT_MS))
            assert isinstance(error, (StoreUnavailable, LockAcquireFailed)), error
        scripted.supervisor.answer = "allow"
        await until_free(scripted, trace)
        assert (await approve(scripted.runtime, trace, digest, 30_000)).state == "COMPLETED"
        assert len(scripted.connector.sent) == 1


async def until_free(scripted: Scripted, trace: TraceId) -> None:
    """What was begun and given up has been given back."""
    await until(lambda: not scripted.runtime._executions.is_busy_with(TRACE.stream(trace)))


async def test_a_decision_that_is_being_committed_is_unknown_and_stands_later(database: Database) -> None:
    """Not "it still waits", which is what the record says at that moment."""
    async with open_scripted(database.gateway_url, real_time=True) as scripted:
        trace, digest = await waiting(scripted)
        scripted.supervisor.answer = "allow"
        lock = locked(database, "entries")

        async def lock_it(_: Plan) -> None:
            scripted.ledger.before = None
            await lock.__aenter__()

        scripted.ledger.before = lock_it
        assert trace_in(await error_of(approve(scripted.runtime, trace, digest, WAIT_MS))) == trace
        assert scripted.connector.sent == []
        await lock.__aexit__(None, None, None)
        assert await finished(scripted, trace) == "COMPLETED"
        assert len(scripted.connector.sent) == 1


# PostgreSQL falls silent


async def test_whatever_is_asked_of_a_silent_store_is_answered_by_then(database: Database, relay: Relay) -> None:
    async with open_scripted(relay.url, real_time=True) as scripted:
        await scripted.runtime.call(call(key="done"))
        trace, digest = await waiting(scripted)
        scripted.supervisor.answer = "allow"
        fresh = new_key()
        async with silent(relay):
            errors = await asyncio.gather(
                error_of(scripted.runtime.call(call(key=fresh), wait_ms=WAIT_MS)),
                error_of(scripted.runtime.call(call(key="done"), wait_ms=WAIT_MS)),
                error_of(approve(scripted.runtime, trace, digest, WAIT_MS)),
                error_of(scripted.runtime.recover(trace, wait_ms=WAIT_MS)),
            )
        codes = {"STORE_UNAVAILABLE", "STORE_OUTCOME_UNKNOWN", "STATE_CONCURRENT_EXECUTION"}
        assert {error.code for error in errors} <= codes, errors
        assert isinstance(errors[0], OutcomeUnknown)
        for key in (fresh, "done"):
            assert (await scripted.runtime.call(call(key=key))).state == "COMPLETED"
            assert scripted.connector.sends_of_key[key] == 1
        await until_free(scripted, trace)
        assert (await approve(scripted.runtime, trace, digest, 30_000)).state == "COMPLETED"


# A batch that is refused as a whole


async def test_a_batch_with_one_locked_stream_commits_all_the_others(
    database: Database, sessions: Sessions, admin: Admin
) -> None:
    ledger = PostgresLedger(sessions, lock_timeout_ms=200)
    plans = [plan_of(pending_trace(number)) for number in range(1, 13)]
    async with admin.transaction():
        await admin.execute("SELECT pg_advisory_xact_lock(tga.stream_lock_key($1))", plans[5].stream)
        results = await ledger.commit_batch(plans)
    assert [place for place, error in enumerate(results) if error is not None] == [5]
    assert isinstance(results[5], LockAcquireFailed)
    await ledger.commit(plans[5])


async def test_a_batch_on_a_locked_table_is_refused_after_a_few_of_its_plans(
    database: Database, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has waited already; the whole takes little longer than one."""
    ledger, timeouts = PostgresLedger(sessions, lock_timeout_ms=500), []
    commit = sessions.commit

    async def noted(statement: str, *arguments: Any) -> list[asyncpg.Record]:
        timeouts.append(arguments[0])
        return await commit(statement, *arguments)

    monkeypatch.setattr(sessions, "commit", noted)
    plans = [plan_of(pending_trace(number)) for number in range(1, BATCH_PLANS_MAX + 1)]
    async with locked(database, "entries"):
        results = await ledger.commit_batch(plans)
    assert {type(error) for error in results} == {LockAcquireFailed}
    assert [error.stream for error in results if error is not None] == [plan.stream for plan in plans]
    assert timeouts == [500] + [SINGLE_LOCK_TIMEOUT_MS] * SINGLE_LOCK_FAILURES_MAX
    assert await ledger.commit_batch(plans) == [None] * len(plans)
