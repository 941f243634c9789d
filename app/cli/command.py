"""The command `tga`: what it offers, and how an error becomes an exit code.

0 fine, 1 found something wrong, 2 bad usage, 3 cannot reach what it needs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn

import typer
import uuid_utils
import uvloop
from rich.console import Console

from app import __version__
from app.cli.calls import call_tool, parse_arguments, resolve_trace, show_trace, show_traces
from app.cli.context import Context, Gateway
from app.cli.db import load_database_status, migrate_database
from app.cli.recovery import recover, serve
from app.cli.verify import verify
from app.core.errors import (
    ArgumentsInvalid,
    EmbeddedPostgresFailed,
    InputMalformed,
    InputTooLarge,
    KeyMissing,
    LockAcquireFailed,
    MigrationRefused,
    OutcomeUnknown,
    SchemaViolation,
    SettingInvalid,
    StoreBusy,
    StoreUnavailable,
    StoreUnfit,
    TgaError,
    ToolNotFound,
)
from app.domain.tga.transitions import TRACE

EXIT_WRONG = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
_BAD_USAGE = (
    SettingInvalid,
    InputMalformed,
    InputTooLarge,
    SchemaViolation,
    ToolNotFound,
    ArgumentsInvalid,
    KeyMissing,
)
_UNREACHABLE = (
    StoreUnavailable,
    StoreUnfit,
    StoreBusy,
    OutcomeUnknown,
    LockAcquireFailed,
    MigrationRefused,
    EmbeddedPostgresFailed,
)

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

_TRACE_ID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def _trace_id(text: str | None) -> str | None:
    bare = None if text is None else text.removeprefix(f"{TRACE.name}:")
    if bare is not None and not _TRACE_ID.fullmatch(bare):
        raise typer.BadParameter("a trace id is a UUID of version 7, as `tga traces` shows it")
    return bare


TraceArgument = Annotated[str, typer.Argument(metavar="ID", help="The trace.", callback=_trace_id)]
MaybeTrace = Annotated[str | None, typer.Argument(metavar="ID", help="One trace.", callback=_trace_id)]
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
    trace_id: MaybeTrace = None,
    everything: Annotated[bool, typer.Option("--all", help="Every stream of the ledger.")] = False,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, link, transition, artifact, claim, checkpoint and head; exit 1 if anything is wrong."""
    if (trace_id is None) != everything:
        _refuse("name one trace, or say --all")
    is_sound = _run(verify(_context(context).settings, trace_id, as_json=as_json))
    raise typer.Exit(0 if is_sound else EXIT_WRONG)


@application.command("call")
def call_command(
    context: typer.Context,
    server: Annotated[str, typer.Argument(metavar="SERVER", help="A server of the configuration file.")],
    tool: Annotated[str, typer.Argument(metavar="TOOL", help="One of its tools.")],
    argument: Annotated[
        list[str] | None, typer.Option("-a", "--argument", help="name=value; JSON if it reads so.")
    ] = None,
    text: Annotated[str | None, typer.Option("--json", help="All arguments as one JSON object; - reads stdin.")] = None,
    key: Annotated[str | None, typer.Option("-k", "--key", help="Idempotency key; a new one if not given.")] = None,
) -> None:
    """Call a tool. Its output goes to stdout; exit 1 if it failed or was denied."""
    if argument and text is not None:
        _refuse("give arguments with -a or with --json, not both")

    async def work(gateway: Gateway) -> bool:
        arguments = parse_arguments(argument or [], text)
        return await call_tool(gateway, server, tool, arguments, key=key, new_key=str(uuid_utils.uuid7()))

    _run_in_gateway(context, work)


@application.command("traces")
def traces_command(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The newest traces."""
    wanted = None if state is None else state.upper()
    if wanted is not None and wanted not in TRACE.states:
        _refuse(f"--state is one of {', '.join(TRACE.states)}")
    _run_in_gateway(context, lambda gateway: show_traces(gateway, state=wanted, limit=limit, as_json=as_json))


@application.command("trace")
def trace_command(context: typer.Context, trace_id: TraceArgument, as_json: AsJson = False) -> None:
    """One trace as a timeline: who asked, who decided, what was sent, what came back."""
    _run_in_gateway(context, lambda gateway: show_trace(gateway, trace_id, as_json=as_json))


@application.command("recover")
def recover_command(
    context: typer.Context,
    trace_id: MaybeTrace = None,
    everything: Annotated[bool, typer.Option("--all", help="Every trace that has no living executor.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue traces whose executor is gone; exit 1 if any could not be recovered."""
    if (trace_id is None) != everything:
        _refuse("name one trace, or say --all")
    _run_in_gateway(context, lambda gateway: recover(gateway, trace_id, dry_run=dry_run, as_json=as_json))


@application.command("resolve")
def resolve_command(
    context: typer.Context,
    trace_id: TraceArgument,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="redispatch, succeeded or failed.")],
    rationale: Annotated[str, typer.Option("-r", "--rationale", help="Why; it goes on the record.")],
    result: Annotated[str | None, typer.Option("--output", help="With succeeded: the output, as JSON.")] = None,
) -> None:
    """End a hold: say what became of a call whose outcome is unknown, or have it sent again."""
    if action not in ("redispatch", "succeeded", "failed"):
        _refuse("ACTION is redispatch, succeeded or failed")
    known: Any = action
    _run_in_gateway(
        context, lambda gateway: resolve_trace(gateway, trace_id, known, rationale=rationale, result=result)
    )


@application.command("serve")
def serve_command(context: typer.Context) -> None:
    """Recover what was interrupted, now and every few seconds, until stopped."""
    _run_in_gateway(context, serve)


@database.command("migrate")
def migrate_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Bring the database's schema up to date. Running it again changes nothing."""
    _run(migrate_database(_context(context).settings, as_json=as_json))


@database.command("status")
def status_command(context: typer.Context, as_json: AsJson = False) -> None:
    """What is applied, what is pending, and whether server and guards are fit; exit 1 if not."""
    is_fit = _run(load_database_status(_context(context).settings, as_json=as_json))
    raise typer.Exit(0 if is_fit else EXIT_WRONG)


command = typer.main.get_command(application)


def show_error(error: TgaError) -> int:
    """Say it, and return the exit code that it means."""
    errors.print(f"[bold red]error[/] {error.code}", end="")
    errors.print(f": {str(error).removeprefix(error.code + ': ')}", markup=False)
    if isinstance(error, _BAD_USAGE):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, _UNREACHABLE) else EXIT_WRONG


def _run(work: Coroutine[Any, Any, bool]) -> bool:
    try:
        return uvloop.run(work)
    except TgaError as error:
        raise typer.Exit(show_error(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)


def _run_in_gateway(context: typer.Context, work: Callable[[Gateway], Coroutine[Any, Any, bool]]) -> NoReturn:
    async def opened() -> bool:
        async with _context(context).open_gateway() as gateway:
            return await work(gateway)

    raise typer.Exit(0 if _run(opened()) else EXIT_WRONG)


def _refuse(what: str) -> NoReturn:
    errors.print(f"[bold red]usage[/]: {what}. See `tga --help`.")
    raise typer.Exit(EXIT_USAGE)


def _context(context: typer.Context) -> Context:
    found = context.find_object(Context)
    if found is None:
        raise RuntimeError("the command was called without its context; call app.main.run")
    return found
