"""What recovery did to a trace, in one line: for an operator who runs `tga recover` or watches `tga serve`."""

from __future__ import annotations

import json

from rich.console import Console

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


def tell_recovered(result: Recovered, *, as_json: bool) -> None:
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
