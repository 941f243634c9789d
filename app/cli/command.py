"""The command `tga`: what it offers, and how an error becomes an exit code.

0 fine, 1 found something wrong, 2 bad usage, 3 cannot reach what it needs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from app import __version__
from app.cli.db import load_database_status, migrate_database
from app.cli.verify import verify
from app.core.errors import (
    EmbeddedPostgresFailed,
    MigrationRefused,
    SettingInvalid,
    StoreUnavailable,
    StoreUnfit,
    TgaError,
)
from app.settings import Settings

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
_UNREACHABLE = (StoreUnavailable, StoreUnfit, MigrationRefused, EmbeddedPostgresFailed)

errors = Console(stderr=True, highlight=False, soft_wrap=True)
application = typer.Typer(
    name="tga",
    help="Every tool call decided, dispatched once, and on a log that can be verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
database = typer.Typer(
    help="The database: bring its schema up to date, and see whether it is fit.", no_args_is_help=True
)
application.add_typer(database, name="db")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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
    """TGA_HOME (default ~/.tga) is where state lives; TGA_DATABASE_URL names a PostgreSQL server, else the embedded
    one is used."""


@application.command("verify")
def verify_command(
    context: typer.Context,
    trace_id: Annotated[str | None, typer.Argument(metavar="ID", help="One trace.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every stream of the ledger.")] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, link, transition, artifact, claim, checkpoint and head; exit 1 if anything is wrong."""
    if (trace_id is None) != everything:
        _refuse("name one trace, or say --all")
    is_sound = _run(verify(context.find_object(Settings) or _no_settings(), trace_id, as_json=as_json))
    raise typer.Exit(0 if is_sound else EXIT_WRONG)


@database.command("migrate")
def migrate_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Bring the database's schema up to date. Running it again changes nothing."""
    _run(migrate_database(context.find_object(Settings) or _no_settings(), as_json=as_json))


@database.command("status")
def status_command(context: typer.Context, as_json: AsJson = False) -> None:
    """What is applied, what is pending, and whether server and guards are fit; exit 1 if not."""
    is_fit = _run(load_database_status(context.find_object(Settings) or _no_settings(), as_json=as_json))
    raise typer.Exit(0 if is_fit else EXIT_WRONG)


command = typer.main.get_command(application)


def _run(work: Coroutine[Any, Any, bool]) -> bool:
    try:
        return asyncio.run(work)
    except TgaError as error:
        errors.print(f"[bold red]error[/] {error.code}", end="")
        errors.print(f": {str(error).removeprefix(error.code + ': ')}", markup=False)
        if isinstance(error, SettingInvalid):
            raise typer.Exit(EXIT_USAGE) from None
        raise typer.Exit(EXIT_UNREACHABLE if isinstance(error, _UNREACHABLE) else EXIT_WRONG) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse(what: str) -> NoReturn:
    errors.print(f"[bold red]usage[/]: {what}. See `tga --help`.")
    raise typer.Exit(EXIT_USAGE)


def _no_settings() -> NoReturn:
    raise RuntimeError("the command was called without settings; call app.main.run")
