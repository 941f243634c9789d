"""The sound documents that vectors are made of, and the chain that binds them. Nothing here comes from `app`.

Ids and times are counted, never drawn: the same source gives the same bytes for ever.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any, Final

import rfc8785

Json = dict[str, Any]

GENESIS: Final = "0" * 64
STATES: Final = ("PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "FAILED", "DENIED")

# The locked specification's five transitions, by the step that makes each; entry 1 is the birth. Written out here a
# second time on purpose: if the table in app/domain/tga changed, these vectors must not follow it.
STEPS: Final = ("action_request", "approval", "denial", "tool_call", "success", "failure")
TYPE_OF_STEP: Final = {
    "action_request": "action_request",
    "approval": "supervisor_decision",
    "denial": "supervisor_decision",
    "tool_call": "tool_call",
    "success": "tool_effect",
    "failure": "tool_effect",
}
STEP_LEADS_TO: Final = {
    "action_request": "PENDING",
    "approval": "AUTHORIZED",
    "denial": "DENIED",
    "tool_call": "EXECUTING",
    "success": "COMPLETED",
    "failure": "FAILED",
}
ALLOWED: Final = (
    ("PENDING", "approval"),
    ("PENDING", "denial"),
    ("AUTHORIZED", "tool_call"),
    ("EXECUTING", "success"),
    ("EXECUTING", "failure"),
)
PATH_TO: Final = {
    "PENDING": ("action_request",),
    "DENIED": ("action_request", "denial"),
    "AUTHORIZED": ("action_request", "approval"),
    "EXECUTING": ("action_request", "approval", "tool_call"),
    "COMPLETED": ("action_request", "approval", "tool_call", "success"),
    "FAILED": ("action_request", "approval", "tool_call", "failure"),
}


def digest(value: object) -> str:
    return hashlib.sha256(rfc8785.dumps(value)).hexdigest()  # type: ignore[arg-type]


def uuid7(number: int) -> str:
    return f"01970000-0000-7000-8000-{number:012x}"


def time_at(ms: int) -> str:
    return f"2026-01-01T00:00:{ms // 1000:02d}.{ms % 1000:03d}Z"


TRACE_ID: Final = uuid7(0x10)
OTHER_TRACE_ID: Final = uuid7(0x20)
TOOL_CALL_ID: Final = uuid7(0x30)
OTHER_TOOL_CALL_ID: Final = uuid7(0x40)
EXECUTOR_ID: Final = uuid7(0x50)
OTHER_EXECUTOR_ID: Final = uuid7(0x60)
KEY: Final = "invoice 2026-0001"
OTHER_DIGEST: Final = digest("another document")


def action_request(**changes: Any) -> Json:
    """A write-class request with every optional field filled, so that every field can be changed."""
    return {
        "schema_id": "tga/v1/action_request",
        "schema_version": "1.0",
        "trace_id": TRACE_ID,
        "requested_at": time_at(1000),
        "expires_at": time_at(59000),
        "principal": {"principal_id": "agent-7", "tenant": "default"},
        "server_id": "billing",
        "tool_name": "pay_invoice",
        "tool_class": "write",
        "tool_definition_digest": digest("the tool's definition"),
        "arguments": {"invoice_id": "INV-1", "amount_cents": 1250, "is_final": True},
        "idempotency_key": KEY,
        "intent": "Pay what is due.",
        **changes,
    }


def read_request(**changes: Any) -> Json:
    """A read-class request without a key, and with everything else null that may be."""
    reading: Json = {
        "expires_at": None,
        "tool_name": "find_invoice",
        "tool_class": "read",
        "tool_definition_digest": None,
        "arguments": {},
        "idempotency_key": None,
        "intent": None,
    }
    return action_request(**{**reading, **changes})


def supervisor_decision(bound: str, **changes: Any) -> Json:
    return {
        "schema_id": "tga/v1/supervisor_decision",
        "schema_version": "1.0",
        "trace_id": TRACE_ID,
        "action_request_digest": bound,
        "decision": "APPROVE",
        "decided_by": {"type": "policy", "id": "default"},
        "decided_at": time_at(2000),
        "policy_digest": digest("the policy"),
        "policy_ids": ["allow-billing"],
        "rationale": "Within the limit.",
        # Not a real signature: the shape is what the schema knows, and verifying it is another contract's.
        "signature": {"algorithm": "Ed25519", "key_id": "supervisor-1", "value": "A" * 86 + "=="},
        **changes,
    }


def tool_call(bound: str, request: Json, **changes: Any) -> Json:
    same = ("server_id", "tool_name", "tool_class", "tool_definition_digest", "arguments", "idempotency_key")
    return {
        "schema_id": "tga/v1/tool_call",
        "schema_version": "1.0",
        "trace_id": TRACE_ID,
        "tool_call_id": TOOL_CALL_ID,
        "supervisor_decision_digest": bound,
        **{field: copy.deepcopy(request[field]) for field in same},
        "on_unknown_outcome": "redispatch",
        "reconcile_tool": None,
        "prepared_at": time_at(3000),
        **changes,
    }


def tool_effect(bound: str, **changes: Any) -> Json:
    return {
        "schema_id": "tga/v1/tool_effect",
        "schema_version": "1.0",
        "trace_id": TRACE_ID,
        "tool_call_id": TOOL_CALL_ID,
        "tool_call_digest": bound,
        "outcome": "SUCCESS",
        "basis": "answer",
        "output": {"encoding": "json", "value": {"receipt": "R-1"}},
        "error": None,
        "attempts": [{"attempt": 1, "started_at": time_at(3100), "ended_at": time_at(3900), "result": "answered"}],
        "resolution": None,
        "recorded_at": time_at(4000),
        **changes,
    }


FAILED_BY_ANSWER: Final[Json] = {
    "outcome": "FAILURE",
    "output": {"encoding": "digest", "sha256": digest("a long answer"), "size_bytes": 9000000, "truncated": True},
    "error": {"code": "card_declined", "message": "The bank said no."},
}


def artifact_of_step(step: str, bound: str, request: Json) -> Json:
    """The artifact that this step appends, bound to the digest of the artifact before it."""
    if step == "action_request":
        return copy.deepcopy(request)
    if step == "approval":
        return supervisor_decision(bound)
    if step == "denial":
        return supervisor_decision(bound, decision="DENY")
    if step == "tool_call":
        return tool_call(bound, request)
    return tool_effect(bound, **(FAILED_BY_ANSWER if step == "failure" else {}))


def seal(entry: Json) -> Json:
    """The entry with the digest of its other fields."""
    body = {field: value for field, value in entry.items() if field != "entry_digest"}
    return {**body, "entry_digest": digest(body)}


def append(records: list[Json], artifact: Json, artifact_type: str, to_state: str, **entry_changes: Any) -> list[Json]:
    """The log with one more record, linked and sealed as its fields, changed ones too, demand."""
    last = records[-1]["entry"] if records else None
    entry = {
        "schema_id": "tga/v1/execution_log_entry",
        "schema_version": "1.0",
        "trace_id": artifact.get("trace_id"),
        "sequence_number": len(records) + 1,
        "prev_entry_digest": last["entry_digest"] if last else GENESIS,
        "from_state": last["to_state"] if last else "PENDING",
        "to_state": to_state,
        "artifact_type": artifact_type,
        "artifact_digest": digest(artifact),
        "executor_id": EXECUTOR_ID,
        "recorded_at": time_at(1000 * (len(records) + 1) + 1),
        **entry_changes,
    }
    return [*copy.deepcopy(records), {"entry": seal(entry), "artifact": artifact}]


def append_step(records: list[Json], step: str, **entry_changes: Any) -> list[Json]:
    """The log with the next record that this step makes, correctly bound, whether or not the state admits it."""
    bound = records[-1]["entry"]["artifact_digest"] if records else OTHER_DIGEST
    request = records[0]["artifact"] if records else action_request()
    artifact = artifact_of_step(step, bound, request)
    to_state = entry_changes.pop("to_state", STEP_LEADS_TO[step])
    return append(records, artifact, TYPE_OF_STEP[step], to_state, **entry_changes)


def log_of(steps: tuple[str, ...], request: Json | None = None, *, trace_id: str = TRACE_ID) -> list[Json]:
    """A sound log of these steps."""
    records: list[Json] = []
    for step in steps:
        bound = records[-1]["entry"]["artifact_digest"] if records else OTHER_DIGEST
        artifact = artifact_of_step(step, bound, action_request() if request is None else request)
        artifact["trace_id"] = trace_id
        records = append(records, artifact, TYPE_OF_STEP[step], STEP_LEADS_TO[step])
    return records


def log_to(state: str, request: Json | None = None) -> list[Json]:
    return log_of(PATH_TO[state], request)


def state_after(records: list[Json]) -> Json | None:
    """What a sound log folds to, read off its records; nothing is verified."""
    if not records:
        return None
    request, last = records[0]["artifact"], records[-1]["entry"]
    digest_by_type = {record["entry"]["artifact_type"]: record["entry"]["artifact_digest"] for record in records}
    call = next((r["artifact"] for r in records if r["entry"]["artifact_type"] == "tool_call"), None)
    return {
        "schema_id": "tga/v1/execution_state",
        "schema_version": "1.0",
        "trace_id": last["trace_id"],
        "state": last["to_state"],
        "sequence_number": last["sequence_number"],
        "entry_digest": last["entry_digest"],
        "updated_at": last["recorded_at"],
        "server_id": request["server_id"],
        "tool_name": request["tool_name"],
        "tool_class": request["tool_class"],
        "idempotency_key": request["idempotency_key"],
        "payload_digest": digest({field: request[field] for field in ("server_id", "tool_name", "arguments")}),
        "action_request_digest": digest_by_type["action_request"],
        "supervisor_decision_digest": digest_by_type.get("supervisor_decision"),
        "tool_call_digest": digest_by_type.get("tool_call"),
        "tool_call_id": call["tool_call_id"] if call else None,
        "tool_effect_digest": digest_by_type.get("tool_effect"),
    }


def checkpoint_of(state: Json, **changes: Any) -> Json:
    return {
        "schema_id": "tga/v1/execution_checkpoint",
        "schema_version": "1.0",
        "trace_id": state["trace_id"],
        "created_at": time_at(5000),
        "checkpoint_state": copy.deepcopy(state),
        "checkpoint_digest": digest(state),
        **changes,
    }
