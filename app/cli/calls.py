"""`tga call`, `tga traces`, `tga trace`, `tga resolve`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from app.cli.context import Gateway
from app.core.canonical import canonical_bytes, parse_json, parse_object
from app.core.errors import InputMalformed, TgaError, TraceNotFound
from app.domain.tga.drive import Answer
from app.domain.tga.models import JsonOutput, Principal, ToolEffect, TraceId
from app.domain.tga.ports import StoredTrace
from app.domain.tga.runtime import CheckedCall
from app.postgres.listing import list_traces

output = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)
STATE_STYLE = {"COMPLETED": "green", "FAILED": "red", "DENIED": "red", "PENDING": "yellow", "EXECUTING": "cyan"}


def parse_arguments(pairs: list[str], text: str | None) -> dict[str, Any]:
    """`-a k=v` pairs, each value JSON if it reads as JSON and text otherwise; or one JSON object."""
    if text is not None:
        return parse_object(sys.stdin.buffer.read() if text == "-" else text)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputMalformed("an argument is not name=value", found=pair, remedy="Write -a name=value.")
        try:
            arguments[name] = parse_json(value)
        except TgaError:
            arguments[name] = value
    return arguments


async def call_tool(
    gateway: Gateway, server: str, tool: str, arguments: dict[str, Any], *, key: str | None, new_key: str
) -> bool:
    """True when the call is completed, or waits for a person."""
    chosen = key
    if key is None and gateway.registry.resolve(server, tool).tool_class == "write":
        chosen = new_key
        notes.print(f"idempotency key [bold]{chosen}[/] (repeat with -k {chosen} to be answered from the record)")
    principal = Principal(principal_id="cli", tenant="default")
    answer = await gateway.runtime.call(CheckedCall(server, tool, arguments, chosen, principal))
    return show_answer(answer)


def show_answer(answer: Answer) -> bool:
    style = STATE_STYLE.get(answer.state, "bold")
    replayed = " (answered from the record)" if answer.replayed else ""
    notes.print(f"[{style}]{answer.state}[/] trace {answer.trace_id}{replayed}")
    if answer.waiting == "supervisor":
        notes.print("It waits for a person to decide. (There is no command for that in this version yet.)")
    if answer.waiting == "operator":
        notes.print(f"Its outcome is unknown, and it is held: `tga resolve {answer.trace_id} …` ends that.")
    if answer.effect is not None:
        if answer.effect.error is not None:
            notes.print(f"{answer.effect.error.code}: {answer.effect.error.message}", markup=False)
        output.print(_shown_output(answer.effect), markup=False)
    return answer.state == "COMPLETED" or answer.waiting is not None


def _shown_output(effect: ToolEffect) -> str:
    if isinstance(effect.output, JsonOutput):
        return canonical_bytes(effect.output.value).decode()  # as it is recorded: a repeat prints the same bytes
    return "null" if effect.output is None else json.dumps(effect.output.to_json())


async def show_traces(gateway: Gateway, *, state: str | None, limit: int, as_json: bool) -> bool:
    traces = await list_traces(gateway.sessions, state=state, limit=limit)
    if as_json:
        output.print(json.dumps([asdict(trace) for trace in traces]), markup=False)
        return True
    if not traces:
        output.print("No traces yet." if state is None else f"No trace is {state}.")
        return True
    table = Table(box=None, pad_edge=False)
    for heading, width in (("trace", 36), ("state", 9), ("tool", 4), ("asked by", 8), ("requested at", 12)):
        table.add_column(heading, no_wrap=True, min_width=width)
    for trace in traces:
        waiting = f" (waits for {trace.waiting})" if trace.waiting else ""
        style = STATE_STYLE.get(trace.state, "bold")
        tool = f"{trace.server_id} {trace.tool_name}"
        table.add_row(
            trace.trace_id, f"[{style}]{trace.state}[/]{waiting}", tool, trace.principal_id, trace.requested_at
        )
    # In a pipe nothing is cut off; on a terminal its width decides.
    wide = output if output.is_terminal else Console(highlight=False, width=200)
    wide.print(table)
    return True


async def show_trace(gateway: Gateway, trace_id: str, *, as_json: bool) -> bool:
    stored = await gateway.traces.load_trace(TraceId(trace_id))
    if as_json:
        output.print(json.dumps(trace_document(stored)), markup=False)
        return True
    state = stored.state
    waiting = f", waits for {stored.waiting}" if stored.waiting else ""
    output.print(f"[bold]{state.server_id} {state.tool_name}[/]  trace {state.trace_id}")
    style = STATE_STYLE.get(state.state, "bold")
    output.print(f"[{style}]{state.state}[/]{waiting}  key {state.idempotency_key or '(none)'}", end="\n\n")
    for record in stored.records:
        entry, artifact = record.entry, record.artifact
        arrow = entry.to_state if entry.from_state == entry.to_state else f"{entry.from_state} → {entry.to_state}"
        output.print(f"[dim]{entry.recorded_at}[/]  {entry.sequence_number}  {arrow:<24} {entry.artifact_type}")
        for line in _told(artifact):
            output.print(f"{'':29}{line}", markup=False)
        output.print(f"{'':29}[dim]entry {entry.entry_digest[:16]}…[/]")
    for number, started_at in enumerate(stored.attempt_times, 2):
        output.print(f"[dim]{started_at}[/]     attempt {number} begun")
    return True


def trace_document(stored: StoredTrace) -> dict[str, Any]:
    return {
        "state": stored.state.to_json(),
        "waiting": stored.waiting,
        "owner": stored.owner,
        "attempts_after_the_first": list(stored.attempt_times),
        "entries": [
            {"entry": r.entry.to_json(), "artifact": None if r.artifact is None else r.artifact.to_json()}
            for r in stored.records
        ],
    }


def _told(artifact: Any) -> list[str]:
    document = {} if artifact is None else artifact.to_json()
    match document.get("schema_id"):
        case "tga/v1/action_request":
            who = document["principal"]["principal_id"]
            return [f"{who} asks for {json.dumps(document['arguments'], ensure_ascii=False)}"]
        case "tga/v1/supervisor_decision":
            by = document["decided_by"]
            rationale = f": {document['rationale']}" if document["rationale"] else ""
            return [f"{document['decision']} by {by['type']} {by['id']}{rationale}"]
        case "tga/v1/tool_call":
            return [f"tool call {document['tool_call_id']}, if unknown: {document['on_unknown_outcome']}"]
        case "tga/v1/tool_effect":
            told = [f"{document['outcome']}, known by {document['basis']}: {_shown_output(artifact)}"]
            if document["error"]:
                told.append(f"{document['error']['code']}: {document['error']['message']}")
            return told + [f"attempt {a['attempt']}  {a['started_at']}  {a['result']}" for a in document["attempts"]]
        case _:
            return ["(payload missing)"]


async def resolve_trace(
    gateway: Gateway,
    trace_id: str,
    action: Literal["redispatch", "succeeded", "failed"],
    *,
    rationale: str,
    result: str | None,
) -> bool:
    identity = TraceId(trace_id)
    stored = await gateway.traces.load_trace(identity)
    if stored.state.tool_call_digest is None:
        raise TraceNotFound("the trace has no tool call to resolve", stream=f"trace:{identity}")
    kept = None if result is None else JsonOutput(encoding="json", value=parse_json(result))
    answer = await gateway.runtime.resolve(
        identity,
        action=action,
        tool_call_digest=stored.state.tool_call_digest,
        resolved_by="cli",
        rationale=rationale,
        output=kept,
    )
    return show_answer(answer) or action == "failed"
