"""The policy sets on the record, newest first: one indexed query, bounded in the entries that it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.core.digest import digest_of_bytes
from app.core.limits import LIST_ROWS_LOOKED_AT_MAX
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.queries import Page
from app.domain.system.documents import SYSTEM, PolicySet
from app.postgres.sessions import Sessions

# Entries of a stream have numbers without a gap, so the span that is looked at is named by numbers: without its lower
# end the planner reads the whole stream and sorts it. `is_last`: the oldest entry that was looked at.
_SETS: Final = f"""
SELECT l.sequence_number, l.is_last, l.is_set, l.artifact_digest,
       CASE WHEN l.is_set THEN (SELECT p.artifacts[l.place] FROM tga.payloads p
                                 WHERE p.stream_no = l.stream_no
                                   AND p.sequence_number = l.sequence_number - l.place + 1) END AS artifact
  FROM (SELECT l.*, l.artifact_type = 'policy_set' AS is_set,
               l.sequence_number = min(l.sequence_number) OVER () AS is_last
          FROM (SELECT h.stream_no, least($2, h.sequence_number + 1) AS below
                  FROM tga.heads h WHERE h.stream = $1) AS h
          JOIN tga.links l ON l.stream_no = h.stream_no AND l.sequence_number < h.below
                          AND l.sequence_number >= h.below - {LIST_ROWS_LOOKED_AT_MAX}) AS l
 WHERE l.is_set OR l.is_last
 ORDER BY l.sequence_number DESC LIMIT $3
"""  # noqa: S608 - only our own numbers
_NUMBER_MAX: Final = 2**62


@dataclass(frozen=True, slots=True)
class RecordedSet:
    """A policy as the system stream has it: in force since `recorded_at`, until the next one was recorded. With a
    `problem` (a code) its text is not shown: it is not what the log commits to."""

    sequence_number: int
    policy_digest: str | None
    recorded_at: str | None
    recorded_by: str | None
    text: str | None
    problem: str | None


async def list_policy_sets(sessions: Sessions, *, before: int | None, limit: int) -> Page[RecordedSet]:
    rows = await sessions.fetch(_SETS, SYSTEM.stream(DEFAULT_TENANT), before or _NUMBER_MAX, limit + 1)
    found = [row for row in rows if row["is_set"]]
    items = [_recorded(row["sequence_number"], row["artifact"], row["artifact_digest"]) for row in found[:limit]]
    if len(found) > limit:
        return Page(items, str(items[-1].sequence_number))
    is_cut = bool(rows) and rows[-1]["is_last"] and rows[-1]["sequence_number"] > 1
    return Page(items, str(rows[-1]["sequence_number"]) if is_cut else None)


def _recorded(sequence_number: int, raw: bytes | None, digest: bytes) -> RecordedSet:
    if raw is None or digest_of_bytes(raw) != digest.hex():  # I5
        return RecordedSet(sequence_number, None, None, None, None, "STATE_CHECKSUM_MISMATCH")
    said = PolicySet.from_bytes(raw)
    return RecordedSet(sequence_number, said.policy_digest, said.recorded_at, said.recorded_by, said.text, None)
