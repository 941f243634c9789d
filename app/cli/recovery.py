"""`tga recover`: continue what a crash interrupted, whether a gateway runs or not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from app.cli.running import AsJson, MaybeTrace, refuse, run_in_gateway
from app.core.errors import ConcurrentExecution, TgaError
from app.core.limits import RECOVERY_PAGE_STREAMS
from app.domain.tga.documents import ToolCall, TraceId
from app.domain.tga.ports import StoredTrace
from app.domain.tga.replay import Dispatch, decide_next
from app.domain.tga.runtime import Recovered
from app.domain.tga.transitions import TRACE
from app.gateway.recovery_report import tell_recovered

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway

output = Console(highlight=False, soft_wrap=True)


def add_to(application: typer.Typer) -> None:
    application.command("recover")(recover_command)


def recover_command(
    context: typer.Context,
    trace_id: MaybeTrace = None,
    everything: Annotated[bool, typer.Option("--all", help="Every trace that has no living executor.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue traces whose executor is gone; exit 1 if any could not be recovered.

    Traces that runs wait for are among them. Runs themselves go on by their workers, and any gateway does what is due
    for them: `tga doctor` counts those that need a person, `tga run show ID` says what to do.
    """
    if (trace_id is None) != everything:
        refuse("name one trace, or say --all")
    run_in_gateway(context, lambda gateway: recover(gateway, trace_id, dry_run=dry_run, as_json=as_json), make=False)


async def recover(gateway: Gateway, trace_id: str | None, *, dry_run: bool, as_json: bool) -> bool:
    """True when nothing is left that could not be recovered."""
    if dry_run:
        return await _tell_what_would_be_done(gateway, trace_id, as_json=as_json)
    recovered = failed = 0
    with _progress() as progress:
        task = progress.add_task("recovering", total=None)
        if trace_id is not None:
            one = await _recover_one(gateway, TraceId(trace_id))
            tell_recovered(one, as_json=as_json)
            return one.error is None
        async for result in gateway.runtime.recover_all():
            if isinstance(result.error, ConcurrentExecution):
                continue  # another executor was faster: it is being executed, which is all that is wanted
            recovered += result.error is None
            failed += result.error is not None
            progress.update(task, advance=1, description=f"recovering, {recovered} done, {failed} failed")
            tell_recovered(result, as_json=as_json)
    if not as_json:
        output.print(f"{recovered} recovered, {failed} could not be.")
    return failed == 0


async def _recover_one(gateway: Gateway, trace_id: TraceId) -> Recovered:
    found = None
    try:
        found = (await gateway.traces.load_trace(trace_id)).state.state
        return Recovered(trace_id, found, await gateway.runtime.recover(trace_id))
    except TgaError as error:
        return Recovered(trace_id, found, None, error)


async def _tell_what_would_be_done(gateway: Gateway, trace_id: str | None, *, as_json: bool) -> bool:
    if trace_id is not None:
        traces = [TraceId(trace_id)]
    else:
        traces, after = [], None
        while page := await gateway.traces.list_recoverable(TRACE.name, after=after, limit=RECOVERY_PAGE_STREAMS):
            traces += [TraceId(TRACE.identity_of(stream)) for stream in page]
            after = page[-1]
    all_fine = True
    for identity in traces:
        try:
            stored = await gateway.traces.load_trace(identity)
            told = _what_would_be_done(stored)
            document = {"trace_id": identity, "found": stored.state.state, "would": told, "error": None}
        except TgaError as error:
            all_fine = False
            document = {"trace_id": identity, "found": None, "would": "leave it as it is", "error": str(error)}
        if as_json:
            output.print(json.dumps(document), markup=False)
        else:
            output.print(f"  {identity}  found {document['found'] or 'unreadable'}, would {document['would']}")
            if document["error"]:
                output.print(f"    {document['error']}", markup=False)
    if not as_json:
        output.print(f"{len(traces)} to recover; nothing was changed.")
    return all_fine


def _what_would_be_done(stored: StoredTrace) -> str:
    action = decide_next(stored.state, claim_effect=stored.claim_effect)
    if stored.waiting is not None:
        return f"leave it waiting for its {stored.waiting}"
    if not isinstance(action, Dispatch):
        return action.replace("_", " ")
    call = next(record.artifact for record in stored.records if isinstance(record.artifact, ToolCall))
    return {
        "redispatch": "send it again, with the same ids",
        "reconcile": f"ask {call.reconcile_tool} whether it was executed",
        "hold": "hold it for an operator",
    }[call.on_unknown_outcome]


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
