"""Pages of runs: one indexed query each, bounded in the rows that it looks at.

Positions are plain text here; the edge hands them out as opaque cursors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg

from app.core.limits import LIST_ITEMS_DEFAULT, LIST_PREFIX_ROWS_MAX, LIST_ROWS_LOOKED_AT_MAX
from app.domain.ledger.queries import Page, Visibility
from app.domain.runs.transitions import RUN
from app.postgres.sessions import Sessions

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AFTER_ALL: Final = datetime(9999, 12, 31, tzinfo=UTC)
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
_NEWEST: Final = f"ORDER BY r.created_at DESC, r.stream_no DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX}"
# The same in other words: where the planner does not know the number it takes it that few rows are wanted, and reads
# the index in its order; where it does, it sorts all runs of a state if those are fewer.
_NEWEST_FIRST: Final = _NEWEST.replace("LIMIT ", "LIMIT (SELECT ") + ")"

# The last row that may be looked at comes along whether it fits or not: the next page starts after it.
_PAGE: Final = f"""
SELECT t.*, {_TIME.format("t.created_at")} AS started, {_TIME.format("t.updated_at")} AS updated,
       t.state <> 'SCHEDULED' OR EXISTS (
           SELECT FROM tga.workers w
            WHERE w.tenant = $1 AND w.seen_at > statement_timestamp() - $9 * interval '1 millisecond'
              AND t.procedure || chr(9) || t.program = ANY (w.programs)) AS has_worker
  FROM (SELECT t.*, h.stream, h.waiting, h.principal_id, h.updated_at,
               t.place <= {LIST_ROWS_LOOKED_AT_MAX}
               AND ($4::text IS NULL OR h.principal_id = $4) AND ($5::text IS NULL OR h.principal_id = $5)
               AND ($6::text IS NULL OR t.procedure = $6) AND starts_with(h.stream, $7)
               AND ($8::boolean IS NULL OR (h.waiting IS NOT DISTINCT FROM 'person') = $8) AS fits
          FROM (SELECT r.*, row_number() OVER (ORDER BY r.created_at DESC, r.stream_no DESC) AS place
                  FROM {{rows}} AS r {_NEWEST}) AS t
          JOIN tga.heads h ON h.stream_no = t.stream_no) AS t
 WHERE t.fits OR t.place = {LIST_ROWS_LOOKED_AT_MAX}
 ORDER BY t.created_at DESC, t.stream_no DESC LIMIT $10
"""  # noqa: S608 - only our own numbers and names
_RUNS: Final = _PAGE.format(
    rows=f"""(SELECT r.* FROM tga.runs r
               WHERE r.tenant = $1 AND (r.created_at, r.stream_no) < ($2, $3) {_NEWEST})"""  # noqa: S608 - likewise
)
# A state each, put together in their order as they are read. The index has runs that wait for a person apart (0034).
_IN_STATE: Final = f"""(SELECT r.* FROM tga.runs r
               WHERE r.tenant = $1 AND r.state = {{state}} AND r.waits_for_person = $8 AND r.created_at <= $2
                 AND (r.created_at, r.stream_no) < ($2, $3) {_NEWEST_FIRST})"""  # noqa: S608 - likewise
_RUNS_IN_STATES: Final = {
    1: _PAGE.format(rows=_IN_STATE.format(state="$11")),
    2: _PAGE.format(rows=f"({_IN_STATE.format(state='$11')} UNION ALL {_IN_STATE.format(state='$12')})"),
}


# Where few ids begin so, those are the rows, whatever else there is: `heads` has streams in the order of their bytes.
_OF_PREFIX: Final = """(SELECT r.*
                FROM (SELECT o.stream_no FROM tga.heads o
                       WHERE o.stream >= $7 AND o.stream < $7 || chr(127) OFFSET 0) AS o
               CROSS JOIN LATERAL (SELECT r.* FROM tga.runs r WHERE r.stream_no = o.stream_no OFFSET 0) AS r
               WHERE r.tenant = $1 AND (r.created_at, r.stream_no) < ($2, $3) {state})"""
_RUNS_OF_PREFIX: Final = {
    0: _PAGE.format(rows=_OF_PREFIX.format(state="")),
    1: _PAGE.format(rows=_OF_PREFIX.format(state="AND r.state = $11")),
    2: _PAGE.format(rows=_OF_PREFIX.format(state="AND r.state IN ($11, $12)")),
}
_ARE_FEW: Final = f"""
SELECT count(*) <= {LIST_PREFIX_ROWS_MAX} AS are_few
  FROM (SELECT FROM tga.heads o WHERE o.stream >= $1 AND o.stream < $1 || chr(127)
         LIMIT {LIST_PREFIX_ROWS_MAX + 1}) AS o
"""  # noqa: S608 - only our own numbers


def _began_since(query: str, parameter: int) -> str:
    """The same of runs that began at this moment or later. Only where that is asked: plans of other lists stay what
    they are."""
    return query.replace("r.tenant = $1", f"r.tenant = $1 AND r.created_at >= ${parameter}")


# By the key of `links`, from each head back: no payload is read.
_JOURNALS: Final = """
SELECT h.stream, h.sequence_number AS entries,
       ARRAY(SELECT l.artifact_type FROM tga.links l WHERE l.stream_no = h.stream_no
              ORDER BY l.sequence_number DESC LIMIT $2) AS newest
  FROM tga.heads h WHERE h.stream = ANY ($1::text[])
"""


@dataclass(frozen=True, slots=True)
class ListedJournal:
    """How many entries a run has, and of the newest of them, the newest last, what each is."""

    entries: int
    newest: list[str]


@dataclass(frozen=True, slots=True)
class ListedRun:
    """`has_worker`: whether a living worker asks for its program; True where none is needed now."""

    run_id: str
    procedure: str
    version: str
    state: str
    waiting: str | None
    attempt: int
    principal_id: str
    started_at: str
    updated_at: str
    has_worker: bool


async def list_runs(
    sessions: Sessions,
    scope: Visibility,
    *,
    states: Sequence[str] | None = None,
    is_waiting_for_person: bool = False,
    procedure: str | None = None,
    prefix: str = "",
    principal_id: str | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    before: str | None = None,
    limit: int = LIST_ITEMS_DEFAULT,
    worker_seen_ms: int,
) -> Page[ListedRun]:
    """Newest first, of one state, of two, or of all; `before` is the `next` of the page before. Of states it lists runs
    that wait for a person, or else all others of these states. `prefix` is that of the id on the log; where few ids
    begin so, only those are looked at, else the newest runs of all. They began at `since_ms` or later, and before
    `until_ms`."""
    end = (_AFTER_ALL if until_ms is None else _EPOCH + timedelta(milliseconds=until_ms), 0)
    if before is not None:
        micros, _, number = before.partition(".")
        end = min(end, (_EPOCH + timedelta(microseconds=int(micros)), int(number)))
    given = (scope.tenant, *end, scope.principal_id, principal_id, procedure, RUN.stream(prefix))
    for_person = None if states is None else is_waiting_for_person
    asked: list[Any] = [*given, for_person, worker_seen_ms, limit + 1, *(states or ())]
    if prefix.rpartition("/")[2] and (await sessions.fetch(_ARE_FEW, RUN.stream(prefix)))[0]["are_few"]:
        query = _RUNS_OF_PREFIX[len(states or ())]
    else:
        query = _RUNS if states is None else _RUNS_IN_STATES[len(states)]
    if since_ms is not None:
        asked.append(_EPOCH + timedelta(milliseconds=since_ms))
        query = _began_since(query, len(asked))
    rows = await sessions.fetch(query, *asked)
    fitting = [row for row in rows if row["fits"]]
    items = [_listed_run(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, _position(fitting[limit - 1]))
    is_cut = bool(rows) and rows[-1]["place"] >= LIST_ROWS_LOOKED_AT_MAX
    return Page(items, _position(rows[-1]) if is_cut else None)


async def list_journals(sessions: Sessions, run_ids: Sequence[str], *, newest: int) -> dict[str, ListedJournal]:
    """Of the runs of a page: one query, which reads so many rows of each at most."""
    rows = await sessions.fetch(_JOURNALS, [RUN.stream(run_id) for run_id in run_ids], newest)
    return {RUN.identity_of(row["stream"]): ListedJournal(row["entries"], row["newest"][::-1]) for row in rows}


def _position(row: asyncpg.Record) -> str:
    return f"{_micros(row['created_at'])}.{row['stream_no']}"


def _micros(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _listed_run(row: asyncpg.Record) -> ListedRun:
    return ListedRun(
        run_id=RUN.identity_of(row["stream"]),
        procedure=row["procedure"],
        version=str(row["program"]).rpartition("@")[0],
        state=row["state"],
        waiting=row["waiting"],
        attempt=row["attempt"],
        principal_id=row["principal_id"],
        started_at=row["started"],
        updated_at=row["updated"],
        has_worker=row["has_worker"],
    )
