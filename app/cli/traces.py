"""`tga traces` and `tga trace`: what happened, and what happens while one watches. Over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated, Any, Final

import typer
from rich.markup import escape

from app.cli.client import GatewayClient, error_of, path_to
from app.cli.pipes import reader_is_gone
from app.cli.running import AsJson, Limit, TraceArgument, moment, refuse, run_over_http
from app.cli.showing import (
    decided_by,
    note_own_only,
    notes,
    output,
    output_of,
    print_json,
    print_table,
    printable,
    shown_json,
    state_cell,
    styled_state,
)
from app.core.errors import GatewayUnreachable, ShuttingDown, StoreUnavailable
from app.core.limits import LIST_ENTRIES_MAX
from app.domain.tga.transitions import TRACE

_INDENT: Final = " " * 29
_AGAIN_S: Final = 1.0
_PATIENCE_S: Final = 60.0  # how long a watcher waits for a gateway that is being restarted


def add_to(application: typer.Typer) -> None:
    application.command("traces")(traces_command)
    application.command("trace")(trace_command)


def traces_command(
    context: typer.Context,
    state: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(TRACE.states)}; more than once for several.")
    ] = None,
    server: Annotated[str | None, typer.Option(help="Only calls of this server.")] = None,
    tool: Annotated[str | None, typer.Option(help="Only calls of this tool.")] = None,
    principal: Annotated[str | None, typer.Option(help="Only what this principal asked for.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only calls with exactly this idempotency key.")] = None,
    waiting: Annotated[
        str | None, typer.Option(help="Only what rests for a person: supervisor, or operator (held).")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only what was asked for since: 15m, 2h, 7d, or 2026-01-31T12:00:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Only what was asked for before; likewise.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """The newest traces."""
    wanted = None if not state else ",".join(one.upper() for one in state)
    if wanted is not None and not set(wanted.split(",")) <= set(TRACE.states):
        refuse(f"--state is one of {', '.join(TRACE.states)}")
    if waiting not in (None, "supervisor", "operator"):
        refuse("--waiting is supervisor or operator")
    filters = {
        "state": wanted,
        "server_id": server,
        "tool_name": tool,
        "principal_id": principal,
        "idempotency_key": key,
        "waiting": waiting,
        "since": moment(since, "--since"),
        "until": moment(until, "--until"),
    }
    run_over_http(context, lambda client: show_traces(client, limit=limit, as_json=as_json, **filters))


def trace_command(
    context: typer.Context,
    trace_id: TraceArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it is finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """One trace as a timeline: who asked, who decided, what was sent, what came back.

    With --json one document; with --watch --json one line for each entry as it comes.
    """
    show = watch_trace if watch else show_trace
    run_over_http(context, lambda client: show(client, trace_id, as_json=as_json))


async def show_traces(client: GatewayClient, *, limit: int, as_json: bool, **filters: str | None) -> bool:
    traces = await client.list_items("/v1/traces", limit=limit, **filters)
    if traces.is_own_only:
        note_own_only("traces of others")
    if as_json:
        print_json(traces)
        return True
    if not traces:
        output.print("No trace fits." if any(filters.values()) else "No traces yet.")
        return True
    print_table(
        ("trace", "state", "tool", "asked by", "requested at", "took", "sent"),
        (
            (
                trace["trace_id"],
                state_cell(trace["state"], trace["waiting"]),
                f"{trace['server_id']} {trace['tool_name']}",
                trace["principal_id"] or "",
                trace["requested_at"] or "",
                "" if trace["total_ms"] is None else f"{trace['total_ms']} ms",
                f"{trace['attempts']}×" if trace["attempts"] else "",
            )
            for trace in traces
        ),
    )
    return True


async def show_trace(client: GatewayClient, trace_id: str, *, as_json: bool) -> bool:
    trace = await client.get(path_to("v1", "traces", trace_id))
    entries = await _entries(client, trace_id)
    if as_json:
        print_json({**trace, "entries": entries})
        return True
    _show_head(trace)
    for item in entries:
        _show_entry(item)
    for attempt in trace["attempts"]:
        output.print(f"[dim]{attempt['started_at']}[/]     attempt {attempt['attempt']} begun")
    if trace["waiting"] == "supervisor":
        output.print(f"\nIt waits for a person until {trace['expires_at']}: `tga approve {trace_id}`.")
    elif trace["waiting"] == "operator":
        output.print(f"\nIts outcome is unknown, and it is held: `tga resolve {trace_id} …` ends that.")
    return True


async def watch_trace(client: GatewayClient, trace_id: str, *, as_json: bool) -> bool:
    """Entries as they come, until the trace is finished. A gateway that restarts meanwhile is waited for."""
    if not as_json:
        _show_head(await client.get(path_to("v1", "traces", trace_id)))
    last_id: str | None = None
    heard_at = time.monotonic()
    while True:
        try:
            async for event in client.events(path_to("v1", "traces", trace_id, "events"), last_id=last_id):
                heard_at, last_id = time.monotonic(), event.last_id or last_id
                item = json.loads(event.data)
                if event.name == "end":
                    if not as_json:
                        output.print(f"{styled_state(item['state'])}")
                    return True
                if event.name == "problem":
                    raise error_of(item)
                if event.name == "entry":
                    print_json(item) if as_json else _show_entry(item)
                    if reader_is_gone():
                        return True
            if last_id is not None and await _is_finished(client, trace_id, last_id):
                return True
        except (GatewayUnreachable, ShuttingDown, StoreUnavailable) as error:
            if last_id is None or time.monotonic() - heard_at > _PATIENCE_S:
                raise
            if not as_json:
                notes.print(f"[dim]{escape(error.code)}: asking again[/]")
        await asyncio.sleep(_AGAIN_S)


async def _is_finished(client: GatewayClient, trace_id: str, last_id: str) -> bool:
    trace = await client.get(path_to("v1", "traces", trace_id))
    return trace["state"] in ("COMPLETED", "FAILED", "DENIED") and str(trace["sequence_number"]) == last_id


async def _entries(client: GatewayClient, trace_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    after = "0"
    while len(items) < LIST_ENTRIES_MAX:
        page = await client.get(path_to("v1", "traces", trace_id, "entries"), after_seq=after)
        items += page["items"]
        if page["next"] is None:
            break
        after = page["next"]
    return items


def _show_head(trace: dict[str, Any]) -> None:
    waiting = f", waits for {trace['waiting']}" if trace["waiting"] else ""
    key = escape(trace["idempotency_key"] or "(none)")
    tool = escape(f"{trace['server_id']} {trace['tool_name']}")
    output.print(f"[bold]{tool}[/]  trace {trace['trace_id']}")
    erased = "  [yellow]payloads erased[/]" if trace["erased"] else ""
    output.print(f"{styled_state(trace['state'])}{waiting}  key {key}{erased}", end="\n\n")


def _show_entry(item: dict[str, Any]) -> None:
    entry, artifact = item["entry"], item["artifact"]
    is_move = entry["from_state"] != entry["to_state"]
    arrow = f"{entry['from_state']} → {entry['to_state']}" if is_move else entry["to_state"]
    number = entry["sequence_number"]
    output.print(f"[dim]{entry['recorded_at']}[/]  {number}  {arrow:<24} {entry['artifact_type']}")
    for line in _told(artifact):
        output.print(_INDENT + printable(line), markup=False)
    output.print(f"{_INDENT}[dim]entry {item['entry_digest'][:16]}…[/]")


def _told(artifact: dict[str, Any] | None) -> list[str]:
    match None if artifact is None else artifact.get("schema_id"), artifact:
        case "tga/v1/action_request", dict(request):
            intent = [f"to {shown_json(request['intent'])}"] if request["intent"] else []
            return [f"{request['principal']['principal_id']} asks for {shown_json(request['arguments'])}", *intent]
        case "tga/v1/supervisor_decision", dict(decision):
            by = decision["decided_by"]
            rationale = f": {decision['rationale']}" if decision["rationale"] else ""
            policies = f" ({', '.join(decision['policy_ids'])})" if decision["policy_ids"] else ""
            signed = [f"signed with {decision['signature']['key_id']}"] if decision["signature"] else []
            return [f"{decision['decision']} {decided_by(by)}{rationale}{policies}", *signed]
        case "tga/v1/tool_call", dict(call):
            return [f"tool call {call['tool_call_id']}, if unknown: {call['on_unknown_outcome']}"]
        case "tga/v1/tool_effect", dict(effect):
            told = [f"{effect['outcome']}, known by {effect['basis']}: {output_of(effect)}"]
            if effect["error"]:
                told.append(f"{effect['error']['code']}: {effect['error']['message']}")
            if effect["resolution"]:
                told.append(f"resolved by {effect['resolution']['resolved_by']}: {effect['resolution']['rationale']}")
            return told + [f"attempt {a['attempt']}  {a['started_at']}  {a['result']}" for a in effect["attempts"]]
        case _:
            return ["(payload missing)"]
