"""Lists of the calls of one agent or one tool: what a page costs does not grow with the calls of others, and nothing is
left out or shown twice. The indexes know agents and tools by a hash, and of an id as much as a quarter of a second."""

from __future__ import annotations

import os
import random
from typing import Final, TypeAlias

import asyncpg

from app.domain.ledger.queries import Visibility
from app.postgres import listing
from app.postgres.listing import TraceFilters, list_traces
from app.postgres.sessions import IN_ORDER, Sessions
from tests.postgres.test_listing import EMPTY, plan_and_buffers, scanned_whole

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
SIZES: Final = (1_000, 1_000_000) if os.environ.get("TGA_SOAK") else (1_000, 20_000)
SELDOM: Final = 100
TENANT: Final = Visibility("default", None)
# In the order of their ids: `apart` milliseconds between two calls.
_ADDED: Final = """
INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, is_open, tenant, principal_id, subject, name,
       idempotency_key)
SELECT 'trace:' || substr(d.digits, 1, 8) || '-' || substr(d.digits, 9) || '-7000-8000-' || lpad(to_hex(n), 12, '0'), 1,
       '', CASE WHEN n % 9 = 0 THEN 'FAILED' ELSE 'COMPLETED' END, false,
       CASE WHEN n % 5 = 4 THEN 'other' ELSE 'default' END,
       CASE WHEN n % $3 = 1 THEN 'seldom' ELSE 'often' END, 'crm', CASE WHEN n % $3 = 2 THEN 'seldom' ELSE 'often' END,
       'key-' || n
  FROM generate_series($1::integer, $2::integer) AS n
 CROSS JOIN LATERAL (SELECT lpad(to_hex(1700000000000 + n::bigint * $4), 12, '0')) AS d(digits)
"""


async def _add(admin: Admin, first: int, last: int, *, turn: int, apart: int) -> None:
    async with admin.transaction():  # past the triggers: lists read nothing else
        await admin.execute("ALTER TABLE tga.heads DISABLE TRIGGER ALL")
        await admin.execute(_ADDED, first, last, turn, apart)
        await admin.execute(
            "INSERT INTO tga.call_facts (stream_no, sequence_number, tenant, state, attempts)"
            " SELECT stream_no, 1, tenant, state, 1 FROM tga.heads ON CONFLICT DO NOTHING"
        )


async def test_a_page_of_one_agent_or_tool_costs_the_same_however_many_calls_others_make(admin: Admin) -> None:
    """Both sizes have as many of the seldom ones, spread over all; also where nothing was analysed, and where all but
    one agent are so rare that PostgreSQL expects a page of few rows."""
    asked = {
        "seldom agent": (listing._TRACES_OF_PRINCIPAL, (None, None, None, None, "seldom")),
        "often agent": (listing._TRACES_OF_PRINCIPAL, (None, None, None, None, "often")),
        "no agent": (listing._TRACES_OF_PRINCIPAL, (None, None, None, None, "nobody")),
        "own calls": (listing._TRACES_OF_PRINCIPAL, ("seldom", None, None, None, None)),
        "seldom tool": (listing._TRACES_OF_TOOL, (None, None, "crm", "seldom", None)),
        "often tool": (listing._TRACES_OF_TOOL, (None, None, "crm", "often", None)),
        "no tool": (listing._TRACES_OF_TOOL, (None, None, "crm", "none", None)),
    }
    found: dict[str, dict[str, int]] = {}
    for size in SIZES:
        await admin.execute("ALTER TABLE tga.heads DISABLE TRIGGER ALL")
        await admin.execute("TRUNCATE tga.heads, tga.call_facts")
        await _add(admin, 1, size, turn=size // SELDOM, apart=60)
        for step in ("", "analysed", "many agents"):
            if step == "many agents":
                await admin.execute(
                    "UPDATE tga.heads SET principal_id = 'p' || stream_no WHERE stream_no % 2 = 1"
                    " AND principal_id = 'often'"
                )
            if step:
                await admin.execute("VACUUM ANALYZE tga.heads, tga.call_facts")
            costs = found.setdefault(f"{size} {step}", {})
            for what, (statement, filters) in asked.items():
                given = ("default", "trace:", "trace;", *filters, 52, None, None)
                plan, costs[what] = await plan_and_buffers(admin, statement, *given, settings=IN_ORDER)
                assert scanned_whole(plan) <= {*EMPTY, "call_facts"}, (step, what)
                assert '"Sort"' not in plan, (step, what)
    print(found)
    for step in ("", "analysed", "many agents"):
        small, large = (found[f"{size} {step}"] for size in SIZES)
        for what, buffers in large.items():
            assert buffers <= 2 * small[what] + 16, (step, what, small[what], buffers)


async def test_pages_of_one_agent_or_tool_have_every_call_once_and_newest_first(
    admin: Admin, sessions: Sessions
) -> None:
    """Many fall into the same quarter of a second; pages end between them, and times cut through them."""
    chance = random.Random(7)
    await _add(admin, 1, 600, turn=4, apart=7)
    await _add(admin, 601, 700, turn=4, apart=0)
    rows = [dict(row) for row in await admin.fetch("SELECT * FROM tga.heads WHERE tenant = 'default'")]
    rows.sort(key=lambda row: row["stream"], reverse=True)
    times = [None, 1_700_000_000_000, 1_700_000_001_000, 1_700_000_001_001, 1_700_000_003_333]
    for _ in range(25):
        principal, tool = chance.choice([(p, t) for p in ("seldom", "often", None) for t in ("seldom", "often", None)])
        scope = Visibility("default", chance.choice([None, None, "seldom"]))
        since, until = chance.choice(times), chance.choice(times)
        states = chance.choice([None, ["COMPLETED"], ["COMPLETED", "FAILED"]])
        filters = TraceFilters(
            states=states,
            principal_id=principal,
            server_id=None if tool is None else "crm",
            tool_name=tool,
            since_ms=since,
            until_ms=until,
        )
        expected = [
            row["stream"][6:]
            for row in rows
            if (principal is None or row["principal_id"] == principal)
            and (scope.principal_id is None or row["principal_id"] == scope.principal_id)
            and (tool is None or row["name"] == tool)
            and (states is None or row["state"] in states)
            and (since is None or _ms(row["stream"]) >= since)
            and (until is None or _ms(row["stream"]) < until)
        ]
        seen, before = list[str](), None
        limit = chance.choice([1, 7, 50, 200]) if len(expected) < 100 else chance.choice([50, 200])
        while True:
            page = await list_traces(sessions, scope, filters, before=before, limit=limit)
            seen += [one.trace_id for one in page.items]
            before = page.next
            if before is None:
                break
        assert seen == expected, (filters, scope)


def _ms(stream: str) -> int:
    return int(stream[6:14] + stream[15:19], 16)
