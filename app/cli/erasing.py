"""`tga erase`: remove the payloads of a finished trace or run, directly on the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.running import StreamArgument, Yes, run_in_gateway, stream_of
from app.cli.showing import confirmed, notes, output
from app.domain.identity import DEFAULT_TENANT
from app.domain.runs.erasing import ERASABLE_RUNS
from app.domain.runs.transitions import RUN
from app.domain.tga.erasing import ERASABLE_TRACES
from app.postgres.erasing import erase_stream

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway

_BY = "cli"


def add_to(application: typer.Typer) -> None:
    application.command("erase")(erase_command)


def erase_command(
    context: typer.Context,
    trace_id: StreamArgument,
    rationale: Annotated[str, typer.Option("-r", "--rationale", help="Why; it goes on the record.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose it is.")] = DEFAULT_TENANT,
    yes: Yes = False,
) -> None:
    """Remove the payloads of a finished trace or run, for ever. Its entries and digests stand, and so does the erasure.

    It asks first; without a terminal it does nothing unless given --yes. Names stay: tenant, principal, server, tool
    and idempotency key.
    """
    run_in_gateway(
        context, lambda gateway: erase(gateway, trace_id, tenant=tenant, rationale=rationale, yes=yes), make=False
    )


async def erase(gateway: Gateway, trace_id: str, *, tenant: str, rationale: str, yes: bool) -> bool:
    """True when it is erased; what cannot be erased is left as it is."""
    if not confirmed(f"Erase the payloads of {trace_id} for ever?", yes=yes):
        notes.print("Nothing was erased.")
        return False
    stream = stream_of(trace_id)
    await erase_stream(
        gateway.sessions,
        gateway.system,
        gateway.clock,
        gateway.traces.executor_id(),
        stream,
        ERASABLE_RUNS if RUN.has(stream) else ERASABLE_TRACES,
        tenant=tenant,
        erased_by=_BY,
        rationale=rationale,
    )
    output.print(f"The payloads of {trace_id} are erased; its entries and digests stand.", markup=False)
    return True
