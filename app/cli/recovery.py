"""`tga recover`: continue what a crash interrupted, whether a gateway runs or not."""

from __future__ import annotations

import json

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from app.cli.context import Gateway
from app.core.errors import ConcurrentExecution, TgaError
from app.core.limits import RECOVERY_PAGE_TRACES
from app.domain.tga.models import ToolCall, TraceId
from app.domain.tga.ports import StoredTrace
from app.domain.tga.replay import Dispatch, decide_next
from app.domain.tga.runtime import Recovered

output = Console(highlight=False, soft_wrap=True)
_WHY = {
    "PENDING": "nobody had been asked yet",
    "AUTHORIZED": "it was decided on and not yet sent",
    "EXECUTING": "no effect was recorded, so the same call was sent again with the same ids",
}
_WHY_BASIS = {
    "reconciliation": "no effect was recorded; its server was asked, and had executed it",
    "unknown": "no effect was recorded, and its attempts are used up",
    "not_sent": "no effect was recorded, and its server cannot be reached",
}


async def recover(gateway: Gateway, trace_id: str | None, *, dry_run: bool, as_json: bool) -> bool:
    """True when nothing is left that could not be recovered."""
    if dry_run:
        return await _tell_what_would_be_done(gateway, trace_id, as_json=as_json)
    recovered = failed = 0
    with _progress() as progress:
        task = progress.add_task("recovering", total=None)
        if trace_id is not None:
            one = await _recover_one(gateway, TraceId(trace_id))
            tell(one, as_json=as_json)
            return one.error is None
        async for result in gateway.runtime.recover_all():
            if isinstance(result.error, ConcurrentExecution):
                continue  # another executor was faster: it is being driven, which is all that is wanted
            recovered += result.error is None
            failed += result.error is not None
            progress.update(task, advance=1, description=f"recovering, {recovered} done, {failed} failed")
            tell(result, as_json=as_json)
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


def tell(result: Recovered, *, as_json: bool) -> None:
    state = None if result.answer is None else result.answer.state
    if as_json:
        error = None if result.error is None else {"code": result.error.code, "message": str(result.error)}
        document = {"trace_id": result.trace_id, "found": result.found, "state": state, "error": error}
        output.print(json.dumps(document), markup=False)
    elif result.error is not None:
        output.print(f"[red]✗[/] {result.trace_id}  found {result.found or 'unreadable'}, left as it is")
        output.print(f"    {result.error}", markup=False)
    else:
        answer = result.answer
        waiting = answer.waiting if answer else None
        done = f"waits for {waiting}" if waiting else f"now {state}"
        why = _WHY.get(result.found or "", "it was finished already")
        if answer is not None and answer.effect is not None:
            why = _WHY_BASIS.get(answer.effect.basis, why)
        if waiting == "operator":
            why = "its outcome is unknown, and its tool is to be held then"
        output.print(f"[green]✓[/] {result.trace_id}  found {result.found}, {done}: {why}")


async def _tell_what_would_be_done(gateway: Gateway, trace_id: str | None, *, as_json: bool) -> bool:
    if trace_id is not None:
        traces = [TraceId(trace_id)]
    else:
        traces = []
        while page := await gateway.traces.list_recoverable(
            after=traces[-1] if traces else None, limit=RECOVERY_PAGE_TRACES
        ):
            traces += page
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
