"""When schedules are due, on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import asyncpg
import orjson

from app.core.limits import SCHEDULE_HOLD_MS
from app.domain.runs.scheduling import Change, Fired, StoredSchedule, TakenSchedule
from app.domain.system.documents import Schedule
from app.postgres.sessions import Sessions

_COLUMNS = """tenant, name, sequence_number, procedure, version, spec, missed, principal_id, next_at, last_at,
       last_run_id, last_error"""
_LOAD = f"SELECT {_COLUMNS} FROM tga.schedules WHERE tenant = $1 AND name = $2"  # noqa: S608 - constants of this file
_LIST = f"""
SELECT {_COLUMNS}
  FROM tga.schedules
 WHERE tenant = $1 AND name > $2 AND ($3::text IS NULL OR principal_id = $3)
 ORDER BY name LIMIT $4
"""  # noqa: S608 - constants of this file


_UNFINISHED = """
SELECT tenant, name, begun_at FROM tga.schedule_changes
 WHERE begun_at <= statement_timestamp() - $1 * interval '1 millisecond' ORDER BY begun_at LIMIT $2
"""


class PostgresSchedules:
    """The ScheduleStore port."""

    def __init__(self, sessions: Sessions, *, hold_ms: int = SCHEDULE_HOLD_MS) -> None:
        self._sessions = sessions
        self._hold_ms = hold_ms

    async def begin(self, tenant: str, name: str) -> Change:
        (row,) = await self._sessions.commit("SELECT tga.begin_schedule_change($1, $2) AS begun", tenant, name)
        return Change(tenant, name, row["begun"])

    async def end(self, change: Change) -> None:
        await self._sessions.commit("SELECT tga.end_schedule_change($1, $2, $3)", *change)

    async def unfinished(self, limit: int) -> Sequence[Change]:
        rows = await self._sessions.fetch(_UNFINISHED, self._hold_ms, limit)
        return [Change(row["tenant"], row["name"], row["begun_at"]) for row in rows]

    async def put(self, schedule: Schedule, sequence_number: int, next_at: str | None) -> None:
        await self._sessions.commit(
            "SELECT tga.put_schedule($1, $2, $3, $4, $5, $6, $7, $8, $9)",
            schedule.system_id,
            schedule.name,
            sequence_number,
            schedule.procedure,
            schedule.version,
            orjson.dumps(schedule.spec.model_dump()).decode(),
            schedule.missed,
            schedule.principal.principal_id,
            _moment(next_at),
        )

    async def drop(self, tenant: str, name: str, sequence_number: int) -> None:
        await self._sessions.commit("SELECT tga.drop_schedule($1, $2, $3)", tenant, name, sequence_number)

    async def known(self, tenant: str) -> dict[str, int]:
        rows = await self._sessions.fetch("SELECT name, sequence_number FROM tga.schedules WHERE tenant = $1", tenant)
        return {row["name"]: row["sequence_number"] for row in rows}

    async def load(self, tenant: str, name: str) -> StoredSchedule | None:
        rows = await self._sessions.fetch(_LOAD, tenant, name)
        return _stored(rows[0]) if rows else None

    async def page(
        self, tenant: str, *, principal_id: str | None, after: str | None, limit: int
    ) -> Sequence[StoredSchedule]:
        rows = await self._sessions.fetch(_LIST, tenant, after or "", principal_id, limit)
        return [_stored(row) for row in rows]

    async def take_due(self, limit: int) -> Sequence[TakenSchedule]:
        rows = await self._sessions.commit("SELECT * FROM tga.take_schedules($1, $2)", limit, self._hold_ms)
        return [
            TakenSchedule(
                row["tenant"],
                row["name"],
                row["sequence_number"],
                _written(row["next_at"]),
                _written(row["taken_at"]),
            )
            for row in sorted(rows, key=lambda row: row["next_at"])
        ]

    async def settle(self, fired: Fired) -> None:
        taken = fired.taken
        last_at = fired.times[-1] if fired.times else (taken.next_at if fired.error is not None else None)
        await self._sessions.commit(
            "SELECT tga.settle_schedule($1, $2, $3, $4, $5, $6, $7, $8)",
            taken.tenant,
            taken.name,
            taken.sequence_number,
            _moment(taken.next_at),
            _moment(fired.next_at),
            _moment(last_at),
            fired.run_ids[-1] if fired.run_ids else None,
            None if fired.error is None else f"{fired.error.code}: {fired.error.what}",
        )


def _stored(row: asyncpg.Record) -> StoredSchedule:
    times = {name: _written(row[name]) if row[name] is not None else None for name in ("next_at", "last_at")}
    told: dict[str, Any] = {**dict(row), **times, "spec": orjson.loads(row["spec"])}
    return StoredSchedule(**told)


def _moment(time: str | None) -> datetime | None:
    return None if time is None else datetime.fromisoformat(time)


def _written(moment: datetime) -> str:
    utc = moment.astimezone(UTC)
    return f"{utc:%Y-%m-%dT%H:%M:%S}.{utc.microsecond // 1000:03d}Z"
