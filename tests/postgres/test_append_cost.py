"""What an append may cost, in numbers that do not flake: round trips, commits and buffers (see bench/)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import asyncpg
import pytest

from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from bench.cost import buffers_of_append, commits_of, measuring_session
from bench.gateway import cost_of_calls
from bench.streams import GrowingStream, TraceTemplate, register_kind

if TYPE_CHECKING:
    from tests.conftest import Server

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

APPENDS = 9
CALLS = 9
WARMUP_APPENDS = 8  # after five, a session settles on its plans
# A deeper index and a page that is just full; not a scan.
BUFFERS_MORE = 8


async def test_an_append_is_one_round_trip_and_one_commit(server: Server, database: Database) -> None:
    async with measuring_session(database.admin_url) as superuser:
        await register_kind(superuser)
    stream = GrowingStream("one")
    found = []
    async with measuring_session(server.root_url) as observer:
        for _ in range(3):
            plans = [stream.next_plan() for _ in range(APPENDS)]
            found.append(await commits_of(database.gateway_url, observer, plans))
            if found[-1] == (APPENDS, APPENDS):
                return
    # The server's own housekeeping can only add to the count, and not three times in a row.
    pytest.fail(f"commits and round trips of {APPENDS} appends: {found}")


async def test_an_allowed_call_is_two_round_trips_and_two_commits(server: Server, database: Database) -> None:
    """One before the world is touched, one after; the claim of a fresh key costs nothing more."""
    found = []
    async with measuring_session(server.root_url) as observer:
        for attempt in range(3):
            found.append(await cost_of_calls(database.gateway_url, observer, f"attempt-{attempt}", CALLS))
            if found[-1] == (2 * CALLS, 2 * CALLS):
                return
    pytest.fail(f"commits and round trips of {CALLS} calls: {found}")


async def test_a_long_stream_costs_no_more_than_a_short_one(ledger: PostgresLedger, admin: Session) -> None:
    await register_kind(admin)
    stream = GrowingStream("long")
    at_10 = await _buffers_after(10, stream, ledger, admin)
    at_1000 = await _buffers_after(1_000, stream, ledger, admin)
    assert at_1000 <= at_10 + BUFFERS_MORE


async def test_other_streams_cost_nothing(ledger: PostgresLedger, admin: Session) -> None:
    await register_kind(admin)
    alone = await _buffers_after(10, GrowingStream("alone"), ledger, admin)
    others = [GrowingStream(f"other-{n}").next_plan() for n in range(1_024)]
    for start in range(0, len(others), 64):
        assert await ledger.commit_batch(others[start : start + 64]) == [None] * 64
    among_others = await _buffers_after(10, GrowingStream("among"), ledger, admin)
    assert among_others <= alone + BUFFERS_MORE


async def test_a_kind_of_stream_is_data(ledger: PostgresLedger, admin: Session) -> None:
    """The append function serves a kind that it has never heard of, and refuses it where it is not registered."""
    stream = GrowingStream("new")
    plan = stream.next_plan()
    (refused,) = await ledger.commit_batch([plan])
    assert refused is not None
    assert refused.code == "SCHEMA_VIOLATION"
    await register_kind(admin)
    await ledger.commit(plan)
    await ledger.commit(stream.next_plan(16))
    rows = await admin.fetch("SELECT sequence_number FROM tga.heads WHERE stream = $1", stream.stream)
    assert [row["sequence_number"] for row in rows] == [17]


async def test_the_traces_of_the_benchmark_are_real(ledger: PostgresLedger, admin: Session) -> None:
    for plan in TraceTemplate().plans(7):
        await ledger.commit(plan)
    assert await admin.fetchval("SELECT state FROM tga.heads WHERE stream LIKE 'trace:%'") == "COMPLETED"


async def _buffers_after(length: int, stream: GrowingStream, ledger: PostgresLedger, admin: Session) -> int:
    """The median of a few appends to a stream of that length, on a session that is warm."""
    for plan in stream.plans_until(length):
        await ledger.commit(plan)
    warmup = GrowingStream(f"warmup-for-{stream.stream.removeprefix('bench:')}-{length}")
    for _ in range(WARMUP_APPENDS):
        await buffers_of_append(admin, warmup.next_plan())
    counts = sorted([await buffers_of_append(admin, stream.next_plan()) for _ in range(APPENDS)])
    return counts[len(counts) // 2]
