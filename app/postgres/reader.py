"""Everything stored, stream by stream, from one snapshot and in flat memory: the LedgerReader of PostgreSQL.

Nine cursors, each in the order of its index, are merged here like sorted files: the server sorts nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from app.core.chain import Head
from app.core.digest import Digest
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import (
    ClaimedKey,
    StoredCheckpoint,
    StoredEntry,
    StoredErasure,
    StoredSeal,
    StoredStream,
    Summary,
)
from app.postgres.sessions import Connection, Sessions

_ENTRIES = (
    "SELECT stream, sequence_number, entry, entry_digest FROM tga.entries {where} ORDER BY stream, sequence_number"
)
_ARTIFACTS = "SELECT * FROM tga.artifacts {where} ORDER BY stream, sequence_number"
_HEADS = """
SELECT *, to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS expires
  FROM tga.heads {where} ORDER BY stream
"""
_CHECKPOINTS = "SELECT * FROM tga.execution_checkpoints {where} ORDER BY stream, sequence_number"
_CLAIMS = "SELECT * FROM tga.claims {where} ORDER BY stream"
_EFFECTS = "SELECT * FROM tga.claim_effects {where} ORDER BY stream"
_ERASURES = """
SELECT e.stream, e.system_stream, e.sequence_number, e.claim_salt, a.artifact
  FROM tga.erasures e
  LEFT JOIN tga.artifacts a ON a.stream = e.system_stream AND a.sequence_number = e.sequence_number
 {where} ORDER BY e.stream
"""
_SEALED = "SELECT * FROM tga.sealed {where} ORDER BY stream"
_ATTEMPTS = "SELECT stream, attempt FROM tga.dispatch_attempts {where} ORDER BY stream, attempt"
# Along the primary key of claims; where someone has dropped it the server sorts, in bounded memory.
_CLAIMED_KEYS = """
SELECT server_id, tool_name, idempotency_key, stream FROM tga.claims ORDER BY server_id, tool_name, idempotency_key
"""
_CLAIMED_BY_ITS_KEY = """
SELECT c.server_id, c.tool_name, c.idempotency_key, c.stream
  FROM tga.claims o
  JOIN tga.claims c ON c.server_id = o.server_id AND c.tool_name = o.tool_name AND c.idempotency_key = o.idempotency_key
 WHERE o.stream = $1
"""
_LEAF_INDEX = "SELECT leaf_index FROM tga.leaves WHERE stream = $1 AND sequence_number = $2"

_PREFETCH_ROWS = 500


class _Merged:
    """A cursor that can be looked at before it is taken from."""

    def __init__(self, rows: AsyncIterator[asyncpg.Record]) -> None:
        self._rows = rows
        self.next_row: asyncpg.Record | None = None

    async def advance(self) -> asyncpg.Record | None:
        taken = self.next_row
        self.next_row = await anext(self._rows, None)
        return taken

    async def taken_at(self, stream: str, sequence_number: int) -> asyncpg.Record | None:
        row = self.next_row
        if row is None or (row["stream"], row["sequence_number"]) != (stream, sequence_number):
            return None
        return await self.advance()

    async def of(self, stream: str) -> AsyncIterator[asyncpg.Record]:
        while self.next_row is not None and self.next_row["stream"] == stream:
            row = await self.advance()
            if row is not None:
                yield row


class PostgresLedgerReader:
    """All streams, or one, as they stood when it was opened."""

    def __init__(self, connection: Connection, stream: str | None, streams: int) -> None:
        self._connection = connection
        self._stream = stream
        self._streams = streams

    def count_streams(self) -> int:
        return self._streams

    def is_asked_for(self, stream: str) -> bool:
        return self._stream in (None, stream)

    async def streams(self) -> AsyncIterator[StoredStream]:
        # The system streams are read along: the keys that signed decisions are on them.
        wanted = "WHERE ({0}stream = $1 OR ({0}stream >= 'system:' AND {0}stream < 'system;'))"
        where, arguments = ("", ()) if self._stream is None else (wanted, (self._stream,))
        cursors = [
            _Merged(
                aiter(
                    self._connection.cursor(
                        query.format(where=where.format("e." if query is _ERASURES else "")),
                        *arguments,
                        prefetch=_PREFETCH_ROWS,
                    )
                )
            )
            for query in (_ENTRIES, _ARTIFACTS, _HEADS, _CHECKPOINTS, _CLAIMS, _EFFECTS, _ATTEMPTS, _ERASURES, _SEALED)
        ]
        for cursor in cursors:
            await cursor.advance()
        entries, artifacts, heads, checkpoints, claims, effects, attempts, erasures, sealed = cursors
        while waiting := [cursor.next_row["stream"] for cursor in cursors if cursor.next_row is not None]:
            stream = min(waiting)
            head = [row async for row in heads.of(stream)]
            claim = [row async for row in claims.of(stream)]
            effect = [row async for row in effects.of(stream)]
            erasure = [row async for row in erasures.of(stream)]
            seal = [row async for row in sealed.of(stream)]
            stored = StoredStream(
                stream=stream,
                head=_head(head[0]) if head else None,
                is_open=bool(head) and head[0]["is_open"],
                waiting=head[0]["waiting"] if head else None,
                checkpoints=[_checkpoint(row) async for row in checkpoints.of(stream)],
                claim=_claim(claim[0]) if claim else None,
                claim_effect=_digest(effect[0]["artifact_digest"]) if effect else None,
                dispatch_attempts=[row["attempt"] async for row in attempts.of(stream)],
                erasure=_erasure(erasure[0]) if erasure else None,
                summary=_summary(head[0]) if head else None,
                sealed=StoredSeal(seal[0]["sealed_salt"], seal[0]["sealed_values"]) if seal else None,
                rows_repeated=[
                    table
                    for table, rows in (
                        ("heads", head),
                        ("claims", claim),
                        ("claim_effects", effect),
                        ("erasures", erasure),
                        ("sealed", seal),
                    )
                    if len(rows) > 1
                ],
                entries=_places(stream, entries, artifacts),
            )
            yield stored
            for cursor in (entries, artifacts):
                async for _ in cursor.of(stream):
                    pass  # what the verifier left unread

    async def leaf_index(self, stream: str, sequence_number: int) -> int | None:
        found: int | None = await self._connection.fetchval(_LEAF_INDEX, stream, sequence_number)
        return found

    async def claimed_keys(self) -> AsyncIterator[ClaimedKey]:
        query, arguments = (_CLAIMED_KEYS, ()) if self._stream is None else (_CLAIMED_BY_ITS_KEY, (self._stream,))
        async for row in self._connection.cursor(query, *arguments, prefetch=_PREFETCH_ROWS):
            yield ClaimedKey(row["server_id"], row["tool_name"], row["idempotency_key"], row["stream"])


@asynccontextmanager
async def open_reader(sessions: Sessions, *, stream: str | None = None) -> AsyncIterator[PostgresLedgerReader]:
    async with sessions.reading() as connection:
        # Without hash joins and sorts the cursors follow their indexes and the first row comes at once.
        await connection.execute("SET LOCAL enable_hashjoin = off; SET LOCAL enable_sort = off; SET LOCAL jit = off")
        count = 1 if stream is not None else await connection.fetchval("SELECT count(*) FROM tga.heads")
        yield PostgresLedgerReader(connection, stream, count)


def _digest(raw: bytes | None) -> Digest | None:
    return None if raw is None else Digest(raw.hex())


async def _places(stream: str, entries: _Merged, artifacts: _Merged) -> AsyncIterator[StoredEntry]:
    """Every place of the stream at which there is an entry, an artifact, or both."""
    while places := [
        cursor.next_row["sequence_number"]
        for cursor in (entries, artifacts)
        if cursor.next_row is not None and cursor.next_row["stream"] == stream
    ]:
        place = min(places)
        entry, artifact = await entries.taken_at(stream, place), await artifacts.taken_at(stream, place)
        yield StoredEntry(
            place,
            None if entry is None else entry["entry"],
            None if entry is None else _digest(entry["entry_digest"]),
            None if artifact is None else artifact["artifact"],
        )


def _head(row: asyncpg.Record) -> Head:
    return Head(
        row["sequence_number"], Digest(row["entry_digest"].hex()), row["state"], _digest(row["artifact_digest"])
    )


def _checkpoint(row: asyncpg.Record) -> StoredCheckpoint:
    return StoredCheckpoint(row["sequence_number"], row["checkpoint_state"], Digest(row["checkpoint_digest"].hex()))


def _claim(row: asyncpg.Record) -> Claim | None:
    if row["server_id"] is None:
        return None
    return Claim(row["server_id"], row["tool_name"], row["idempotency_key"], Digest(row["payload_digest"].hex()))


def _erasure(row: asyncpg.Record) -> StoredErasure:
    return StoredErasure(row["system_stream"], row["sequence_number"], row["artifact"], row["claim_salt"])


def _summary(row: asyncpg.Record) -> Summary:
    return Summary(row["tenant"], row["principal_id"], row["server_id"], row["tool_name"], row["expires"])
