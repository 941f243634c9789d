"""Everything stored, stream by stream, from one snapshot and in flat memory: the LedgerReader of PostgreSQL.

Cursors in the order of the streams' numbers are merged here like sorted files. Entries, artifacts and heads come along
their primary keys; what is rare (checkpoints, attempts, erasures, seals) is sorted by the server. System streams come
first: the keys that signed decisions are on them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import asyncpg

from app.core.canonical import parse_object
from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import TgaError
from app.core.limits import ARTIFACT_BYTES_MAX
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import (
    ClaimedKey,
    Referred,
    StoredCheckpoint,
    StoredEntry,
    StoredErasure,
    StoredSeal,
    StoredStream,
    Summary,
)
from app.postgres.sessions import Connection, Sessions

_ENTRIES: Final = """
SELECT e.stream_no, e.sequence_number, e.entry, e.entry_digest
  FROM tga.entries e WHERE {numbers} ORDER BY e.stream_no, e.sequence_number
"""
_PAYLOADS: Final = """
SELECT e.stream_no, e.sequence_number, e.artifacts
  FROM tga.payloads e WHERE {numbers} ORDER BY e.stream_no, e.sequence_number
"""
# With the table, if there is one, in which recovery, expiry or lists look for the stream and find something else than
# its head says. A row of `in_work` whose stream has ended is swept away later, and says nothing.
_HEADS: Final = """
SELECT e.*, to_char(e.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS expires,
       CASE WHEN e.sequence_number = 0 THEN NULL
            WHEN e.is_open AND e.waiting IS NULL AND w.stream_no IS NULL THEN 'in_work'
            WHEN (e.waiting IS NOT NULL OR NOT e.is_open AND e.state IS DISTINCT FROM k.usual_end)
                 <> (r.stream_no IS NOT NULL) THEN 'at_rest'
            WHEN (r.stream, r.tenant, r.state, r.waiting, r.expires_at)
                 IS DISTINCT FROM (e.stream, e.tenant, e.state, e.waiting, e.expires_at)
                 AND r.stream_no IS NOT NULL THEN 'at_rest'
            WHEN (q.state, q.tenant) IS DISTINCT FROM (e.state, e.tenant) AND q.stream_no IS NOT NULL THEN 'runs'
            END AS misplaced_in, q.attempt AS scheduled_attempt
  FROM tga.heads e
  LEFT JOIN tga.stream_kinds k ON k.kind = split_part(e.stream, ':', 1)
  LEFT JOIN tga.in_work w ON w.kind = k.kind AND w.stream_no = e.stream_no
  LEFT JOIN tga.at_rest r ON r.stream_no = e.stream_no
  LEFT JOIN tga.runs q ON q.stream_no = e.stream_no
 WHERE {numbers} ORDER BY e.stream_no
"""
_CHECKPOINTS: Final = """
SELECT e.stream_no, k.* FROM tga.execution_checkpoints k LEFT JOIN tga.heads e USING (stream)
 WHERE {numbers} ORDER BY e.stream_no, k.stream, k.sequence_number
"""
_ERASURES: Final = """
SELECT e.stream_no, k.stream, k.system_stream, k.sequence_number, k.claim_salt, a.artifact
  FROM tga.erasures k LEFT JOIN tga.heads e USING (stream)
  LEFT JOIN tga.records a ON a.stream = k.system_stream AND a.sequence_number = k.sequence_number
 WHERE {numbers} ORDER BY e.stream_no, k.stream
"""
_SEALED: Final = """
SELECT e.stream_no, k.* FROM tga.sealed k LEFT JOIN tga.heads e USING (stream)
 WHERE {numbers} ORDER BY e.stream_no, k.stream
"""
_ATTEMPTS: Final = """
SELECT e.stream_no, k.stream, k.attempt FROM tga.dispatch_attempts k LEFT JOIN tga.heads e USING (stream)
 WHERE {numbers} ORDER BY e.stream_no, k.stream, k.attempt
"""
# Along the index of claims; where someone has dropped it the server sorts, in bounded memory.
_CLAIMED_KEYS: Final = """
SELECT server_id, tool_name, idempotency_key, stream FROM tga.claims ORDER BY server_id, tool_name, idempotency_key
"""
_CLAIMED_BY_ITS_KEY: Final = """
SELECT c.server_id, c.tool_name, c.idempotency_key, c.stream
  FROM tga.claims o
  JOIN tga.claims c ON c.server_id = o.server_id AND c.tool_name = o.tool_name AND c.idempotency_key = o.idempotency_key
 WHERE o.stream = $1
"""
_LEAF_INDEX: Final = """
SELECT s.first_index + l.place - 1
  FROM tga.heads h
  JOIN tga.links l ON l.stream_no = h.stream_no
  JOIN tga.leaf_spans s ON s.stream_no = l.stream_no AND s.sequence_number = l.sequence_number - l.place + 1
 WHERE h.stream = $1 AND l.sequence_number = $2
"""
_RECORDS: Final = """
SELECT e.sequence_number, e.entry, e.entry_digest, e.artifact
  FROM tga.records e
 WHERE e.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1 LIMIT 1) AND {condition}
"""
_LAST: Final = """
SELECT l.sequence_number, l.entry_digest, l.to_state AS state, l.artifact_digest, r.stream IS NOT NULL AS is_erased
  FROM tga.heads h
  JOIN tga.links l ON l.stream_no = h.stream_no
  LEFT JOIN tga.erasures r ON r.stream = h.stream
 WHERE h.stream = $1 ORDER BY l.sequence_number DESC LIMIT 1
"""
_SYSTEMS: Final = "SELECT stream_no FROM tga.heads WHERE stream >= 'system:' AND stream < 'system;' ORDER BY stream"
_ASKED_FOR: Final = "SELECT stream_no FROM tga.heads WHERE stream = $1"
# Along the index of names; where someone has dropped it, two rows may have one name.
_REPEATED: Final = "SELECT stream FROM tga.heads GROUP BY stream HAVING count(*) > 1"
_REPEATED_SYSTEMS: Final = """
SELECT stream FROM tga.heads WHERE stream >= 'system:' AND stream < 'system;' GROUP BY stream HAVING count(*) > 1
"""
_NUMBERS_END: Final = "SELECT coalesce(max(stream_no), 0) + 1 FROM tga.heads"
_KINDS: Final = "SELECT kind, id_field FROM tga.stream_kinds ORDER BY kind"

_SNAPSHOT: Final = re.compile("[0-9A-F-]{1,64}")
_PREFETCH_ROWS: Final = 500
_NO_NUMBER: Final = 2**63  # of what is left of a stream whose head is gone, after all others: as PostgreSQL sorts NULL

Cursor: TypeAlias = Any  # of asyncpg, which has no types
_Key = tuple[int, str]  # a stream's number; its name, where it has no number


class _Merged:
    """A cursor that can be looked at before it is taken from."""

    def __init__(self, query: Cursor) -> None:
        self._query = query
        self._rows: list[asyncpg.Record] = []  # that were fetched together, and which of them is next
        self._at = 0
        self._is_last = False
        self.next_row: asyncpg.Record | None = None
        self.next_key: _Key | None = None

    async def begin(self) -> None:
        self._cursor = await self._query
        await self._fetch()

    async def _fetch(self) -> None:
        self._rows, self._at = await self._cursor.fetch(_PREFETCH_ROWS), 0
        self._is_last = len(self._rows) < _PREFETCH_ROWS
        self._look()

    def _look(self) -> None:
        if self._at == len(self._rows):
            self.next_row = self.next_key = None
            return
        row = self.next_row = self._rows[self._at]
        number = row["stream_no"]
        self.next_key = (_NO_NUMBER, row["stream"]) if number is None else (number, "")

    async def advance(self) -> asyncpg.Record | None:
        taken = self.next_row
        if taken is not None:
            self._at += 1
            if self._at == len(self._rows) and not self._is_last:
                await self._fetch()
            else:
                self._look()
        return taken

    async def of(self, key: _Key) -> list[asyncpg.Record]:
        """All of this stream, which are few."""
        found: list[asyncpg.Record] = []
        while self.next_key == key and (row := await self.advance()) is not None:
            found.append(row)
        return found

    async def pass_over(self, key: _Key) -> None:
        while self.next_key == key:
            self._at = self._end_of(key)
            if self._at == len(self._rows) and not self._is_last:
                await self._fetch()
            else:
                self._look()

    def at_hand(self, key: _Key) -> list[asyncpg.Record] | None:
        """All of this stream, without taking them; None if some are not fetched yet."""
        if self.next_key != key:
            return []
        end = self._end_of(key)
        return self._rows[self._at : end] if end < len(self._rows) or self._is_last else None

    def _end_of(self, key: _Key) -> int:
        """After the last of this stream, among those that were fetched together."""
        number, rows, end = key[0], self._rows, self._at + 1
        if number == _NO_NUMBER:  # then it is known by its name
            return end
        while end < len(rows) and rows[end]["stream_no"] == number:
            end += 1
        return end


class PostgresLedgerReader:
    """All streams, or one, as they stood when it was opened."""

    def __init__(self, connection: Connection, stream: str | None, streams: int) -> None:
        self._connection = connection
        self._stream = stream
        self._streams = streams
        self._id_fields: dict[str, str] = {}
        self._repeated: set[str] = set()
        self._systems: list[int] = []

    def count_streams(self) -> int:
        return self._streams

    def is_asked_for(self, stream: str) -> bool:
        return self._stream in (None, stream)

    async def streams(self) -> AsyncIterator[StoredStream]:
        async for stored in self.vouching():
            yield stored
        if self._stream is None:
            async for stored in self.numbered():
                yield stored
            return
        found = await self._connection.fetch(_ASKED_FOR, self._stream)
        if len(found) > 1:
            self._repeated.add(self._stream)
        asked = found[0]["stream_no"] if found else None
        if asked is not None and asked not in self._systems:
            async for stored in self._merged("e.stream_no = ANY ($1)", [asked]):
                yield stored

    async def vouching(self) -> AsyncIterator[StoredStream]:
        """System streams, before all others."""
        self._id_fields = {row["kind"]: row["id_field"] for row in await self._connection.fetch(_KINDS)}
        repeated = _REPEATED if self._stream is None else _REPEATED_SYSTEMS
        self._repeated = {row["stream"] for row in await self._connection.fetch(repeated)}
        self._systems = [row["stream_no"] for row in await self._connection.fetch(_SYSTEMS)]
        async for stored in self._merged("e.stream_no = ANY ($1)", self._systems):
            yield stored

    def numbered(self, first: int | None = None, end: int | None = None) -> AsyncIterator[StoredStream]:
        """All others, in the order of their numbers: from `first` on, and before `end`. Without `end` also what is left
        of streams that have no number any more."""
        within = "e.stream_no <> ALL ($1)" + ("" if first is None else f" AND e.stream_no >= {int(first)}")
        within += "" if end is None else f" AND e.stream_no < {int(end)}"
        return self._merged(within if end is not None else f"({within} OR e.stream_no IS NULL)", self._systems)

    async def numbers_end(self) -> int:
        """After the last number that a head has."""
        return int(await self._connection.fetchval(_NUMBERS_END))

    async def export_snapshot(self) -> str:
        """For readers in other sessions (`open_reader`), as long as this one is open."""
        return str(await self._connection.fetchval("SELECT pg_export_snapshot()"))

    async def _merged(self, numbers: str, argument: list[int]) -> AsyncIterator[StoredStream]:
        cursors = [
            _Merged(self._connection.cursor(query.format(numbers=numbers), argument))
            for query in (_ENTRIES, _PAYLOADS, _HEADS, _CHECKPOINTS, _ATTEMPTS, _ERASURES, _SEALED)
        ]
        for cursor in cursors:
            await cursor.begin()
        entries, payloads, heads, checkpoints, attempts, erasures, sealed = cursors
        while waiting := [cursor.next_key for cursor in cursors if cursor.next_key is not None]:
            key = min(waiting)
            head = await heads.of(key)
            erasure = await erasures.of(key) if erasures.next_key == key else []
            seal = await sealed.of(key) if sealed.next_key == key else []
            claim, effect = (head[0]["idempotency_key"], head[0]["effect_digest"]) if head else (None, None)
            single = (("heads", head), ("erasures", erasure), ("sealed", seal))
            yield StoredStream(
                stream=head[0]["stream"] if head else key[1] or self._name_of(key, payloads),
                head=_head(head[0]) if head else None,
                is_open=bool(head) and head[0]["is_open"],
                waiting=head[0]["waiting"] if head else None,
                misplaced_in=head[0]["misplaced_in"] if head else None,
                scheduled_attempt=head[0]["scheduled_attempt"] if head else None,
                checkpoints=[_checkpoint(row) for row in await checkpoints.of(key)],
                claim=_claim(head[0]) if claim is not None else None,
                claim_effect=_digest(effect),
                dispatch_attempts=[row["attempt"] for row in await attempts.of(key)],
                erasure=_erasure(erasure[0]) if erasure else None,
                summary=_summary(head[0]) if head else None,
                sealed=StoredSeal(seal[0]["sealed_salt"], seal[0]["sealed_values"]) if seal else None,
                rows_repeated=[table for table, rows in single if len(rows) > 1]
                + ["heads" for row in head[:1] if row["stream"] in self._repeated],
                entries=_places(key, entries, payloads),
                rows=_rows_at_hand(entries.at_hand(key), payloads.at_hand(key)),
            )
            for cursor in (entries, payloads):
                await cursor.pass_over(key)  # what the verifier left unread

    async def leaf_index(self, stream: str, sequence_number: int) -> int | None:
        found: int | None = await self._connection.fetchval(_LEAF_INDEX, stream, sequence_number)
        return found

    async def entries_of(self, stream: str, *, up_to: int) -> AsyncIterator[StoredEntry]:
        query = _RECORDS.format(condition="e.sequence_number <= $2 ORDER BY e.sequence_number")
        async for row in self._connection.cursor(query, stream, up_to, prefetch=_PREFETCH_ROWS):
            yield _stored(row)

    async def referred(self, stream: str) -> Referred | None:
        row = await self._connection.fetchrow(_LAST, stream)
        if row is None:
            return None
        first = await self._connection.fetchrow(_RECORDS.format(condition="e.sequence_number = $2"), stream, 1)
        return Referred(_head(row), None if first is None else _stored(first), row["is_erased"])

    async def claimed_keys(self) -> AsyncIterator[ClaimedKey]:
        query, arguments = (_CLAIMED_KEYS, ()) if self._stream is None else (_CLAIMED_BY_ITS_KEY, (self._stream,))
        cursor = await self._connection.cursor(query, *arguments)
        while rows := await cursor.fetch(_PREFETCH_ROWS):
            for row in rows:
                yield ClaimedKey(*row)

    def _name_of(self, key: _Key, payloads: _Merged) -> str:
        """The name of a stream whose head is gone, as its first artifact says it."""
        if payloads.next_key == key and payloads.next_row is not None:
            try:
                said: dict[str, Any] = parse_object(payloads.next_row["artifacts"][0], bytes_max=ARTIFACT_BYTES_MAX)
            except (TgaError, IndexError, TypeError):
                said = {}
            for kind, id_field in self._id_fields.items():
                if isinstance(said.get(id_field), str):
                    return f"{kind}:{said[id_field]}"
        return f"unknown:{key[0]}"


@asynccontextmanager
async def open_reader(
    sessions: Sessions, *, stream: str | None = None, snapshot: str | None = None
) -> AsyncIterator[PostgresLedgerReader]:
    """`snapshot`: as another reader sees it, which has exported this and is still open."""
    async with sessions.reading() as connection:
        if snapshot is not None:
            await adopt_snapshot(connection, snapshot)
        # Without hash joins and sorts the cursors follow their indexes and the first row comes at once.
        await connection.execute("SET LOCAL enable_hashjoin = off; SET LOCAL enable_sort = off")
        count = 1 if stream is not None else await connection.fetchval("SELECT count(*) FROM tga.heads")
        yield PostgresLedgerReader(connection, stream, count)


async def adopt_snapshot(connection: Connection, snapshot: str) -> None:
    if not _SNAPSHOT.fullmatch(snapshot):
        raise ValueError(f"no snapshot of PostgreSQL: {snapshot!r}")
    await connection.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")


def _digest(raw: bytes | None) -> Digest | None:
    return None if raw is None else Digest(raw.hex())


def _stored(row: asyncpg.Record) -> StoredEntry:
    return StoredEntry(row["sequence_number"], row["entry"], _digest(row["entry_digest"]), row["artifact"])


def _rows_at_hand(
    entries: list[asyncpg.Record] | None, payloads: list[asyncpg.Record] | None
) -> list[StoredEntry] | None:
    """What `_places` gives, where that is every place from the first on, once, with entry and artifact."""
    if not entries or not payloads:
        return None
    artifacts: list[bytes | None] = []
    for row in payloads:
        if row["sequence_number"] != len(artifacts) + 1:
            return None
        artifacts += row["artifacts"]
    if len(artifacts) != len(entries):
        return None
    rows = []
    for place, (row, artifact) in enumerate(zip(entries, artifacts, strict=True), 1):
        _, number, entry, digest = row
        if number != place or entry is None or digest is None or artifact is None:
            return None
        rows.append(StoredEntry(number, entry, Digest(digest.hex()), artifact))
    return rows


async def _places(key: _Key, entries: _Merged, payloads: _Merged) -> AsyncIterator[StoredEntry]:
    """Every place of the stream at which there is an entry, an artifact, or both."""
    artifacts: dict[int, bytes] = {}  # of the payload row that has been begun
    while True:
        if not artifacts and payloads.next_key == key and (row := await payloads.advance()) is not None:
            found = enumerate(row["artifacts"], row["sequence_number"])
            artifacts = {place: artifact for place, artifact in found if artifact is not None}
            continue
        at_hand = [min(artifacts)] if artifacts else []
        if entries.next_key == key and entries.next_row is not None:
            at_hand.append(entries.next_row["sequence_number"])
        if not at_hand:
            return
        place = min(at_hand)
        entry = None
        if entries.next_key == key and entries.next_row is not None and entries.next_row["sequence_number"] == place:
            entry = await entries.advance()
        yield StoredEntry(
            place,
            None if entry is None else entry["entry"],
            None if entry is None else _digest(entry["entry_digest"]),
            artifacts.pop(place, None),
        )


def _head(row: asyncpg.Record) -> Head:
    return Head(
        row["sequence_number"], Digest(row["entry_digest"].hex()), row["state"], _digest(row["artifact_digest"])
    )


def _checkpoint(row: asyncpg.Record) -> StoredCheckpoint:
    return StoredCheckpoint(row["sequence_number"], row["checkpoint_state"], Digest(row["checkpoint_digest"].hex()))


def _claim(row: asyncpg.Record) -> Claim:
    return Claim(row["subject"], row["name"], row["idempotency_key"], Digest(row["payload_digest"].hex()))


def _erasure(row: asyncpg.Record) -> StoredErasure:
    return StoredErasure(row["system_stream"], row["sequence_number"], row["artifact"], row["claim_salt"])


def _summary(row: asyncpg.Record) -> Summary:
    return Summary(row["tenant"], row["principal_id"], row["subject"], row["name"], row["expires"])
