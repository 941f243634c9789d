"""A trace's log, folded: its execution state, and the checkpoint that keeps one. They agree with schemas/tga/v1."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator

from app.core.chain import Head
from app.core.errors import ChecksumMismatch
from app.domain.ledger.documents import Document, IdempotencyKey, Name, SequenceNumber, Sha256, Time, Uuid7
from app.domain.tga.documents import ActionRequest, SupervisorDecision, ToolCall, ToolEffect, require_key_for_writes
from app.domain.tga.transitions import State
from app.domain.tools import ToolClass

# Which digests a trace in this state must have, and no others: decision, call (with its id), effect.
_BEHIND: dict[str, tuple[bool, bool, bool]] = {
    "PENDING": (False, False, False),
    "AUTHORIZED": (True, False, False),
    "DENIED": (True, False, False),
    "EXECUTING": (True, True, False),
    "COMPLETED": (True, True, True),
    "FAILED": (True, True, True),
}


class ExecutionState(Document):
    """A trace's log, folded: all that recovery needs to go on."""

    schema_id: Literal["tga/v1/execution_state"] = "tga/v1/execution_state"
    trace_id: Uuid7
    state: State
    sequence_number: SequenceNumber
    entry_digest: Sha256
    updated_at: Time
    server_id: Name
    tool_name: Name
    tool_class: ToolClass
    idempotency_key: IdempotencyKey | None
    payload_digest: Sha256
    action_request_digest: Sha256
    supervisor_decision_digest: Sha256 | None
    tool_call_digest: Sha256 | None
    tool_call_id: Uuid7 | None
    tool_effect_digest: Sha256 | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_key_for_writes(self.tool_class, self.idempotency_key)
        self._verify_digests()
        return self

    def _verify_digests(self) -> None:
        decided, called, ended = _BEHIND[self.state]
        if (
            (self.supervisor_decision_digest is not None) != decided
            or (self.tool_call_digest is not None) != called
            or (self.tool_call_id is not None) != called
            or (self.tool_effect_digest is not None) != ended
        ):
            raise ValueError(f"the digests do not fit the state {self.state}")

    @classmethod
    def of_documents(
        cls,
        head: Head,
        updated_at: str,
        request: ActionRequest,
        decision: SupervisorDecision | None,
        call: ToolCall | None,
        effect: ToolEffect | None,
    ) -> Self:
        """What folding the log of these documents gives; for an executor that appended them and knows the head."""
        return cls.of_known(
            {
                "trace_id": request.trace_id,
                "state": head.state,
                "sequence_number": head.sequence_number,
                "entry_digest": head.entry_digest,
                "updated_at": updated_at,
                "server_id": request.server_id,
                "tool_name": request.tool_name,
                "tool_class": request.tool_class,
                "idempotency_key": request.idempotency_key,
                "payload_digest": request.payload_digest,
                "action_request_digest": request.digest(),
                "supervisor_decision_digest": None if decision is None else decision.digest(),
                "tool_call_digest": None if call is None else call.digest(),
                "tool_call_id": None if call is None else call.tool_call_id,
                "tool_effect_digest": None if effect is None else effect.digest(),
            }
        )

    def moved(self, fields: dict[str, Any]) -> Self:
        """The state with these fields, each of them already validated as a field of an entry or artifact."""
        next_state = self.of_known({**self.__dict__, **fields})
        next_state._verify_digests()
        return next_state


class ExecutionCheckpoint(Document):
    """A snapshot of a trace's state; `checkpoint_digest` is over `checkpoint_state` alone (I4)."""

    schema_id: Literal["tga/v1/execution_checkpoint"] = "tga/v1/execution_checkpoint"
    trace_id: Uuid7
    created_at: Time
    checkpoint_state: ExecutionState
    checkpoint_digest: Sha256

    @field_validator("checkpoint_state", mode="before")
    @classmethod
    def _read_state(cls, value: Any) -> Any:
        # The state inside must name its schema, as every document that is read.
        return ExecutionState.from_json(value) if isinstance(value, dict) else value

    @classmethod
    def of(cls, state: ExecutionState, *, created_at: str) -> ExecutionCheckpoint:
        return cls(
            trace_id=state.trace_id,
            created_at=created_at,
            checkpoint_state=state,
            checkpoint_digest=state.digest(),
        )

    def verify(self) -> None:
        """Raise ChecksumMismatch unless the digest is that of the state, and the state is this trace's (I4)."""
        found = self.checkpoint_state.digest()
        if found != self.checkpoint_digest:  # I4
            raise ChecksumMismatch(
                "the checkpoint's state does not hash to its digest",
                expected=self.checkpoint_digest,
                found=found,
            )
        if self.checkpoint_state.trace_id != self.trace_id:
            raise ChecksumMismatch(
                "the checkpoint holds another trace's state",
                expected=self.trace_id,
                found=self.checkpoint_state.trace_id,
            )
