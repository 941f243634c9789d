"""What the gateway answers, as types. Fields that a newer gateway adds are kept: `model_extra` has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from tga_sdk.plain import tool_output

AT_REST: Final = ("completed", "failed", "cancelled", "parked", "diverged")


class Answered(BaseModel):
    """What all of these are: read, never changed."""

    model_config = ConfigDict(frozen=True, extra="allow")


@dataclass(frozen=True, slots=True)
class Result:
    """A tool call that was completed. `output` is what the tool answered; `replayed`: it was recorded before, and
    nothing was executed now. `effect` is the record: attempts, basis, times."""

    output: Any
    key: str
    trace_id: str
    tool_call_id: str | None = None
    replayed: bool = False
    effect: dict[str, Any] = field(default_factory=dict, repr=False)


class Trace(Answered):
    """One call: where it stands, and what is recorded of it."""

    trace_id: str
    state: str
    waiting: str | None = None
    server_id: str | None = None
    tool_name: str | None = None
    principal_id: str | None = None
    idempotency_key: str | None = None
    action_request_digest: str | None = None
    tool_call_digest: str | None = None
    expires_at: str | None = None
    artifacts: dict[str, dict[str, Any] | None] | None = None


class TraceItem(Answered):
    """One call, as it stands in a list."""

    trace_id: str
    state: str
    waiting: str | None = None
    server_id: str | None = None
    tool_name: str | None = None
    principal_id: str | None = None
    updated_at: str | None = None
    expires_at: str | None = None


class Approval(Answered):
    """What waits for a person: a call (`kind` is `call`) or a question of a run (`run`)."""

    kind: str
    trace_id: str | None = None
    action_request_digest: str | None = None
    server_id: str | None = None
    tool_name: str | None = None
    arguments: dict[str, Any] | None = None
    intent: str | None = None
    run_id: str | None = None
    path: str | None = None
    procedure: str | None = None
    request: dict[str, Any] | None = None
    intent_digest: str | None = None
    principal_id: str | None = None
    expires_at: str | None = None
    problem: str | None = None


class Moved(Answered):
    """Where a call stands after a decision or a withdrawal."""

    trace_id: str
    state: str
    waiting: str | None = None
    decision: dict[str, Any] | None = None
    tool_effect: dict[str, Any] | None = None

    @property
    def output(self) -> Any:
        """What the tool answered, where it has."""
        return None if self.tool_effect is None else output_of(self.tool_effect)


class Entry(Answered):
    """One entry of a trace or a run, as it came: what happened (`kind`), and the recorded document."""

    sequence_number: int
    entry_digest: str
    entry: dict[str, Any]
    artifact: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """What was recorded: `action_request`, `tool_effect`, `run_checkpoint`, ..."""
        return str(self.entry.get("artifact_type"))

    @property
    def state(self) -> str:
        """The state after this entry."""
        return str(self.entry.get("to_state"))

    @property
    def is_rest(self) -> bool:
        """Of a run: whether nothing happens to it after this entry unless a person has it go on."""
        return self.state.lower() in AT_REST


class Tool(Answered):
    """A tool of the gateway. One that is quarantined shows an agent no description and no schema."""

    server_id: str
    tool_name: str
    tool_class: str = "write"
    description: str | None = None
    tags: list[str] = Field(default_factory=list)
    input_schema: dict[str, Any] = Field(default_factory=dict)
    pin: dict[str, Any] | None = None

    @property
    def is_quarantined(self) -> bool:
        """Its definition has changed and no operator has accepted that: calls are refused."""
        return (self.pin or {}).get("status") == "quarantined"


class RunItem(Answered):
    """A run, as it stands in a list."""

    run_id: str
    procedure: str
    version: str
    state: str
    status: str
    waiting: str | None = None
    notice: str | None = None
    attempt: int = 0
    started_at: str | None = None
    updated_at: str | None = None

    @property
    def has_ended(self) -> bool:
        """Nothing happens to it any more by itself: completed, failed, cancelled, parked or diverged."""
        return self.status in AT_REST


class Run(RunItem):
    """A run: what it waits for, its newest steps, its output or error. `replayed`: this start had been made before."""

    input: dict[str, Any] | None = None
    output: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    divergence: dict[str, Any] | None = None
    awaits: list[dict[str, Any]] = Field(default_factory=list)
    steps: list[dict[str, Any]] = Field(default_factory=list)
    sequence_number: int = 0
    replayed: bool = False


class RunState(Answered):
    """The state that a program keeps, after entry `at` of its journal."""

    run_id: str
    at: int
    run_state: str
    state: dict[str, Any]


class Started(Answered):
    """What one event has started of one procedure, or why it has not."""

    procedure: str
    run_id: str
    is_new: bool
    problem: dict[str, Any] | None = None


class Triggered(Answered):
    """What an event has started."""

    event: str
    event_id: str
    runs: list[Started]


def output_of(effect: dict[str, Any]) -> Any:
    return tool_output(effect.get("output"))
