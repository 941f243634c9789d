"""`tga serve`: the gateway over HTTP, in one process or several."""

from __future__ import annotations

import dataclasses
import signal
from typing import Annotated

import typer

from app.cli.running import cancelled_by_signals, context_of, run
from app.core.limits import PROCESSES_MAX


def add_to(application: typer.Typer) -> None:
    application.command("serve")(serve_command)


def serve_command(
    context: typer.Context,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=PROCESSES_MAX, help="So many processes serve the port; else TGA_PROCESSES, else one."),
    ] = None,
    process: Annotated[
        int | None, typer.Option(hidden=True, help="Which of them this is; a supervisor says so.")
    ] = None,
    channel: Annotated[int | None, typer.Option(hidden=True, help="The way to its supervisor.")] = None,
) -> None:
    """Run the gateway on TGA_HOST and TGA_PORT until SIGINT or SIGTERM.

    It also recovers what was interrupted, lets requests expire, follows the policy file and announces what waits. To
    authenticate, callers send a key as `Authorization: Bearer`; the first start writes an administrator's key to
    TGA_HOME/admin.key, and `tga keys create` makes others.

    With --processes it uses more than one core: a supervisor starts the processes, replaces one that ends, and on
    SIGHUP starts all of them anew, one by one, without a refused call; a changed tga.toml counts from then on.
    """
    settings = context_of(context).settings
    settings = dataclasses.replace(settings, processes=processes or settings.processes)
    opened_by = context_of(context).open_with

    async def work() -> bool:
        # Here, because the web framework takes as long to load as all the rest: only who serves waits for it.
        from app.gateway.serving import serve

        async with opened_by(settings) as gateway:
            return await serve(gateway, settings)

    async def supervised() -> bool:
        from app.gateway.supervisor import supervise

        if code := await supervise(settings):
            raise typer.Exit(code)
        return True

    async def one_of_several(number: int, descriptor: int) -> bool:
        from app.gateway.serving import serve
        from app.gateway.serving_process import ServingProcess, Share

        own = ServingProcess.of_descriptor(descriptor, Share(number, settings.processes))

        async def opened() -> bool:
            async with opened_by(settings) as gateway:
                return await serve(gateway, settings, process=own)

        try:
            return await own.unless_stopped_early(opened())
        finally:
            await own.close()

    if process is not None and channel is not None:
        # A signal that is sent to all processes by their name is meant for the supervisor.
        signal.signal(signal.SIGHUP, lambda *_: None)
        run(cancelled_by_signals(one_of_several(process, channel)))
    run(cancelled_by_signals(work() if settings.processes == 1 else supervised()))
