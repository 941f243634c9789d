"""POST /v1/tool-calls: what the runtime is asked, and what its answers become."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.core.errors import (
    ArgumentsInvalid,
    CallInFlight,
    ConcurrentExecution,
    KeyReused,
    OutcomeUnknown,
    SequenceGap,
    StoreUnavailable,
    ToolNotFound,
)
from app.domain.tga.documents import DecidedBy, SupervisorDecision, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from tests.api.wire import AGENT, CALL, STRANGER, TOOL_CALL_ID, TRACE_ID, Front, effect_of, request

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def front(lasting_front: Front) -> Front:
    lasting_front.runtime.calls.clear()
    lasting_front.runtime.waits_ms.clear()
    lasting_front.runtime.answering = None
    return lasting_front


def answers(answer: Answer) -> Callable[[CheckedCall], Awaitable[Answer]]:
    async def answering(_: CheckedCall) -> Answer:
        return answer

    return answering


def raises(error: Exception) -> Callable[[CheckedCall], Awaitable[Answer]]:
    async def answering(_: CheckedCall) -> Answer:
        raise error

    return answering


async def test_the_runtime_is_asked_exactly_what_was_sent(front: Front) -> None:
    body = {**CALL, "arguments": {"a": [1, 2.5, None, "ä"]}, "intent": "why", "trace_id": TRACE_ID, "wait_ms": 7}
    reply = await front.ask(request(body=body, headers={"traceparent": TRACEPARENT}))
    assert reply.status == 200
    assert front.runtime.calls == [
        CheckedCall(
            server_id="crm",
            tool_name="create",
            arguments={"a": [1, 2.5, None, "ä"]},
            idempotency_key="k-1",
            principal=AGENT,
            intent="why",
            trace_id=TraceId(TRACE_ID),
            traceparent=TRACEPARENT,
            is_trace_id_chosen=True,
        )
    ]
    assert front.runtime.waits_ms == [7]


async def test_what_may_be_left_out_has_its_default(front: Front) -> None:
    body: dict[str, Any] = {
        "server_id": "crm",
        "tool_name": "read",
        "arguments": {},
        "intent": None,
        "idempotency_key": None,
    }
    assert (await front.ask(request(body=body))).status == 200
    (call,) = front.runtime.calls
    assert (call.idempotency_key, call.intent, call.traceparent) == (None, None, None)
    assert front.runtime.waits_ms == [30_000]


async def test_a_server_is_its_tenants_own(front: Front) -> None:
    await front.ask(request(body=CALL, who="stranger"))
    await front.ask(request(body={**CALL, "server_id": "acme/crm"}))
    stranger, agent = front.runtime.calls
    assert (stranger.principal, stranger.server_id) == (STRANGER, "acme/crm")
    assert agent.server_id != stranger.server_id


async def test_the_key_may_come_as_a_header(front: Front) -> None:
    without = {name: value for name, value in CALL.items() if name != "idempotency_key"}
    assert (await front.ask(request(body=without, headers={"Idempotency-Key": "h-1"}))).status == 200
    assert (await front.ask(request(body=CALL, headers={"Idempotency-Key": "k-1"}))).status == 200
    assert [call.idempotency_key for call in front.runtime.calls] == ["h-1", "k-1"]
    reply = await front.ask(request(body=CALL, headers={"Idempotency-Key": "k-2"}))
    assert (reply.status, reply.code) == (400, "INPUT_MALFORMED")
    reply = await front.ask(request(body=without, headers={"Idempotency-Key": "x" * 256}))
    assert (reply.status, reply.code) == (422, "SCHEMA_VIOLATION")
    twice = request(body=without, headers={"Idempotency-Key": "a", "idempotency-key": "b"})
    assert (await front.ask(twice)).code == "INPUT_MALFORMED"
    assert len(front.runtime.calls) == 2


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        TRACEPARENT.upper(),
        TRACEPARENT.replace("00-", "01-", 1),
        TRACEPARENT + "-x",
        TRACEPARENT[:-1],
        "00-" + "0" * 32 + TRACEPARENT[35:],
        TRACEPARENT[:36] + "0" * 16 + "-01",
        "é" * 55,
    ],
)
async def test_a_traceparent_that_is_none_is_ignored(front: Front, traceparent: str) -> None:
    assert (await front.ask(request(body=CALL, headers={"traceparent": traceparent}))).status == 200
    assert front.runtime.calls[0].traceparent is None


async def test_a_finished_call_is_answered_with_the_recorded_bytes(front: Front) -> None:
    effect = effect_of(value={"z": 1, "a": [1.5, "é"]})
    front.runtime.answering = answers(Answer(TraceId(TRACE_ID), "COMPLETED", TOOL_CALL_ID, None, effect))
    reply = await front.ask(request(body=CALL))
    assert reply.status == 200
    assert effect.to_bytes() in reply.body
    assert {**reply.document, "tool_effect": None} == {
        "trace_id": TRACE_ID,
        "tool_call_id": TOOL_CALL_ID,
        "state": "COMPLETED",
        "replayed": False,
        "tool_effect": None,
    }
    assert "idempotent-replayed" not in reply.headers
    replayed = Answer(TraceId(TRACE_ID), "COMPLETED", TOOL_CALL_ID, None, effect, replayed=True)
    front.runtime.answering = answers(replayed)
    again = await front.ask(request(body=CALL))
    assert again.headers["idempotent-replayed"] == "true"
    assert again.document["replayed"] is True
    assert effect.to_bytes() in again.body


@pytest.mark.parametrize(("state", "waiting"), [("PENDING", "supervisor"), ("EXECUTING", None)])
async def test_an_unfinished_call_is_202_and_says_where(front: Front, state: Any, waiting: Any) -> None:
    front.runtime.answering = answers(Answer(TraceId(TRACE_ID), state, None, None, None, waiting))
    reply = await front.ask(request(body=CALL))
    assert reply.status == 202
    assert reply.headers["location"] == f"/v1/traces/{TRACE_ID}"
    assert reply.document == {"trace_id": TRACE_ID, "state": state, "waiting": waiting}


async def test_a_denied_call_says_who_and_why(front: Front) -> None:
    decision = SupervisorDecision(
        trace_id=TRACE_ID,
        action_request_digest="9c" * 32,
        decision="DENY",
        decided_by=DecidedBy(type="policy", id="default"),
        decided_at="2025-07-01T12:00:00.043Z",
        policy_digest="ab" * 32,
        policy_ids=["no-refunds"],
        rationale="not at night",
        signature=None,
    )
    front.runtime.answering = answers(Answer(TraceId(TRACE_ID), "DENIED", None, decision, None))
    reply = await front.ask(request(body=CALL))
    assert (reply.status, reply.code) == (403, "CALL_DENIED")
    assert reply.document["trace_id"] == TRACE_ID
    assert reply.document["decision"] == {
        "decision": "DENY",
        "decided_by": {"type": "policy", "id": "default"},
        "rationale": "not at night",
        "policy_ids": ["no-refunds"],
    }


STREAM = f"trace:{TRACE_ID}"
ERRORS: list[tuple[Exception, int, str, bool]] = [
    (ToolNotFound("no tool"), 404, "TOOL_NOT_FOUND", False),
    (ArgumentsInvalid("arguments at /amount"), 422, "ARGUMENTS_INVALID", False),
    (KeyReused("the key belongs to another call"), 422, "IDEMPOTENCY_KEY_REUSED", False),
    (CallInFlight("still being executed", stream=STREAM), 409, "CALL_IN_FLIGHT", True),
    (OutcomeUnknown("no answer", stream=STREAM, found="db-7.internal"), 503, "STORE_OUTCOME_UNKNOWN", True),
    (StoreUnavailable("gone", found="OSError: db-7.internal"), 503, "STORE_UNAVAILABLE", True),
]


@pytest.mark.parametrize(("error", "status", "code", "comes_back"), ERRORS, ids=[code for _, _, code, _ in ERRORS])
async def test_errors_keep_their_code_and_say_when_to_come_back(
    front: Front, error: Exception, status: int, code: str, comes_back: bool
) -> None:
    front.runtime.answering = raises(error)
    reply = await front.ask(request(body=CALL))
    assert (reply.status, reply.code) == (status, code)
    assert ("retry-after" in reply.headers) is comes_back
    assert reply.document.get("trace_id") == (TRACE_ID if getattr(error, "stream", None) else None)
    assert b"internal" not in reply.body.lower().replace(b"internal server error", b"")


async def test_a_taken_trace_id_gets_one_answer_whoever_has_it(front: Front) -> None:
    body = {**CALL, "trace_id": TRACE_ID}
    bodies = set()
    for error in (
        SequenceGap("the entry is not the next of its stream", expected=5, found=1, stream=STREAM, sequence_number=5),
        ConcurrentExecution("another executor owns the stream", expected="one", found="another", stream=STREAM),
        ConcurrentExecution("this process already executes the trace", stream=STREAM),
    ):
        front.runtime.answering = raises(error)
        reply = await front.ask(request(body=body))
        assert (reply.status, reply.code) == (409, "STATE_CONCURRENT_EXECUTION")
        bodies.add(reply.body)
    assert len(bodies) == 1


@pytest.mark.parametrize("who", ["supervisor", "operator"])
async def test_only_agents_and_workers_call(front: Front, who: str) -> None:
    reply = await front.ask(request(body=CALL, who=who))
    assert (reply.status, reply.code) == (403, "FORBIDDEN")
    assert front.runtime.calls == []


async def test_nobody_calls_without_a_credential(front: Front) -> None:
    for raw in (request(body=CALL, who=None), request(body=CALL, who="nobody")):
        reply = await front.ask(raw)
        assert (reply.status, reply.code) == (401, "UNAUTHENTICATED")
        assert reply.headers["www-authenticate"] == "Bearer"
    twice = request(body=CALL, headers={"authorization": "Bearer operator"})
    assert (await front.ask(twice)).code == "INPUT_MALFORMED"
    assert front.runtime.calls == []


async def test_a_bad_body_of_a_stranger_is_not_even_looked_at(front: Front) -> None:
    assert (await front.ask(request(body=b"{", who="nobody"))).code == "UNAUTHENTICATED"
