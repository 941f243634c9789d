"""Pages of traces: one indexed query each, bounded in the rows that it looks at.

What heads do not say (who decided, how often it was sent, how long it took) comes from the facts that were folded of
traces that have ended, and is computed for the others of the page. Positions are plain text here; the edge hands them
out as opaque cursors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg

from app.core.limits import FIND_ITEMS_MAX, LIST_ITEMS_DEFAULT, LIST_ROWS_LOOKED_AT_MAX
from app.domain.ledger.queries import Page, Visibility
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE
from app.postgres.queries import between, shortest
from app.postgres.sessions import Sessions

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PREFIX: Final = f"{TRACE.name}:"
_AFTER_ALL: Final = f"{TRACE.name};"  # what follows every stream of the kind
_MS_MAX: Final = 2**48 - 1  # in a trace's id
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
_ROWS: Final = LIST_ROWS_LOOKED_AT_MAX + 1
_FACTS: Final = ", ".join(
    f"coalesce(c.{name}, f.{name}) AS {name}"
    for name in ("attempts", "decided_by", "decider", "error_code", "decided_ms", "dispatch_ms", "total_ms")
)

# The last row that may be looked at, and the one after it, come along whether they fit or not: the next page starts
# between them. Facts are looked up for the rows of the page only.
_PAGE: Final = f"""
SELECT t.*, {_TIME.format("t.updated_at")} AS updated, {_TIME.format("t.expires_at")} AS expires,
       {_FACTS}, EXISTS (SELECT FROM tga.erasures e WHERE e.stream = t.stream) AS is_erased
  FROM (SELECT t.* FROM (
            SELECT t.*, t.place <= {LIST_ROWS_LOOKED_AT_MAX} AND t.sequence_number > 0
                   AND ($4::text IS NULL OR t.principal_id = $4) AND ($5::text[] IS NULL OR t.state = ANY ($5))
                   AND ($6::text IS NULL OR t.subject = $6) AND ($7::text IS NULL OR t.name = $7)
                   AND ($8::text IS NULL OR t.principal_id = $8) AND ($10::text IS NULL OR t.waiting = $10)
                   AND ($11::text IS NULL OR t.idempotency_key = $11) AS fits
              FROM (SELECT h.*, row_number() OVER (ORDER BY {{order}}) AS place
                      FROM {{heads}} AS h
                     ORDER BY {{order}} LIMIT {_ROWS}) AS t) AS t
         WHERE t.fits OR t.place >= {LIST_ROWS_LOOKED_AT_MAX}
         ORDER BY {{outer}} LIMIT $9) AS t
  LEFT JOIN LATERAL (SELECT c.* FROM tga.call_facts c
                      WHERE c.stream_no = t.stream_no AND c.sequence_number = t.sequence_number
                        AND t.fits AND NOT t.is_open OFFSET 0) AS c ON true
  LEFT JOIN LATERAL tga.facts_of(CASE WHEN t.fits AND c.stream_no IS NULL THEN t.stream_no END) AS f ON true
 ORDER BY {{outer}}
"""  # noqa: S608 - only our own numbers and names
_TRACES: Final = _PAGE.format(
    heads="""(SELECT h.* FROM tga.heads h
               WHERE (h.tenant, h.stream) > ($1, $2) AND (h.tenant, h.stream) < ($1, $3))""",
    order="h.tenant DESC, h.stream DESC",
    outer="t.tenant DESC, t.stream DESC",
)
# Of one agent or one tool, by indexes that know them by a hash and of an id its first part (0033): what has the same
# first part is sorted. `trace;` has no id: all ids come before it.
_OF: Final = """(
        SELECT h.*, substr(h.stream, 7, 11) AS at FROM tga.heads h
         WHERE h.stream >= 'trace:' AND h.stream < 'trace;' AND {}
           AND substr(h.stream, 7, 11) >= substr($2, 7, 11)
           AND substr(h.stream, 7, 11) <= CASE WHEN $3 < 'trace;' THEN substr($3, 7, 11) ELSE 'g' END
           AND h.stream > $2 AND h.stream < $3)"""
_TRACES_OF_PRINCIPAL: Final = _PAGE.format(
    heads=_OF.format(
        "hashtext(h.tenant || ' ' || h.principal_id) = hashtext($1 || ' ' || coalesce($4, $8))"
        " AND h.tenant = $1 AND h.principal_id = coalesce($4, $8)"
    ),
    order="h.at DESC, h.stream DESC",
    outer="t.at DESC, t.stream DESC",
)
_TRACES_OF_TOOL: Final = _PAGE.format(
    heads=_OF.format(
        "hashtext(h.tenant || ' ' || h.subject || ' ' || h.name) = hashtext($1 || ' ' || $6 || ' ' || $7)"
        " AND h.tenant = $1 AND h.subject = $6 AND h.name = $7"
    ),
    order="h.at DESC, h.stream DESC",
    outer="t.at DESC, t.stream DESC",
)
# In the order of `at_rest`, whose index a page follows only as far as it needs.
_AT_REST: Final = """(
        SELECT h.*, r.stream AS at
          FROM tga.at_rest r
         CROSS JOIN LATERAL (SELECT h.* FROM tga.heads h WHERE h.stream_no = r.stream_no OFFSET 0) AS h
         WHERE r.tenant = $1 AND {} AND r.stream > $2 AND r.stream < $3 ORDER BY r.stream DESC)"""
_IN_WORK: Final = f"""(
        SELECT h.*, h.stream::text AS at FROM tga.in_work w JOIN tga.heads h ON h.stream_no = w.stream_no
         WHERE w.kind = '{TRACE.name}' AND h.is_open AND h.waiting IS NULL AND h.tenant = $1 AND h.state = ANY ($5)
           AND h.stream > $2 AND h.stream < $3
         ORDER BY h.stream::text DESC)"""  # noqa: S608 - only our own numbers and names
_TRACES_WAITING: Final = _PAGE.format(heads=_AT_REST.format("r.waiting = $10"), order="h.at DESC", outer="t.at DESC")
# Most calls complete. The others rest and have an index of their own, or are in work and few, so that a rare state is
# one page, too: a statement for each number of states.
_TRACES_IN_STATES: Final = {
    count: _PAGE.format(
        heads="("
        + " UNION ALL ".join(
            [*(_AT_REST.format(f"r.state = ($5::text[])[{n}]") for n in range(1, count + 1)), _IN_WORK]
        )
        + ")",
        order="h.at DESC",
        outer="t.at DESC",
    )
    for count in range(1, len(TRACE.states) + 1)
}
# By the claims of the tools that there are now, and by what was folded.
_TRACES_BY_KEY: Final = _PAGE.format(
    heads=f"""(
        SELECT h.* FROM (SELECT h.stream_no FROM unnest($12::text[], $13::text[]) AS tool(subject, name)
                           JOIN tga.heads h ON h.subject = tool.subject AND h.name = tool.name
                                           AND h.idempotency_key = $11
                          UNION
                        (SELECT c.stream_no FROM tga.call_facts c
                          WHERE c.tenant = $1 AND c.idempotency_key = $11 LIMIT {FIND_ITEMS_MAX})) AS r
          JOIN tga.heads h ON h.stream_no = r.stream_no
         WHERE h.tenant = $1 AND h.stream > $2 AND h.stream < $3)""",  # noqa: S608 - only our own numbers and names
    order="h.stream DESC",
    outer="t.stream DESC",
)
_HEAD: Final = f"""
SELECT h.state, h.waiting, h.subject, h.name, h.principal_id, h.sequence_number, h.entry_digest,
       {_TIME.format("h.expires_at")} AS expires, h.idempotency_key
  FROM tga.heads h
 WHERE h.stream = $1 AND h.sequence_number > 0
"""  # noqa: S608 - only our own numbers and names


@dataclass(frozen=True, slots=True)
class TraceFilters:
    """What a list of traces leaves out. `server_id` is the qualified one; times are in milliseconds, `until_ms` is not
    in it, and both are compared with the time in a trace's id. `tools`: those that the tenant has, for the key."""

    states: Sequence[str] | None = None
    waiting: str | None = None
    server_id: str | None = None
    tool_name: str | None = None
    principal_id: str | None = None
    idempotency_key: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    tools: Sequence[tuple[str, str]] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class DecidedBy:
    """Who decided: a policy, a person, expiry or the caller's withdrawal."""

    type: str
    id: str | None


@dataclass(frozen=True, slots=True)
class ListedTrace:
    """`requested_at` is the time in the trace's id, by which lists are ordered. Of an erased trace the decider and the
    error are not shown."""

    trace_id: str
    state: str
    waiting: str | None
    server_id: str | None
    tool_name: str | None
    principal_id: str | None
    idempotency_key: str | None
    attempts: int
    decided_by: DecidedBy | None
    error_code: str | None
    decided_ms: int | None
    dispatch_ms: int | None
    total_ms: int | None
    requested_at: str | None
    updated_at: str
    expires_at: str | None


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
    filters: TraceFilters = TraceFilters(),  # noqa: B008 - it cannot be changed
    *,
    before: str | None = None,
    limit: int = LIST_ITEMS_DEFAULT,
) -> Page[ListedTrace]:
    """Newest first, by trace id; `before` is the `next` of the page before."""
    lower, upper = _bounds(filters, before)
    states = None if filters.states is None else list(dict.fromkeys(filters.states))
    asked = (
        *(scope.tenant, lower, upper, scope.principal_id, states, filters.server_id, filters.tool_name),
        *(filters.principal_id, limit + 2, filters.waiting, filters.idempotency_key),
    )
    if filters.idempotency_key is not None:
        subjects, names = [subject for subject, _ in filters.tools], [name for _, name in filters.tools]
        rows = await sessions.fetch(_TRACES_BY_KEY, *asked, subjects, names)
    elif filters.waiting is not None:
        rows = await sessions.fetch_page(_TRACES_WAITING, *asked)
    elif states is None or TRACE.usual_end in states:
        if scope.principal_id is not None or filters.principal_id is not None:
            rows = await sessions.fetch_in_order(_TRACES_OF_PRINCIPAL, *asked)
        elif filters.server_id is not None and filters.tool_name is not None:
            rows = await sessions.fetch_in_order(_TRACES_OF_TOOL, *asked)
        else:
            rows = await sessions.fetch(_TRACES, *asked)
    else:
        rows = await sessions.fetch_page(_TRACES_IN_STATES[len(states)], *asked)
    fitting = [row for row in rows if row["fits"]]
    items = [_listed_trace(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, items[-1].trace_id)
    places = between(TRACE, rows)
    return Page(items, None if places is None else shortest(after=places[1], up_to=places[0]))


def _bounds(filters: TraceFilters, before: str | None) -> tuple[str, str]:
    lower = _PREFIX if filters.since_ms is None else _PREFIX + _beginning_of_id(filters.since_ms)
    upper = _AFTER_ALL if filters.until_ms is None else _PREFIX + _beginning_of_id(filters.until_ms)
    return lower, min(upper, f"{_PREFIX}{before}") if before else upper


def _beginning_of_id(milliseconds: int) -> str:
    """What ids of that time begin with; no id is equal to it."""
    digits = f"{min(max(milliseconds, 0), _MS_MAX):012x}"
    return f"{digits[:8]}-{digits[8:]}"


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


def _listed_trace(row: asyncpg.Record) -> ListedTrace:
    trace_id = TRACE.identity_of(row["stream"])
    is_shown = row["decided_by"] is not None and not row["is_erased"]
    return ListedTrace(
        trace_id=trace_id,
        state=row["state"],
        waiting=row["waiting"],
        server_id=row["subject"],
        tool_name=row["name"],
        principal_id=row["principal_id"],
        idempotency_key=row["idempotency_key"],
        attempts=row["attempts"] or 0,
        decided_by=DecidedBy(row["decided_by"], row["decider"]) if is_shown else None,
        error_code=None if row["is_erased"] else row["error_code"],
        decided_ms=row["decided_ms"],
        dispatch_ms=row["dispatch_ms"],
        total_ms=row["total_ms"],
        requested_at=_time_in(trace_id),
        updated_at=row["updated"],
        expires_at=row["expires"],
    )


def _time_in(trace_id: str) -> str | None:
    try:
        milliseconds = int(trace_id[:8] + trace_id[9:13], 16)
        moment = _EPOCH + timedelta(milliseconds=milliseconds)
    except (ValueError, OverflowError):  # the time of a trace that its caller named: beyond every calendar
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{milliseconds % 1000:03}Z"
