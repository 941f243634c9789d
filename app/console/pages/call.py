"""One call: what happened, is it true? And a held one: did it happen?"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Final

import orjson
from starlette.responses import Response

from app.console.components import between_ms, span
from app.console.gateway_api import ApiProblem
from app.console.rendering import SANDBOX
from app.console.shown_text import hidden_in
from app.console.visit import Visit
from app.core.errors import InputMalformed

_ARTIFACTS: Final = ("action_request", "supervisor_decision", "tool_call", "tool_effect")
_ENTRIES: Final = 50
_WAIT_MS: Final = 1_500
_TONES: Final = {"COMPLETED": "ok", "FAILED": "bad", "DENIED": "none", "PENDING": "wait"}


async def show(visit: Visit) -> Response:
    return await _shown(visit)


async def show_value(visit: Visit) -> Response:
    """All of an artifact, as text: what a page has cut."""
    of = visit.query.get("of", "")
    if of not in _ARTIFACTS:
        raise InputMalformed("there is no such part", expected=", ".join(_ARTIFACTS))
    trace = await visit.api.get(f"/v1/traces/{visit.request.path_params['trace_id']}")
    artifact = (trace["artifacts"] or {}).get(of)
    body = orjson.dumps(artifact, option=orjson.OPT_INDENT_2)
    return Response(body, media_type="text/plain; charset=utf-8", headers={**SANDBOX, "Cache-Control": "no-store"})


async def resolve(visit: Visit) -> Response:
    """End a hold. The form names the tool call that the page showed; a reason is required."""
    form, trace_id = visit.form, visit.request.path_params["trace_id"]
    body: dict[str, Any] = {
        "action": form.get("action", ""),
        "tool_call_digest": form.get("tool_call_digest", ""),
        "rationale": form.get("rationale", "").strip(),
        "wait_ms": _WAIT_MS,
    }
    try:
        if body["action"] not in ("succeeded", "failed", "redispatch"):
            raise _missing("Choose what became of it. Nothing is chosen for you.")
        if not body["rationale"]:
            raise _missing("Say how you know. The reason goes on the record.")
        if body["action"] == "succeeded" and form.get("output", "").strip():
            try:
                body["output"] = orjson.loads(form["output"])
            except orjson.JSONDecodeError as error:
                raise _missing(f"What the tool answered is not JSON: {error}") from None
        await visit.api.post(f"/v1/traces/{trace_id}/resolve", body)
    except ApiProblem as problem:
        if problem.code in ("FORBIDDEN", "TRACE_NOT_FOUND", "UNAUTHENTICATED"):
            raise
        return await _shown(visit, problem=problem, typed=form)
    return visit.go(f"/calls/{trace_id}")


async def withdraw(visit: Visit) -> Response:
    """Its caller takes a request back before anybody has decided: nothing will run."""
    rationale = visit.form.get("rationale", "").strip()
    return await _moved(visit, "withdraw", {"rationale": rationale} if rationale else {})


async def recover(visit: Visit) -> Response:
    """Go on where the record ends, with the same key: what was sent is sent again only where its tool allows it."""
    return await _moved(visit, "recover", {"wait_ms": _WAIT_MS})


async def _moved(visit: Visit, what: str, body: dict[str, Any]) -> Response:
    trace_id = visit.request.path_params["trace_id"]
    try:
        await visit.api.post(f"/v1/traces/{trace_id}/{what}", body)
    except ApiProblem as problem:
        if problem.code in ("FORBIDDEN", "TRACE_NOT_FOUND", "UNAUTHENTICATED"):
            raise
        return await _shown(visit, problem=problem, typed=visit.form)
    return visit.go(f"/calls/{trace_id}")


def _missing(words: str) -> ApiProblem:
    return ApiProblem(
        422, {"code": "SCHEMA_VIOLATION", "title": "Something is missing", "detail": words, "remedy": None}
    )


async def _shown(visit: Visit, *, problem: ApiProblem | None = None, typed: dict[str, str] | None = None) -> Response:
    trace_id = visit.request.path_params["trace_id"]
    trace = await visit.api.get(f"/v1/traces/{trace_id}")
    entries, verification, tools = await asyncio.gather(
        visit.api.find(f"/v1/traces/{trace_id}/entries", limit=_ENTRIES),
        visit.api.find(f"/v1/traces/{trace_id}/verification"),
        visit.api.find("/v1/tools", server_id=trace["server_id"]),
    )
    artifacts = trace["artifacts"] or dict.fromkeys(_ARTIFACTS)
    tool = next((one for one in (tools or {"items": []})["items"] if one["tool_name"] == trace["tool_name"]), None)
    is_held = trace["waiting"] == "operator"
    shown_entries = [
        one["entry"] | {"entry_digest": one["entry_digest"], "leaf": leaf_said(verification, one["sequence_number"])}
        for one in (entries or {"items": []})["items"]
    ]
    now = visit.clock.now()
    return await visit.page(
        "call.html",
        nav="Tool calls",
        status=200 if problem is None else problem.status,
        trace=trace,
        asked=artifacts["action_request"],
        decision=artifacts["supervisor_decision"],
        sent=artifacts["tool_call"],
        effect=artifacts["tool_effect"],
        hidden=hidden_in([artifacts["action_request"], artifacts["tool_effect"]]),
        entries=shown_entries,
        more_entries=(entries or {}).get("next"),
        attempts=_attempts(trace, artifacts["tool_call"], artifacts["tool_effect"], now),
        machine=_machine(trace, shown_entries, artifacts, now),
        verification=verification,
        checks=checks_said(verification),
        tool_of=tool,
        read_tools=[one for one in (tools or {"items": []})["items"] if one["tool_class"] == "read"][:3],
        is_held=is_held,
        problem=None if problem is None else problem.document,
        typed=typed or {},
        url=str(visit.request.base_url).rstrip("/"),
    )


def checks_said(verification: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Each check once, as (outcome, name, words): what was not checked says why in its own line, and what no check is
    about follows them."""
    if verification is None:
        return []
    said, of_checks, reasons = list[tuple[str, str, str]](), set[str](), verification["not_checked"]
    for check in verification["checks"]:
        name, words = check["name"].replace("_", " "), check["what"]
        if check["outcome"] == "not_checked":
            why = next((one for one in reasons if name in one.partition(": ")[0].split(" and ")), None)
            if why is not None:
                of_checks.add(why)
                words = f"Not checked: {why.partition(': ')[2]}"
        said.append((check["outcome"], name.capitalize(), words))
    return said + [("not_checked", "Not checked", one) for one in reasons if one not in of_checks]


def leaf_said(verification: dict[str, Any] | None, sequence_number: int) -> str | None:
    """Where an entry stands in the tree. An entry that came after the verification has no leaf in it."""
    if verification is None:
        return None
    leaves = verification["leaves"]
    leaf = leaves[sequence_number - 1] if sequence_number <= len(leaves) else None
    return "not yet in the tree" if leaf is None else f"leaf {leaf:,}"


def _attempts(trace: dict[str, Any], sent: Any, effect: Any, now: str) -> list[dict[str, Any]]:
    """Each time that the call was sent, drawn to one scale."""
    if effect is not None:
        known = [dict(one) for one in effect["attempts"]]
    elif sent is not None:
        known = [{"attempt": 1, "started_at": sent["prepared_at"], "ended_at": None, "result": None}]
        known += [{**one, "ended_at": None, "result": None} for one in trace["attempts"]]
        for one, following in itertools.pairwise(known):
            one["ended_at"], one["result"] = following["started_at"], "not answered"
    else:
        known = []
    if not known:
        return []
    begin = known[0]["started_at"]
    whole = max(between_ms(begin, known[-1]["ended_at"] or now) or 0, 1.0)
    for one in known:
        took = between_ms(one["started_at"], one["ended_at"])
        one["took"] = "not known" if took is None else span(took)
        one["x"] = round(100 * (between_ms(begin, one["started_at"]) or 0) / whole, 2)
        one["width"] = round(max(1.5, 100 * (took if took is not None else 0) / whole), 2)
    return known


def _machine(
    trace: dict[str, Any], entries: list[dict[str, Any]], artifacts: dict[str, Any], now: str
) -> dict[str, Any]:
    """The path through the states: who moved it, and how long it stood before."""
    on, edges, before = ["PENDING"], dict[str, tuple[str, str]](), None
    names = {"AUTHORIZED": "PA", "DENIED": "PD", "EXECUTING": "AE", "COMPLETED": "EC", "FAILED": "EF"}
    for entry in entries:
        to = entry["to_state"]
        if to in names:
            on.append(to)
            edges[names[to]] = (_moved_by(to, artifacts), span(between_ms(before, entry["recorded_at"])))
        before = entry["recorded_at"]
    is_held = trace["waiting"] == "operator"
    tone = "wait" if is_held else _TONES.get(trace["state"], "accent")
    return {"on": list(dict.fromkeys(on)), "edges": edges, "tone": tone, "is_held": is_held}


def _moved_by(state: str, artifacts: dict[str, Any]) -> str:
    decision, effect = artifacts["supervisor_decision"], artifacts["tool_effect"]
    if state in ("AUTHORIZED", "DENIED") and decision is not None:
        by = decision["decided_by"]
        verb = "approved" if state == "AUTHORIZED" else "denied"
        who = {"policy": "the policy", "expiry": "nobody in time:", "withdrawal": "its caller"}.get(
            by["type"], by["id"]
        )
        return f"{who[:18]} {verb}"
    if state == "EXECUTING":
        return "made durable"
    if effect is None:
        return ""
    if effect["resolution"] is not None:
        return f"{effect['resolution']['resolved_by'][:18]} resolved it"
    count = len(effect["attempts"])
    return "not sent" if not count else "answered" if count == 1 else f"after {count} attempts"
