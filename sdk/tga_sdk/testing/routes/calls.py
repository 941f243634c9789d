"""Tool calls, and all that waits for people."""

from __future__ import annotations

from tga_sdk.canonical import NotCanonical, canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing import views
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.reading import body_of, parameters
from tga_sdk.testing.routes.routing import Asked, Reply, json_reply, page_of, route
from tga_sdk.testing.tools import Call


@route("POST", "/v1/tool-calls")
async def call_tool(asked: Asked) -> Reply:
    body = body_of(m.ToolCallBody, asked.raw)
    gateway, key = asked.gateway, asked.headers.get("Idempotency-Key", body.idempotency_key)
    if body.idempotency_key not in (None, key):
        raise Problem("INPUT_MALFORMED", "two idempotency keys", expected="one key, or the same one twice")
    with gateway.lock:
        tool = gateway.tools.find(body.server_id, body.tool_name)
        if key is None and not tool.read_only:
            raise Problem("IDEMPOTENCY_KEY_MISSING", "a write-class tool needs an idempotency key")
        if key is not None and key.startswith("run:"):
            raise Problem("IDEMPOTENCY_KEY_RESERVED", "the idempotency key is one of a run")
        try:
            canonical(body.arguments)
        except NotCanonical as error:
            raise Problem("INPUT_MALFORMED", str(error)) from None
        made = Call(
            trace_id=body.trace_id or gateway.engine.new_id(),
            server_id=body.server_id,
            tool_name=body.tool_name,
            arguments=body.arguments,
            key=key,
            principal_id=asked.principal,
            intent=body.intent,
            requested_at=gateway.engine.now(),
        )
        call = gateway.tools.begin(made)
    await gateway.made(call, wait_ms=body.wait_ms, waits_for_people="wait_ms" in body.model_fields_set)
    return _call_answer(call, is_replayed=call is not made)


def _call_answer(call: Call, *, is_replayed: bool) -> Reply:
    if call.state == "DENIED":
        raise _denial_of(call)
    if call.effect is None:
        headers = {"Location": f"/v1/traces/{call.trace_id}", "Retry-After": "1" if call.waiting is None else "5"}
        return json_reply({"trace_id": call.trace_id, "state": call.state, "waiting": call.waiting}, 202, **headers)
    head = {"trace_id": call.trace_id, "tool_call_id": call.tool_call_id, "state": call.state}
    headers = {"Idempotent-Replayed": "true"} if is_replayed else {}
    return json_reply({**head, "replayed": is_replayed, "tool_effect": call.effect}, 200, **headers)


def _denial_of(call: Call) -> Problem:
    decision = call.decision or {"decided_by": {"id": "nobody", "type": "person"}, "rationale": None}
    by, why = decision["decided_by"], decision["rationale"]
    who = {"withdrawal": "by its own caller", "policy": "by the policy"}.get(by["type"], f"by {by['id']}")
    problem = Problem("CALL_DENIED", f"the call was denied {who}" + (f": {why}" if why else ""))
    problem.more = {"trace_id": call.trace_id, "decision": decision}
    return problem


@route("GET", "/v1/traces/{trace_id}")
async def get_trace(asked: Asked) -> Reply:
    parameters(asked.query)
    return json_reply(views.trace_document(_trace(asked)))


@route("POST", "/v1/traces/{trace_id}/decision")
async def decide(asked: Asked) -> Reply:
    gateway, call = asked.gateway, _trace(asked)
    body = body_of(m.DecisionBody, asked.raw)
    with gateway.lock:
        if body.action_request_digest != call.digest:
            raise Problem("REQUEST_MISMATCH", "the decision is about another request", expected=call.digest)
        if call.state != "PENDING":
            was = (call.decision or {}).get("decision")
            if was != body.decision:
                raise Problem("ALREADY_DECIDED", "the call was decided on before", found=was)
        elif body.decision == "DENY":
            gateway.tools.deny(call, by=asked.principal, rationale=body.rationale)
            gateway.engine.tool_ended(call)
        else:
            gateway.tools.approve(call, by=asked.principal, rationale=body.rationale)
        gateway.notify()
    await gateway.made(call, wait_ms=body.wait_ms)
    return _moved(call)


@route("POST", "/v1/traces/{trace_id}/withdraw")
async def withdraw(asked: Asked) -> Reply:
    gateway, call = asked.gateway, _trace(asked)
    body = body_of(m.WithdrawalBody, asked.raw, is_optional=True)
    with gateway.lock:
        if call.state != "PENDING":
            raise Problem("ALREADY_DECIDED", "the call was decided on before", found=call.state)
        gateway.tools.deny(call, by=asked.principal, rationale=body.rationale, kind="withdrawal")
        gateway.engine.tool_ended(call)
        gateway.notify()
    return _moved(call)


def _moved(call: Call) -> Reply:
    if not call.is_final and call.waiting is None:
        return _call_answer(call, is_replayed=False)
    head = {"trace_id": call.trace_id, "state": call.state, "waiting": call.waiting}
    head["tool_call_id"] = None if call.effect is None else call.tool_call_id
    return json_reply({**head, "decision": call.decision, "tool_effect": call.effect})


@route("GET", "/v1/approvals")
async def list_approvals(asked: Asked) -> Reply:
    given = parameters(asked.query, "cursor", "limit")
    gateway = asked.gateway
    with gateway.lock:
        gateway.engine.advance()
        now = gateway.engine.now()
        calls = [views.approval(call) for call in gateway.tools.by_trace.values() if call.waiting == "supervisor"]
        questions = [
            views.question(run, intent)
            for run in gateway.engine.runs.values()
            if run.state in ("SCHEDULED", "RUNNING", "WAITING")
            for intent in run.begun.values()
            if intent.said["kind"] == "ask"
            and (intent.said["request"]["expires_at"] is None or intent.said["request"]["expires_at"] > now)
        ]
        waiting = sorted([*calls, *questions], key=lambda one: one["expires_at"] or "never")
        page, goes_on = page_of(waiting, given)
        count = {"calls": len(calls), "questions": len(questions), "is_exact": True}
        return json_reply({"items": page, "next": goes_on, "scope": "tenant", "count": count})


@route("GET", "/v1/tools")
async def list_tools(asked: Asked) -> Reply:
    server_id = parameters(asked.query, "server_id").get("server_id")
    tools = sorted(asked.gateway.tools.tools.items())
    items = [tool.item(name) for name, tool in tools if server_id in (None, name.partition(".")[0])]
    return json_reply({"items": items, "next": None})


def _trace(asked: Asked) -> Call:
    call = asked.gateway.tools.by_trace.get(asked.named["trace_id"])
    if call is None:
        raise Problem("TRACE_NOT_FOUND", "no such trace")
    return call
