"""Plans to append, and how to look at everything that a ledger holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import asyncpg

from app.domain.ledger.checks import Report
from app.domain.ledger.plans import Plan, PlannedCheckpoint, PlannedEntry
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord, fold
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from tests.traces import EXECUTOR, time_at

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


def plan_of(
    records: Sequence[LogRecord],
    *,
    executor_id: str = EXECUTOR,
    owner_after: str | None = None,
    with_checkpoint: bool = False,
) -> Plan:
    """The plan that appends these records, with the claim that belongs to them."""
    folded = fold(records) if with_checkpoint else None
    return Plan(
        stream=records[0].stream,
        executor_id=executor_id,
        owner_after=owner_after,
        entries=[planned(record) for record in records],
        claim=decide_claim(records),
        checkpoint=None if folded is None else PlannedCheckpoint(folded.to_bytes(), time_at(3)),
    )


def planned(record: LogRecord) -> PlannedEntry:
    assert record.artifact is not None
    return PlannedEntry(record.entry.body_bytes(), record.artifact.to_bytes())


async def contents(admin: Admin) -> dict[str, list[str]]:
    """Every row of every table of the schema, as text."""
    names = await admin.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r' ORDER BY relname"
    )
    return {
        row["relname"]: [
            found["row"] for found in await admin.fetch(f"SELECT t::text AS row FROM tga.{row['relname']} t ORDER BY 1")
        ]
        for row in names
    }


async def tables_naming(admin: Admin, stream: str) -> dict[str, int]:
    """How many rows each table holds about a stream, by its name or its number; tables without any are left out."""
    counts = {}
    number = await admin.fetchval("SELECT stream_no FROM tga.heads WHERE stream = $1", stream)
    for row in await admin.fetch(
        "SELECT relname, bool_or(attname = 'stream') AS by_name"
        "  FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attname IN ('stream', 'stream_no')"
        " WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r' AND relname <> 'tree_cursor' GROUP BY relname"
    ):
        column, wanted = ("stream", stream) if row["by_name"] else ("stream_no", number)
        if count := await admin.fetchval(f"SELECT count(*) FROM tga.{row['relname']} WHERE {column} = $1", wanted):
            counts[row["relname"]] = count
    return counts


async def verify_all(sessions: Sessions) -> Report:
    """Every stream verifies, from its first entry to its head."""
    report = Report()
    async with open_reader(sessions) as reader:
        findings = [str(finding) async for finding in verify_ledger(reader, stream_checks(), report)]
    assert findings == [], "\n".join(findings)
    return report
