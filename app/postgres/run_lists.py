"""Pages of runs, and of the questions that they have open: one indexed query each, bounded in the rows it looks at.

Positions are plain text here; the edge hands them out as opaque cursors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg

from app.core.digest import Digest
from app.core.errors import RecoveryFailed, TgaError
from app.core.limits import LIST_ITEMS_DEFAULT, LIST_ROWS_LOOKED_AT_MAX
from app.domain.ledger.queries import Page, Visibility
from app.domain.runs.documents import RunIntent
from app.domain.runs.replay import RUN_DOCUMENTS
from app.domain.runs.requests import AskRequest
from app.domain.runs.transitions import RUN
from app.postgres.sessions import Sessions

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AFTER_ALL: Final = datetime(9999, 12, 31, tzinfo=UTC)
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
_NEWEST: Final = f"ORDER BY r.created_at DESC, r.stream_no DESC LIMIT {LIST_ROWS_LOOKED_AT_MAX}"

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
# A state each, put together in their order as they are read.
_IN_STATE: Final = f"""(SELECT r.* FROM tga.runs r
               WHERE r.tenant = $1 AND r.state = {{state}} AND r.created_at <= $2
                 AND (r.created_at, r.stream_no) < ($2, $3) {_NEWEST})"""  # noqa: S608 - likewise
_RUNS_IN_STATES: Final = {
    1: _PAGE.format(rows=_IN_STATE.format(state="$11")),
    2: _PAGE.format(rows=f"({_IN_STATE.format(state='$11')} UNION ALL {_IN_STATE.format(state='$12')})"),
}
_QUESTIONS: Final = f"""
SELECT t.*, {_TIME.format("t.expires_at")} AS expires, {_TIME.format("t.asked_at")} AS asked,
       e.entry, e.entry_digest, CASE WHEN t.fits THEN e.artifact END AS artifact
  FROM (SELECT q.*, h.stream, h.principal_id, r.procedure,
               q.place <= {LIST_ROWS_LOOKED_AT_MAX} AND ($4::text IS NULL OR h.principal_id = $4)
               AND (q.expires_at IS NULL OR q.expires_at > clock_timestamp()) AS fits
          FROM (SELECT q.*, row_number() OVER (ORDER BY q.asked_at, q.stream_no, q.path) AS place
                  FROM tga.run_requests q
                 WHERE q.tenant = $1 AND (q.asked_at, q.stream_no, q.path) > ($2, $3, $6)
                 ORDER BY q.asked_at, q.stream_no, q.path LIMIT {LIST_ROWS_LOOKED_AT_MAX}) AS q
          JOIN tga.heads h ON h.stream_no = q.stream_no
          JOIN tga.runs r ON r.stream_no = q.stream_no) AS t
  LEFT JOIN LATERAL (SELECT e.entry, e.entry_digest, e.artifact FROM tga.records e
                      WHERE t.fits AND e.stream_no = t.stream_no
                        AND e.sequence_number = t.sequence_number OFFSET 0) AS e ON true
 WHERE t.fits OR t.place = {LIST_ROWS_LOOKED_AT_MAX}
 ORDER BY t.asked_at, t.stream_no, t.path LIMIT $5
"""  # noqa: S608 - only our own numbers


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


@dataclass(frozen=True, slots=True)
class ListedQuestion:
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
    position: str = field(repr=False)  # after which the list goes on


async def list_runs(
    sessions: Sessions,
    scope: Visibility,
    *,
    states: Sequence[str] | None = None,
    is_waiting_for_person: bool | None = None,
    procedure: str | None = None,
    prefix: str = "",
    principal_id: str | None = None,
    before: str | None = None,
    limit: int = LIST_ITEMS_DEFAULT,
    worker_seen_ms: int,
) -> Page[ListedRun]:
    """Newest first, of one state, of two, or of all; `before` is the `next` of the page before. `prefix` is that of the
    id on the log."""
    created_at, stream_no = _AFTER_ALL, 0
    if before is not None:
        micros, _, number = before.partition(".")
        created_at, stream_no = _EPOCH + timedelta(microseconds=int(micros)), int(number)
    given = (scope.tenant, created_at, stream_no, scope.principal_id, principal_id, procedure, RUN.stream(prefix))
    asked = (*given, is_waiting_for_person, worker_seen_ms, limit + 1)
    query = _RUNS if states is None else _RUNS_IN_STATES[len(states)]
    rows = await sessions.fetch(query, *asked, *(states or ()))
    fitting = [row for row in rows if row["fits"]]
    items = [_listed_run(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, _position(fitting[limit - 1]))
    is_cut = bool(rows) and rows[-1]["place"] >= LIST_ROWS_LOOKED_AT_MAX
    return Page(items, _position(rows[-1]) if is_cut else None)


async def list_questions(
    sessions: Sessions, scope: Visibility, *, after: str | None = None, limit: int = LIST_ITEMS_DEFAULT
) -> Page[ListedQuestion]:
    """What runs have asked and nobody has answered, oldest first. Each is compared with what the log commits to; one
    that does not fit is shown as a problem and hides no other."""
    micros, number, path = (after or "0.0.").split(".", 2)
    asked_at = _EPOCH + timedelta(microseconds=int(micros))
    rows = await sessions.fetch(_QUESTIONS, scope.tenant, asked_at, int(number), scope.principal_id, limit + 1, path)
    fitting = [row for row in rows if row["fits"]]
    items = [_listed_question(row) for row in fitting[:limit]]
    if len(fitting) > limit:
        return Page(items, _after(fitting[limit - 1]))
    is_cut = bool(rows) and rows[-1]["place"] >= LIST_ROWS_LOOKED_AT_MAX
    return Page(items, _after(rows[-1]) if is_cut else None)


def _position(row: asyncpg.Record) -> str:
    return f"{_micros(row['created_at'])}.{row['stream_no']}"


def _after(row: asyncpg.Record) -> str:
    return f"{_micros(row['asked_at'])}.{row['stream_no']}.{row['path']}"


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


def _listed_question(row: asyncpg.Record) -> ListedQuestion:
    name = request = digest = problem = None
    try:
        if row["entry"] is None or row["artifact"] is None:
            raise RecoveryFailed("the question's payload is missing")
        record = RUN_DOCUMENTS.read(row["entry"], row["artifact"], entry_digest=Digest(row["entry_digest"].hex()))
        intent = record.artifact
        if not isinstance(intent, RunIntent) or not isinstance(intent.request, AskRequest):
            raise RecoveryFailed("the entry is not a question")
        name, request = intent.name, intent.request.to_json()
        digest = record.entry.artifact_digest
    except TgaError as error:
        problem = error.code
    return ListedQuestion(
        run_id=RUN.identity_of(row["stream"]),
        path=row["path"],
        procedure=row["procedure"],
        principal_id=row["principal_id"],
        name=name,
        request=request,
        intent_digest=digest,
        asked_at=row["asked"],
        expires_at=row["expires"],
        level=row["level"],
        problem=problem,
        position=_after(row),
    )
