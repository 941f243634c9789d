"""What is answered about a trace that was called, decided on, recovered or resolved."""

from __future__ import annotations

from typing import Any, Final

import orjson
from starlette.responses import Response
from starlette.types import Scope, Send

from app.core.errors import CallDenied
from app.core.limits import LOOK_AGAIN_S, LOOK_AGAIN_WAITING_S
from app.domain.tga.documents import SupervisorDecision
from app.domain.tga.execution import Answer
from app.domain.tga.transitions import TRACE
from app.edge.problems import problem
from app.edge.protocol import ANSWER_WHOLE

_JSON: Final = (b"content-type", b"application/json")
_REPLAYED: Final = (b"idempotent-replayed", b"true")


async def send_json(scope: Scope, send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Straight to the protocol: the hot route's answers need nothing that a Response object does."""
    sent = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
    answer_whole = scope.get(ANSWER_WHOLE)
    if answer_whole is not None and answer_whole(send, status, sent, body):
        return
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})


async def send_effect(scope: Scope, send: Send, answer: Answer) -> None:
    """200 with the recorded effect, byte for byte."""
    if answer.effect is None:
        raise RuntimeError("a finished call without an effect")
    body = b'{"trace_id":"%b","tool_call_id":"%b","state":"%b","replayed":%b,"tool_effect":%b}' % (
        answer.trace_id.encode(),
        (answer.tool_call_id or "").encode(),
        answer.state.encode(),
        b"true" if answer.replayed else b"false",
        answer.effect.to_bytes(),
    )
    await send_json(scope, send, 200, body, *((_REPLAYED,) if answer.replayed else ()))


def accepted(trace_id: str, state: str, waiting: str | None) -> Response:
    """202: durable, and not finished. Location leads to the trace; Retry-After says when to look, later for people."""
    body = orjson.dumps({"trace_id": trace_id, "state": state, "waiting": waiting})
    retry_after_s = LOOK_AGAIN_S if waiting is None else LOOK_AGAIN_WAITING_S
    headers = {"Location": f"/v1/traces/{trace_id}", "Retry-After": str(retry_after_s)}
    return Response(body, status_code=202, headers=headers, media_type="application/json")


def denied(answer: Answer) -> Response:
    """403 with who denied it and why."""
    error = denial_of(answer)
    headers = {"Idempotent-Replayed": "true"} if answer.replayed else None
    return problem(error, headers=headers, decision=summary_of(answer.decision))


_DENIED_BY = {"policy": "by the policy", "expiry": "because nobody decided in time", "withdrawal": "by its own caller"}


def denial_of(answer: Answer) -> CallDenied:
    """Who denied the call, and why: for a person who reads it, and for a model that should not ask again."""
    decision = answer.decision
    by, why = "", ""
    if decision is not None:
        decider = decision.decided_by
        by = " " + _DENIED_BY.get(decider.type, f"by {decider.id}")
        why = f": {decision.rationale}" if decision.rationale else ""
    return CallDenied(f"the call was denied{by}{why}", stream=TRACE.stream(answer.trace_id))


def summary_of(decision: SupervisorDecision | None) -> dict[str, Any] | None:
    if decision is None:
        return None
    return {
        "decision": decision.decision,
        "decided_by": decision.decided_by.to_json(),
        "rationale": decision.rationale,
        "policy_ids": list(decision.policy_ids),
    }


def moved(answer: Answer) -> Response:
    """What a decision, a recovery or a resolution led to: 200 when the trace rests, 202 while it is under way."""
    if not answer.is_final and answer.waiting is None:
        return accepted(answer.trace_id, answer.state, answer.waiting)
    effect = b"null" if answer.effect is None else answer.effect.to_bytes()
    head = orjson.dumps(
        {
            "trace_id": answer.trace_id,
            "state": answer.state,
            "waiting": answer.waiting,
            "tool_call_id": answer.tool_call_id,
            "decision": summary_of(answer.decision),
        }
    )
    return Response(head[:-1] + b',"tool_effect":' + effect + b"}", media_type="application/json")
