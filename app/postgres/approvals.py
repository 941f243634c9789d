"""What waits for a person: calls, and questions of runs, in one order. One indexed query, bounded in the rows that it
looks at.

In the order in which they expire; what never expires comes last, older before newer. Positions are plain text here;
the edge hands them out as opaque cursors.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg

from app.core.canonical import JsonValue, parse_object
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import ChecksumMismatch, RecoveryFailed, TgaError
from app.core.limits import APPROVALS_COUNTED_MAX, ARTIFACT_BYTES_MAX, LIST_ITEMS_DEFAULT, LIST_ROWS_LOOKED_AT_MAX
from app.domain.ledger.queries import Page, Visibility
from app.domain.runs.documents import RunIntent
from app.domain.runs.replay import RUN_DOCUMENTS
from app.domain.runs.requests import AskRequest
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE
from app.postgres.sessions import Sessions

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER: Final = "never"
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
_ENDS: Final = "coalesce({}.expires_at, 'infinity'::timestamptz)"
# What is past its time is not looked at, by the database's clock; $2 null: after what expires.
_FROM: Final = "greatest(coalesce($2, 'infinity'::timestamptz), statement_timestamp())"

_IN_ORDER: Final = f"""
   (SELECT 'call' AS kind, r.stream_no, '' AS path, {_ENDS.format("r")} AS ends, r.expires_at,
           NULL::bigint AS sequence_number, NULL::timestamptz AS asked_at, 0 AS level
      FROM tga.at_rest r
     WHERE r.tenant = $1 AND r.waiting = 'supervisor' AND r.stream >= 'trace:' AND r.stream < 'trace;'
       AND {_ENDS.format("r")} >= {_FROM} AND ({_ENDS.format("r")}, r.stream_no, '') > ($2_at, $3, $4)
     ORDER BY {_ENDS.format("r")}, r.stream_no LIMIT $rows)
    UNION ALL
   (SELECT 'run', q.stream_no, q.path, {_ENDS.format("q")}, q.expires_at, q.sequence_number, q.asked_at, q.level
      FROM tga.run_requests q
     WHERE q.tenant = $1
       AND {_ENDS.format("q")} >= {_FROM} AND ({_ENDS.format("q")}, q.stream_no, q.path) > ($2_at, $3, $4)
     ORDER BY {_ENDS.format("q")}, q.stream_no, q.path LIMIT $rows)
""".replace("$2_at", "coalesce($2, 'infinity'::timestamptz)")  # noqa: S608 - only our own numbers and names
# The last row that may be looked at comes along whether it fits or not: the next page starts after it.
_WAITING: Final = f"""
SELECT t.*, {_TIME.format("t.expires_at")} AS expires, {_TIME.format("t.asked_at")} AS asked,
       CASE WHEN t.fits AND t.kind = 'call' THEN
            (SELECT p.artifacts[1] FROM tga.payloads p
              WHERE p.stream_no = t.stream_no AND p.sequence_number = 1) END AS request,
       e.entry, e.entry_digest AS asked_digest, e.artifact
  FROM (SELECT w.*, h.stream, h.principal_id, h.subject, h.name, h.artifact_digest,
               w.place <= {LIST_ROWS_LOOKED_AT_MAX} AND ($5::text IS NULL OR h.principal_id = $5) AS fits
          FROM (SELECT w.*, row_number() OVER (ORDER BY w.ends, w.stream_no, w.path) AS place
                  FROM ({_IN_ORDER}) AS w
                 ORDER BY w.ends, w.stream_no, w.path LIMIT {LIST_ROWS_LOOKED_AT_MAX}) AS w
         CROSS JOIN LATERAL (SELECT h.* FROM tga.heads h WHERE h.stream_no = w.stream_no OFFSET 0) AS h) AS t
  LEFT JOIN LATERAL (SELECT e.entry, e.entry_digest, e.artifact FROM tga.records e
                      WHERE t.fits AND e.stream_no = t.stream_no
                        AND e.sequence_number = t.sequence_number OFFSET 0) AS e ON true
 WHERE t.fits OR t.place = {LIST_ROWS_LOOKED_AT_MAX}
 ORDER BY t.ends, t.stream_no, t.path LIMIT $6
""".replace("$rows", str(LIST_ROWS_LOOKED_AT_MAX))  # noqa: S608 - only our own numbers and names
_COUNT: Final = f"""
SELECT count(*) FILTER (WHERE w.kind = 'call' AND w.fits) AS calls,
       count(*) FILTER (WHERE w.kind = 'run' AND w.fits) AS questions,
       greatest(count(*) FILTER (WHERE w.kind = 'call'), count(*) FILTER (WHERE w.kind = 'run')) AS looked_at
  FROM (SELECT w.kind, $5::text IS NULL
               OR (SELECT h.principal_id FROM tga.heads h WHERE h.stream_no = w.stream_no) = $5 AS fits
          FROM ({_IN_ORDER}) AS w) AS w
""".replace("$rows", "$6")  # noqa: S608 - only our own numbers and names


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """What a person is asked to decide on, as recorded. With a `problem` (a code) nothing of the request is shown: its
    bytes are not those that the log commits to, and no decision on them can be taken."""

    trace_id: str
    action_request_digest: str
    server_id: str | None
    tool_name: str | None
    principal_id: str | None
    expires_at: str | None
    request: dict[str, JsonValue] | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class WaitingQuestion:
    """What a run asks a person, as recorded. With a `problem` (a code) nothing of the question is shown: its bytes are
    not those that the log commits to."""

    run_id: str
    path: str
    procedure: str
    principal_id: str
    name: str | None
    request: dict[str, Any] | None
    intent_digest: str | None
    asked_at: str
    expires_at: str | None
    level: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class WaitingCount:
    """`is_exact` is False where there are more than are counted."""

    calls: int
    questions: int
    is_exact: bool


async def list_waiting(
    sessions: Sessions, scope: Visibility, *, after: str | None = None, limit: int = LIST_ITEMS_DEFAULT
) -> Page[WaitingCall | WaitingQuestion]:
    """What waits for a person and is not past its time by the database's clock. Each document is compared with what the
    log commits to; one that does not fit is shown as a problem and hides no other."""
    rows = await sessions.fetch(_WAITING, scope.tenant, *_place(after), scope.principal_id, limit + 1)
    fitting = [row for row in rows if row["fits"]]
    items = [_call(row) if row["kind"] == "call" else _question(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, _position(fitting[limit - 1]))
    is_cut = bool(rows) and rows[-1]["place"] >= LIST_ROWS_LOOKED_AT_MAX
    return Page(items, _position(rows[-1]) if is_cut else None)


async def count_waiting(sessions: Sessions, scope: Visibility) -> WaitingCount:
    """How many there are, up to APPROVALS_COUNTED_MAX of each; of one principal those among ten times as many."""
    most = APPROVALS_COUNTED_MAX * (1 if scope.principal_id is None else 10)
    (row,) = await sessions.fetch(_COUNT, scope.tenant, *_place(None), scope.principal_id, most)
    return WaitingCount(row["calls"], row["questions"], row["looked_at"] < most)


def _place(after: str | None) -> tuple[datetime | None, int, str]:
    if after is None:
        return _EPOCH, 0, ""
    micros, number, path = after.split(".", 2)
    try:
        ends = None if micros == _NEVER else _EPOCH + timedelta(microseconds=int(micros))
    except OverflowError:  # a made-up one, beyond every calendar
        ends = None
    return ends, int(number), path


def _position(row: asyncpg.Record) -> str:
    ends = row["expires_at"]
    micros = _NEVER if ends is None else (ends - _EPOCH) // timedelta(microseconds=1)
    return f"{micros}.{row['stream_no']}.{row['path']}"


def _call(row: asyncpg.Record) -> WaitingCall:
    request = problem = None
    try:
        request = _verified_request(row["request"], row["artifact_digest"])
    except TgaError as error:
        problem = error.code
    return WaitingCall(
        trace_id=TRACE.identity_of(row["stream"]),
        action_request_digest=row["artifact_digest"].hex(),
        server_id=row["subject"],
        tool_name=row["name"],
        principal_id=row["principal_id"],
        expires_at=row["expires"],
        request=request,
        problem=problem,
    )


def _verified_request(raw: bytes | None, digest: bytes) -> dict[str, JsonValue]:
    if raw is None:
        raise RecoveryFailed("the request's payload is missing")
    if digest_of_bytes(raw) != digest.hex():  # I5: a person must not decide on what was not asked
        raise ChecksumMismatch("the stored request is not the one that the log commits to")
    return parse_object(raw, bytes_max=ARTIFACT_BYTES_MAX)


def _question(row: asyncpg.Record) -> WaitingQuestion:
    name = request = digest = problem = None
    try:
        if row["entry"] is None or row["artifact"] is None:
            raise RecoveryFailed("the question's payload is missing")
        record = RUN_DOCUMENTS.read(row["entry"], row["artifact"], entry_digest=Digest(row["asked_digest"].hex()))
        intent = record.artifact
        if not isinstance(intent, RunIntent) or not isinstance(intent.request, AskRequest):
            raise RecoveryFailed("the entry is not a question")
        name, request = intent.name, intent.request.to_json()
        digest = record.entry.artifact_digest
    except TgaError as error:
        problem = error.code
    return WaitingQuestion(
        run_id=RUN.identity_of(row["stream"]),
        path=row["path"],
        procedure=row["subject"],
        principal_id=row["principal_id"],
        name=name,
        request=request,
        intent_digest=digest,
        asked_at=row["asked"],
        expires_at=row["expires"],
        level=row["level"],
        problem=problem,
    )
