"""Pages of traces, of what waits for a person, and of a trace's entries: one indexed query each, bounded in the rows it
looks at and in the bytes it brings.

Positions are plain text here; the edge hands them out as opaque cursors.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, TypeVar

import asyncpg

from app.core.canonical import JsonValue, parse_object
from app.core.digest import digest_of_bytes
from app.core.errors import ChecksumMismatch, RecoveryFailed, TgaError
from app.core.limits import ARTIFACT_BYTES_MAX, LIST_ITEMS_DEFAULT, LIST_ROWS_LOOKED_AT_MAX, PAGE_BYTES_MAX
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE
from app.postgres.sessions import Sessions

T = TypeVar("T")

JUST_AFTER: Final = "~"  # greater than all that an id is made of: the position after a trace
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PREFIX: Final = f"{TRACE.name}:"
_AFTER_ALL: Final = f"{TRACE.name};"  # what follows every stream of the kind
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""

# Compared as pairs, which the index (tenant, stream) alone can follow: the primary key would lead through everybody's
# traces, and would take longer to miss a foreign one than one that does not exist.
_VISIBLE: Final = """
SELECT FROM tga.heads h
 WHERE (h.tenant, h.stream) >= ($1, $2) AND (h.tenant, h.stream) <= ($1, $2)
   AND h.sequence_number > 0 AND ($3::text IS NULL OR h.principal_id = $3)
"""
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
_TRACES: Final = _PAGE.format(heads="tga.heads")
# Most traces end as they usually do. The others rest and have an index of their own, or are in work and few, so that a
# rare state is one page, too.
_TRACES_IN_STATE: Final = _PAGE.format(
    heads=f"""(
       (SELECT h.* FROM tga.at_rest r JOIN tga.heads h ON h.stream_no = r.stream_no
         WHERE r.tenant = $1 AND r.state = $5 AND r.stream > $2 AND r.stream < $3
         ORDER BY r.stream DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX + 1})
       UNION ALL
       (SELECT h.* FROM tga.in_work w JOIN tga.heads h ON h.stream_no = w.stream_no
         WHERE w.kind = '{TRACE.name}' AND h.is_open AND h.waiting IS NULL AND h.tenant = $1 AND h.state = $5
           AND h.stream > $2 AND h.stream < $3
         ORDER BY h.stream DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX + 1}))"""  # noqa: S608 - only our own numbers and names
)
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
_HEAD: Final = f"""
SELECT h.state, h.waiting, h.subject, h.name, h.principal_id, h.sequence_number, h.entry_digest,
       {_TIME.format("h.expires_at")} AS expires, h.idempotency_key
  FROM tga.heads h
 WHERE h.stream = $1 AND h.sequence_number > 0
"""  # noqa: S608 - only our own numbers and names
_SEQUENCES: Final = "SELECT h.stream, h.sequence_number FROM tga.heads h WHERE h.stream = ANY ($1::text[])"


@dataclass(frozen=True, slots=True)
class Visibility:
    """How far someone sees: a tenant's traces, or of these only one principal's."""

    tenant: str
    principal_id: str | None

    @property
    def name(self) -> str:
        return "tenant" if self.principal_id is None else "own"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """`next` is the position to go on from; None when there is nothing more. A page may be empty and not the last."""

    items: list[T]
    next: str | None


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
class StoredEntry:
    """An entry and its artifact as stored; the artifact is None when its payload is gone."""

    stream: str
    sequence_number: int
    entry_digest: str
    entry: bytes
    artifact: bytes | None


@dataclass(frozen=True, slots=True)
class EntryPage:
    """Entries of one snapshot, and where the stream's head stood in it."""

    items: list[StoredEntry]
    head: int
    state: str
    is_open: bool

    @property
    def last(self) -> int | None:
        return self.items[-1].sequence_number if self.items else None


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


async def is_stream_visible(sessions: Sessions, stream: str, scope: Visibility) -> bool:
    """Whether there is such a stream within the scope. Another tenant's costs exactly what a missing one costs."""
    return bool(await sessions.fetch(_VISIBLE, scope.tenant, stream, scope.principal_id))


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
    upper = f"{_PREFIX}{before}" if before else _AFTER_ALL
    filters = (scope.principal_id, state, server_id, tool_name, principal_id)
    statement = _TRACES if state in (None, "COMPLETED") else _TRACES_IN_STATE
    rows = await sessions.fetch(statement, scope.tenant, _PREFIX, upper, *filters, limit + 2)
    fitting = [row for row in rows if row["fits"]]
    items = [_listed_trace(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, items[-1].trace_id)
    between = _between(rows)
    return Page(items, None if between is None else _shortest(after=between[1], up_to=between[0]))


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
    between = _between(rows)
    return Page(items, None if between is None else _shortest(after=between[0], up_to=between[1]))


async def load_stream_entries(
    sessions: Sessions, stream: str, *, after_seq: int, limit: int, bytes_max: int = PAGE_BYTES_MAX
) -> EntryPage | None:
    """Stored entries after `after_seq`, at least one if there is one; None when there is no such stream.

    Nothing is verified here: whoever shows them compares digests.
    """
    rows = await sessions.fetch(_ENTRIES, stream, after_seq, limit, bytes_max)
    if not rows:
        return None
    items = [
        StoredEntry(stream, row["sequence_number"], row["entry_digest"].hex(), row["entry"], row["artifact"])
        for row in rows
        if row["sequence_number"] is not None
    ]
    return EntryPage(items, rows[0]["head"], rows[0]["state"], rows[0]["is_open"])


async def load_sequence_numbers(sessions: Sessions, streams: list[str]) -> dict[str, int]:
    """How far each of these streams has come; those that do not exist are left out."""
    rows = await sessions.fetch(_SEQUENCES, streams)
    return {row["stream"]: row["sequence_number"] for row in rows}


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


def _between(rows: list[asyncpg.Record]) -> tuple[str, str] | None:
    """The ids of the last row that was looked at and of the next one, when there is a next one."""
    if not rows or rows[-1]["place"] <= LIST_ROWS_LOOKED_AT_MAX:
        return None
    return _trace_id(rows[-2]), _trace_id(rows[-1])


def _shortest(*, after: str, up_to: str) -> str:
    """The shortest beginning of `up_to` that comes after `after`: a position that names nobody's trace in full, since
    neither row need be one that the reader may see."""
    same = next((place for place, (a, b) in enumerate(zip(after, up_to, strict=False)) if a != b), len(up_to))
    return up_to[: same + 1]


def _trace_id(row: asyncpg.Record) -> str:
    return str(row["stream"]).removeprefix(_PREFIX)


def _listed_trace(row: asyncpg.Record) -> ListedTrace:
    trace_id = _trace_id(row)
    return ListedTrace(
        trace_id=trace_id,
        state=row["state"],
        waiting=row["waiting"],
        server_id=row["subject"],
        tool_name=row["name"],
        principal_id=row["principal_id"],
        requested_at=_time_in(trace_id),
        updated_at=row["updated"],
        expires_at=row["expires"],
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
