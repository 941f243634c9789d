"""TgaStateStore in memory: the specification's semantics in as few lines as possible, to compare the real one with."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.digest import Digest
from app.core.errors import (
    ChecksumMismatch,
    ConcurrentExecution,
    InputTooLarge,
    KeyClaimed,
    TgaError,
    TraceNotFound,
)
from app.core.limits import ARTIFACT_BYTES_MAX, LIST_ENTRIES_MAX
from app.domain.ledger.plans import Claim
from app.domain.tga.documents import ExecutionLogEntry, TraceId
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord, fold, head_of, verify_checkpoint, verify_next


@dataclass
class MemoryLedger:
    """What all executors share. An executor lives while its id is in `living`."""

    records: dict[TraceId, list[LogRecord]] = field(default_factory=dict)
    checkpoints: dict[TraceId, dict[int, ExecutionCheckpoint]] = field(default_factory=dict)
    owners: dict[TraceId, str] = field(default_factory=dict)
    claims: dict[tuple[str, str, str], tuple[TraceId, Claim]] = field(default_factory=dict)
    claim_effects: dict[TraceId, Digest] = field(default_factory=dict)
    living: set[str] = field(default_factory=set)


class MemoryStateStore:
    def __init__(self, ledger: MemoryLedger, executor_id: str) -> None:
        self._ledger = ledger
        self._held: set[TraceId] = set()
        self.executor_id = executor_id
        ledger.living.add(executor_id)

    def die(self) -> None:
        self._ledger.living.discard(self.executor_id)

    async def load_state(self, trace_id: TraceId) -> ExecutionState:
        checkpoint = await self.load_latest_checkpoint(trace_id)
        start = None if checkpoint is None else checkpoint.checkpoint_state
        after = 0 if start is None else start.sequence_number
        state = fold(self._ledger.records.get(trace_id, [])[after:], start=start)
        if state is None:
            raise TraceNotFound("no such trace", stream=f"trace:{trace_id}")
        return state

    async def append_log_entry(self, entry: LogRecord) -> None:
        trace_id = TraceId(entry.entry.trace_id)
        if entry.artifact is None:
            raise ChecksumMismatch("an entry is appended with its artifact (I7)", stream=entry.stream)
        if len(entry.artifact.to_bytes()) > ARTIFACT_BYTES_MAX:
            raise InputTooLarge("the artifact is too large", stream=entry.stream)
        self._verify_owner(trace_id)
        stored = self._ledger.records.get(trace_id, [])
        try:
            verify_next(head_of(fold(stored)), entry)
        except TgaError as error:
            raise error.at(stream=entry.stream, sequence_number=len(stored) + 1) from None
        claim = decide_claim([entry])
        if claim is not None:
            key = (claim.server_id, claim.tool_name, claim.idempotency_key)
            owner, owned = self._ledger.claims.setdefault(key, (trace_id, claim))
            if owner != trace_id:
                raise KeyClaimed(
                    "another claim stands in the way",
                    owner_stream=f"trace:{owner}",
                    owner_payload_digest=owned.payload_digest,
                )
        self._ledger.records.setdefault(trace_id, []).append(entry)
        if entry.entry.artifact_type == "tool_effect":
            self._ledger.claim_effects[trace_id] = Digest(entry.entry.artifact_digest)
            self._ledger.owners.pop(trace_id, None)

    async def list_log_entries(self, trace_id: TraceId, after_seq: int) -> list[LogRecord]:
        return self._ledger.records.get(trace_id, [])[after_seq : after_seq + LIST_ENTRIES_MAX]

    async def write_checkpoint(self, checkpoint: ExecutionCheckpoint) -> None:
        trace_id = TraceId(checkpoint.trace_id)
        stream = f"trace:{trace_id}"
        checkpoint.verify()
        self._verify_owner(trace_id)
        if trace_id not in self._ledger.records:
            raise TraceNotFound("the stream has no entries", stream=stream)
        state = checkpoint.checkpoint_state
        if fold(self._ledger.records[trace_id][: state.sequence_number]) != state:
            raise ChecksumMismatch("the checkpoint is not what the log folds to", stream=stream)
        kept = self._ledger.checkpoints.setdefault(trace_id, {})
        known = kept.setdefault(checkpoint.checkpoint_state.sequence_number, checkpoint)
        if known.checkpoint_digest != checkpoint.checkpoint_digest:
            raise ChecksumMismatch("another checkpoint stands on this entry", stream=stream)

    async def load_latest_checkpoint(self, trace_id: TraceId) -> ExecutionCheckpoint | None:
        kept = self._ledger.checkpoints.get(trace_id)
        if not kept:
            return None
        latest = kept[max(kept)]
        verify_checkpoint(latest, entry=self._entry(trace_id, latest))
        return latest

    async def acquire_trace_lock(self, trace_id: TraceId) -> None:
        if trace_id in self._held:
            raise ConcurrentExecution("this process already executes the trace", stream=f"trace:{trace_id}")
        owner = self._ledger.owners.get(trace_id)
        if owner not in (None, self.executor_id) and owner in self._ledger.living:
            raise ConcurrentExecution("a living executor owns the stream", found=owner, stream=f"trace:{trace_id}")
        self._ledger.owners[trace_id] = self.executor_id
        self._held.add(trace_id)

    async def release_trace_lock(self, trace_id: TraceId) -> None:
        if trace_id not in self._held:
            raise ConcurrentExecution("this process does not drive the trace", stream=f"trace:{trace_id}")
        self._held.discard(trace_id)
        if self._ledger.owners.get(trace_id) == self.executor_id:
            del self._ledger.owners[trace_id]

    def _verify_owner(self, trace_id: TraceId) -> None:
        owner = self._ledger.owners.get(trace_id)
        if owner not in (None, self.executor_id):
            raise ConcurrentExecution("another executor owns the stream", found=owner, stream=f"trace:{trace_id}")

    def _entry(self, trace_id: TraceId, checkpoint: ExecutionCheckpoint) -> ExecutionLogEntry | None:
        records = self._ledger.records.get(trace_id, [])
        place = checkpoint.checkpoint_state.sequence_number
        return records[place - 1].entry if place <= len(records) else None
