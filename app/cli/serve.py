"""`tga serve`: the gateway over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from app.cli.running import context_of, run_in_gateway

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway


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

    async def work(gateway: Gateway) -> bool:
        return await serve(gateway, context_of(context).settings)

    run_in_gateway(context, work)
