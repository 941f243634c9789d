"""The outbox on PostgreSQL: each row is leased to one at a time, and none is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import asyncpg
import pytest

from app.postgres.database import Database
from app.postgres.guards import find_problems
from app.postgres.outbox import PostgresOutbox
from app.postgres.sessions import GATEWAY_ROLE, connect
from tests.conftest import Admin
from tests.patience import HANG_S
from tests.traces import trace_id
from tests.webhooks.sending import decide, fill, make_due, rows_of


async def test_due_rows_of_the_named_webhooks_are_taken_oldest_first(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 3)
    await fill(admin, 1, webhook="other")
    await fill(admin, 1, webhook="third")
    first = await outbox.take(["approvals"], lease_ms=60_000, at_most=2)
    assert [(row.webhook, row.identity, row.attempts) for row in first] == [
        ("approvals", trace_id(1), 1),
        ("approvals", trace_id(2), 1),
    ]
    assert first[0].created_at.endswith("Z")
    rest = await outbox.take(["approvals", "other"], lease_ms=60_000, at_most=10)
    assert [(row.webhook, row.identity) for row in rest] == [("approvals", trace_id(3)), ("other", trace_id(1))]
    assert await outbox.take(["approvals", "other", "nobody"], lease_ms=60_000, at_most=10) == []


async def test_a_taken_row_comes_again_when_its_lease_has_run_out(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 1)
    (row,) = await outbox.take(["approvals"], lease_ms=300, at_most=10)
    assert await outbox.take(["approvals"], lease_ms=300, at_most=10) == []
    await asyncio.sleep(0.35)
    assert await outbox.take(["approvals"], lease_ms=300, at_most=10) == [replace(row, attempts=2)]


async def test_many_takers_at_once_never_hold_the_same_row(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 100)
    taken: list[int] = []

    async def take_all() -> None:
        while rows := await outbox.take(["approvals"], lease_ms=60_000, at_most=3):
            taken.extend(row.id for row in rows)

    await asyncio.gather(*(take_all() for _ in range(4)))
    # A taker may skip rows that another is about to take; whoever is last leaves none.
    await take_all()
    assert len(taken) == len(set(taken)) == 100


async def test_a_row_that_another_holds_is_skipped_and_not_waited_for(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 2)
    async with admin.transaction():
        await admin.execute("SELECT FROM tga.outbox WHERE stream = $1 FOR UPDATE", f"trace:{trace_id(1)}")
        (row,) = await asyncio.wait_for(outbox.take(["approvals"], lease_ms=60_000, at_most=2), timeout=HANG_S)
    assert row.identity == trace_id(2)


async def test_what_is_done_is_gone_and_may_be_said_twice(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 2)
    one, other = await outbox.take(["approvals"], lease_ms=60_000, at_most=2)
    await outbox.done([one])
    await outbox.done([one])
    assert [row["stream"] for row in await rows_of(admin)] == [f"trace:{other.identity}"]


async def test_what_failed_is_due_again_after_its_time_with_its_error(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 1)
    (row,) = await outbox.take(["approvals"], lease_ms=60_000, at_most=1)
    await outbox.failed(row, "e" * 5000, retry_ms=250)
    (stored,) = await rows_of(admin)
    assert stored["last_error"] == "e" * 1024
    assert 0 < stored["due_in_ms"] <= 250
    await asyncio.sleep(0.3)
    assert await outbox.take(["approvals"], lease_ms=60_000, at_most=1) == [replace(row, attempts=2)]


async def test_a_late_failure_does_not_cut_the_lease_of_the_next_taker(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 1)
    (late,) = await outbox.take(["approvals"], lease_ms=60_000, at_most=1)
    await make_due(admin)
    await outbox.take(["approvals"], lease_ms=60_000, at_most=1)
    await outbox.failed(late, "late", retry_ms=1)
    (stored,) = await rows_of(admin)
    assert stored["last_error"] is None
    assert stored["due_in_ms"] > 50_000


async def test_rows_of_decided_traces_are_dropped_and_no_others(outbox: PostgresOutbox, admin: Admin) -> None:
    await fill(admin, 4)
    await fill(admin, 4, webhook="not configured")
    await decide(admin, 2)
    await admin.execute("UPDATE tga.heads SET waiting = 'operator' WHERE stream = $1", f"trace:{trace_id(3)}")
    assert await outbox.drop_decided(at_most=3) == 3
    assert await outbox.drop_decided(at_most=3) == 1
    assert await outbox.drop_decided(at_most=3) == 0
    left = [(row["webhook"], row["stream"]) for row in await rows_of(admin)]
    expected = [f"trace:{trace_id(n)}" for n in (1, 4)]
    assert left == [(webhook, stream) for webhook in ("approvals", "not configured") for stream in expected]


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO tga.outbox (webhook, stream) VALUES ('a', 'trace:x')",
        "UPDATE tga.outbox SET attempts = 0",
        "DELETE FROM tga.outbox",
        "TRUNCATE tga.outbox",
    ],
)
async def test_the_gateway_changes_the_outbox_only_through_its_functions(
    database: Database, admin: Admin, statement: str
) -> None:
    await fill(admin, 1)
    session = await connect(database.gateway_url, role=GATEWAY_ROLE)
    try:
        assert await session.fetchval("SELECT count(*) FROM tga.outbox") == 1
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await session.execute(statement)
    finally:
        await session.close()
    assert await find_problems(database.admin_url) == []


async def test_looking_for_due_rows_reads_no_row_that_is_not_due(admin: Admin) -> None:
    await admin.execute(
        "INSERT INTO tga.outbox (webhook, stream, next_attempt_at)"
        " SELECT 'approvals', 'trace:' || n, clock_timestamp() + interval '1 hour' FROM generate_series(1, 20000) AS n"
    )
    await admin.execute("ANALYZE tga.outbox")
    async with admin.transaction():
        assert await admin.fetch("SELECT * FROM tga.outbox_take('{approvals}', 1000, 4)") == []
        table = await admin.fetchval("SELECT 'tga.outbox'::regclass::oid")
        assert await admin.fetchval("SELECT pg_stat_get_xact_tuples_returned($1)", table) == 0
        assert await admin.fetchval("SELECT pg_stat_get_xact_tuples_fetched($1)", table) == 0
