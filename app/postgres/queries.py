"""Streams of any kind, by their names: one indexed query each, bounded in the rows and bytes that it brings."""

from __future__ import annotations

from typing import Final

import asyncpg

from app.core.chain import StreamKind
from app.core.limits import LIST_ITEMS_DEFAULT, LIST_ROWS_LOOKED_AT_MAX, PAGE_BYTES_MAX
from app.domain.ledger.queries import EntryPage, ListedStream, Page, ShownEntry, Visibility
from app.postgres.sessions import Sessions

# The first one from this place on in the order of the index (tenant, stream), which no other index gives: the unique
# one of names would take longer to miss a foreign trace than one that does not exist. Without the order PostgreSQL
# takes the pairs for most of the tenant's rows, and reads the whole table beside a million.
_VISIBLE: Final = """
SELECT FROM (SELECT h.* FROM tga.heads h WHERE (h.tenant, h.stream) >= ($1, $2)
              ORDER BY h.tenant, h.stream LIMIT 1) AS h
 WHERE h.tenant = $1 AND h.stream = $2 AND h.sequence_number > 0 AND ($3::text IS NULL OR h.principal_id = $3)
"""
# One snapshot: what the head says and what stands before it. The first entry comes whatever its size.
_ENTRIES: Final = """
SELECT h.sequence_number AS head, h.state, h.is_open, p.sequence_number, p.entry, p.entry_digest, p.artifact
  FROM tga.heads h
  LEFT JOIN LATERAL (
       SELECT e.sequence_number, e.entry, e.entry_digest, e.artifact,
              sum(octet_length(e.entry) + coalesce(octet_length(e.artifact), 0)) OVER (ORDER BY e.sequence_number)
              - octet_length(e.entry) - coalesce(octet_length(e.artifact), 0) AS bytes_before
         FROM (SELECT * FROM tga.records e WHERE e.stream_no = h.stream_no AND e.sequence_number > $2
                ORDER BY e.sequence_number LIMIT $3) AS e) AS p
    ON p.bytes_before < $4
 WHERE h.stream = $1 AND h.sequence_number > 0
 ORDER BY p.sequence_number
"""
_SEQUENCES: Final = "SELECT h.stream, h.sequence_number FROM tga.heads h WHERE h.stream = ANY ($1::text[])"

_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
# The last row that may be looked at, and the one after it, come along whether they fit or not: the next page starts
# between them.
_PAGE = f"""
SELECT t.*, {_TIME.format("t.updated_at")} AS updated, {_TIME.format("t.expires_at")} AS expires
  FROM (SELECT t.*, t.place <= {LIST_ROWS_LOOKED_AT_MAX} AND t.sequence_number > 0
               AND ($4::text IS NULL OR t.principal_id = $4) AND ($5::text IS NULL OR t.state = $5)
               AND ($6::text IS NULL OR t.subject = $6) AND ($7::text IS NULL OR t.name = $7)
               AND ($8::text IS NULL OR t.principal_id = $8) AS fits
          FROM (SELECT h.*, row_number() OVER (ORDER BY h.tenant DESC, h.stream DESC) AS place
                  FROM {{heads}} AS h
                 WHERE (h.tenant, h.stream) > ($1, $2) AND (h.tenant, h.stream) < ($1, $3)
                 ORDER BY h.tenant DESC, h.stream DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX + 1}) AS t) AS t
 WHERE t.fits OR t.place >= {LIST_ROWS_LOOKED_AT_MAX}
 ORDER BY t.tenant DESC, t.stream DESC LIMIT $9
"""  # noqa: S608 - only our own numbers and names
_STREAMS: Final = _PAGE.format(heads="tga.heads")
# Most streams end as is usual for their kind. The others rest and have an index of their own, or are in work and few,
# so that a rare state is one page, too.
_STREAMS_IN_STATE: Final = _PAGE.format(
    heads=f"""(
       (SELECT h.* FROM tga.at_rest r JOIN tga.heads h ON h.stream_no = r.stream_no
         WHERE r.tenant = $1 AND r.state = $5 AND r.stream > $2 AND r.stream < $3
         ORDER BY r.stream DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX + 1})
       UNION ALL
       (SELECT h.* FROM tga.in_work w JOIN tga.heads h ON h.stream_no = w.stream_no
         WHERE w.kind = $10 AND h.is_open AND h.waiting IS NULL AND h.tenant = $1 AND h.state = $5
           AND h.stream > $2 AND h.stream < $3
         ORDER BY h.stream DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX + 1}))"""  # noqa: S608 - only our own numbers and names
)


class PostgresQueries:
    """The StreamQueries port."""

    __slots__ = ("_sessions",)

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def is_visible(self, stream: str, scope: Visibility) -> bool:
        return bool(await self._sessions.fetch(_VISIBLE, scope.tenant, stream, scope.principal_id))

    async def entries(
        self, stream: str, *, after_seq: int, limit: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> EntryPage | None:
        rows = await self._sessions.fetch(_ENTRIES, stream, after_seq, limit, bytes_max)
        if not rows:
            return None
        items = [
            ShownEntry(stream, row["sequence_number"], row["entry_digest"].hex(), row["entry"], row["artifact"])
            for row in rows
            if row["sequence_number"] is not None
        ]
        return EntryPage(items, rows[0]["head"], rows[0]["state"], rows[0]["is_open"])

    async def sequence_numbers(self, streams: list[str]) -> dict[str, int]:
        rows = await self._sessions.fetch(_SEQUENCES, streams)
        return {row["stream"]: row["sequence_number"] for row in rows}

    async def streams(
        self,
        kind: StreamKind,
        scope: Visibility,
        *,
        state: str | None = None,
        subject: str | None = None,
        name: str | None = None,
        principal_id: str | None = None,
        before: str | None = None,
        limit: int = LIST_ITEMS_DEFAULT,
    ) -> Page[ListedStream]:
        prefix, after_all = f"{kind.name}:", f"{kind.name};"
        upper = f"{prefix}{before}" if before else after_all
        filters = (scope.principal_id, state, subject, name, principal_id)
        if state in (None, kind.usual_end) or kind.usual_end is None:
            rows = await self._sessions.fetch(_STREAMS, scope.tenant, prefix, upper, *filters, limit + 2)
        else:
            rows = await self._sessions.fetch(
                _STREAMS_IN_STATE, scope.tenant, prefix, upper, *filters, limit + 2, kind.name
            )
        fitting = [row for row in rows if row["fits"]]
        items = [_listed(kind, row) for row in fitting[:limit]]
        if len(fitting) > limit:
            return Page(items, items[-1].identity)
        places = between(kind, rows)
        return Page(items, None if places is None else shortest(after=places[1], up_to=places[0]))


def _listed(kind: StreamKind, row: asyncpg.Record) -> ListedStream:
    return ListedStream(
        identity=kind.identity_of(row["stream"]),
        state=row["state"],
        waiting=row["waiting"],
        subject=row["subject"],
        name=row["name"],
        principal_id=row["principal_id"],
        updated_at=row["updated"],
        expires_at=row["expires"],
    )


def between(kind: StreamKind, rows: list[asyncpg.Record]) -> tuple[str, str] | None:
    """The ids of the last row that was looked at and of the next one, when there is a next one."""
    if not rows or rows[-1]["place"] <= LIST_ROWS_LOOKED_AT_MAX:
        return None
    return kind.identity_of(rows[-2]["stream"]), kind.identity_of(rows[-1]["stream"])


def shortest(*, after: str, up_to: str) -> str:
    """The shortest beginning of `up_to` that comes after `after`: a position that names nobody's stream in full, since
    neither row need be one that the reader may see."""
    same = next((place for place, (a, b) in enumerate(zip(after, up_to, strict=False)) if a != b), len(up_to))
    return up_to[: same + 1]
