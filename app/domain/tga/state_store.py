"""The store of the locked specification: seven methods, and what each one promises."""

from __future__ import annotations

from typing import Protocol

from app.domain.tga.documents import TraceId
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.replay import LogRecord


class TgaStateStore(Protocol):
    """Append-only state of traces. Every method raises TgaError with a stable code, and nothing else."""

    async def load_state(self, trace_id: TraceId) -> ExecutionState:
        """Fold the log, from the latest checkpoint on, verifying every link that is read (I1, I4, I5).

        Raises TraceNotFound without entries. Proves the log as stored; not that its tail was never cut off.
        """
        ...

    async def append_log_entry(self, entry: LogRecord) -> None:
        """Append an entry with its artifact in one transaction (I7); durable when it returns.

        Refused unless it is the next of its stream, links to its predecessor, and its transition is allowed; and
        while another executor owns the trace (I6). A request's key is claimed with it, an effect settles it (I2).
        """
        ...

    async def list_log_entries(self, trace_id: TraceId, after_seq: int) -> list[LogRecord]:
        """The entries after `after_seq`, in order, with their artifacts; at most LIST_ENTRIES_MAX."""
        ...

    async def write_checkpoint(self, checkpoint: ExecutionCheckpoint) -> None:
        """Keep a snapshot that stands on an entry of the log (I4); writing the same one again changes nothing."""
        ...

    async def load_latest_checkpoint(self, trace_id: TraceId) -> ExecutionCheckpoint | None:
        """The newest snapshot, its digest recomputed and compared with its entry; a wrong one raises (I4)."""
        ...

    async def acquire_trace_lock(self, trace_id: TraceId) -> None:
        """Become the one executor of the trace (I6), at once if its last one is dead; never blocks for ever.

        ConcurrentExecution: a living executor has it. LockAcquireFailed: its lock was not obtained in time.
        """
        ...

    async def release_trace_lock(self, trace_id: TraceId) -> None:
        """Give the trace back. Not having been its executor is ConcurrentExecution; having been fenced is no error."""
        ...
