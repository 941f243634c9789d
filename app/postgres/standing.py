"""How much stands in the store and waits: counted when the metrics are read, in one statement, by indexes alone.

Every count ends at a bound, so it costs the same with a million traces; beyond it one more is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from app.core.limits import METRICS_COUNTED_MAX
from app.postgres.sessions import Sessions

_MAX: Final = METRICS_COUNTED_MAX + 1
# Runs that have ended well are not counted: there is no end of them.
RUN_STATES: Final = ("SCHEDULED", "RUNNING", "WAITING", "FAILED", "PARKED", "DIVERGED")

STANDING: Final = f"""
WITH waiting AS MATERIALIZED (
    SELECT w.waiting, w.stream_no
      FROM tga.tenants t, unnest(ARRAY['supervisor', 'operator']) AS k(waiting)
     CROSS JOIN LATERAL (SELECT a.waiting, a.stream_no FROM tga.at_rest a
                          WHERE a.tenant = t.tenant AND a.waiting = k.waiting AND a.stream >= 'trace:'
                            AND a.stream < 'trace;' LIMIT {_MAX}) AS w),
asked AS MATERIALIZED (
    SELECT q.asked_at FROM tga.tenants t
     CROSS JOIN LATERAL (SELECT r.asked_at FROM tga.run_requests r WHERE r.tenant = t.tenant
                          ORDER BY r.asked_at LIMIT {_MAX}) AS q),
ready AS MATERIALIZED (
    SELECT r.tenant, r.procedure, r.program FROM tga.tenants t
     CROSS JOIN LATERAL (SELECT r.tenant, r.procedure, r.program FROM tga.runs r
                          WHERE r.tenant = t.tenant AND r.state = 'SCHEDULED'
                            AND (r.due_at IS NULL OR r.due_at <= statement_timestamp()) LIMIT {_MAX}) AS r),
alive AS MATERIALIZED (
    SELECT w.tenant, w.programs FROM tga.workers w
     WHERE w.seen_at > statement_timestamp() - $2 * interval '1 millisecond' LIMIT {_MAX}),
unworked AS (
    SELECT p.tenant, p.procedure, p.program, count(*) AS runs FROM ready p GROUP BY 1, 2, 3)
SELECT (SELECT count(*) FROM waiting WHERE waiting = 'supervisor') AS calls_waiting,
       (SELECT count(*) FROM waiting WHERE waiting = 'operator') AS calls_held,
       (SELECT extract(epoch FROM statement_timestamp() - min(h.updated_at)) FROM waiting w
          JOIN tga.heads h ON h.stream_no = w.stream_no WHERE w.waiting = 'supervisor')::float8 AS calls_waiting_s,
       (SELECT count(*) FROM asked) AS questions,
       (SELECT extract(epoch FROM statement_timestamp() - min(asked_at)) FROM asked)::float8 AS questions_s,
       (SELECT array_agg(n.runs ORDER BY s.place)
          FROM unnest($1::text[]) WITH ORDINALITY AS s(state, place)
         CROSS JOIN LATERAL (SELECT count(*) AS runs FROM tga.tenants t
                              CROSS JOIN LATERAL (SELECT FROM tga.runs r WHERE r.tenant = t.tenant
                                                     AND r.state = s.state LIMIT {_MAX}) AS r) AS n) AS runs,
       (SELECT coalesce(sum(u.runs), 0) FROM unworked u
         WHERE NOT EXISTS (SELECT FROM alive w WHERE w.tenant = u.tenant
                              AND u.procedure || chr(9) || u.program = ANY (w.programs)))::bigint AS without_worker,
       (SELECT count(*) FROM alive) AS workers,
       (SELECT count(*) FROM (SELECT FROM tga.outbox LIMIT {_MAX}) AS o) AS announcements,
       (SELECT max(size) FROM tga.tree_heads) AS log_size,
       (SELECT extract(epoch FROM statement_timestamp() - l.recorded_at::timestamptz)
          FROM (SELECT l.recorded_at FROM tga.tree_cursor c
                 CROSS JOIN LATERAL (SELECT l.recorded_at FROM tga.links l
                                      WHERE l.place = 1
                                        AND (l.xid, l.stream_no, l.sequence_number)
                                            > (c.xid, c.stream_no, c.sequence_number)
                                      ORDER BY l.xid, l.stream_no, l.sequence_number LIMIT 1) AS l) AS l)::float8
           AS log_delay_s
"""  # noqa: S608 - only our own numbers


class Standing(NamedTuple):
    """Of all tenants together."""

    calls_waiting: int
    calls_waiting_s: float
    calls_held: int
    questions: int
    questions_s: float
    runs: Mapping[str, int]
    runs_without_worker: int
    workers: int
    announcements: int
    log_size: int
    log_delay_s: float


async def load_standing(sessions: Sessions, *, worker_silent_ms: int) -> Standing:
    """What waits, and for how long the oldest of it has."""
    (row,) = await sessions.fetch(STANDING, list(RUN_STATES), worker_silent_ms)
    return Standing(
        calls_waiting=row["calls_waiting"],
        calls_waiting_s=max(0.0, row["calls_waiting_s"] or 0.0),
        calls_held=row["calls_held"],
        questions=row["questions"],
        questions_s=max(0.0, row["questions_s"] or 0.0),
        runs=dict(zip(RUN_STATES, row["runs"], strict=True)),
        runs_without_worker=row["without_worker"],
        workers=row["workers"],
        announcements=row["announcements"],
        log_size=row["log_size"] or 0,
        log_delay_s=max(0.0, row["log_delay_s"] or 0.0),
    )
