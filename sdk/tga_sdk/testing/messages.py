"""The bodies of requests, with the real gateway's limits: docs/worker-protocol.md, and its schemas."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

INLINE_BYTES_MAX: Final = 32_768
PUT_BYTES_MAX: Final = 262_144
DOCUMENT_BYTES_MAX: Final = 262_144
STATE_BYTES_MAX: Final = 1_048_576
PAGE_RECORDS_MAX: Final = 1_000
PAGE_BYTES_MAX: Final = 1_048_576
PATH_LEVELS_MAX: Final = 16
BRANCHES_MAX: Final = 1_000
CHILD_LEVELS_MAX: Final = 32
OPEN_BELOW_MAX: Final = 10_000
ENTRIES_MAX: Final = 1_000_000
SAFE_INTEGER_MAX: Final = 2**53 - 1
SIGNAL_IDS_KEPT: Final = 256

OWN_RUN_ID: Final = "^[A-Za-z0-9][A-Za-z0-9._:-]{0,95}$"
_NUMBER: Final = "[1-9][0-9]{0,6}"
_TIME: Final = (
    r"^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]\.[0-9]{3}Z$"
)

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[str, StringConstraints(pattern=_TIME)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Text = Annotated[str, StringConstraints(max_length=4_096)]
Count = Annotated[int, Field(ge=0, le=SAFE_INTEGER_MAX)]
Positive = Annotated[int, Field(ge=1, le=ENTRIES_MAX)]
Path = Annotated[
    str, StringConstraints(min_length=1, max_length=96, pattern=rf"^{_NUMBER}((:{_NUMBER})?\.{_NUMBER})*$")
]
RunId = Annotated[str, StringConstraints(min_length=1, max_length=96, pattern=OWN_RUN_ID)]
Milliseconds = Annotated[int, Field(ge=1, le=31_536_000_000)]
Lease = Annotated[str, StringConstraints(min_length=16, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]
WorkerId = Annotated[str, StringConstraints(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
WaitMs = Annotated[int, Field(ge=0, le=60_000)]
Tags = Annotated[list[Name], Field(max_length=16)]
Resume = Literal["snapshot", "recompute"]
ProcedureName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
OperationKind = Literal[
    "step", "tool", "ask", "sleep", "signal", "child", "call",
    "gather", "checkpoint", "turn", "model", "now", "emit", "patched",
]  # fmt: skip


class Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    def to_json(self) -> dict[str, Any]:
        return self.model_dump()


class InlineValue(Part):
    tier: Literal["inline"]
    value: Any


class BlobReference(Part):
    sha256: Sha256
    size_bytes: Count
    media_type: Name
    serializer: Literal["json", "bytes", "text", "pydantic"]


class ArtifactValue(Part):
    tier: Literal["artifact"]
    ref: BlobReference


class SecretSaid(Part):
    tier: Literal["secret"]
    value: Any


class EventValue(Part):
    tier: Literal["event"]
    value: Any


class TransientValue(Part):
    tier: Literal["transient"]


PutValue = Annotated[
    InlineValue | ArtifactValue | SecretSaid | EventValue | TransientValue, Field(discriminator="tier")
]
Value = Annotated[InlineValue | ArtifactValue | EventValue | TransientValue, Field(discriminator="tier")]


class RunError(Part):
    type: Name
    message: Text
    retryable: bool


class SetAt(Part):
    op: Literal["set"]
    at: Annotated[str, StringConstraints(max_length=256, pattern=r"^(/[^/\x00-\x1f]*)*$")]
    to: Any


class RemoveAt(Part):
    op: Literal["remove"]
    at: Annotated[str, StringConstraints(max_length=256, pattern=r"^(/[^/\x00-\x1f]*)*$")]


StateChanges = Annotated[
    list[Annotated[SetAt | RemoveAt, Field(discriminator="op")]], Field(max_length=256, default_factory=list)
]


class LogLine(Part):
    level: Literal["debug", "info", "warning", "error"]
    text: Annotated[str, StringConstraints(max_length=1_024)]
    at: Time


class CheckpointPut(Part):
    type: Literal["checkpoint"]
    path: Path
    kind: OperationKind
    name: Name
    input_digest: Sha256
    outcome: Literal["OK", "ERROR", "RETRY", "INTERRUPTED"]
    value: PutValue | None = None
    error: RunError | None = None
    resume: Resume = "snapshot"
    try_number: Positive = 1
    inner: Count = 0
    state_change: StateChanges
    logs: Annotated[list[LogLine], Field(max_length=64, default_factory=list)]
    started_at: Time
    duration_ms: Count
    source: Text | None = None


class Escalation(Part):
    at: Time
    webhooks: Annotated[list[Name], Field(max_length=16)]


class AskedOfAPerson(Part):
    form: Literal["approve", "input", "select", "review"]
    message: Text
    context: Value | None = None
    answer_schema: dict[str, Any]
    expires_at: Time | None = None
    default: Value | None = None
    webhooks: Annotated[list[Name], Field(max_length=16, default_factory=list)]
    escalations: Annotated[list[Escalation], Field(max_length=8, default_factory=list)]
    callback: Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$", max_length=2048)] | None = None

    @model_validator(mode="after")
    def _check(self) -> AskedOfAPerson:
        times = [level.at for level in self.escalations] + ([] if self.expires_at is None else [self.expires_at])
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("each escalation comes after the one before it, and before the question expires")
        return self


class _Begun(Part):
    path: Path
    name: Name
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None


class AskPut(_Begun):
    type: Literal["ask"]
    request: AskedOfAPerson


class SleepPut(_Begun):
    type: Literal["sleep"]
    wakes_at: Time


class SignalPut(_Begun):
    type: Literal["signal"]
    expires_at: Time | None = None


class StepPut(_Begun):
    type: Literal["step"]


Put = Annotated[CheckpointPut | AskPut | SleepPut | SignalPut | StepPut, Field(discriminator="type")]


class RetrySaid(Part):
    retries: Annotated[int, Field(ge=0, le=1_000)] = 0
    first_ms: Milliseconds = 1_000
    max_ms: Milliseconds = 60_000


class PolicySaid(Part):
    timeout_ms: Milliseconds | None = None
    checkpoint_timeout_ms: Milliseconds | None = None
    retry: RetrySaid = RetrySaid()
    park_after: Annotated[int, Field(ge=1, le=1_000)] = 5
    retention: Literal["keep", "delete_on_success"] = "keep"


class RetryStated(Part):
    retries: Annotated[int, Field(ge=0, le=1_000)]
    first_ms: Milliseconds
    max_ms: Milliseconds


class RunPolicy(Part):
    timeout_ms: Milliseconds | None
    checkpoint_timeout_ms: Milliseconds | None
    retry: RetryStated
    park_after: Annotated[int, Field(ge=1, le=1_000)]
    on_parent_end: Literal["cancel", "abandon"]
    retention: Literal["keep", "delete_on_success"]


class ThenTool(Part):
    type: Literal["tool"]
    path: Path
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None
    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]
    intent: Text | None = None
    retries: Annotated[int, Field(ge=0, le=1_000)] = 0
    timeout_ms: Milliseconds | None = None
    continues_try: Positive | None = None
    wait_ms: WaitMs = 30_000

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.continues_try is not None and self.continues_try >= self.try_number:
            raise ValueError("a call is continued by a later try")
        return self


class ThenChild(Part):
    type: Literal["child"]
    path: Path
    name: Name
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None
    procedure: Name
    version: Name | None = None
    run_id: RunId | None = None
    input: Value
    policy: RunPolicy | None = None
    tags: Annotated[Tags, Field(default_factory=list)]


class ThenSuspend(Part):
    type: Literal["suspend"]
    awaits: Annotated[list[Path], Field(min_length=1, max_length=BRANCHES_MAX)]
    wake: Literal["ANY", "ALL"] = "ANY"
    wait_ms: WaitMs = 0


class ThenComplete(Part):
    type: Literal["complete"]
    output: Value
    positions: Count


class ThenFail(Part):
    type: Literal["fail"]
    error: RunError


class Divergence(Part):
    path: Path
    recorded: Text
    performed: Text
    source: Text | None


class ThenDiverge(Part):
    type: Literal["diverge"]
    divergence: Divergence


class ThenRelease(Part):
    type: Literal["release"]
    reason: Text | None = None
    not_before_ms: Milliseconds | None = None


Then = Annotated[
    ThenTool | ThenChild | ThenSuspend | ThenComplete | ThenFail | ThenDiverge | ThenRelease,
    Field(discriminator="type"),
]


class PutRequest(Part):
    lease: Lease
    attempt: Positive
    after_seq: Annotated[int, Field(ge=0)]
    puts: Annotated[list[Put], Field(max_length=64, default_factory=list)]
    then: Then | None = None


class OfferedProcedure(Part):
    name: Name
    version: Name
    program_digest: Sha256
    accepts: Annotated[list[Name], Field(max_length=64, default_factory=list)]


class LeaseRequest(Part):
    worker: WorkerId
    name: Name
    procedures: Annotated[list[OfferedProcedure], Field(min_length=1, max_length=256)]
    slots: Annotated[int, Field(ge=1, le=256)] = 1
    wait_ms: WaitMs = 0


class Beat(Part):
    run_id: Annotated[
        str, StringConstraints(max_length=225, pattern=r"^([!-.0-~]{1,128}/)?[A-Za-z0-9][A-Za-z0-9._:-]{0,95}$")
    ]
    lease: Lease
    after_seq: Annotated[int, Field(ge=0)] = 0


class BeatRequest(Part):
    worker: WorkerId
    name: Name
    runs: Annotated[list[Beat], Field(max_length=1_000, default_factory=list)]


class EventTrigger(Part):
    event: Name


class ProcedureSaid(Part):
    name: ProcedureName
    version: Name = "1"
    program_digest: Sha256
    language: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+#._-]{0,31}$")] = "python"
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None
    state_schema: dict[str, Any] | None = None
    policy: PolicySaid = PolicySaid()
    triggers: Annotated[list[EventTrigger], Field(max_length=16, default_factory=list)]
    tags: Annotated[Tags, Field(default_factory=list)]


class StartBody(Part):
    procedure: Name
    version: Name | None = None
    input: Any = None
    run_id: RunId | None = None
    policy: PolicySaid | None = None
    tags: Annotated[Tags, Field(default_factory=list)]
    strict_determinism: bool = False


class SignalBody(Part):
    path: Path | None = None
    answer: Any = None
    intent_digest: Sha256 | None = None
    name: Name | None = None
    value: Any = None
    signal_id: Name | None = None
    signature: str | None = None  # not verified here
    key_id: Name | None = None
    answered_at: Time | None = None


class CancelBody(Part):
    rationale: Text | None = None


class Accepted(Part):
    version: Name
    program_digest: Sha256


class Resolved(Part):
    path: Path
    outcome: Literal["OK", "ERROR"]
    value: Value | None
    error: RunError | None

    @model_validator(mode="after")
    def _check(self) -> Resolved:
        if (self.outcome == "OK") != (self.value is not None) or (self.outcome == "OK") != (self.error is None):
            raise ValueError("what succeeded has a value, what failed an error")
        return self


class RetryBody(Part):
    rationale: Text | None = None
    accepts: Accepted | None = None
    resolves: Annotated[list[Resolved], Field(max_length=64, default_factory=list)]


class ForkBody(Part):
    at: Annotated[int, Field(ge=1)] | None = None
    run_id: RunId | None = None
    version: Name | None = None
    state_change: StateChanges


class ToolCallBody(Part):
    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]
    idempotency_key: (
        Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[!-~]([ -~]*[!-~])?$")] | None
    ) = None
    intent: Text | None = None
    trace_id: str | None = None
    wait_ms: Annotated[int, Field(ge=0, le=120_000)] = 30_000


class DecisionBody(Part):
    decision: Literal["APPROVE", "DENY"]
    action_request_digest: Sha256
    rationale: Text | None = None
    signature: str | None = None
    key_id: Name | None = None
    decided_at: Time | None = None
    wait_ms: Annotated[int, Field(ge=0, le=120_000)] = 30_000


class WithdrawalBody(Part):
    rationale: Text | None = None


class EventBody(Part):
    event_id: Name
    payload: Any = None


class CronSpec(Part):
    type: Literal["cron"]
    expression: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
    time_zone: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_+/-]*$")]


class IntervalSpec(Part):
    type: Literal["interval"]
    every_ms: Annotated[int, Field(ge=1_000, le=31_536_000_000)]


class ScheduleBody(Part):
    procedure: ProcedureName
    version: Name | None = None
    input: Any = None
    spec: Annotated[CronSpec | IntervalSpec, Field(discriminator="type")]
    missed: Literal["skip", "one", "all"] = "one"
