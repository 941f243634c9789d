"""Approvals: shall exactly this run? The list by expiry, and one request beside it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.responses import Response

from app.console.components import between_ms, moment
from app.console.gateway_api import ApiProblem
from app.console.shown_text import arguments_shown, hidden_in, summary_of
from app.console.visit import Visit, counted
from app.edge.cursors import list_cursor

_SOON_MS: Final = 3_600_000
_LISTED: Final = 100
_NEAR: Final = 20
# Execution goes on without us: the page that follows is live.
_WAIT_MS: Final = 1_500


async def show(visit: Visit) -> Response:
    listed = await _listed(visit)
    return await visit.page("approvals.html", nav="Approvals", listed=listed, request=None)


async def show_one(visit: Visit) -> Response:
    return await _one(visit, visit.request.path_params["trace_id"])


async def decide(visit: Visit) -> Response:
    """Approve or deny exactly the request that the page showed: the form names its digest."""
    trace_id, form = visit.request.path_params["trace_id"], visit.form
    body: dict[str, Any] = {
        "decision": form.get("decision", ""),
        "action_request_digest": form.get("action_request_digest", ""),
        "wait_ms": _WAIT_MS,
    }
    if form.get("rationale", "").strip():
        body["rationale"] = form["rationale"].strip()
    try:
        await visit.api.post(f"/v1/traces/{trace_id}/decision", body)
    except ApiProblem as problem:
        if problem.code in ("FORBIDDEN", "TRACE_NOT_FOUND", "UNAUTHENTICATED"):
            raise
        return await _one(visit, trace_id, problem=problem, typed=form.get("rationale", ""))
    return visit.go(f"/approvals/{trace_id}")


async def _one(visit: Visit, trace_id: str, *, problem: ApiProblem | None = None, typed: str = "") -> Response:
    listed, trace = await asyncio.gather(_listed(visit), visit.api.get(f"/v1/traces/{trace_id}"))
    item = next((one for one in listed["items"] if one.get("trace_id") == trace_id), None)
    if item is None and trace["waiting"] == "supervisor":
        item = await _item(visit, trace)
    request = await _request(visit, trace, item)
    return await visit.page(
        "approvals.html",
        nav="Approvals",
        status=200 if problem is None else problem.status,
        listed=listed,
        request=request,
        problem=None if problem is None else problem.document,
        typed=typed,
    )


async def _listed(visit: Visit) -> dict[str, Any]:
    cursor = visit.query.get("cursor")
    page = await visit.api.get("/v1/approvals", limit=_LISTED, cursor=cursor)
    now = visit.clock.now()
    items: list[dict[str, Any]] = page["items"]
    for one in items:
        left_ms = between_ms(now, one["expires_at"])
        one["left_ms"], one["is_soon"] = left_ms, left_ms is not None and left_ms < _SOON_MS
        said = one.get("arguments") if one["kind"] == "call" else one.get("request")
        one["summary"], one["hidden"] = summary_of(said), hidden_in([said, one.get("intent")])
    return {
        "items": items,
        "waiting": counted(page["count"]),
        "later": None if page["next"] is None else f"/console/approvals?cursor={page['next']}",
        "soonest": "/console/approvals" if cursor else None,
        "cursor": cursor,
    }


async def _item(visit: Visit, trace: dict[str, Any]) -> dict[str, Any] | None:
    """What the list says of a request that stands on another page of it: the page that begins where it expires. What
    never expires stands in the order of its numbers, which only the store knows: None unless it is near."""
    ends = trace["expires_at"]
    place = "never" if ends is None else str(int(moment(ends).timestamp() * 1000) * 1000)
    page = await visit.api.get("/v1/approvals", limit=_NEAR, cursor=list_cursor("approvals", f"{place}.0."))
    return next((one for one in page["items"] if one.get("trace_id") == trace["trace_id"]), None)


async def _request(visit: Visit, trace: dict[str, Any], item: dict[str, Any] | None) -> dict[str, Any]:
    """One request as it is recorded, with what a person needs to judge it."""
    asked = (trace["artifacts"] or {}).get("action_request")
    server_id, tool_name, principal_id = trace["server_id"], trace["tool_name"], trace["principal_id"]
    tools, before = await asyncio.gather(
        visit.api.find("/v1/tools", server_id=server_id),
        visit.api.find("/v1/traces", server_id=server_id, tool_name=tool_name, principal_id=principal_id, limit=6),
    )
    tool = next((one for one in (tools or {"items": []})["items"] if one["tool_name"] == tool_name), None)
    pin_status = (item or {}).get("pin_status")
    if pin_status is None and asked is not None:
        is_same = tool is not None and tool["definition_digest"] == asked["tool_definition_digest"]
        pin_status = "pinned" if is_same and tool is not None and tool["pin"]["status"] == "pinned" else "changed"
    is_waiting = trace["state"] == "PENDING" and trace["waiting"] == "supervisor"
    now = visit.clock.now()
    return {
        "trace": trace,
        "asked": asked,
        "arguments": [] if asked is None else arguments_shown(asked["arguments"]),
        "hidden": 0 if asked is None else hidden_in([asked["arguments"], asked["intent"]]),
        "tool": tool,
        "policy": (item or {}).get("policy"),
        "pin_status": pin_status,
        "is_waiting": is_waiting,
        "is_expired": is_waiting and trace["expires_at"] is not None and trace["expires_at"] <= now,
        "left_ms": between_ms(now, trace["expires_at"]),
        "whole_ms": between_ms(None if asked is None else asked["requested_at"], trace["expires_at"]),
        "before": [one for one in (before or {"items": []})["items"] if one["trace_id"] != trace["trace_id"]][:4],
        "decision": (trace["artifacts"] or {}).get("supervisor_decision"),
        "effect": (trace["artifacts"] or {}).get("tool_effect"),
    }
