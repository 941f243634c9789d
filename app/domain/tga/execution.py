"""A trace being executed by this process, and what a caller is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from app.core.digest import Digest
from app.core.errors import RecoveryFailed
from app.domain.ledger.owned_stream import OwnedStream, Position, StreamPorts
from app.domain.ledger.plans import Sealed
from app.domain.tga.attempts import Attempts
from app.domain.tga.documents import (
    ActionRequest,
    ArtifactDocument,
    Resolution,
    SupervisorDecision,
    ToolCall,
    ToolEffect,
    TraceId,
)
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.ports import Companion, StoredTrace, Waiting
from app.domain.tga.replay import head_of
from app.domain.tga.transitions import TRACE, State

T = TypeVar("T")


class Answer(NamedTuple):
    """Where a trace stands. `effect` is there when it is COMPLETED or FAILED, `decision` once it was decided on."""

    trace_id: TraceId
    state: State
    tool_call_id: str | None
    decision: SupervisorDecision | None
    effect: ToolEffect | None
    waiting: Waiting | None = None
    replayed: bool = False

    @property
    def is_final(self) -> bool:
        return self.state in TRACE.terminal_states

    @property
    def is_at_rest(self) -> bool:
        """Finished, or waiting for a person: no executor needs to continue it now."""
        return self.waiting is not None or self.is_final


class ExecutionSecrets(NamedTuple):
    """The secret arguments of a call on their way to the store, in it, and on their way to the tool server."""

    sealed: Sealed | None = None  # set by the runtime at birth, cleared by the commit that stores it
    are_stored: bool = False  # set by that commit, or by loading
    true_arguments: dict[str, Any] | None = None  # set by the runtime at birth, else before the first send


NO_SECRETS: Final = ExecutionSecrets()


@dataclass(slots=True)
class TraceExecution:
    """A trace being executed by this process. Only the task that executes it changes it: TraceExecutor's, and before
    that is started the runtime's. Callers that wait in other tasks read `committed` and `owned.is_unsettled`."""

    # What the trace is: set at birth, or when it is loaded, for good.
    trace_id: TraceId
    request: ActionRequest
    loaded: ExecutionState | None = None  # None at birth
    claim_effect: Digest | None = None  # what its claim said of the effect when it was loaded

    # Head, entries that are not committed yet, ownership: set by `TraceExecutor.advance` and by commits.
    owned: OwnedStream = field(kw_only=True)
    updated_at: str = ""  # when the head was recorded; set with it

    # The documents behind the head: set by `keep`, when they are loaded or advanced over.
    decision: SupervisorDecision | None = None
    call: ToolCall | None = None
    effect: ToolEffect | None = None

    # Supervision.
    must_ask: bool = False  # the policy said so; set by `TraceExecutor.judge`, which then does not ask it again
    waiting: Waiting | None = None  # set with the head that waits, or by loading; cleared by `begin_anew`

    # Sending: set by `TraceExecutor`, step by step.
    attempts: Attempts = field(default_factory=Attempts)
    secrets: ExecutionSecrets = NO_SECRETS
    companion: Companion | None = None  # set at birth or when it is loaded, for good
    redispatch: Resolution | None = None  # an operator's order: set by `TgaRuntime.resolve`, cleared by the send

    # When each phase was over, as (phase, milliseconds of the steady clock), for the observer; empty without one.
    marks: list[tuple[str, float]] = field(default_factory=list)

    # Last durable answer; the head may be ahead of it. Set by each commit and by loading, cleared by `begin_anew`.
    committed: Answer | None = None

    @classmethod
    def of(cls, stored: StoredTrace, ports: StreamPorts, *, executor_id: str) -> TraceExecution:
        state, position = stored.state, position_of(stored)
        owned = OwnedStream(
            ports,
            state.trace_id,
            executor_id=executor_id,
            head=head_of(state),
            dispatch_attempt=position.dispatch_attempt,
        )
        execution = cls(
            TraceId(state.trace_id),
            request_of(stored),
            state,
            stored.claim_effect,
            owned=owned,
            updated_at=state.updated_at,
            waiting=stored.waiting,
            secrets=ExecutionSecrets(are_stored=True) if stored.has_secrets else NO_SECRETS,
        )
        for record in stored.records:
            execution.keep(record.artifact)
        if execution.call is not None:
            # Every attempt that was begun before is interrupted: how it ended is not known.
            execution.attempts = Attempts.interrupted(
                execution.call.prepared_at, stored.attempt_times, stored.resolution
            )
        execution.committed = execution.answer()
        return execution

    @property
    def state(self) -> ExecutionState | None:
        """The log, folded, of the documents at hand; None before the first of them is appended."""
        head = self.owned.head
        if head.sequence_number == 0:
            return None
        return ExecutionState.of_documents(head, self.updated_at, self.request, self.decision, self.call, self.effect)

    def begin_anew(self) -> None:
        """A person, or time, has ended the wait. Until that is durable no caller may be told anything."""
        self.waiting = self.committed = None

    def keep(self, artifact: ArtifactDocument | None) -> None:
        # isinstance would ask pydantic's metaclass, in Python, each time that it is something else.
        if type(artifact) is SupervisorDecision:
            self.decision = artifact
        elif type(artifact) is ToolCall:
            self.call = artifact
        elif type(artifact) is ToolEffect:
            self.effect = artifact

    def is_continued_by(self, artifact: ArtifactDocument) -> bool:
        """I3: whether it is about this very trace, and about the call that was asked for."""
        if artifact.trace_id != self.trace_id:
            return False
        if type(artifact) is ToolCall:
            return artifact.carries_out(self.request)
        if type(artifact) is ToolEffect:
            return self.call is not None and artifact.tool_call_id == self.call.tool_call_id
        return True

    def answer(self) -> Answer:
        call = self.call
        return Answer(
            self.trace_id,
            self.owned.head.state,  # type: ignore[arg-type]  # a trace's
            None if call is None else call.tool_call_id,
            self.decision,
            self.effect,
            self.waiting,
        )


def answer_of(stored: StoredTrace, *, replayed: bool = True) -> Answer:
    """What is recorded of a trace; `replayed` for a caller whose call was not executed for this answer."""
    state = stored.state
    by_type = {type(record.artifact): record.artifact for record in stored.records}
    decision, effect = by_type.get(SupervisorDecision), by_type.get(ToolEffect)
    return Answer(
        TraceId(state.trace_id),
        state.state,
        state.tool_call_id,
        decision if isinstance(decision, SupervisorDecision) else None,
        effect if isinstance(effect, ToolEffect) else None,
        stored.waiting,
        replayed,
    )


def position_of(stored: StoredTrace) -> Position:
    return Position(Digest(stored.state.entry_digest), len(stored.attempt_times) + 1, stored.waiting)


def request_of(stored: StoredTrace) -> ActionRequest:
    request = stored.records[0].artifact if stored.records else None
    if not isinstance(request, ActionRequest):
        raise RecoveryFailed("the trace's request is missing", stream=TRACE.stream(stored.state.trace_id))
    return request


def known(value: T | None) -> T:
    """What the state promises to be there; a stored trace that breaks the promise cannot go on."""
    if value is None:
        raise RecoveryFailed("the trace lacks what its state says it has")
    return value
