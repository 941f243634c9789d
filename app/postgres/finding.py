"""Streams by what identifies them exactly: their name, their idempotency key, a digest of theirs. By index each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import asyncpg

from app.core.limits import FIND_ITEMS_MAX
from app.domain.ledger.queries import Visibility
from app.postgres.sessions import Sessions

_SHOWN: Final = """h.stream, h.state, h.waiting, h.subject, h.name, h.principal_id,
       to_char(h.updated_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS updated"""
# The first row from a pair on, along the index (tenant, stream): what another tenant has costs what nothing costs. Of a
# span between two equal pairs PostgreSQL 15 reads all that the tenant has behind it.
_BY_NAME: Final = f"""
SELECT {_SHOWN}, NULL::bigint AS sequence_number
  FROM unnest($2::text[]) AS asked(stream)
 CROSS JOIN LATERAL (SELECT * FROM tga.heads h WHERE (h.tenant, h.stream) >= ($1, asked.stream)
                      ORDER BY h.tenant, h.stream LIMIT 1) AS h
 WHERE h.tenant = $1 AND h.stream = asked.stream
   AND h.sequence_number > 0 AND ($3::text IS NULL OR h.principal_id = $3)
"""  # noqa: S608 - a constant of this file
# By the claims of the tools that there are now, and by what was folded, where tools of former times are found too.
_BY_KEY: Final = f"""
SELECT {_SHOWN}, NULL::bigint AS sequence_number
  FROM (SELECT h.stream_no FROM unnest($4::text[], $5::text[]) AS tool(subject, name)
          JOIN tga.heads h ON h.subject = tool.subject AND h.name = tool.name AND h.idempotency_key = $2
         UNION
        (SELECT f.stream_no FROM tga.call_facts f WHERE f.tenant = $1 AND f.idempotency_key = $2 LIMIT $6)) AS found
  JOIN tga.heads h ON h.stream_no = found.stream_no
 WHERE h.tenant = $1 AND h.sequence_number > 0 AND ($3::text IS NULL OR h.principal_id = $3)
 ORDER BY h.stream DESC LIMIT $6
"""  # noqa: S608 - likewise
_BY_DIGEST: Final = f"""
SELECT {_SHOWN}, min(l.sequence_number) AS sequence_number
  FROM (SELECT d.leaf_index FROM tga.digest_leaves d WHERE d.prefix = tga.digest_prefix($2) LIMIT $4) AS d
 CROSS JOIN LATERAL (SELECT s.* FROM tga.leaf_spans s
                      WHERE s.first_index <= d.leaf_index ORDER BY s.first_index DESC LIMIT 1) AS s
  JOIN tga.links l ON l.stream_no = s.stream_no
                  AND l.sequence_number = s.sequence_number + d.leaf_index - s.first_index
  JOIN tga.heads h ON h.stream_no = s.stream_no
 WHERE (l.entry_digest = $2 OR l.artifact_digest = $2)
   AND h.tenant = $1 AND ($3::text IS NULL OR h.principal_id = $3)
   AND split_part(h.stream, ':', 1) IN ('trace', 'run')
 GROUP BY h.stream_no ORDER BY h.stream DESC
"""  # noqa: S608 - likewise


@dataclass(frozen=True, slots=True)
class FoundStream:
    """What the head of a stream says. `sequence_number`: of the entry that the digest is of."""

    stream: str
    state: str
    waiting: str | None
    subject: str | None
    name: str | None
    principal_id: str | None
    updated_at: str
    sequence_number: int | None


async def find_by_name(sessions: Sessions, scope: Visibility, streams: Sequence[str]) -> list[FoundStream]:
    return _found(await sessions.fetch(_BY_NAME, scope.tenant, list(streams), scope.principal_id))


async def find_by_key(
    sessions: Sessions, scope: Visibility, key: str, *, tools: Sequence[tuple[str, str]]
) -> list[FoundStream]:
    """`tools`: those that the tenant has now, by qualified server and name."""
    subjects, names = [subject for subject, _ in tools], [name for _, name in tools]
    return _found(await sessions.fetch(_BY_KEY, scope.tenant, key, scope.principal_id, subjects, names, FIND_ITEMS_MAX))


async def find_by_digest(sessions: Sessions, scope: Visibility, digest: bytes) -> list[FoundStream]:
    """Of entries and artifacts that the fold has seen: about a second after they were recorded."""
    return _found(await sessions.fetch(_BY_DIGEST, scope.tenant, digest, scope.principal_id, FIND_ITEMS_MAX))


def _found(rows: list[asyncpg.Record]) -> list[FoundStream]:
    return [
        FoundStream(
            stream=row["stream"],
            state=row["state"],
            waiting=row["waiting"],
            subject=row["subject"],
            name=row["name"],
            principal_id=row["principal_id"],
            updated_at=row["updated"],
            sequence_number=row["sequence_number"],
        )
        for row in rows
    ]
