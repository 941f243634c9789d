"""TgaStateStore on PostgreSQL."""

from __future__ import annotations

from app.core.canonical import parse_object
from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import ChecksumMismatch, ConcurrentExecution, SequenceGap, TgaError, TraceNotFound
from app.core.limits import LIST_ENTRIES_MAX, LOCK_TIMEOUT_MS
from app.domain.ledger.plans import Ledger, Plan, PlannedCheckpoint, PlannedEntry
from app.domain.tga.documents import TraceId
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import (
    LogRecord,
    fold,
    head_of,
    record_from_bytes,
    verify_checkpoint,
)
from app.domain.tga.transitions import TRACE
from app.postgres.ownership import Executor, acquire_stream, release_stream
from app.postgres.sessions import Connection, Sessions

_ENTRIES = """
SELECT e.sequence_number, e.entry, e.entry_digest, e.artifact
  FROM tga.records e
 WHERE e.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1) AND e.sequence_number > $2
 ORDER BY e.sequence_number LIMIT $3
"""
_LATEST_CHECKPOINT = """
SELECT k.checkpoint_state, k.checkpoint_digest, k.created_at, k.sequence_number, e.entry, e.entry_digest, e.artifact
  FROM tga.execution_checkpoints k
  LEFT JOIN tga.records e USING (stream, sequence_number)
 WHERE k.stream = $1 ORDER BY k.sequence_number DESC LIMIT 1
"""
_HEAD = "SELECT sequence_number, entry_digest, state FROM tga.heads WHERE stream = $1"


class PostgresStateStore:
    """The seven methods of the specification. One executor; `held` is its process-local table of owned traces."""

    def __init__(
        self, sessions: Sessions, ledger: Ledger, executor: Executor, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS
    ) -> None:
        self._sessions = sessions
        self._ledger = ledger
        self._executor = executor
        self._lock_timeout_ms = lock_timeout_ms
        self._held: set[TraceId] = set()

    async def load_state(self, trace_id: TraceId) -> ExecutionState:
        stream = TRACE.stream(trace_id)
        async with self._sessions.reading() as connection:
            checkpoint = await _load_checkpoint(connection, trace_id)
            state = None if checkpoint is None else checkpoint.checkpoint_state
            while page := await _load_records(connection, stream, state.sequence_number if state else 0):
                state = fold(page, start=state)
            head = await connection.fetchrow(_HEAD, stream)
        if state is None:
            if head is not None and head["sequence_number"] > 0:
                raise SequenceGap(
                    "the head stands further than the log", expected=head["sequence_number"], found=0, stream=stream
                )
            raise TraceNotFound("no such trace", stream=stream)
        sequence, digest = (head["sequence_number"], head["entry_digest"]) if head else (None, None)
        verify_head(head_of(state), stream=TRACE.stream(state.trace_id), head_sequence=sequence, head_digest=digest)
        return state

    async def append_log_entry(self, entry: LogRecord) -> None:
        trace_id = TraceId(entry.entry.trace_id)
        if entry.artifact is None:
            raise ChecksumMismatch("an entry is appended with its artifact (I7)", stream=entry.stream)
        executor_id = self._executor.executor_id
        terminal = entry.entry.to_state in TRACE.terminal_states
        owner_after = executor_id if trace_id in self._held and not terminal else None
        await self._ledger.commit(
            Plan(
                stream=entry.stream,
                executor_id=executor_id,
                owner_after=owner_after,
                entries=[PlannedEntry(_stated_bytes(entry), entry.artifact.to_bytes())],
                claim=decide_claim([entry]),
            )
        )

    async def list_log_entries(self, trace_id: TraceId, after_seq: int) -> list[LogRecord]:
        async with self._sessions.reading() as connection:
            return await _load_records(connection, TRACE.stream(trace_id), after_seq)

    async def write_checkpoint(self, checkpoint: ExecutionCheckpoint) -> None:
        checkpoint.verify()
        await self._verify_folds_to(checkpoint.checkpoint_state)
        await self._ledger.commit(
            Plan(
                stream=TRACE.stream(checkpoint.trace_id),
                executor_id=self._executor.executor_id,
                owner_after=None,
                checkpoint=PlannedCheckpoint(checkpoint.checkpoint_state.to_bytes(), checkpoint.created_at),
            )
        )

    async def _verify_folds_to(self, claimed: ExecutionState) -> None:
        """I4: the database compares a checkpoint with its entry; only a fold can compare all of it."""
        stream, folded = TRACE.stream(claimed.trace_id), None
        async with self._sessions.reading() as connection:
            while page := await _load_records(connection, stream, folded.sequence_number if folded else 0):
                folded = fold(page[: claimed.sequence_number - (folded.sequence_number if folded else 0)], start=folded)
                if folded is None or folded.sequence_number >= claimed.sequence_number:
                    break
        if folded is None:
            raise TraceNotFound("the stream has no entries", stream=stream)
        if folded != claimed:
            raise ChecksumMismatch(
                "the checkpoint is not what the log folds to",
                expected=folded.digest(),
                found=claimed.digest(),
                stream=stream,
                sequence_number=claimed.sequence_number,
            )

    async def load_latest_checkpoint(self, trace_id: TraceId) -> ExecutionCheckpoint | None:
        async with self._sessions.reading() as connection:
            return await _load_checkpoint(connection, trace_id)

    async def acquire_trace_lock(self, trace_id: TraceId) -> None:
        if trace_id in self._held:  # I6: two tasks of one process are two executors too
            raise ConcurrentExecution("this process already executes the trace", stream=TRACE.stream(trace_id))
        self._held.add(trace_id)
        try:
            await self._executor.verify()
            await acquire_stream(
                self._sessions,
                TRACE.stream(trace_id),
                self._executor.executor_id,
                lock_timeout_ms=self._lock_timeout_ms,
            )
        except BaseException:
            self._held.discard(trace_id)
            raise

    async def release_trace_lock(self, trace_id: TraceId) -> None:
        if trace_id not in self._held:
            raise ConcurrentExecution("this process does not execute the trace", stream=TRACE.stream(trace_id))
        await release_stream(
            self._sessions,
            TRACE.stream(trace_id),
            self._executor.executor_id,
            lock_timeout_ms=self._lock_timeout_ms,
        )
        self._held.discard(trace_id)  # only now: a release that failed can be repeated


def _stated_bytes(record: LogRecord) -> bytes:
    """The bytes to store; they must hash to the digest that the entry states."""
    link = record.entry.link()
    if link.computed_digest != link.entry_digest:  # I5
        raise ChecksumMismatch(
            "the entry's bytes do not hash to its digest",
            expected=link.entry_digest,
            found=link.computed_digest,
            stream=record.stream,
            sequence_number=link.sequence_number,
        )
    return record.entry.body_bytes()


async def _load_records(connection: Connection, stream: str, after_seq: int) -> list[LogRecord]:
    records = []
    for row in await connection.fetch(_ENTRIES, stream, after_seq, LIST_ENTRIES_MAX):
        try:
            record = record_from_bytes(row["entry"], row["artifact"], entry_digest=Digest(row["entry_digest"].hex()))
            if (record.stream, record.entry.sequence_number) != (stream, row["sequence_number"]):
                raise SequenceGap(
                    "the entry stands in another's place",
                    expected=f"{stream} {row['sequence_number']}",
                    found=f"{record.stream} {record.entry.sequence_number}",
                )
        except TgaError as error:
            raise error.at(stream=stream, sequence_number=row["sequence_number"]) from None
        records.append(record)
    return records


async def _load_checkpoint(connection: Connection, trace_id: TraceId) -> ExecutionCheckpoint | None:
    row = await connection.fetchrow(_LATEST_CHECKPOINT, TRACE.stream(trace_id))
    if row is None:
        return None
    try:
        checkpoint = ExecutionCheckpoint(
            trace_id=trace_id,
            created_at=row["created_at"],
            checkpoint_state=ExecutionState.from_json(parse_object(row["checkpoint_state"])),
            checkpoint_digest=row["checkpoint_digest"].hex(),
        )
        if checkpoint.checkpoint_state.sequence_number != row["sequence_number"]:
            raise SequenceGap(
                "the checkpoint stands in another's place",
                expected=row["sequence_number"],
                found=checkpoint.checkpoint_state.sequence_number,
            )
        entry = None
        if row["entry"] is not None:
            entry = record_from_bytes(
                row["entry"], row["artifact"], entry_digest=Digest(row["entry_digest"].hex())
            ).entry
        verify_checkpoint(checkpoint, entry=entry)  # I4
    except TgaError as error:
        raise error.at(stream=TRACE.stream(trace_id), sequence_number=row["sequence_number"]) from None
    return checkpoint


def verify_head(folded: Head, *, stream: str, head_sequence: int | None, head_digest: bytes | None) -> None:
    """The head is a projection: it must agree with what the log folds to, and the log decides."""
    if head_sequence != folded.sequence_number:
        raise SequenceGap(
            "the log does not end where its head stands",
            expected=head_sequence,
            found=folded.sequence_number,
            stream=stream,
            sequence_number=folded.sequence_number,
        )
    if head_digest is None or head_digest.hex() != folded.entry_digest:
        raise ChecksumMismatch(
            "the log's last entry is not the head's",
            expected=None if head_digest is None else head_digest.hex(),
            found=folded.entry_digest,
            stream=stream,
            sequence_number=folded.sequence_number,
        )
