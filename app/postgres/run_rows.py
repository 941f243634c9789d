"""What is stored of runs beside their streams, made anew from them: rows of the scheduler, open questions, references
to blobs. And whether it is all there.

A gateway may run meanwhile: a row is written only for the head that it was folded from, under that head's lock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

import asyncpg
import orjson

from app.core.digest import Digest
from app.core.errors import RunErased, TgaError
from app.domain.clock import Clock
from app.domain.runs.engine.ports import LoadedRun
from app.domain.runs.referring import blobs_of
from app.domain.runs.replay import RUN_DOCUMENTS
from app.domain.runs.schedule import schedule_of
from app.domain.runs.transitions import RUN
from app.postgres.runs import PostgresRuns
from app.postgres.sessions import Sessions, connect

_PAGE_RUNS: Final = 200
_STREAMS: Final = """
SELECT stream_no, stream FROM tga.heads
 WHERE stream >= 'run:' AND stream < 'run;' AND stream_no > $1 AND sequence_number > 0 ORDER BY stream_no LIMIT $2
"""
_HEADS_LOCKED: Final = """
SELECT stream_no FROM tga.heads h JOIN unnest($1::bigint[], $2::bigint[]) AS u(number, sequence_number)
    ON h.stream_no = u.number AND h.sequence_number = u.sequence_number
 ORDER BY h.stream_no FOR UPDATE OF h
"""
_WITH_BLOBS: Final = """
SELECT e.sequence_number, e.entry, e.entry_digest, e.artifact FROM tga.records e
 WHERE e.stream_no = $1 AND position('"ref":{'::bytea IN e.artifact) > 0 ORDER BY e.sequence_number
"""
_REFER: Final = "SELECT tga.refer_to_blobs($1::bigint[], $2::bigint[], $3::text[], $4::bytea[])"
_NOT_REFERRED: Final = """
DELETE FROM tga.blob_refs r WHERE r.stream_no = $1
   AND NOT EXISTS (SELECT FROM unnest($2::bigint[], $3::bytea[]) AS u(number, sha256)
                    WHERE u.number = r.sequence_number AND u.sha256 = r.sha256)
"""
_ORPHANS: Final = "DELETE FROM tga.{} r WHERE NOT EXISTS (SELECT FROM tga.heads h WHERE h.stream_no = r.stream_no)"
_TABLES: Final = ("runs", "run_requests", "blob_refs")
_STANDING: Final = """
SELECT count(*) FILTER (WHERE r.stream_no IS NULL) AS without_row,
       count(*) FILTER (WHERE r.state <> h.state OR r.waits_for_person <> coalesce(h.waiting = 'person', false)
             ) AS elsewhere,
       count(*) FILTER (WHERE h.state = 'PARKED') AS parked,
       count(*) FILTER (WHERE h.state = 'DIVERGED') AS diverged,
       count(*) FILTER (WHERE h.state = 'FAILED') AS failed,
       count(*) FILTER (WHERE h.state = 'SCHEDULED' AND NOT EXISTS (
             SELECT FROM tga.workers w
              WHERE w.tenant = r.tenant AND w.seen_at > statement_timestamp() - $1 * interval '1 millisecond'
                AND r.procedure || E'\\t' || r.program = ANY (w.programs))) AS without_worker,
       (SELECT count(*) FROM tga.runs o WHERE NOT EXISTS (
               SELECT FROM tga.heads g WHERE g.stream_no = o.stream_no)) AS without_stream
  FROM tga.heads h LEFT JOIN tga.runs r ON r.stream_no = h.stream_no
 WHERE h.stream >= 'run:' AND h.stream < 'run;' AND h.sequence_number > 0 AND h.is_open
"""


class RunStanding(NamedTuple):
    """Of the runs that are open: how many need a person, and how many the scheduler does not see as they stand."""

    without_row: int
    elsewhere: int
    parked: int
    diverged: int
    failed: int
    without_worker: int
    without_stream: int


class Rebuilt(NamedTuple):
    """One run. `error`: why it could not be folded; its row stays as it is."""

    run_id: str
    error: TgaError | None = None


async def load_standing(sessions: Sessions, *, lease_ms: int) -> RunStanding:
    (row,) = await sessions.fetch(_STANDING, lease_ms)
    return RunStanding(*(row[name] for name in RunStanding._fields))


async def rebuild_runs(sessions: Sessions, admin_url: str, clock: Clock) -> AsyncIterator[Rebuilt]:
    """Each run, as it is done. Of a run that a worker has, the worker stays if the row still says which one; otherwise
    its attempt is over at the next sweep, and another worker goes on."""
    runs = PostgresRuns(sessions)
    connection = await connect(admin_url)
    try:
        after = 0
        while page := await sessions.fetch(_STREAMS, after, _PAGE_RUNS):
            after = page[-1]["stream_no"]
            for row in page:
                run_id = RUN.identity_of(row["stream"])
                try:
                    await _rebuild_one(connection, runs, row["stream_no"], run_id, clock)
                except RunErased:
                    continue  # it has ended, and nothing is due
                except TgaError as error:
                    yield Rebuilt(run_id, error)
                    continue
                yield Rebuilt(run_id)
        for table in _TABLES:
            await connection.execute(_ORPHANS.format(table))
    finally:
        await connection.close()


async def _rebuild_one(
    connection: asyncpg.Connection[asyncpg.Record], runs: PostgresRuns, number: int, run_id: str, clock: Clock
) -> None:
    while True:
        loaded = await runs.load(run_id)
        async with connection.transaction():
            sequence_number = loaded.run.head.sequence_number
            if not await connection.fetch(_HEADS_LOCKED, [number], [sequence_number]):
                continue  # it went on meanwhile
            row = _row_of(loaded, clock.now())
            await connection.execute("SELECT tga.write_run_rows($1::bigint[], $2::jsonb[])", [number], [row])
            await _rebuild_references(connection, number, loaded.tenant)
            return


def _row_of(loaded: LoadedRun, now: str) -> str:
    schedule = schedule_of(loaded.run, loaded.start, worker=loaded.worker, now=now)
    if loaded.run.head.state == "RUNNING" and loaded.worker is None:
        schedule = schedule._replace(due_at=now, due_in_ms=0)
    return orjson.dumps(schedule._asdict(), default=tuple).decode()


async def _rebuild_references(connection: asyncpg.Connection[asyncpg.Record], number: int, tenant: str) -> None:
    found: list[tuple[int, bytes]] = []
    for row in await connection.fetch(_WITH_BLOBS, number):
        digest = Digest(row["entry_digest"].hex())
        artifact = RUN_DOCUMENTS.read(row["entry"], row["artifact"], entry_digest=digest).artifact
        if artifact is not None:
            found += [(row["sequence_number"], bytes.fromhex(ref.sha256)) for ref in blobs_of(artifact)]
    places, digests = _columns(found)
    await connection.execute(_NOT_REFERRED, number, places, digests)
    if found:
        await connection.execute(_REFER, [number] * len(found), places, [tenant] * len(found), digests)


def _columns(found: Sequence[tuple[int, bytes]]) -> tuple[list[int], list[bytes]]:
    return [place for place, _ in found], [digest for _, digest in found]
