"""The documents of a run. They agree with schemas/tga/v1; a property test holds them together.

Every field is stated: one that has nothing to say is null. `try_number` counts from 1.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from app.core.canonical import JsonValue, canonical_bytes
from app.core.limits import (
    RUN_AWAITS_MAX,
    RUN_ENTRIES_MAX,
    RUN_ESCALATIONS_MAX,
    RUN_LOG_CHARS_MAX,
    RUN_LOG_LINES_MAX,
    RUN_TAGS_MAX,
    WEBHOOKS_MAX,
)
from app.domain.identity import Principal
from app.domain.ledger.documents import (
    Count,
    LogEntry,
    Name,
    Part,
    SequenceNumber,
    Sha256,
    Signature,
    StreamArtifact,
    Text,
    Time,
    require_no_stated_null,
)
from app.domain.runs.requests import REQUEST_OF_KIND, AskRequest, Request, ToolRequest
from app.domain.runs.state import StateChanges
from app.domain.runs.transitions import RUN, RunArtifactType, RunState
from app.domain.runs.values import Path, Resume, RunId, TransientValue, Value
from app.domain.system.documents import Milliseconds, RetryPolicy

Positive = Annotated[int, Field(ge=1, le=RUN_ENTRIES_MAX)]
OperationKind = Literal[
    "step",
    "tool",
    "ask",
    "sleep",
    "signal",
    "child",
    "call",
    "gather",
    "checkpoint",
    "turn",
    "model",
    "now",
    "emit",
    "patched",
]


class RunDocument(StreamArtifact):
    """A document that an entry of a run commits to."""

    artifact_type: ClassVar[RunArtifactType]
    run_id: RunId


class RunError(Part):
    """`retryable`: whether trying again may help. The program, or its retry policy, decides whether it does."""

    type: Name
    message: Text
    retryable: bool


class Trigger(Part):
    type: Literal["call", "schedule", "event", "child", "fork"]
    id: Name | None


class Parent(Part):
    """Whose child the run is: it is told how the run ends."""

    run_id: RunId
    path: Path
    intent_digest: Sha256


class ForkedFrom(Part):
    """The journal up to this entry is the source's; its digest commits to all before it."""

    run_id: RunId
    sequence_number: SequenceNumber
    entry_digest: Sha256
    state_change: StateChanges


class RunPolicy(Part):
    """`timeout_ms`: of the whole run. `checkpoint_timeout_ms`: without a word from its worker. `park_after`: attempts
    in a row without a checkpoint."""

    timeout_ms: Milliseconds | None
    checkpoint_timeout_ms: Milliseconds | None
    retry: RetryPolicy
    park_after: Annotated[int, Field(ge=1, le=1_000)]
    on_parent_end: Literal["cancel", "abandon"]
    retention: Literal["keep", "delete_on_success"]


class AllowedBy(Part):
    """The policy's word on a start: its text, by digest, and which of its rules said so."""

    policy_digest: Sha256 | None
    policy_ids: Annotated[list[Name], Field(max_length=64)]


class RunStart(RunDocument):
    """`strict_determinism`: what a replay would not repeat stops this run, in whichever attempt and at whichever
    gateway; left out where the start did not say so, and the program or its host decides."""

    artifact_type: ClassVar[RunArtifactType] = "run_start"
    schema_id: Literal["tga/v1/run_start"] = "tga/v1/run_start"
    principal: Principal
    procedure: Name
    version: Name
    program_digest: Sha256
    input: Value
    started_at: Time
    trigger: Trigger
    parent: Parent | None
    forked_from: ForkedFrom | None
    policy: RunPolicy
    allowed_by: AllowedBy
    tags: Annotated[list[Name], Field(max_length=RUN_TAGS_MAX)]
    strict_determinism: Literal[True] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_no_stated_null(self, "strict_determinism")
        if (self.trigger.type == "child") != (self.parent is not None):
            raise ValueError("a child names its parent, always and only")
        if (self.trigger.type == "fork") != (self.forked_from is not None):
            raise ValueError("a fork names its source, always and only")
        return self

    @property
    def is_strict(self) -> bool:
        """Whether its caller wanted it stopped by what a replay would not repeat."""
        return self.strict_determinism is True

    def _members(self) -> dict[str, Any]:
        members = super()._members()
        return members if self.is_strict else {n: v for n, v in members.items() if n != "strict_determinism"}

    def to_json(self) -> dict[str, JsonValue]:
        body = super().to_json()
        if not self.is_strict:
            del body["strict_determinism"]
        return body


class WorkerName(Part):
    principal_id: Name
    name: Name


class RunAttempt(RunDocument):
    """LEASED: a worker begins the attempt. RELEASED, LOST, FAILED: it has ended, not before `not_before` comes the
    next. FENCED: a worker whose attempt was over came back and was refused."""

    artifact_type: ClassVar[RunArtifactType] = "run_attempt"
    schema_id: Literal["tga/v1/run_attempt"] = "tga/v1/run_attempt"
    attempt: Positive
    change: Literal["LEASED", "RELEASED", "LOST", "FAILED", "FENCED"]
    worker: WorkerName
    program_digest: Sha256
    reason: Text | None
    error: RunError | None
    not_before: Time | None
    at: Time

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.change == "FAILED") != (self.error is not None):
            raise ValueError("an attempt that failed says why in `error`, always and only")
        return self


class RunIntent(RunDocument):
    """What the worker is about to do, durable before it is done. `source`: the line of the program that performs it;
    left out where the worker does not say it."""

    artifact_type: ClassVar[RunArtifactType] = "run_intent"
    schema_id: Literal["tga/v1/run_intent"] = "tga/v1/run_intent"
    attempt: Positive
    path: Path
    kind: Literal["step", "tool", "ask", "sleep", "signal", "child"]
    name: Name
    input_digest: Sha256
    try_number: Positive
    request: Request
    source: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_no_stated_null(self, "source")
        expected = REQUEST_OF_KIND[self.kind]
        if type(self.request) is not expected:
            raise ValueError(f"the request of a {self.kind} is a {expected.__name__}")
        return self

    def _members(self) -> dict[str, Any]:
        members = super()._members()
        return members if self.source is not None else {n: v for n, v in members.items() if n != "source"}

    def to_json(self) -> dict[str, JsonValue]:
        body = super().to_json()
        if self.source is None:
            del body["source"]
        return body

    @property
    def due_at(self) -> str | None:
        """When it ends by itself: a sleep is over, a question or a wait for a signal expires."""
        return self.request.due_at

    @property
    def escalates_at(self) -> tuple[str, ...]:
        """When a question that is still open is told to others."""
        return self.request.escalates_at

    @property
    def has_default(self) -> bool:
        """Whether a question whose time is over is answered, and does not time out."""
        return isinstance(self.request, AskRequest) and self.request.default is not None

    @property
    def retries(self) -> int:
        """How often an answer may say RETRY."""
        return self.request.retries if isinstance(self.request, ToolRequest) else 0


class LogLine(Part):
    level: Literal["debug", "info", "warning", "error"]
    text: Annotated[str, StringConstraints(max_length=RUN_LOG_CHARS_MAX)]
    at: Time


class RunCheckpoint(RunDocument):
    """An operation has ended, or one try of it. `inner`: how many operations it performed inside."""

    artifact_type: ClassVar[RunArtifactType] = "run_checkpoint"
    schema_id: Literal["tga/v1/run_checkpoint"] = "tga/v1/run_checkpoint"
    attempt: Positive
    path: Path
    kind: OperationKind
    name: Name
    input_digest: Sha256
    outcome: Literal["OK", "ERROR", "RETRY", "INTERRUPTED"]
    value: Value | None
    error: RunError | None
    resume: Resume
    try_number: Positive
    inner: Count
    state_change: StateChanges
    logs: Annotated[list[LogLine], Field(max_length=RUN_LOG_LINES_MAX)]
    started_at: Time
    duration_ms: Count
    source: Text | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.outcome == "OK") != (self.value is not None) or (self.outcome == "OK") != (self.error is None):
            raise ValueError("an operation that succeeded has a value, any other an error")
        if self.outcome != "OK" and self.state_change:
            raise ValueError("what a failed operation changed is dropped")
        if self.resume == "recompute" and self.state_change:
            raise ValueError("what is recomputed changes no state")
        if self.resume == "snapshot" and isinstance(self.value, TransientValue):
            raise ValueError("a transient value is not recorded, so a replay cannot skip it: `recompute`")
        return self


class AnsweredBy(Part):
    type: Literal["person", "timer", "signal", "child", "tool", "operator"]
    id: Name


class RunAnswer(RunDocument):
    """What others did for an operation that has begun. RETRY: it is tried again under a new intent. A person's is
    signed, by their own key or by the gateway for them; all others' say nothing in `signature`."""

    artifact_type: ClassVar[RunArtifactType] = "run_answer"
    schema_id: Literal["tga/v1/run_answer"] = "tga/v1/run_answer"
    path: Path
    intent_digest: Sha256
    wakes: Literal["YES", "NO"]
    outcome: Literal["OK", "ERROR", "TIMEOUT", "RETRY"]
    value: Value | None
    error: RunError | None
    answered_by: AnsweredBy
    answered_at: Time
    signature: Signature | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.outcome == "OK") != (self.error is None):
            raise ValueError("an answer that is not OK says why in `error`, always and only")
        if self.outcome == "OK" and self.value is None:
            raise ValueError("an answer that is OK has a value")
        return self

    @property
    def is_of_a_person(self) -> bool:
        return self.answered_by.type in ("person", "operator")

    @property
    def signer_id(self) -> str:
        """The principal who answered."""
        return self.answered_by.id

    def signed_bytes(self) -> bytes:
        """What its signature is over: the question, the answer, who and when; not whether it wakes the run, which the
        gateway adds."""
        body = self.to_json()
        for added in ("wakes", "signature"):
            del body[added]
        return canonical_bytes(body)


class RunEscalation(RunDocument):
    """Nobody has answered a question in time, so others are told of it; it stays open. `level`: which of the intent's
    escalations this is, from 1. `announced_to`: the webhooks of this gateway that were told."""

    artifact_type: ClassVar[RunArtifactType] = "run_escalation"
    schema_id: Literal["tga/v1/run_escalation"] = "tga/v1/run_escalation"
    path: Path
    intent_digest: Sha256
    level: Annotated[int, Field(ge=1, le=RUN_ESCALATIONS_MAX)]
    announced_to: Annotated[list[Name], Field(max_length=WEBHOOKS_MAX)]
    escalated_at: Time


class RunSignal(RunDocument):
    artifact_type: ClassVar[RunArtifactType] = "run_signal"
    schema_id: Literal["tga/v1/run_signal"] = "tga/v1/run_signal"
    name: Name
    signal_id: Name
    value: Value
    sent_by: Name
    sent_at: Time


class RunSuspension(RunDocument):
    """The worker leaves; the run waits for one of these operations, or for all of them."""

    artifact_type: ClassVar[RunArtifactType] = "run_suspension"
    schema_id: Literal["tga/v1/run_suspension"] = "tga/v1/run_suspension"
    attempt: Positive
    awaits: Annotated[list[Path], Field(min_length=1, max_length=RUN_AWAITS_MAX)]
    wake: Literal["ANY", "ALL"]


class Divergence(Part):
    """The program is not the one that wrote the journal: what each of them has at the first address that differs."""

    path: Path
    recorded: Text
    performed: Text
    source: Text | None


class EndedBy(Part):
    type: Literal["worker", "person", "time", "parent", "gateway"]
    id: Name


class RunEnd(RunDocument):
    """`positions`: how many operations the program itself performed; null where it was not the program that ended."""

    artifact_type: ClassVar[RunArtifactType] = "run_end"
    schema_id: Literal["tga/v1/run_end"] = "tga/v1/run_end"
    attempt: Count
    outcome: Literal["COMPLETED", "FAILED", "PARKED", "DIVERGED", "CANCELLED"]
    output: Value | None
    error: RunError | None
    divergence: Divergence | None
    positions: Count | None
    ended_by: EndedBy
    ended_at: Time

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.outcome == "COMPLETED") != (self.output is not None):
            raise ValueError("a run that is completed has an output, always and only")
        if (self.outcome == "COMPLETED") != (self.error is None):
            raise ValueError("a run that is not completed says why in `error`, always and only")
        if (self.outcome == "DIVERGED") != (self.divergence is not None):
            raise ValueError("a divergence is named, always and only")
        if self.outcome == "COMPLETED" and self.positions is None:
            raise ValueError("a run that is completed says how many operations it performed")
        return self


class Accepted(Part):
    version: Name
    program_digest: Sha256


class Resolved(Part):
    """An operator's word on a step that was interrupted."""

    path: Path
    outcome: Literal["OK", "ERROR"]
    value: Value | None
    error: RunError | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.outcome == "OK") != (self.value is not None) or (self.outcome == "OK") != (self.error is None):
            raise ValueError("what succeeded has a value, what failed an error")
        return self


class RunResumption(RunDocument):
    """`frontier_digest`: of the frontier after `reopens`, so that a verifier computes the same one."""

    artifact_type: ClassVar[RunArtifactType] = "run_resumption"
    schema_id: Literal["tga/v1/run_resumption"] = "tga/v1/run_resumption"
    resumed_by: Name
    rationale: Text
    accepts: Accepted | None
    reopens: Annotated[list[Path], Field(max_length=RUN_AWAITS_MAX)]
    frontier_digest: Sha256
    resolves: Annotated[list[Resolved], Field(max_length=RUN_AWAITS_MAX)]
    resumed_at: Time


RUN_MODELS: Final[dict[str, type[RunDocument]]] = {
    model.artifact_type: model
    for model in (
        RunStart,
        RunAttempt,
        RunIntent,
        RunCheckpoint,
        RunAnswer,
        RunEscalation,
        RunSignal,
        RunSuspension,
        RunEnd,
        RunResumption,
    )
}


class RunLogEntry(LogEntry):
    """One link of a run's chain."""

    kind: ClassVar = RUN
    schema_id: Literal["tga/v1/run_log_entry"] = "tga/v1/run_log_entry"
    run_id: RunId
    from_state: RunState
    to_state: RunState
    artifact_type: RunArtifactType
