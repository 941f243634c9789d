"""`tga stats`: how many calls, what became of them, and how quick. Over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.cli.client import GatewayClient
from app.cli.running import AsJson, moment, run_over_http
from app.cli.showing import notes, output, print_json, print_table


def add_to(application: typer.Typer) -> None:
    application.command("stats")(stats_command)


def stats_command(
    context: typer.Context,
    since: Annotated[str, typer.Option(help="From when: 15m, 2h, 7d ago, or 2026-01-31T12:00:00Z.")] = "24h",
    until: Annotated[str | None, typer.Option(help="Up to when; likewise. Else now.")] = None,
    server: Annotated[str | None, typer.Option(help="Only calls of this server.")] = None,
    tool: Annotated[str | None, typer.Option(help="Only calls of this tool.")] = None,
    as_json: AsJson = False,
) -> None:
    """How many calls there were, what became of them, and how quick, by tool."""
    asked = {
        "since": moment(since, "--since"),
        "until": moment(until, "--until"),
        "server_id": server,
        "tool_name": tool,
    }
    run_over_http(context, lambda client: show_stats(client, as_json=as_json, **asked))


async def show_stats(client: GatewayClient, *, as_json: bool, **asked: str | None) -> bool:
    found = await client.get("/v1/stats", **asked)
    if as_json:
        print_json(found)
        return True
    total, now = found["total"], found["now"]
    output.print(
        f"{total['asked']} calls since {found['since']}, {total['asked_per_minute']:g} a minute: "
        f"{total['completed']} completed, {total['failed']} failed, {total['denied']} denied, {total['open']} open; "
        f"{total['replayed']} repeats answered from the record."
    )
    output.print(f"Now {now['in_flight']} in flight, {now['waiting']} wait for a person, {now['held']} held.")
    if found["by_tool"]:
        print_table(
            ("tool", "calls", "completed", "failed", "denied", "half below", "95 % below", "99 % below"),
            (_row(one) for one in found["by_tool"]),
        )
    if found["tools_left_out"]:
        notes.print(f"{found['tools_left_out']} more tools; name one with --tool.")
    if found["folded_leaves"] < found["tree_size"]:
        notes.print(f"{found['tree_size'] - found['folded_leaves']} newer entries are not counted yet.")
    return True


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    latency = one["latency"]
    times = ("" if latency[share] is None else f"{latency[share]} ms" for share in ("p50_ms", "p95_ms", "p99_ms"))
    counts = (str(one[name]) for name in ("asked", "completed", "failed", "denied"))
    return (f"{one['server_id']} {one['tool_name']}", *counts, *times)
