"""Plans to append, and how to look at everything that a ledger holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import asyncpg

from app.domain.ledger.checks import Report
from app.domain.ledger.plans import Plan, PlannedCheckpoint, PlannedEntry
from app.domain.ledger.verification import verify_ledger
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord, fold
from app.domain.tga.verification import stream_checks
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
    """The plan that appends these records, with the claim and the checkpoint that belong to them.

    `with_checkpoint`: one that stands on the last of them instead.
    """
    folded = fold(records) if with_checkpoint else _executing(records)
    return Plan(
        stream=records[0].stream,
        executor_id=executor_id,
        owner_after=owner_after,
        entries=[planned(record) for record in records],
        claim=decide_claim(records),
        checkpoint=None if folded is None else PlannedCheckpoint(folded.to_bytes(), time_at(3)),
    )


def _executing(records: Sequence[LogRecord]) -> ExecutionState | None:
    """The state at the entry with which a checkpoint is due, if these records lead there from the beginning."""
    states = [record.entry.to_state for record in records]
    if records[0].entry.sequence_number != 1 or "EXECUTING" not in states:
        return None
    return fold(records[: states.index("EXECUTING") + 1])


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
    """How many rows each table holds about a stream; tables without any are left out."""
    counts = {}
    for row in await admin.fetch(
        "SELECT relname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attname = 'stream'"
        " WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r'"
    ):
        name = row["relname"]
        if count := await admin.fetchval(f"SELECT count(*) FROM tga.{name} WHERE stream = $1", stream):
            counts[name] = count
    return counts


async def verify_all(sessions: Sessions) -> Report:
    """Every stream verifies, from its first entry to its head."""
    report = Report()
    async with open_reader(sessions) as reader:
        findings = [str(finding) async for finding in verify_ledger(reader, stream_checks(), report)]
    assert findings == []
    return report
