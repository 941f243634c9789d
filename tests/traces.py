"""Sample traces: complete, linked records for every path through the table, from a number alone.

The same number gives the same bytes on every machine. Keyword arguments replace fields of the action request
(`arguments`, `tool_class`, `idempotency_key`, ...); the tool call follows the request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

from hypothesis import strategies as st

from app.domain.tga.documents import ActionRequest, ArtifactDocument, SupervisorDecision, ToolCall, ToolEffect, TraceId
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import LogRecord, advance, fold

# 2026-01-01T00:00:00Z; the ids of sample traces are a millisecond apart, as UUIDv7 orders them.
_EPOCH_MS: Final = 1_767_225_600_000


def uuid7(n: int, *, role: str = "trace") -> str:
    """A well-formed UUIDv7 that depends on `n` and `role` alone."""
    noise = hashlib.sha256(f"{role}:{n}".encode()).digest()
    number = ((_EPOCH_MS + n) & (2**48 - 1)) << 80 | int.from_bytes(noise[:10])
    number = number & ~(0xF << 76) | 0x7 << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def time_at(n: int) -> str:
    """The n-th second of a fixed day (n modulo a day)."""
    return f"2026-01-01T{n // 3600 % 24:02}:{n // 60 % 60:02}:{n % 60:02}.000Z"


EXECUTOR: Final = uuid7(0, role="executor")
OTHER_EXECUTOR: Final = uuid7(1, role="executor")


def trace_id(n: int) -> TraceId:
    return TraceId(uuid7(n))


def tool_call_id(n: int) -> str:
    return uuid7(n, role="tool_call")


def action_request(n: int, **overrides: Any) -> ActionRequest:
    fields: dict[str, Any] = {
        "trace_id": trace_id(n),
        "requested_at": time_at(0),
        "expires_at": None,
        "principal": {"principal_id": "agent-1", "tenant": "default"},
        "server_id": "crm",
        "tool_name": "create_ticket",
        "tool_class": "write",
        "tool_definition_digest": None,
        "arguments": {"title": f"ticket {n}", "priority": 2},
        "idempotency_key": f"key-{n}",
        "intent": None,
        **overrides,
    }
    return ActionRequest.model_validate(fields)


def supervisor_decision(request: ActionRequest, *, decision: str = "APPROVE", **overrides: Any) -> SupervisorDecision:
    fields: dict[str, Any] = {
        "trace_id": request.trace_id,
        "action_request_digest": request.digest(),
        "decision": decision,
        "decided_by": {"type": "policy", "id": "policy-1"},
        "decided_at": time_at(1),
        "policy_digest": None,
        "policy_ids": ["rule-1"],
        "rationale": None,
        "signature": None,
        **overrides,
    }
    return SupervisorDecision.model_validate(fields)


def tool_call(n: int, request: ActionRequest, decision: SupervisorDecision, **overrides: Any) -> ToolCall:
    fields: dict[str, Any] = {
        "trace_id": request.trace_id,
        "tool_call_id": tool_call_id(n),
        "supervisor_decision_digest": decision.digest(),
        "server_id": request.server_id,
        "tool_name": request.tool_name,
        "tool_class": request.tool_class,
        "tool_definition_digest": request.tool_definition_digest,
        "arguments": request.arguments,
        "idempotency_key": request.idempotency_key,
        "on_unknown_outcome": "redispatch",
        "reconcile_tool": None,
        "prepared_at": time_at(2),
        **overrides,
    }
    return ToolCall.model_validate(fields)


def tool_effect(call: ToolCall, *, outcome: str = "SUCCESS", **overrides: Any) -> ToolEffect:
    failed = outcome == "FAILURE"
    fields: dict[str, Any] = {
        "trace_id": call.trace_id,
        "tool_call_id": call.tool_call_id,
        "tool_call_digest": call.digest(),
        "outcome": outcome,
        "basis": "answer",
        "output": None if failed else {"encoding": "json", "value": {"ticket_id": "T-1"}},
        "error": {"code": "refused", "message": "the server said no"} if failed else None,
        "resolution": None,
        "attempts": [{"attempt": 1, "started_at": time_at(3), "ended_at": time_at(4), "result": "answered"}],
        "recorded_at": time_at(4),
        **overrides,
    }
    return ToolEffect.model_validate(fields)


def records_of(*artifacts: ArtifactDocument, executor_id: str = EXECUTOR) -> list[LogRecord]:
    """The log that these artifacts make, one entry each, a second apart."""
    state: ExecutionState | None = None
    records: list[LogRecord] = []
    for artifact in artifacts:
        record, _ = advance(state, artifact, executor_id=executor_id, recorded_at=time_at(len(records)))
        state = fold([record], start=state)
        records.append(record)
    return records


def pending_trace(n: int, *, executor_id: str = EXECUTOR, **overrides: Any) -> list[LogRecord]:
    return records_of(action_request(n, **overrides), executor_id=executor_id)


def authorized_trace(n: int, *, executor_id: str = EXECUTOR, **overrides: Any) -> list[LogRecord]:
    request = action_request(n, **overrides)
    return records_of(request, supervisor_decision(request), executor_id=executor_id)


def denied_trace(n: int, *, executor_id: str = EXECUTOR, **overrides: Any) -> list[LogRecord]:
    request = action_request(n, **overrides)
    return records_of(request, supervisor_decision(request, decision="DENY"), executor_id=executor_id)


def executing_trace(n: int, *, executor_id: str = EXECUTOR, **overrides: Any) -> list[LogRecord]:
    request = action_request(n, **overrides)
    decision = supervisor_decision(request)
    return records_of(request, decision, tool_call(n, request, decision), executor_id=executor_id)


def completed_trace(n: int, *, executor_id: str = EXECUTOR, **overrides: Any) -> list[LogRecord]:
    return _ended_trace(n, "SUCCESS", executor_id, overrides)


def failed_trace(n: int, *, executor_id: str = EXECUTOR, **overrides: Any) -> list[LogRecord]:
    return _ended_trace(n, "FAILURE", executor_id, overrides)


def _ended_trace(n: int, outcome: str, executor_id: str, overrides: dict[str, Any]) -> list[LogRecord]:
    request = action_request(n, **overrides)
    decision = supervisor_decision(request)
    call = tool_call(n, request, decision)
    return records_of(request, decision, call, tool_effect(call, outcome=outcome), executor_id=executor_id)


TraceMaker = Callable[..., list[LogRecord]]

# Every path through the table, by the state that it ends in.
PATHS: Final[dict[str, TraceMaker]] = {
    "PENDING": pending_trace,
    "AUTHORIZED": authorized_trace,
    "DENIED": denied_trace,
    "EXECUTING": executing_trace,
    "COMPLETED": completed_trace,
    "FAILED": failed_trace,
}


def paths() -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(PATHS))


def names() -> st.SearchStrategy[str]:
    return st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=16)


def argument_values() -> st.SearchStrategy[Any]:
    """JSON that the strict rules accept, shallow."""
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(min_value=-(2**53) + 1, max_value=2**53 - 1),
        st.floats(min_value=-1e15, max_value=1e15),
        text,
    )
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
    )


@st.composite
def traces(draw: st.DrawFn) -> list[LogRecord]:
    """A trace of any length, with any arguments, read-class without a key among them."""
    tool_class = draw(st.sampled_from(("read", "write")))
    key = st.from_regex(r"[!-~]([ -~]{0,14}[!-~])?", fullmatch=True)
    return PATHS[draw(paths())](
        draw(st.integers(min_value=0, max_value=2**20)),
        server_id=draw(names()),
        tool_name=draw(names()),
        tool_class=tool_class,
        idempotency_key=draw(key if tool_class == "write" else st.none() | key),
        arguments=draw(st.dictionaries(names(), argument_values(), max_size=4)),
        intent=draw(
            st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8)
        ),
    )
