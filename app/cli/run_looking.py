"""`tga runs`, `tga run show`, `tga run watch` and `tga run state`: what runs do, and what they wait for. Over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from app.cli.client import GatewayClient, error_of, path_to
from app.cli.pipes import reader_is_gone
from app.cli.run_drawing import STATUS_STYLE, Timeline, duration, shown_value, waits_for
from app.cli.run_journal import Item, Journal, apart_ms, journal_of, read_journal
from app.cli.showing import note_own_only, notes, output, print_json, print_table, printable, shown_json
from app.core.errors import GatewayUnreachable, ShuttingDown, StoreUnavailable

_AGAIN_S: Final = 0.2  # what comes together is read together
_PATIENCE_S: Final = 60.0  # how long a watcher waits for a gateway that is being restarted
_MAY_REST: Final = ("run_end", "run_suspension", "run_answer")  # after these a run may wait for a person or a signal
_ENDED: Final = ("COMPLETED", "CANCELLED", "FAILED", "PARKED", "DIVERGED")


async def show_runs(client: GatewayClient, *, limit: int, as_json: bool, **filters: str | None) -> bool:
    runs = await client.list_items("/v1/runs", limit=limit, **filters)
    if runs.is_own_only:
        note_own_only("runs of others")
    if as_json:
        print_json(runs)
        return True
    if not runs:
        output.print("No run fits." if any(filters.values()) else "No runs yet: `tga run start` starts one.")
        return True
    print_table(
        ("run", "status", "procedure", "attempt", "started by", "started at", "last entry at", ""),
        (
            (
                run["run_id"],
                status_cell(run["status"], run["waiting"]),
                f"{run['procedure']} {run['version']}",
                str(run["attempt"] or ""),
                run["principal_id"] or "",
                run["started_at"] or "",
                run["updated_at"] or "",
                Text(printable(run["notice"] or ""), style="yellow"),
            )
            for run in runs
        ),
    )
    return True


def status_cell(status: str, waiting: str | None) -> Text:
    cell = Text(status.replace("_", " "), style=STATUS_STYLE.get(status, "bold"))
    if waiting is None or status in ("waiting_for_human", "failed", "parked", "diverged"):
        return cell  # the status says for whom
    return cell.append(f" (waits for {_whom(waiting)})", style="default")


async def show_run(client: GatewayClient, run_id: str, *, limit: int, as_json: bool) -> bool:
    """The run's head, its journal as a timeline, and what to do next if a person has to act."""
    run = await client.get(path_to("v1", "runs", run_id), steps=None if as_json else 0)
    after = run["sequence_number"] - limit
    items = [item async for item in read_journal(client, run_id, after=after)]
    if as_json:
        print_json({**run, "journal": items})
        return True
    show_head(run)
    if items and items[0]["artifact_type"] != "run_start":
        told = f"the last {len(items):,} of {run['sequence_number']:,} entries; `--limit` shows more"
        output.print(f"[dim]           ({told})[/]")
    journal = journal_of(items)
    Timeline(run["started_at"]).draw(journal)
    show_what_next(run, journal)
    return True


async def watch_run(client: GatewayClient, run_id: str, *, to_end: bool, as_json: bool) -> bool:
    """Entries as they come, until the run rests. True unless it ended without being completed."""
    run = await client.get(path_to("v1", "runs", run_id), steps=0)
    if not as_json:
        show_head(run)
    timeline, journal = Timeline(run["started_at"]), Journal()
    async for item in _followed(client, run_id, to_end=to_end):
        journal.add(item)
        print_json(item) if as_json else timeline.record(item, journal)
        if reader_is_gone():
            return True
    run = await client.get(path_to("v1", "runs", run_id), steps=0)
    if not as_json:
        show_what_next(run, journal)
    return run["state"] not in ("FAILED", "CANCELLED", "PARKED", "DIVERGED")


async def wait_for_rest(client: GatewayClient, run_id: str) -> dict[str, Any]:
    """The run, once it rests."""
    async for _ in _followed(client, run_id, to_end=False):
        pass
    return await client.get(path_to("v1", "runs", run_id), steps=0)


async def _followed(client: GatewayClient, run_id: str, *, to_end: bool) -> AsyncIterator[Item]:
    """The journal from its beginning, and what is added, until the run rests. A gateway that restarts meanwhile is
    waited for."""
    after: int | None = None
    heard_at = time.monotonic()
    while True:
        try:
            may_rest = False
            async for item in read_journal(client, run_id, after=after):
                after, heard_at = item["sequence_number"], time.monotonic()
                may_rest = item["artifact_type"] in _MAY_REST or may_rest
                yield item
            if may_rest or after is None:
                run = await client.get(path_to("v1", "runs", run_id), steps=0)
                if rests(run, to_end=to_end) and run["sequence_number"] == after:
                    return
            await _await_news(client, run_id, after or 0)
        except (GatewayUnreachable, ShuttingDown, StoreUnavailable) as error:
            if after is None or time.monotonic() - heard_at > _PATIENCE_S:
                raise
            notes.print(f"[dim]{escape(error.code)}: asking again[/]")
        await asyncio.sleep(_AGAIN_S)


async def _await_news(client: GatewayClient, run_id: str, after: int) -> None:
    """Until something is added to the journal: the gateway holds the question, so that waiting costs nothing."""
    path = path_to("v1", "runs", run_id, "events")
    async with aclosing(client.events(path, last_id=str(max(after, 0)))) as events:
        async for event in events:
            if event.name == "problem":
                raise error_of(json.loads(event.data))
            return


def rests(run: dict[str, Any], *, to_end: bool = False) -> bool:
    """Whether nothing happens until a person acts: it has ended, or waits for a person or a signal."""
    return run["state"] in _ENDED or (not to_end and run["waiting"] in ("person", "signal"))


def show_head(run: dict[str, Any]) -> None:
    output.print(f"[bold]{escape(run['procedure'])} {escape(run['version'])}[/]  run {escape(run['run_id'])}")
    style = STATUS_STYLE.get(run["status"], "bold")
    ended_at = run["updated_at"] if run["state"] in _ENDED else _now()
    told = [
        f"[{style}]{run['state']}[/]" + (f", waits for {_whom(run['waiting'])}" if run["waiting"] else ""),
        f"attempt {run['attempt']}" if run["attempt"] else "not begun",
        f"started by {escape(run['principal_id'])} at {run['started_at']}",
        ("took " if run["state"] in _ENDED else "for ") + duration(apart_ms(run["started_at"], ended_at)),
    ]
    output.print("[dim] · [/]".join(told), end="\n\n")


def show_what_next(run: dict[str, Any], journal: Journal, *, to: Console = output) -> None:
    """What the run waits for, and what to type."""
    lines = _what_next(run, journal)
    if lines:
        to.print()
    for line in lines:
        to.print(printable(line), markup=False)


def _what_next(run: dict[str, Any], journal: Journal) -> list[str]:
    run_id, state = run["run_id"], run["state"]
    if run["divergence"]:
        found = run["divergence"]
        at = f" ({found['source']})" if found["source"] else ""
        return [
            f"At {found['path']} the journal has {found['recorded']}; the program performed {found['performed']}{at}.",
            "Deploy the program that wrote the journal, or say that a newer one may go on: "
            f"`tga run retry {run_id} --accept-version V`; or `tga run fork {run_id} --at N`.",
        ]
    if state in ("FAILED", "PARKED"):
        return [*_noticed(run), f"`tga run retry {run_id}` has it go on, `tga run cancel {run_id}` ends it."]
    if run["notice"]:
        return _noticed(run)
    lines = []
    for awaited in run["awaits"] if state in ("WAITING", "RUNNING") else ():
        operation = journal.operations.get(awaited["path"])
        if operation is None or operation.last.outcome is not None:
            continue
        at = f", at {awaited['source']}" if awaited.get("source") else ""
        lines.append(f"{awaited['path']} {waits_for(operation, operation.last)}{at}{_answer_with(run_id, awaited)}")
    if state == "COMPLETED" and run["output"] and run["output"]["tier"] == "artifact":
        lines.append(f"Its output is {shown_value(run['output'])}.")
    return lines


def _answer_with(run_id: str, awaited: dict[str, Any]) -> str:
    if awaited["kind"] == "ask":
        return f"  (`tga run answer {run_id} {awaited['path']}`)"
    return f"  (`tga run signal {run_id} {awaited['name']}`)" if awaited["kind"] == "signal" else ""


def _noticed(run: dict[str, Any]) -> list[str]:
    return [f"{run['notice'][0].upper()}{run['notice'][1:]}."] if run["notice"] else []


async def show_state(client: GatewayClient, run_id: str, *, at: int | None, as_json: bool) -> bool:
    """The state that the program keeps, as JSON on stdout."""
    found = await client.get(path_to("v1", "runs", run_id, "state"), at=at)
    if as_json:
        print_json(found)
        return True
    notes.print(f"[dim]after entry {found['at']}, {found['run_state']}[/]")
    output.print(shown_json(found["state"], indent=2), markup=False)
    return True


def _whom(waiting: str) -> str:
    return (
        f"a {waiting}" if waiting in ("person", "worker", "signal", "child", "tool") else _OTHERS.get(waiting, waiting)
    )


_OTHERS: Final = {"operator": "an operator", "time": "a time"}


def _now() -> str:
    return datetime.now(UTC).isoformat()
