"""`tga approvals`, `tga approve`, `tga deny`, `tga withdraw`, `tga resolve`: what people decide.

A decision is about exactly the request that was shown: it names the digest of what stands on the screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from app.cli.calls import show_answer
from app.cli.client import GatewayClient, path_to
from app.cli.showing import confirmed, notes, output, print_json, print_table, printable, shown_json
from app.cli.signing import load_private_key, signed
from app.clock import SystemClock
from app.core.canonical import parse_json
from app.core.digest import digest_of
from app.core.errors import AlreadyDecided, ChecksumMismatch, TraceErased, TraceNotHeld
from app.domain.tga.documents import DecidedBy, SupervisorDecision
from app.domain.tga.transitions import TRACE


async def show_approvals(client: GatewayClient, *, limit: int, as_json: bool) -> bool:
    waiting = await client.list_items("/v1/approvals", limit=limit)
    if as_json:
        print_json(waiting)
        return True
    if not waiting:
        output.print("Nothing waits for a person.")
        return True
    print_table(
        ("trace", "tool", "asked by", "until", "arguments"),
        (
            (
                item["trace_id"],
                f"{item['server_id']} {item['tool_name']}",
                item["principal_id"] or "",
                item["expires_at"] or "",
                item["problem"] or shown_json(item["arguments"]),
            )
            for item in waiting
        ),
    )
    return True


async def decide(
    client: GatewayClient,
    trace_id: str,
    decision: Literal["APPROVE", "DENY"],
    *,
    rationale: str | None,
    sign_with: Path | None,
    principal: str | None,
    yes: bool,
) -> bool:
    """Show the request, then decide on exactly that. True when the decision stands and what followed went well."""
    key = None if sign_with is None else load_private_key(sign_with)
    request, digest = await _waiting_request(client, trace_id)
    _show_request(request)
    if decision == "APPROVE" and not confirmed("Approve it?", yes=yes):
        notes.print("Nothing was decided.")
        return False
    body: dict[str, Any] = {"decision": decision, "action_request_digest": digest}
    if rationale is not None:
        body["rationale"] = rationale
    if key is not None and principal is not None:
        document = SupervisorDecision.made(
            trace_id=trace_id,
            action_request_digest=digest,
            decision=decision,
            decided_by=DecidedBy.made(type="person", id=principal),
            decided_at=SystemClock().now(),
            policy_digest=None,
            policy_ids=[],
            rationale=rationale,
            signature=None,
        )
        signature = signed(document, key)
        body |= {"signature": signature.value, "key_id": signature.key_id, "decided_at": document.decided_at}
    reply = await client.post(path_to("v1", "traces", trace_id, "decision"), body)
    return show_answer(reply) or decision == "DENY"


async def withdraw(client: GatewayClient, trace_id: str, *, rationale: str | None) -> bool:
    body = {} if rationale is None else {"rationale": rationale}
    show_answer(await client.post(path_to("v1", "traces", trace_id, "withdraw"), body))
    return True


async def resolve(client: GatewayClient, trace_id: str, action: str, *, rationale: str, result: str | None) -> bool:
    body: dict[str, Any] = {"action": action, "rationale": rationale}
    if result is not None:
        body["output"] = parse_json(result)
    trace = await client.get(path_to("v1", "traces", trace_id))
    if trace["waiting"] != "operator" and trace["state"] != "EXECUTING":  # whether that one can be sent, it knows best
        raise TraceNotHeld(
            "nothing to resolve",
            expected="a trace that waits for an operator or cannot be sent any more",
            found=f"{trace['state']}, waiting for {trace['waiting'] or 'nobody'}",
            stream=TRACE.stream(trace_id),
        )
    body["tool_call_digest"] = trace["tool_call_digest"]
    reply = await client.post(path_to("v1", "traces", trace_id, "resolve"), body)
    return show_answer(reply) or action == "failed"


async def _waiting_request(client: GatewayClient, trace_id: str) -> tuple[dict[str, Any], str]:
    trace = await client.get(path_to("v1", "traces", trace_id))
    stream = TRACE.stream(trace_id)
    if trace["waiting"] != "supervisor":
        raise AlreadyDecided("the request does not wait for a person", found=trace["state"], stream=stream)
    if trace["artifacts"] is None:
        raise TraceErased("its request cannot be shown", stream=stream)
    request: dict[str, Any] = trace["artifacts"]["action_request"]
    found = digest_of(request)
    if found != trace["action_request_digest"]:  # nobody decides on what is not what was asked
        raise ChecksumMismatch(
            "the request is not the one that waits", expected=trace["action_request_digest"], found=found, stream=stream
        )
    return request, found


def _show_request(request: dict[str, Any]) -> None:
    asker = request["principal"]
    roles = f" ({', '.join(asker['roles'])})" if asker.get("roles") else ""
    lines = [
        ("asked by", f"{asker['principal_id']}{roles}, tenant {asker['tenant']}, {request['requested_at']}"),
        ("tool", f"{request['server_id']} {request['tool_name']} ({request['tool_class']})"),
        ("arguments", shown_json(request["arguments"], indent=2)),
        ("intent", printable(request["intent"]) if request["intent"] else "(none given)"),
        ("key", request["idempotency_key"] or "(none)"),
        ("until", request["expires_at"] or "(no end)"),
    ]
    for name, value in lines:
        notes.print(f"{name:<10} ", end="", style="dim")
        notes.print(value.replace("\n", "\n" + " " * 11), markup=False)
    notes.print()
