"""The outbox on PostgreSQL: announcements that are still to be made, leased to one deliverer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC

from app.domain.tga.announcements import OutboxRow
from app.postgres.sessions import Sessions


class PostgresOutbox:
    """Leases are kept by the database's clock, so that deliverers need not agree on the time."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def take(self, webhooks: Sequence[str], *, lease_ms: int, at_most: int) -> list[OutboxRow]:
        rows = await self._sessions.commit(
            "SELECT * FROM tga.outbox_take($1, $2, $3) ORDER BY id", list(webhooks), lease_ms, at_most
        )
        return [
            OutboxRow(
                id=row["id"],
                webhook=row["webhook"],
                stream=row["stream"],
                attempts=row["attempts"],
                created_at=row["created_at"].astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z",
            )
            for row in rows
        ]

    async def done(self, rows: Sequence[OutboxRow]) -> None:
        await self._sessions.commit("SELECT tga.outbox_done($1)", [row.id for row in rows])

    async def failed(self, row: OutboxRow, error: str, *, retry_ms: int) -> None:
        await self._sessions.commit("SELECT tga.outbox_failed($1, $2, $3, $4)", row.id, row.attempts, error, retry_ms)

    async def drop_decided(self, *, at_most: int) -> int:
        (row,) = await self._sessions.commit("SELECT tga.outbox_drop_decided($1) AS dropped", at_most)
        return int(row["dropped"])
