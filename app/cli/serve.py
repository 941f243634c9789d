"""`tga serve`: the gateway over HTTP."""

from __future__ import annotations

import typer

from app.cli.running import cancelled_by_signals, context_of, run


def add_to(application: typer.Typer) -> None:
    application.command("serve")(serve_command)


def serve_command(context: typer.Context) -> None:
    """Run the gateway on TGA_HOST and TGA_PORT until SIGINT or SIGTERM.

    It also recovers what was interrupted, lets requests expire, follows the policy file and announces what waits. To
    authenticate, callers send a key as `Authorization: Bearer`; the first start writes an administrator's key to
    TGA_HOME/admin.key, and `tga keys create` makes others.
    """

    # Here, because the web framework takes as long to load as all the rest: only who serves waits for it.
    from app.gateway.serving import serve

    async def work() -> bool:
        async with context_of(context).open_gateway() as gateway:
            return await serve(gateway, context_of(context).settings)

    run(cancelled_by_signals(work()))
