"""Fold a trace's log into its state, verifying every link on the way; and say what the state calls for.

`fold` from nothing and `fold` from a checkpoint's state give the same, at every cut (I4).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import ChecksumMismatch, RecoveryFailed, SchemaViolation, TgaError
from app.domain.ledger.records import Record, StreamDocuments
from app.domain.tga.documents import ARTIFACT_MODELS, ActionRequest, ArtifactDocument, ExecutionLogEntry, ToolCall
from app.domain.tga.execution_state import ExecutionCheckpoint, ExecutionState
from app.domain.tga.transitions import TRACE, State

LogRecord = Record[ExecutionLogEntry, ArtifactDocument]
TRACE_DOCUMENTS: Final = StreamDocuments(ExecutionLogEntry, ARTIFACT_MODELS)
record_from_bytes = TRACE_DOCUMENTS.read
verify_next = TRACE_DOCUMENTS.verify_next
plan_next = TRACE_DOCUMENTS.plan

# What the runtime does depends on the state alone (a Moore machine); recovery enters the same table in the middle.
ACTION_OF_STATE: Final[dict[State, Literal["ask_supervisor", "append_tool_call", "dispatch", "return_result"]]] = {
    "PENDING": "ask_supervisor",
    "AUTHORIZED": "append_tool_call",
    "EXECUTING": "dispatch",
    "COMPLETED": "return_result",
    "FAILED": "return_result",
    "DENIED": "return_result",
}


def head_of(state: ExecutionState | None) -> Head:
    if state is None:
        return Head.unborn(TRACE)
    last_artifact = (
        state.tool_effect_digest
        or state.tool_call_digest
        or state.supervisor_decision_digest
        or state.action_request_digest
    )
    return Head(state.sequence_number, Digest(state.entry_digest), state.state, Digest(last_artifact))


def fold(records: Iterable[LogRecord], *, start: ExecutionState | None = None) -> ExecutionState | None:
    """The state after all records, from `start` on; errors name the stream and the entry."""
    state = start
    for record in records:
        state = fold_next(state, record)
    return state


def fold_next(state: ExecutionState | None, record: LogRecord) -> ExecutionState:
    """The state after one more record, or the first check that fails, at the place where the record would stand."""
    return _fold_next(state, head_of(state), record)


def _fold_next(state: ExecutionState | None, head: Head, record: LogRecord) -> ExecutionState:
    entry = record.entry
    try:
        if state is not None and entry.trace_id != state.trace_id:
            raise SchemaViolation("the entry is of another trace", expected=state.trace_id, found=entry.trace_id)
        verify_next(head, record)
        return fold_linked(state, record)
    except TgaError as error:
        raise error.at(stream=record.stream, sequence_number=head.sequence_number + 1) from error.__cause__


def fold_linked(state: ExecutionState | None, record: LogRecord) -> ExecutionState:
    """As `fold_next`, of a record of this trace whose link was verified."""
    _verify_continuity(state, record.artifact)  # a binding too: after the transition
    return _next_state(state, record)


def advance(
    state: ExecutionState | None, artifact: ArtifactDocument, *, executor_id: str, recorded_at: str
) -> tuple[LogRecord, ExecutionState]:
    """The record that appends `artifact` to a trace in `state`, and the state after it; raises where it may not."""
    planned, _, _ = plan_next(
        head_of(state), artifact, identity=artifact.trace_id, executor_id=executor_id, recorded_at=recorded_at
    )
    record = LogRecord(ExecutionLogEntry.from_body_bytes(planned.entry), artifact)
    return record, fold_next(state, record)


def verify_checkpoint(checkpoint: ExecutionCheckpoint, *, entry: ExecutionLogEntry | None) -> None:
    """Raise unless the checkpoint is sound (I4) and says what the entry it stands on says.

    A mismatch is never passed over in favour of a full replay: it means that someone changed the store. What earlier
    entries say cannot be compared here; `tga verify` folds them.
    """
    state = checkpoint.checkpoint_state
    try:
        checkpoint.verify()
        if entry is None:
            raise ChecksumMismatch("the checkpoint's entry is missing", expected=state.entry_digest, found="no entry")
        head = head_of(state)
        found = (state.trace_id, head.sequence_number, head.entry_digest, head.state, head.artifact_digest)
        expected = (entry.trace_id, entry.sequence_number, entry.entry_digest, entry.to_state, entry.artifact_digest)
        if found != expected or state.updated_at != entry.recorded_at:  # I4
            raise ChecksumMismatch("the checkpoint does not stand on its entry", expected=expected, found=found)
    except TgaError as error:
        raise error.at(stream=TRACE.stream(checkpoint.trace_id), sequence_number=state.sequence_number) from None


class Dispatch(NamedTuple):
    """Send this call, with these ids, as often as it takes: they never change (I3)."""

    tool_call_id: str
    idempotency_key: str | None


def decide_next(
    state: ExecutionState, *, claim_effect: Digest | None
) -> Literal["ask_supervisor", "append_tool_call", "return_result"] | Dispatch:
    """What to do with a trace in this state. `claim_effect` stands in its claim, committed with the effect."""
    if claim_effect != state.tool_effect_digest and claim_effect is not None:  # I3
        raise RecoveryFailed(
            "claim and log disagree on the effect",
            expected=state.tool_effect_digest,
            found=claim_effect,
            stream=TRACE.stream(state.trace_id),
        )
    action = ACTION_OF_STATE[state.state]
    if action != "dispatch":
        return action
    if state.tool_call_id is None:
        raise RecoveryFailed("an executing trace names no tool call", stream=TRACE.stream(state.trace_id))
    return Dispatch(state.tool_call_id, state.idempotency_key)


def _next_state(state: ExecutionState | None, record: LogRecord) -> ExecutionState:
    entry, artifact = record
    if artifact is None:
        raise RecoveryFailed("the artifact's payload is missing", expected=entry.artifact_digest, found="nothing")
    if state is None and not isinstance(artifact, ActionRequest):
        raise RecoveryFailed("a trace begins with an action request", found=artifact.artifact_type)
    moved = artifact.in_state()
    moved["state"] = entry.to_state
    moved["sequence_number"] = entry.sequence_number
    moved["entry_digest"] = entry.entry_digest
    moved["updated_at"] = entry.recorded_at
    if state is None:
        return ExecutionState.of_known({"trace_id": entry.trace_id, **moved})
    return state.moved(moved)


def _verify_continuity(state: ExecutionState | None, artifact: ArtifactDocument | None) -> None:
    if state is None or artifact is None or artifact.continues(state):  # I3
        return
    if isinstance(artifact, ToolCall):
        raise ChecksumMismatch(
            "the tool call is not the one that was asked for",
            expected=(state.payload_digest, state.tool_class, state.idempotency_key),
            found=(artifact.payload_digest, artifact.tool_class, artifact.idempotency_key),
        )
    raise ChecksumMismatch(
        "the effect is of another tool call",
        expected=state.tool_call_id,
        found=getattr(artifact, "tool_call_id", None),
    )
