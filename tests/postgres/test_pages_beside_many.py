"""Beside many calls a page costs as much as beside few: statistics, what is counted on every page, proofs. By buffers,
never by the clock; and what migration 0034 makes of a store that has counted calls and runs before."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final, TypeAlias

import asyncpg
import pytest

from app.core.merkle import inclusion_ranges, nodes_of
from app.domain.ledger.queries import Visibility
from app.postgres import approvals, statistics, tree
from app.postgres.approvals import count_waiting
from app.postgres.call_facts import fold_all
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate, packaged_migrations
from app.postgres.sessions import Sessions
from app.postgres.statistics import load_counts
from tests.attacker import attacking, insert_bulk
from tests.conftest import Server
from tests.invariants.plans import plan_of
from tests.postgres.test_listing import append, plan_and_buffers, scanned_whole
from tests.traces import completed_trace

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
SMALL: Final = 8  # buffers: an index has a level more
TENANT: Final = Visibility("default", None)
_READ_WHOLE: Final = """
SELECT sum(seq_scan)::bigint FROM pg_stat_xact_user_tables WHERE schemaname = 'tga' AND relname <> 'stream_kinds'
"""
# Of three tools eight measures each in each half hour, a day at a time. Within a day in no order: as rows come to lie
# that calls of many tools have made and changed for half an hour.
_COUNTED: Final = """
INSERT INTO tga.call_counts (tenant, span_s, began, subject, name, measure, detail, calls)
SELECT 'default', 1800, '2026-02-01'::timestamptz - n * interval '30 minutes', 's', 't' || t, 'latency', '00' || m, 1
  FROM generate_series($1::integer, $2::integer) AS n, generate_series(1, 3) AS t, generate_series(1, 8) AS m
 ORDER BY n / 48, hashtext(n || ' ' || t || ' ' || m)
"""


async def test_statistics_read_pages_of_rows_whatever_was_counted_before(admin: Admin) -> None:
    """A session's own plan is for any window: row by row it read as many buffers as there are rows."""
    asked = ("default", 1800, "2026-01-31T00:00:00Z", "2026-02-01T00:00:00Z", None, None)
    rows, found, made = 48 * 3 * 8, list[int](), 1
    for days in (2, 60):
        await admin.execute(_COUNTED, made, days * 48)
        made = days * 48 + 1
        await admin.execute("VACUUM ANALYZE tga.call_counts")
        await plan_and_buffers(admin, statistics._COUNTS, *asked)  # the session makes the plan, and keeps it
        found.append((await plan_and_buffers(admin, statistics._COUNTS, *asked))[1])
    assert found[1] <= 2 * found[0] + SMALL, found
    assert max(found) < rows / 8, found


async def test_what_is_counted_together_lies_together(ledger: PostgresLedger, sessions: Sessions, admin: Admin) -> None:
    """The fold adds rows span by span: a window of half hours does not lie among the minutes of two days."""
    await append(ledger, [plan_of(completed_trace(n, tool_name=f"tool_{n % 7}")) for n in range(40)])
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)
    spans = [row["span_s"] for row in await admin.fetch("SELECT span_s FROM tga.call_counts ORDER BY ctid")]
    assert len(spans) > 100
    assert spans == sorted(spans)


async def _add_waiting(admin: Admin, first: int, last: int, *, who: str) -> None:
    """Calls that wait for a person, past the triggers: of these counts look at nothing else."""
    async with attacking(admin):
        await admin.execute(
            "WITH made AS ("
            "    INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, is_open, waiting, tenant,"
            "                           principal_id, subject, name, idempotency_key)"
            "    SELECT 'trace:' || to_char(n, 'FM00000000'), 1, '', 'PENDING', true, 'supervisor', 'default', $3, 's',"
            "           't', 'k' || n"
            "      FROM generate_series($1::integer, $2::integer) AS n RETURNING *)"
            " INSERT INTO tga.at_rest (stream_no, stream, tenant, state, waiting, expires_at)"
            " SELECT stream_no, stream, tenant, state, waiting, now() + stream_no * interval '1 hour' FROM made",
            first,
            last,
            who,
        )
        await admin.execute("VACUUM ANALYZE tga.at_rest, tga.heads")


async def test_every_page_counts_a_hundred_that_wait_and_no_more(admin: Admin, sessions: Sessions) -> None:
    await _add_waiting(admin, 1, 130, who="often")
    await _add_waiting(admin, 131, 135, who="seldom")
    every = await count_waiting(sessions, TENANT)
    assert (every.calls, every.is_exact) == (100, False)
    asked = ("default", "1970-01-01", 0, "", None, 100)
    _, few = await plan_and_buffers(admin, approvals._COUNT, *asked)
    # Its own requests expire after those of all others: they are found beyond the first hundred.
    own = await count_waiting(sessions, Visibility("default", "seldom"))
    assert (own.calls, own.is_exact) == (5, True)

    await _add_waiting(admin, 136, 6_000, who="often")
    plan, many = await plan_and_buffers(admin, approvals._COUNT, *asked)
    assert "at_rest" not in scanned_whole(plan)
    assert many <= 2 * few + SMALL, (few, many)
    await _add_waiting(admin, 6_001, 6_002, who="latest")
    unseen = await count_waiting(sessions, Visibility("default", "latest"))
    assert (unseen.calls, unseen.is_exact) == (0, False), "not all were looked at, and it says so"


async def test_a_proof_costs_the_same_in_a_larger_tree(admin: Admin, sessions: Sessions) -> None:
    """What is hashed again are up to 255 leaves beside the entry and as many at the end: of both trees as many."""
    sizes = (4 * 256 + 200, (4_000 if os.environ.get("TGA_SOAK") else 120) * 256 + 200)
    found, made = dict[int, int](), 0
    for size in sizes:
        async with attacking(admin):
            await insert_bulk(admin, made + 1, size)
        made = size
        while (await sessions.commit("SELECT leaves_added FROM tga.integrate(20000)"))[0]["leaves_added"]:
            pass
        await admin.execute("VACUUM ANALYZE tga.links, tga.heads, tga.leaf_spans")
        parts = [node for one in inclusion_ranges(300, size) for node in nodes_of(one) if node.level < tree.KEPT_LEVEL]
        assert sum(1 << node.level for node in parts) == 255 + 200
        firsts = ",".join(str(node.index << node.level) for node in parts)
        ends = ",".join(str((node.index + 1) << node.level) for node in parts)
        _, found[size] = await plan_and_buffers(admin, tree._LEAVES, f"{{{firsts}}}", f"{{{ends}}}")
        async with admin.transaction():  # what a function does inside no plan says
            before = await admin.fetchval(_READ_WHOLE)
            await admin.fetch(tree._LEAVES, [n.index << n.level for n in parts], [n.leaves.end for n in parts])
            assert await admin.fetchval(_READ_WHOLE) == before, size
    assert found[sizes[1]] <= 2 * found[sizes[0]] + SMALL, found


@pytest.fixture
async def older(server: Server) -> AsyncIterator[Database]:
    """A database as it was before migration 0034."""
    name = f"tga_before_pages_{os.getpid()}"
    await server.execute_as_root(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    await server.execute_as_root(f"CREATE DATABASE {name}")
    made = server.database(name)
    await migrate(made.admin_url, tuple(one for one in packaged_migrations() if one.version < 34))
    yield made
    await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")


async def test_what_was_counted_before_is_there_by_four_hours_and_runs_say_whom_they_wait_for(older: Database) -> None:
    session: Admin = await asyncpg.connect(older.admin_url)
    try:
        await session.execute(
            "INSERT INTO tga.call_counts SELECT 'default', 1800, '2026-01-01'::timestamptz + n * interval '30 minutes',"
            " 's', 't', 'asked', '', n FROM generate_series(0, 15) AS n"
        )
        await session.execute(
            "INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, is_open, waiting, tenant)"
            " SELECT 'run:' || w, 1, '', 'WAITING', true, w, 'default' FROM unnest('{person,time}'::text[]) AS w"
        )
        await session.execute(
            "INSERT INTO tga.runs (stream_no, tenant, procedure, program, state, attempt, failures, created_at)"
            " SELECT stream_no, tenant, 'p', '1@aa', state, 1, 0, now() FROM tga.heads WHERE stream LIKE 'run:%'"
        )
        await migrate(older.admin_url)
        waits = await session.fetch(
            "SELECT h.waiting, r.waits_for_person FROM tga.runs r JOIN tga.heads h USING (stream_no) ORDER BY 1"
        )
        assert [tuple(row) for row in waits] == [("person", True), ("time", False)]
    finally:
        await session.close()
    async with await Sessions.open(older.gateway_url) as sessions:
        moments = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC))
        counted = await load_counts(sessions, "default", span_s=14_400, since=moments[0], until=moments[1])
    assert [tally.asked for _, tally in sorted(counted.by_time.items())] == [sum(range(8)), sum(range(8, 16))]
    assert counted.total.asked == sum(range(16))
