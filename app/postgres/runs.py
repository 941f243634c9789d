"""Runs on PostgreSQL: read, verified, from the newest execution checkpoint on; held for workers and what is due."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import asyncpg

from app.core.digest import Digest, digest_of_bytes
from app.core.errors import (
    ChecksumMismatch,
    Forbidden,
    RunErased,
    RunNotFound,
    SequenceGap,
    TgaError,
)
from app.core.limits import RUN_HOLD_MS, RUN_PAGE_BYTES_MAX, RUN_PAGE_RECORDS_MAX
from app.domain.identity import Principal
from app.domain.runs.checkpoints import SinceCheckpoint, run_of
from app.domain.runs.documents import RunSignal, RunStart
from app.domain.runs.engine.ports import Due, DueRun, HeadOfRun, HeldRun, LoadedRun, Ready
from app.domain.runs.ids import written
from app.domain.runs.replay import RUN_DOCUMENTS, Run, RunRecord, fold
from app.domain.runs.transitions import RUN
from app.postgres.sessions import Sessions
from app.postgres.state_store import verify_head

_CHANNEL: Final = "tga_runs"
_NAMES_TOLD_BYTES: Final = 7_000
_TIME: Final = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')"""

# One statement, one snapshot: the newest execution checkpoint not after $2, and what stands between the two; the start.
_RUN: Final = """
SELECT h.sequence_number, h.entry_digest, h.owner::text, w.worker, x.stream IS NOT NULL AS is_erased,
       b.entry AS first_entry, b.entry_digest AS first_digest, b.artifact AS first_artifact,
       k.sequence_number AS checkpoint_sequence, k.checkpoint_state, k.checkpoint_digest,
       e.entries, e.digests, e.artifacts
  FROM tga.heads h
  LEFT JOIN tga.runs w ON w.stream_no = h.stream_no
  LEFT JOIN tga.erasures x ON x.stream = h.stream
  LEFT JOIN tga.records b ON b.stream_no = h.stream_no AND b.sequence_number = 1
  LEFT JOIN LATERAL (
       SELECT k.* FROM tga.execution_checkpoints k
        WHERE k.stream = h.stream AND k.sequence_number <= $2
        ORDER BY k.sequence_number DESC LIMIT 1) AS k ON true
 CROSS JOIN LATERAL (
       SELECT array_agg(e.entry ORDER BY e.sequence_number) AS entries,
              array_agg(e.entry_digest ORDER BY e.sequence_number) AS digests,
              array_agg(e.artifact ORDER BY e.sequence_number) AS artifacts
         FROM tga.records e
        WHERE e.stream_no = h.stream_no AND e.sequence_number > coalesce(k.sequence_number, 0)
          AND e.sequence_number <= $2) AS e
 WHERE h.stream = $1 AND h.sequence_number > 0
"""
_RECORDS: Final = """
SELECT p.entry, p.entry_digest, p.artifact
  FROM tga.heads h
 CROSS JOIN LATERAL (
       SELECT e.sequence_number, e.entry, e.entry_digest, e.artifact,
              sum(octet_length(e.artifact)) OVER (ORDER BY e.sequence_number) - octet_length(e.artifact) AS bytes_before
         FROM (SELECT * FROM tga.records e WHERE e.stream_no = h.stream_no AND e.sequence_number > $2
                ORDER BY e.sequence_number LIMIT $3) AS e) AS p
 WHERE h.stream = $1 AND p.bytes_before < $4
 ORDER BY p.sequence_number
"""
# The links of the stream are walked from its end along their primary key; of the artifacts one is read.
_SIGNAL: Final = """
SELECT e.entry, e.entry_digest, e.artifact
  FROM tga.heads h
 CROSS JOIN LATERAL (
       SELECT l.sequence_number FROM tga.links l
        WHERE l.stream_no = h.stream_no AND l.artifact_type = 'run_signal'
        ORDER BY l.sequence_number DESC OFFSET $2 LIMIT 1) AS s
  JOIN tga.records e ON e.stream_no = h.stream_no AND e.sequence_number = s.sequence_number
 WHERE h.stream = $1
"""
_HEADS: Final = """
SELECT h.stream, h.owner::text, h.sequence_number, h.state, coalesce(r.attempt, 0) AS attempt
  FROM tga.heads h LEFT JOIN tga.runs r ON r.stream_no = h.stream_no
 WHERE h.stream = ANY ($1::text[]) AND h.tenant = $2
"""
_CHILDREN: Final = """
SELECT h.stream FROM tga.runs r JOIN tga.heads h ON h.stream_no = r.stream_no
 WHERE r.parent = $1 AND r.state NOT IN ('COMPLETED', 'CANCELLED', 'FAILED')
"""
_HAS_WORKER: Final = """
SELECT EXISTS (SELECT FROM tga.workers w
                WHERE w.tenant = $1 AND w.seen_at > statement_timestamp() - $3 * interval '1 millisecond'
                  AND $2 = ANY (w.programs))
"""
# The last row, without a stream, says how long nothing else is ready. The statement's snapshot is older than what it
# holds: runs that were ready now are not counted among those that will be.
_READY: Final = """
SELECT r.stream, r.procedure, r.program, NULL::bigint AS next_ms FROM tga.hold_ready_runs($1, $2, $3, $4, $5) AS r
 UNION ALL
SELECT NULL, NULL, NULL, tga.next_ready_ms($1, $2, $3)
"""
_ALL: Final = 2**62


class PostgresRuns:
    """The StoredRuns port."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def load(self, run_id: str) -> LoadedRun:
        return await self._load(run_id, _ALL)

    async def load_at(self, run_id: str, sequence_number: int) -> Run:
        return (await self._load(run_id, sequence_number)).run

    async def _load(self, run_id: str, upto: int) -> LoadedRun:
        stream = RUN.stream(run_id)
        rows = await self._sessions.fetch(_RUN, stream, upto)
        if not rows:
            raise RunNotFound("no such run", stream=stream)
        row = rows[0]
        if row["is_erased"]:
            raise RunErased("the run's payloads were erased", stream=stream)
        try:
            start = _start_of(row)
            run = _from_checkpoint(row)
            source = None
            if run is None and start.forked_from is not None:
                source = await self.load_at(start.forked_from.run_id, start.forked_from.sequence_number)
            records = [
                _record(entry, digest, artifact)
                for entry, digest, artifact in zip(
                    row["entries"] or (), row["digests"] or (), row["artifacts"] or (), strict=True
                )
            ]
            folded = fold(records, start=run, source=source)
        except TgaError as error:
            raise error.at(stream=stream) from None
        if folded is None:
            raise SequenceGap("the run has no entries that can be folded", expected=1, found=0, stream=stream)
        if upto == _ALL:
            verify_head(
                folded.head, stream=stream, head_sequence=row["sequence_number"], head_digest=row["entry_digest"]
            )
        since = SinceCheckpoint(
            row["checkpoint_sequence"] or 0,
            len(row["checkpoint_state"] or b""),
            sum(len(artifact or b"") for artifact in row["artifacts"] or ()),
        )
        return LoadedRun(folded, start, row["owner"], row["worker"], since=since)

    async def load_records(self, run_id: str, *, after: int, limit: int = RUN_PAGE_RECORDS_MAX) -> list[RunRecord]:
        stream = RUN.stream(run_id)
        rows = await self._sessions.fetch(_RECORDS, stream, after, min(limit, RUN_PAGE_RECORDS_MAX), RUN_PAGE_BYTES_MAX)
        try:
            return [_record(row["entry"], row["entry_digest"], row["artifact"]) for row in rows]
        except TgaError as error:
            raise error.at(stream=stream) from None

    async def find_signal(self, run_id: str, *, later: int) -> RunSignal | None:
        stream = RUN.stream(run_id)
        rows = await self._sessions.fetch(_SIGNAL, stream, later)
        try:
            found = [_record(row["entry"], row["entry_digest"], row["artifact"]).artifact for row in rows]
        except TgaError as error:
            raise error.at(stream=stream) from None
        return next((one for one in found if isinstance(one, RunSignal)), None)

    async def find_heads(self, run_ids: Sequence[str], *, tenant: str) -> dict[str, HeadOfRun]:
        if not run_ids:
            return {}
        rows = await self._sessions.fetch(_HEADS, [RUN.stream(run_id) for run_id in run_ids], tenant)
        return {
            RUN.identity_of(row["stream"]): HeadOfRun(
                row["owner"], row["sequence_number"], row["state"], row["attempt"]
            )
            for row in rows
        }

    async def list_children(self, run_id: str) -> list[str]:
        rows = await self._sessions.fetch(_CHILDREN, RUN.stream(run_id))
        return [RUN.identity_of(row["stream"]) for row in rows]

    async def count_open_below(self, run_id: str, *, at_most: int) -> int:
        rows = await self._sessions.fetch("SELECT tga.count_open_below($1, $2)", RUN.stream(run_id), at_most)
        return int(rows[0][0])

    async def hold_ready(self, tenant: str, programs: Sequence[tuple[str, str]], limit: int) -> Ready:
        rows = await self._sessions.fetch(
            _READY,
            tenant,
            [procedure for procedure, _ in programs],
            [program for _, program in programs],
            limit,
            RUN_HOLD_MS,
        )
        runs = [HeldRun(RUN.identity_of(row["stream"]), row["procedure"], row["program"]) for row in rows[:-1]]
        return Ready(runs, rows[-1]["next_ms"])

    async def unhold_ready(self, run_ids: Sequence[str]) -> None:
        await self._sessions.fetch("SELECT tga.unhold_ready_runs($1)", [RUN.stream(run_id) for run_id in run_ids])

    async def hold_due(self, *, limit: int, worker_silent_ms: int | None) -> Due:
        rows = await self._sessions.fetch(
            "SELECT * FROM tga.hold_due_runs($1, $2, $3)", limit, RUN_HOLD_MS, worker_silent_ms
        )
        runs = [
            DueRun(
                RUN.identity_of(row["stream"]),
                row["attempt"] if row["is_lost"] else None,
                row["held"].isoformat(),
                written(int(row["held"].timestamp() * 1000) - RUN_HOLD_MS),
            )
            for row in rows
            if row["stream"] is not None
        ]
        next_ms = next((row["next_ms"] for row in rows if row["stream"] is None), None)
        return Due(runs, next_ms)

    async def move_due(self, run_id: str, *, held_until: str, due_at: str | None) -> None:
        await self._sessions.fetch(
            "SELECT tga.move_due_run($1, $2, $3)",
            RUN.stream(run_id),
            datetime.fromisoformat(held_until),
            None if due_at is None else datetime.fromisoformat(due_at),
        )

    async def beat(
        self, worker: str, principal: Principal, name: str, programs: Sequence[tuple[str, str]]
    ) -> list[str]:
        rows = await self._sessions.fetch(
            "SELECT stream FROM tga.beat_worker($1, $2, $3, $4, $5)",
            worker,
            principal.tenant,
            principal.principal_id,
            name,
            [_offered(*program) for program in programs],
        )
        if not rows:
            raise Forbidden("this worker id is another principal's", found=worker)
        return [RUN.identity_of(row["stream"]) for row in rows if row["stream"] is not None]

    async def has_worker(self, tenant: str, procedure: str, program: str, *, within_ms: int) -> bool:
        rows = await self._sessions.fetch(_HAS_WORKER, tenant, _offered(procedure, program), within_ms)
        return bool(rows[0][0])

    async def announce(self, run_ids: Sequence[str]) -> None:
        told = "\n".join(run_ids)
        if len(told.encode()) > _NAMES_TOLD_BYTES:
            told = "*"
        await self._sessions.fetch("SELECT pg_notify($1, $2)", _CHANNEL, told)


def _offered(procedure: str, program: str) -> str:
    return f"{procedure}\t{program}"


def _record(entry: bytes, digest: bytes, artifact: bytes | None) -> RunRecord:
    return RUN_DOCUMENTS.read(entry, artifact, entry_digest=Digest(digest.hex()))


def _start_of(row: asyncpg.Record) -> RunStart:
    first = _record(row["first_entry"], row["first_digest"], row["first_artifact"]).artifact
    if not isinstance(first, RunStart):
        raise ChecksumMismatch("a run begins with its start", expected="run_start", found=type(first).__name__)
    return first


def _from_checkpoint(row: asyncpg.Record) -> Run | None:
    state = row["checkpoint_state"]
    if state is None:
        return None
    found = digest_of_bytes(state)
    if found != Digest(row["checkpoint_digest"].hex()):  # I4
        raise ChecksumMismatch(
            "the checkpoint's state does not hash to its digest", expected=row["checkpoint_digest"].hex(), found=found
        )
    run = run_of(state)
    if run.head.sequence_number != row["checkpoint_sequence"]:
        raise SequenceGap(
            "the checkpoint stands in another's place",
            expected=row["checkpoint_sequence"],
            found=run.head.sequence_number,
        )
    return run
