"""Pages of traces, and of what waits for a person: one indexed query each, bounded in the rows that it looks at.

Positions are plain text here; the edge hands them out as opaque cursors.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import asyncpg

from app.core.canonical import JsonValue, parse_object
from app.core.digest import digest_of_bytes
from app.core.errors import ChecksumMismatch, RecoveryFailed, TgaError
from app.core.limits import ARTIFACT_BYTES_MAX, LIST_ITEMS_DEFAULT, LIST_ROWS_LOOKED_AT_MAX
from app.domain.ledger.queries import ListedStream, Page, Visibility
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE
from app.postgres.queries import PostgresQueries, between, shortest
from app.postgres.sessions import Sessions

T = TypeVar("T")

JUST_AFTER: Final = "~"  # greater than all that an id is made of: the position after a trace
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PREFIX: Final = f"{TRACE.name}:"
_AFTER_ALL: Final = f"{TRACE.name};"  # what follows every stream of the kind
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""

_APPROVALS: Final = f"""
SELECT t.*, {_TIME.format("t.expires_at")} AS expires,
       CASE WHEN t.fits THEN
            (SELECT p.artifacts[1] FROM tga.payloads p
              WHERE p.stream_no = t.stream_no AND p.sequence_number = 1) END AS artifact
  FROM (SELECT t.*, t.place <= {LIST_ROWS_LOOKED_AT_MAX} AND ($4::text IS NULL OR t.principal_id = $4)
               AND (t.expires_at IS NULL OR t.expires_at > clock_timestamp()) AS fits
          FROM (SELECT h.*, row_number() OVER (ORDER BY h.stream) AS place
                  FROM tga.at_rest r JOIN tga.heads h ON h.stream_no = r.stream_no
                 WHERE r.tenant = $1 AND r.waiting = 'supervisor' AND r.stream >= $2 AND r.stream < $3
                 ORDER BY r.stream LIMIT {LIST_ROWS_LOOKED_AT_MAX + 1}) AS t) AS t
 WHERE t.fits OR t.place >= {LIST_ROWS_LOOKED_AT_MAX}
 ORDER BY t.stream LIMIT $5
"""  # noqa: S608 - only our own numbers and names
_HEAD: Final = f"""
SELECT h.state, h.waiting, h.subject, h.name, h.principal_id, h.sequence_number, h.entry_digest,
       {_TIME.format("h.expires_at")} AS expires, h.idempotency_key
  FROM tga.heads h
 WHERE h.stream = $1 AND h.sequence_number > 0
"""  # noqa: S608 - only our own numbers and names


@dataclass(frozen=True, slots=True)
class ListedTrace:
    """`requested_at` is the time in the trace's id, by which lists are ordered: no payload is read for a list."""

    trace_id: str
    state: str
    waiting: str | None
    server_id: str | None
    tool_name: str | None
    principal_id: str | None
    requested_at: str | None
    updated_at: str
    expires_at: str | None


@dataclass(frozen=True, slots=True)
class ListedApproval:
    """What a person is asked to decide on, as recorded. With a `problem` (a code) nothing of the request is shown: its
    bytes are not those that the log commits to, and no decision on them can be taken."""

    trace_id: str
    action_request_digest: str
    server_id: str | None
    tool_name: str | None
    principal_id: str | None
    tool_class: str | None
    arguments: dict[str, JsonValue] | None
    intent: str | None
    requested_at: str | None
    expires_at: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class TraceHead:
    """What a trace's head says without any payload."""

    state: str
    waiting: str | None
    server_id: str | None
    tool_name: str | None
    principal_id: str | None
    sequence_number: int
    entry_digest: str
    expires_at: str | None
    idempotency_key: str | None


async def list_traces(
    sessions: Sessions,
    scope: Visibility,
    *,
    state: str | None = None,
    server_id: str | None = None,
    tool_name: str | None = None,
    principal_id: str | None = None,
    before: str | None = None,
    limit: int = LIST_ITEMS_DEFAULT,
) -> Page[ListedTrace]:
    """Newest first, by trace id; `before` is the `next` of the page before. `server_id` is the qualified one."""
    page = await PostgresQueries(sessions).streams(
        TRACE,
        scope,
        state=state,
        subject=server_id,
        name=tool_name,
        principal_id=principal_id,
        before=before,
        limit=limit,
    )
    return Page([_listed_trace(stream) for stream in page.items], page.next)


async def list_approvals(
    sessions: Sessions, scope: Visibility, *, after: str | None = None, limit: int = LIST_ITEMS_DEFAULT
) -> Page[ListedApproval]:
    """What waits for a person and is not past its time by the database's clock, oldest first. Each request is compared
    with what the log commits to; one that does not fit is shown as a problem and hides no other."""
    lower = f"{_PREFIX}{after}" if after else _PREFIX
    rows = await sessions.fetch(_APPROVALS, scope.tenant, lower, _AFTER_ALL, scope.principal_id, limit + 2)
    fitting = [row for row in rows if row["fits"]]
    items = [_listed_approval(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, items[-1].trace_id + JUST_AFTER)
    places = between(TRACE, rows)
    return Page(items, None if places is None else shortest(after=places[0], up_to=places[1]))


async def load_head(sessions: Sessions, trace_id: TraceId) -> TraceHead | None:
    rows = await sessions.fetch(_HEAD, TRACE.stream(trace_id))
    if not rows:
        return None
    row = rows[0]
    return TraceHead(
        state=row["state"],
        waiting=row["waiting"],
        server_id=row["subject"],
        tool_name=row["name"],
        principal_id=row["principal_id"],
        sequence_number=row["sequence_number"],
        entry_digest=row["entry_digest"].hex(),
        expires_at=row["expires"],
        idempotency_key=row["idempotency_key"],
    )


def _trace_id(row: asyncpg.Record) -> str:
    return str(row["stream"]).removeprefix(_PREFIX)


def _listed_trace(stream: ListedStream) -> ListedTrace:
    return ListedTrace(
        trace_id=stream.identity,
        state=stream.state,
        waiting=stream.waiting,
        server_id=stream.subject,
        tool_name=stream.name,
        principal_id=stream.principal_id,
        requested_at=_time_in(stream.identity),
        updated_at=stream.updated_at,
        expires_at=stream.expires_at,
    )


def _time_in(trace_id: str) -> str | None:
    try:
        milliseconds = int(trace_id[:8] + trace_id[9:13], 16)
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except (ValueError, OverflowError):  # whoever names a trace chooses its time: it may lie beyond every calendar
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % 1000:03}Z"


def _listed_approval(row: asyncpg.Record) -> ListedApproval:
    request: dict[str, Any] = {}
    problem = None
    try:
        request = _verified_request(row["artifact"], row["artifact_digest"])
    except TgaError as error:
        problem = error.code
    return ListedApproval(
        trace_id=_trace_id(row),
        action_request_digest=row["artifact_digest"].hex(),
        server_id=row["subject"],
        tool_name=row["name"],
        principal_id=row["principal_id"],
        tool_class=request.get("tool_class"),
        arguments=request.get("arguments"),
        intent=request.get("intent"),
        requested_at=request.get("requested_at"),
        expires_at=row["expires"],
        problem=problem,
    )


def _verified_request(raw: bytes | None, digest: bytes) -> dict[str, JsonValue]:
    if raw is None:
        raise RecoveryFailed("the request's payload is missing")
    if digest_of_bytes(raw) != digest.hex():  # I5: nobody decides on what was not asked
        raise ChecksumMismatch("the stored request is not the one that the log commits to")
    return parse_object(raw, bytes_max=ARTIFACT_BYTES_MAX)
