"""What workers send and are answered: the worker protocol, as docs/worker-protocol.md tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from app.core.limits import (
    RUN_AWAITS_MAX,
    RUN_LEASE_WAIT_MS_MAX,
    RUN_LOG_LINES_MAX,
    RUN_PUTS_MAX,
    RUN_SLOTS_MAX,
    RUN_TAGS_MAX,
)
from app.domain.ledger.documents import Count, Name, Part, Sha256, Text, Time
from app.domain.runs.documents import (
    Divergence,
    LogLine,
    OperationKind,
    Positive,
    RunError,
    RunPolicy,
)
from app.domain.runs.replay import RunRecord
from app.domain.runs.requests import CallbackUrl, Escalations
from app.domain.runs.state import StateChanges
from app.domain.runs.values import (
    ArtifactValue,
    EventValue,
    InlineValue,
    Path,
    Resume,
    RunId,
    TransientValue,
    Value,
)
from app.domain.system.documents import Milliseconds
from app.domain.tga.documents import ToolEffect

Lease = Annotated[str, StringConstraints(min_length=16, max_length=128, pattern=r"^[A-Za-z0-9_-]+$")]
WorkerId = Annotated[str, StringConstraints(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
WaitMs = Annotated[int, Field(ge=0, le=RUN_LEASE_WAIT_MS_MAX)]
Retries = Annotated[int, Field(ge=0, le=1_000)]


class SecretSaid(Part):
    """A value that only workers of the run may read: the gateway seals it before it is recorded."""

    tier: Literal["secret"]
    value: Any


PutValue = Annotated[
    InlineValue | ArtifactValue | SecretSaid | EventValue | TransientValue, Field(discriminator="tier")
]


class CheckpointPut(Part):
    """An operation has ended, or one try of it."""

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
    state_change: StateChanges = Field(default_factory=list)
    logs: Annotated[list[LogLine], Field(max_length=RUN_LOG_LINES_MAX)] = Field(default_factory=list)
    started_at: Time
    duration_ms: Count
    source: Text | None = None


class AskedOfAPerson(Part):
    """A question. Without `expires_at` it stays open until a person answers; `default` is the answer after that.
    `escalations`: when others are told that nobody has answered yet, the earliest first, all before it expires.
    `callback`: a URL that is told of it, at a host that the gateway allows."""

    form: Literal["approve", "input", "select", "review"]
    message: Text
    context: Value | None = None
    answer_schema: dict[str, Any]
    expires_at: Time | None = None
    default: Value | None = None
    webhooks: Annotated[list[Name], Field(max_length=16)] = Field(default_factory=list)
    escalations: Escalations = Field(default_factory=list)
    callback: CallbackUrl | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        times = [level.at for level in self.escalations] + ([] if self.expires_at is None else [self.expires_at])
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise ValueError("each escalation comes after the one before it, and before the question expires")
        return self


class AskPut(Part):
    type: Literal["ask"]
    path: Path
    name: Name
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None
    request: AskedOfAPerson


class SleepPut(Part):
    type: Literal["sleep"]
    path: Path
    name: Name
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None
    wakes_at: Time


class SignalPut(Part):
    """The program waits for the next signal of this name."""

    type: Literal["signal"]
    path: Path
    name: Name
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None
    expires_at: Time | None = None


class StepPut(Part):
    """A step that is performed at most once, or shown while it runs, is about to begin."""

    type: Literal["step"]
    path: Path
    name: Name
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None


Put = Annotated[CheckpointPut | AskPut | SleepPut | SignalPut | StepPut, Field(discriminator="type")]


class ThenTool(Part):
    """Call a tool as the run's starter. `retries`: after the tool said for certain that it failed. `timeout_ms`: after
    which the run waits no longer, and the answer is TIMEOUT; the call itself goes on. `continues_try`: which try of
    this operation has ended so; this one waits for the same call again, under the same key."""

    type: Literal["tool"]
    path: Path
    input_digest: Sha256
    try_number: Positive = 1
    source: Text | None = None
    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]
    intent: Text | None = None
    retries: Retries = 0
    timeout_ms: Milliseconds | None = None
    continues_try: Positive | None = None
    wait_ms: WaitMs = 30_000

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.continues_try is not None and self.continues_try >= self.try_number:
            raise ValueError("a call is continued by a later try")
        return self


class ThenChild(Part):
    """Start another run, which this one can wait for."""

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
    tags: Annotated[list[Name], Field(max_length=RUN_TAGS_MAX)] = Field(default_factory=list)


class ThenSuspend(Part):
    """Leave, and be leased again when one, or all, of these have ended. Held for `wait_ms` before."""

    type: Literal["suspend"]
    awaits: Annotated[list[Path], Field(min_length=1, max_length=RUN_AWAITS_MAX)]
    wake: Literal["ANY", "ALL"] = "ANY"
    wait_ms: WaitMs = 0


class ThenComplete(Part):
    type: Literal["complete"]
    output: Value
    positions: Count


class ThenFail(Part):
    type: Literal["fail"]
    error: RunError


class ThenDiverge(Part):
    type: Literal["diverge"]
    divergence: Divergence


class ThenRelease(Part):
    """Give the run back, for another worker: this one stops. `not_before_ms`: from now on."""

    type: Literal["release"]
    reason: Text | None = None
    not_before_ms: Milliseconds | None = None


Then = Annotated[
    ThenTool | ThenChild | ThenSuspend | ThenComplete | ThenFail | ThenDiverge | ThenRelease,
    Field(discriminator="type"),
]


class PutRequest(Part):
    """`after_seq`: up to which entry the worker has seen the journal."""

    lease: Lease
    attempt: Positive
    after_seq: Annotated[int, Field(ge=0)]
    puts: Annotated[list[Put], Field(max_length=RUN_PUTS_MAX)] = Field(default_factory=list)
    then: Then | None = None


class OfferedProcedure(Part):
    """A procedure that a worker can run. `accepts`: other versions whose runs it may go on with."""

    name: Name
    version: Name
    program_digest: Sha256
    accepts: Annotated[list[Name], Field(max_length=64)] = Field(default_factory=list)


class LeaseRequest(Part):
    """`worker`: an id that the worker process has chosen for its life; `name` is for people."""

    worker: WorkerId
    name: Name
    procedures: Annotated[list[OfferedProcedure], Field(min_length=1, max_length=256)]
    slots: Annotated[int, Field(ge=1, le=RUN_SLOTS_MAX)] = 1
    wait_ms: WaitMs = 0


class Beat(Part):
    run_id: RunId
    lease: Lease
    after_seq: Annotated[int, Field(ge=0)] = 0


class BeatRequest(Part):
    worker: WorkerId
    name: Name
    runs: Annotated[list[Beat], Field(max_length=1_000)] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """All that a worker needs to go on with a run. `checkpoints`: how many entries its journal has."""

    run_id: str
    attempt: int
    lease: str
    procedure: str
    version: str
    program_digest: str
    input: Value
    salt: str
    draw_salt: str
    sequence_number: int
    first_seq: int
    policy: RunPolicy
    tenant: str
    started_at: str
    strict_determinism: bool
    lease_ms: int


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """`news`: what others have recorded after `after_seq`. `result`: what became of `then`. `effects`: by trace, those
    of news that stand on streams of their own, where they are known without reading them."""

    directive: Literal["CONTINUE", "STOP", "SUSPENDED", "DONE"]
    sequence_number: int
    reason: str | None = None
    news: list[RunRecord] = field(default_factory=list)
    result: dict[str, Any] | None = None
    effects: Mapping[str, ToolEffect | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    run_id: str
    directive: Literal["CONTINUE", "STOP"]
    reason: str | None
    sequence_number: int
    news: list[RunRecord] = field(default_factory=list)
