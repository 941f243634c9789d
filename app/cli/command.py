"""The command `tga`: what it offers. How it exits is in running.py."""

from __future__ import annotations

from typing import Annotated

import typer

from app import __version__
from app.cli import access_commands, gateway_commands, mcp, store_commands
from app.cli.running import show_error as show_error

application = typer.Typer(
    name="tga",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tga {__version__}")
        raise typer.Exit


@application.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Every tool call decided, dispatched once, and on a log that can be verified.

    call, traces, trace, approvals, approve, deny, withdraw, resolve, servers and mcp ask a running gateway: the one at
    TGA_URL (default: http://TGA_HOST:TGA_PORT, which is http://127.0.0.1:8420), with the key in TGA_API_KEY (default,
    on the same machine: the one in TGA_HOME/admin.key). All others work on the store itself, whether a gateway runs or
    not.

    TGA_HOME (default ~/.tga) is where state lives; TGA_DATABASE_URL names a PostgreSQL server, else the embedded
    one is used.

    Exit codes: 0 fine; 1 found something wrong, or was refused (a failed or denied call, a key or role that does not
    do); 2 bad usage; 3 cannot reach what it needs (the gateway or the store is away or busy: try again).
    """


gateway_commands.add_to(application)
store_commands.add_to(application)
access_commands.add_to(application)
mcp.add_to(application)

command = typer.main.get_command(application)
