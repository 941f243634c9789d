"""The shapes of what the routes of runs and of workers answer, for OpenAPI and for those who check answers."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, StringConstraints

from app.api.documents import ListPage, ScopedPage, Shape
from app.core.limits import RUN_LISTED_ENTRIES_MAX
from app.domain.addresses import OWN_RUN_ID_PATTERN
from app.domain.ledger.documents import Count, Name, Sha256, Text, Time
from app.domain.runs.documents import Divergence, OperationKind, RunError, RunPolicy, Trigger, WorkerName
from app.domain.runs.engine.messages import Lease
from app.domain.runs.transitions import RunArtifactType, RunState
from app.domain.runs.values import Path, Value

Status = Literal["running", "waiting", "waiting_for_human", "completed", "failed", "cancelled", "parked", "diverged"]
WaitingFor = Literal["worker", "person", "time", "signal", "child", "tool", "operator"]
OwnRunId = Annotated[str, StringConstraints(pattern=OWN_RUN_ID_PATTERN)]

_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_TIME: Final = "2026-01-01T00:00:00.000Z"
_LEASE: Final = "Zm9yIGV4YW1wbGUgb25seSwgbm90IGE"
_POLICY: Final[dict[str, Any]] = {
    "timeout_ms": None,
    "checkpoint_timeout_ms": 300_000,
    "retry": {"retries": 2, "first_ms": 1_000, "max_ms": 60_000},
    "park_after": 5,
    "on_parent_end": "cancel",
    "retention": "keep",
}
_LISTED: Final[dict[str, Any]] = {
    "run_id": "order-7",
    "procedure": "onboard",
    "version": "1.2.0",
    "state": "WAITING",
    "status": "waiting_for_human",
    "waiting": "person",
    "attempt": 1,
    "principal_id": "agent-1",
    "started_at": _TIME,
    "updated_at": _TIME,
}
_RUN: Final[dict[str, Any]] = {
    **_LISTED,
    "program_digest": _DIGEST,
    "notice": None,
    "failures": 0,
    "worker": None,
    "input": {"tier": "inline", "value": {"email": "a@example.org"}},
    "output": None,
    "error": None,
    "divergence": None,
    "awaits": [
        {
            "path": "2",
            "kind": "ask",
            "name": "pay?",
            "due_at": None,
            "level": 0,
            "intent_digest": _DIGEST,
            "is_awaited": True,
            "source": "onboard.py:12",
        }
    ],
    "steps": [
        {
            "path": "1",
            "kind": "step",
            "name": "plan",
            "status": "completed",
            "tries": 1,
            "attempt": 1,
            "value": {"tier": "inline", "value": {"steps": 3}},
            "error": None,
            "started_at": _TIME,
            "duration_ms": 12,
        }
    ],
    "steps_left_out": False,
    "sequence_number": 5,
    "entry_digest": _DIGEST,
    "trigger": {"type": "call", "id": None},
    "parent": None,
    "forked_from": None,
    "policy": _POLICY,
    "tags": ["crm"],
    "strict_determinism": False,
}
_RECORD: Final[dict[str, Any]] = {
    "run_id": "order-7",
    "sequence_number": 3,
    "artifact_type": "run_checkpoint",
    "artifact_digest": _DIGEST,
    "recorded_at": _TIME,
    "attempt": 1,
    "path": "1",
    "kind": "step",
    "name": "plan",
    "input_digest": _DIGEST,
    "outcome": "OK",
    "value": {"tier": "inline", "value": {"steps": 3}},
}
_BEAT: Final[dict[str, Any]] = {
    "run_id": "order-7",
    "directive": "CONTINUE",
    "reason": None,
    "sequence_number": 12,
    "news": [],
}


_ENTRY: Final[dict[str, Any]] = {
    "schema_id": "tga/v1/run_log_entry",
    "schema_version": "1.0",
    "run_id": "order-7",
    "sequence_number": 2,
    "prev_entry_digest": _DIGEST,
    "from_state": "SCHEDULED",
    "to_state": "RUNNING",
    "artifact_type": "run_attempt",
    "artifact_digest": _DIGEST,
    "executor_id": "019b76da-a800-7000-8000-0000000000ff",
    "recorded_at": _TIME,
}


def _example(value: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": value})


class RunItem(Shape):
    run_id: OwnRunId
    procedure: Name
    version: Name
    state: RunState
    status: Status
    waiting: WaitingFor | None = Field(description="For whom or what it rests.")
    attempt: Count
    principal_id: Name = Field(description="Who started it.")
    started_at: Time
    updated_at: Time


class ListedJournal(Shape):
    entries: int = Field(description="How many there are.")
    newest: list[RunArtifactType] = Field(
        max_length=RUN_LISTED_ENTRIES_MAX, description="What the newest of them are, the newest last."
    )


class ListedRunItem(RunItem):
    notice: Text | None = Field(description="What somebody should do, where that is known.")
    journal: ListedJournal | None = Field(description="Null unless the request asks for `newest`.")


class RunPage(ScopedPage):
    model_config = _example({"items": [{**_LISTED, "notice": None, "journal": None}], "next": None, "scope": "tenant"})
    items: list[ListedRunItem]


class RunEntryItem(Shape):
    """As an item of a trace's entries: `entry` and `artifact` are the stored canonical bytes."""

    sequence_number: int
    entry_digest: Sha256
    entry: dict[str, Any]
    artifact: dict[str, Any] | None = Field(description="Null when its payload is gone.")


class RunEntryPage(ListPage):
    model_config = _example(
        {
            "items": [{"sequence_number": 2, "entry_digest": _DIGEST, "entry": _ENTRY, "artifact": None}],
            "next": None,
        }
    )
    next: str | None = Field(description="The `after_seq` of the next page; null when there is none now.")
    items: list[RunEntryItem]


class AwaitedItem(Shape):
    """Something that has begun and that others can end."""

    path: Path
    kind: OperationKind
    name: Name
    due_at: Time | None
    level: Count = Field(description="How often a question was escalated.")
    intent_digest: Sha256 = Field(description="Of exactly this request: an answer may name it.")
    is_awaited: bool = Field(description="The run rests until this, or this among others, has ended.")
    source: Text | None = Field(description="The line of the program that performs it, where the worker has said it.")


class StepItem(Shape):
    """One operation of the program itself; those inside of others stand in the journal. A flow's steps are all there,
    `pending` before they begin."""

    path: Path
    kind: OperationKind
    name: Name
    status: Literal["pending", "in_progress", "completed", "failed", "retrying", "interrupted"]
    tries: Count
    attempt: Count
    value: Value | None
    error: RunError | None
    started_at: Time | None
    duration_ms: Count | None


class Fork(Shape):
    run_id: OwnRunId
    sequence_number: int
    entry_digest: Sha256
    state_change: list[dict[str, Any]]


class RunDescribed(RunItem):
    model_config = _example(_RUN)
    program_digest: Sha256
    notice: Text | None = Field(description="What somebody should do, where that is known.")
    failures: Count = Field(description="Attempts in a row that ended without a checkpoint.")
    worker: WorkerName | None
    input: Value
    output: Value | None
    error: RunError | None
    divergence: Divergence | None
    awaits: list[AwaitedItem]
    steps: list[StepItem] = Field(description="The newest ones, in their order.")
    steps_left_out: bool = Field(description="There are others than those; the journal has all.")
    sequence_number: Count
    entry_digest: Sha256
    trigger: Trigger
    parent: OwnRunId | None
    forked_from: Fork | None
    policy: RunPolicy
    tags: list[Name]
    strict_determinism: bool = Field(description="What a replay would not repeat stops it, as its start says.")


class RunStarted(RunDescribed):
    model_config = _example({**_RUN, "replayed": False})
    replayed: bool = Field(description="This start had been made before, and started nothing.")


class RunErasedDocument(Shape):
    model_config = _example({"run_id": "order-7", "erased": True, "is_new": True})
    run_id: OwnRunId
    erased: Literal[True]
    is_new: bool = Field(description="False: it had been erased before, and nothing changed.")


class RunStateDocument(Shape):
    model_config = _example({"run_id": "order-7", "at": 12, "run_state": "RUNNING", "state": {"stage": "billing"}})
    run_id: OwnRunId
    at: Count = Field(description="After which entry.")
    run_state: RunState
    state: dict[str, Any] = Field(description="What the program keeps in `ctx.state`.")


class JournalItem(Shape):
    """What the artifact says, with its place in the journal. Of an answer `joined` is what the tool or child returned.
    The first record of a fork has a number below 1."""

    model_config = ConfigDict(extra="allow")
    run_id: OwnRunId
    sequence_number: int
    artifact_type: RunArtifactType
    artifact_digest: Sha256
    recorded_at: Time


class JournalPage(Shape):
    model_config = _example({"items": [_RECORD], "next": 3})
    items: list[JournalItem]
    next: int | None = Field(description="The `after_seq` of the next page; null after the last record.")


class OperationRecords(Shape):
    model_config = _example({"items": [_RECORD]})
    items: list[JournalItem]


class LeasedItem(Shape):
    run_id: OwnRunId
    attempt: Count
    lease: Lease = Field(description="A secret between this worker and the gateways.")
    procedure: Name
    version: Name
    program_digest: Sha256
    input: Value
    salt: str = Field(description="Hex: input digests are keyed with it.")
    draw_salt: str = Field(description="Hex: random numbers and ids are drawn from it.")
    sequence_number: Count = Field(description="How far the journal goes.")
    first_seq: int = Field(description="After which number the journal begins: 0, or below for a fork.")
    policy: RunPolicy
    tenant: Name
    started_at: Time
    strict_determinism: bool = Field(description="What a replay would not repeat must stop the run.")
    lease_ms: Count = Field(description="How long the worker may be silent.")
    traceparent: str = Field(description="W3C Trace Context of this attempt: the parent of the worker's spans.")


class LeaseAnswered(Shape):
    model_config = _example(
        {
            "runs": [
                {
                    "run_id": "order-7",
                    "attempt": 1,
                    "lease": _LEASE,
                    "procedure": "onboard",
                    "version": "1.2.0",
                    "program_digest": _DIGEST,
                    "input": {"tier": "inline", "value": {"email": "a@example.org"}},
                    "salt": "ab" * 32,
                    "draw_salt": "cd" * 32,
                    "sequence_number": 2,
                    "first_seq": 0,
                    "policy": _POLICY,
                    "tenant": "default",
                    "started_at": _TIME,
                    "strict_determinism": False,
                    "lease_ms": 30_000,
                    "traceparent": f"00-{'4b' * 16}-{'ab' * 8}-01",
                }
            ]
        }
    )
    runs: list[LeasedItem] = Field(description="None: nothing was ready within `wait_ms`; ask again.")


class BeatAnswered(Shape):
    model_config = _example(_BEAT)
    run_id: OwnRunId
    directive: Literal["CONTINUE", "STOP"]
    reason: Literal["LEASE_LOST", "CANCELLED", "ENDED"] | None
    sequence_number: Count
    news: list[JournalItem] = Field(description="What others have recorded after `after_seq`.")


class BeatsAnswered(Shape):
    model_config = _example({"runs": [_BEAT]})
    runs: list[BeatAnswered]


class PutAnswered(Shape):
    model_config = _example(
        {"directive": "DONE", "reason": None, "sequence_number": 4, "news": [], "result": {"state": "COMPLETED"}}
    )
    directive: Literal["CONTINUE", "STOP", "SUSPENDED", "DONE"]
    reason: Literal["LEASE_LOST", "CANCELLED", "ENDED"] | None = Field(
        description="With STOP: nothing of the request was stored."
    )
    sequence_number: Count
    news: list[JournalItem] = Field(description="What others have recorded after `after_seq`.")
    result: dict[str, Any] | None = Field(description="What became of `then`.")
