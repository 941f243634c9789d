"""The shapes of what reading routes answer, for OpenAPI and for those who check answers against it."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.domain.ledger.documents import IdempotencyKey, Name, Sha256, Time, Uuid7
from app.domain.tga.transitions import State
from app.domain.tools import ToolClass

Waiting = Literal["supervisor", "operator"]

_TRACE: Final = "019b76da-a800-7000-8000-000000000001"
_TIME: Final = "2026-01-01T00:00:00.000Z"
_DIGEST: Final = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_REQUEST: Final[dict[str, Any]] = {
    "schema_id": "tga/v1/action_request",
    "schema_version": "1.0",
    "trace_id": _TRACE,
    "requested_at": _TIME,
    "expires_at": None,
    "principal": {"principal_id": "agent-1", "tenant": "default"},
    "server_id": "pay",
    "tool_name": "charge",
    "tool_class": "write",
    "tool_definition_digest": _DIGEST,
    "arguments": {"amount": 7},
    "idempotency_key": "order-17",
    "intent": None,
}
_ENTRY: Final[dict[str, Any]] = {
    "schema_id": "tga/v1/execution_log_entry",
    "schema_version": "1.0",
    "trace_id": _TRACE,
    "sequence_number": 1,
    "prev_entry_digest": "0" * 64,
    "from_state": "PENDING",
    "to_state": "PENDING",
    "artifact_type": "action_request",
    "artifact_digest": _DIGEST,
    "executor_id": "019b76da-a800-7000-8000-0000000000ff",
    "recorded_at": _TIME,
}
_ITEM: Final[dict[str, Any]] = {"sequence_number": 1, "entry_digest": _DIGEST, "entry": _ENTRY, "artifact": _REQUEST}
_LISTED: Final[dict[str, Any]] = {
    "trace_id": _TRACE,
    "state": "PENDING",
    "waiting": "supervisor",
    "server_id": "pay",
    "tool_name": "charge",
    "principal_id": "agent-1",
    "idempotency_key": "order-17",
    "attempts": 0,
    "decided_by": None,
    "error_code": None,
    "decided_ms": None,
    "dispatch_ms": None,
    "total_ms": None,
    "requested_at": _TIME,
    "updated_at": _TIME,
    "expires_at": "2026-01-02T00:00:00.000Z",
}


TALLY_EXAMPLE: Final[dict[str, Any]] = {
    "asked": 31,
    "completed": 28,
    "failed": 1,
    "denied": 1,
    "open": 1,
    "sent": 31,
    "replayed": 2,
    "latency": {"calls": 29, "p50_ms": 38, "p95_ms": 431, "p99_ms": 2048},
}


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _page(example: Any, *, next_cursor: str | None = None, **more: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": {"items": [example], "next": next_cursor, **more}})


class ListPage(Shape):
    next: str | None = Field(description="The cursor of the next page; null when there is none.")


class ScopedPage(ListPage):
    scope: Literal["tenant", "own"] = Field(
        description="`own`: only what the caller itself asked for; its roles do not show it what others did."
    )


class DeciderItem(Shape):
    type: str = Field(description="policy, person, expiry or withdrawal.")
    id: str | None


class TraceItem(Shape):
    trace_id: Uuid7
    state: State
    waiting: Waiting | None = Field(description="For whom it rests.")
    server_id: Name | None
    tool_name: Name | None
    principal_id: Name | None
    idempotency_key: IdempotencyKey | None
    attempts: int = Field(description="How often it was sent.")
    decided_by: DeciderItem | None = Field(description="Null while nobody has decided, and of an erased trace.")
    error_code: str | None = Field(description="Of a failed call; not of an erased trace.")
    decided_ms: int | None = Field(description="From the request to the decision.")
    dispatch_ms: int | None = Field(description="From the first send to the last answer.")
    total_ms: int | None = Field(description="From the request to the end; null while it is open.")
    requested_at: Time | None = Field(description="The time in the trace's id, by which the list is ordered.")
    updated_at: Time
    expires_at: Time | None


class TracePage(ScopedPage):
    model_config = _page(_LISTED, scope="tenant")
    items: list[TraceItem]


class TraceArtifacts(Shape):
    """Each as recorded, byte for byte; null where there is none yet. Secret arguments are commitments."""

    action_request: dict[str, Any] | None
    supervisor_decision: dict[str, Any] | None
    tool_call: dict[str, Any] | None
    tool_effect: dict[str, Any] | None


class LaterAttempt(Shape):
    attempt: int
    started_at: Time


class TraceDocument(Shape):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                **{name: _LISTED[name] for name in ("trace_id", "state", "waiting", "server_id", "tool_name")},
                **{name: _LISTED[name] for name in ("principal_id", "expires_at")},
                "idempotency_key": "order-17",
                "sequence_number": 1,
                "entry_digest": _DIGEST,
                "action_request_digest": _DIGEST,
                "tool_call_digest": None,
                "tool_call_id": None,
                "attempts": [],
                "artifacts": {
                    "action_request": _REQUEST,
                    "supervisor_decision": None,
                    "tool_call": None,
                    "tool_effect": None,
                },
                "erased": False,
            }
        }
    )
    trace_id: Uuid7
    state: State
    waiting: Waiting | None
    server_id: Name | None
    tool_name: Name | None
    principal_id: Name | None
    idempotency_key: IdempotencyKey | None
    sequence_number: int
    entry_digest: Sha256
    action_request_digest: Sha256
    tool_call_digest: Sha256 | None
    tool_call_id: Uuid7 | None
    expires_at: Time | None
    attempts: list[LaterAttempt] = Field(
        description="Sends after the first, as they were begun; a tool effect lists all attempts."
    )
    artifacts: TraceArtifacts | None = Field(description="Null when the payloads were erased.")
    erased: bool


class EntryItem(Shape):
    """`entry` and `artifact` are the stored canonical bytes: SHA-256 over the bytes of `entry` is `entry_digest`, over
    those of `artifact` the entry's `artifact_digest`."""

    sequence_number: int
    entry_digest: Sha256
    entry: dict[str, Any]
    artifact: dict[str, Any] | None = Field(description="Null when its payload is gone.")


class EntryPage(ListPage):
    model_config = _page(_ITEM)
    next: str | None = Field(description="The `after_seq` of the next page; null when there is none now.")
    items: list[EntryItem]


class FeedProblem(Shape):
    code: str
    detail: str


class FeedItem(Shape):
    stream: str
    sequence_number: int
    entry_digest: Sha256
    entry: dict[str, Any] | None
    artifact: dict[str, Any] | None
    problem: FeedProblem | None = Field(description="What is stored is not what was recorded, so it is not shown.")


class FeedPage(Shape):
    model_config = _page({"stream": f"trace:{_TRACE}", **_ITEM, "problem": None}, next_cursor="Zjc0Mi40")
    items: list[FeedItem]
    next: str = Field(description="Where to go on, always there. The same as `after`: nothing more for now.")


class LatencyDocument(Shape):
    """Of the calls that were dispatched: within how many milliseconds half, 95 % and 99 % were answered, rounded up by
    at most a fifth; null when there were none."""

    calls: int
    p50_ms: int | None
    p95_ms: int | None
    p99_ms: int | None


class TallyDocument(Shape):
    asked: int
    completed: int
    failed: int
    denied: int
    open: int = Field(description="Asked for, and not over yet.")
    sent: int = Field(description="Dispatches, repeated ones too.")
    replayed: int = Field(description="Repeats that were answered from the record, by when they were.")
    latency: LatencyDocument


class MinuteDocument(Shape):
    """Calls by the minute in which they were asked for; of latency see LatencyDocument."""

    began: Time
    asked: int
    failed: int
    p50_ms: int | None
    p95_ms: int | None


class LatelyDocument(TallyDocument):
    """Calls of the last hour by all gateways, from the store."""

    window_s: int
    by_minute: list[MinuteDocument] = Field(description="Minutes without calls are left out.")


class HealthDocument(Shape):
    """What the last dispatches showed, since this gateway started."""

    dispatching: int
    waiting: int
    answered: int
    failed: int
    last_answer_at: Time | None
    last_failure_at: Time | None
    last_failure_kind: str | None


class ConnectionDocument(Shape):
    """How it stands with an MCP server. `problems`: what is wrong with its tools."""

    state: Literal["connecting", "connected", "waiting", "stopped"]
    protocol_version: str | None
    server: str | None = Field(description="What it calls itself.")
    connects: int
    last_error: str | None = Field(description="For those who see the whole tenant; null for others.")
    problems: list[str]
    stderr: str = Field(description="The last of it; for those who see the whole tenant.")


class StatusDocument(Shape):
    """Whether calls can reach the server. It stays `down` while it is tried again."""

    state: Literal["unchecked", "starting", "up", "down"]
    since: Time
    last_error: str | None = Field(description="In the server's own words only for those who see the whole tenant.")
    remedy: str | None = Field(description="What to do; for those who see the whole tenant, and while it is down.")


class ServerItem(Shape):
    server_id: Name
    transport: str
    base_url: str | None = Field(description="For those who see the whole tenant; null for others.")
    timeout_ms: int
    max_attempts: int
    unreachable_for_ms: int = Field(description="How long a server that takes no connections is waited for.")
    max_concurrency: int
    max_in_flight: int
    tools: list[Name]
    status: StatusDocument
    health: HealthDocument
    lately: LatelyDocument
    connection: ConnectionDocument | None = Field(description="Of an MCP server.")


class ServerPage(ListPage):
    model_config = _page(
        {
            "server_id": "pay",
            "transport": "http",
            "base_url": "http://127.0.0.1:9001",
            "timeout_ms": 5000,
            "max_attempts": 5,
            "unreachable_for_ms": 120000,
            "max_concurrency": 16,
            "max_in_flight": 64,
            "tools": ["charge"],
            "status": {"state": "up", "since": _TIME, "last_error": None, "remedy": None},
            "health": {
                "dispatching": 0,
                "waiting": 0,
                "answered": 12,
                "failed": 0,
                "last_answer_at": _TIME,
                "last_failure_at": None,
                "last_failure_kind": None,
            },
            "lately": {
                **TALLY_EXAMPLE,
                "window_s": 3600,
                "by_minute": [
                    {"began": "2026-01-01T00:00:00.000Z", "asked": 31, "failed": 1, "p50_ms": 54, "p95_ms": 91}
                ],
            },
            "connection": None,
        }
    )
    items: list[ServerItem]


class SigningKeyItem(Shape):
    key_id: str = Field(description="As the header `tga-key-id` of a webhook and a decision's signature name it.")
    algorithm: Literal["Ed25519"]
    public_key: str = Field(description="32 bytes in base64.")
    is_retired: bool = Field(description="It signs nothing new; what it signed before stays good.")


class SigningKeyPage(ListPage):
    model_config = _page(
        {
            "key_id": "ed25519:4a1f0b8e2c113a1f",
            "algorithm": "Ed25519",
            "public_key": "Glzgc1VBxQ2g5ss9pwkSq5Dd2kTqTQFLG1Qrcxyh5ts=",
            "is_retired": False,
        }
    )
    items: list[SigningKeyItem]


class PinDocument(Shape):
    status: Literal["pinned", "quarantined"]
    pinned_digest: Sha256 | None
    found_digest: Sha256
    since: Time | None


class HiddenCharacter(Shape):
    """An invisible character of a definition: which, where (a JSON pointer), and how many times."""

    where: Literal["pinned", "found"]
    at: str
    character: str
    times: int


class PinComparisonDocument(Shape):
    """What is pinned, and what the tool is now. `diff`: lines that begin with `-` (pinned only), `+` (found only)
    or a space (both), invisible characters named; `hidden` lists these."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "server_id": "pay",
                "tool_name": "charge",
                "status": "quarantined",
                "pinned_digest": _DIGEST,
                "found_digest": _DIGEST,
                "since": _TIME,
                "pinned": {"description": "Charge an amount."},
                "found": {"description": "Charge an amount.\u200b"},
                "diff": [
                    '- /description: "Charge an amount."',
                    '+ /description: "Charge an amount.<U+200B ZERO WIDTH SPACE>"',
                ],
                "hidden": [
                    {"where": "found", "at": "/description", "character": "U+200B ZERO WIDTH SPACE", "times": 1}
                ],
            }
        }
    )
    server_id: Name
    tool_name: Name
    status: Literal["pinned", "quarantined"]
    pinned_digest: Sha256 | None
    found_digest: Sha256
    since: Time | None
    pinned: dict[str, Any] | None
    found: dict[str, Any]
    diff: list[str]
    hidden: list[HiddenCharacter]


class ToolItem(Shape):
    server_id: Name
    tool_name: Name
    tool_class: ToolClass
    description: str | None = Field(description="Of a quarantined tool only for those who see the whole tenant.")
    tags: list[Name]
    input_schema: dict[str, Any] = Field(description="Empty where the description is kept back.")
    secret_arguments: list[str] = Field(description="JSON pointers to arguments that are never recorded in clear.")
    on_unknown_outcome: Literal["redispatch", "reconcile", "hold"]
    on_unknown_outcome_chosen: bool = Field(description="Whether the configuration says so, or nobody has chosen.")
    reconcile_tool: Name | None
    timeout_ms: int
    max_attempts: int
    approval_timeout_ms: int
    definition_digest: Sha256
    pin: PinDocument


class ToolPage(ListPage):
    model_config = _page(
        {
            "server_id": "pay",
            "tool_name": "charge",
            "tool_class": "write",
            "description": "Charge a card.",
            "tags": ["approval"],
            "input_schema": {"type": "object"},
            "secret_arguments": ["/card"],
            "on_unknown_outcome": "redispatch",
            "on_unknown_outcome_chosen": True,
            "reconcile_tool": None,
            "timeout_ms": 5000,
            "max_attempts": 5,
            "approval_timeout_ms": 86400000,
            "definition_digest": _DIGEST,
            "pin": {"status": "pinned", "pinned_digest": _DIGEST, "found_digest": _DIGEST, "since": _TIME},
        }
    )
    items: list[ToolItem]
