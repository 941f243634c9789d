"""How a command runs: what it works with, and how what happens becomes words and an exit code.

0 fine; 1 found something wrong, or was refused; 2 bad usage; 3 cannot reach what it needs.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
import uvloop
from rich.console import Console

from app.cli.context import Context
from app.core.errors import (
    ArgumentsInvalid,
    ConfirmationNeeded,
    EmbeddedPostgresFailed,
    GatewayBusy,
    GatewayUnreachable,
    InputMalformed,
    InputTooLarge,
    KeyMissing,
    LockAcquireFailed,
    MigrationRefused,
    OutcomeUnknown,
    ProcedureNotFound,
    RateLimited,
    RequestTimeout,
    RunAnswerInvalid,
    SchemaViolation,
    SettingInvalid,
    ShuttingDown,
    StoreBusy,
    StoreUnavailable,
    StoreUnfit,
    TgaError,
    ToolNotFound,
    TooManyInFlight,
    VerificationUnfinished,
)
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE

if TYPE_CHECKING:
    from app.cli.client import GatewayClient
    from app.gateway.wiring import Gateway

EXIT_WRONG: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNREACHABLE: Final = 3
_BAD_USAGE: Final = (
    ConfirmationNeeded,
    SettingInvalid,
    InputMalformed,
    InputTooLarge,
    SchemaViolation,
    ToolNotFound,
    ProcedureNotFound,
    ArgumentsInvalid,
    RunAnswerInvalid,
    KeyMissing,
)
_UNREACHABLE: Final = (
    StoreUnavailable,
    StoreUnfit,
    StoreBusy,
    OutcomeUnknown,
    LockAcquireFailed,
    MigrationRefused,
    EmbeddedPostgresFailed,
    GatewayUnreachable,
    GatewayBusy,
    ShuttingDown,
    RateLimited,
    TooManyInFlight,
    RequestTimeout,
    VerificationUnfinished,
)
_TRACE_ID: Final = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")

_RUN_ID: Final = re.compile("([!-.0-~]{1,128}/)?[A-Za-z0-9][A-Za-z0-9._:-]{0,95}")

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def checked_trace_id(text: str | None) -> str | None:
    bare = None if text is None else (TRACE.identity_of(text) if TRACE.has(text) else text)
    if bare is not None and not _TRACE_ID.fullmatch(bare):
        raise typer.BadParameter("a trace id is a UUID of version 7, as `tga traces` shows it")
    return bare


def checked_stream_id(text: str | None) -> str | None:
    """A trace's id as it is; a run's with `run:` before it, which tells the two apart."""
    if text is None or not RUN.has(text):
        return checked_trace_id(text)
    if not _RUN_ID.fullmatch(RUN.identity_of(text)):
        raise typer.BadParameter("a run is written run:ID, as `tga runs` shows it")
    return text


def checked_run_id(text: str | None) -> str | None:
    bare = None if text is None else (RUN.identity_of(text) if RUN.has(text) else text)
    if bare is not None and not _RUN_ID.fullmatch(bare):
        raise typer.BadParameter("a run's id is as `tga runs` shows it")
    return bare


def stream_of(checked_id: str) -> str:
    """The stream that `checked_stream_id` has let pass."""
    return checked_id if RUN.has(checked_id) else TRACE.stream(checked_id)


StreamArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The trace, or run:ID for a run.", callback=checked_stream_id)
]
MaybeStream = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="One trace, or run:ID for a run.", callback=checked_stream_id)
]
TraceArgument = Annotated[str, typer.Argument(metavar="ID", help="The trace.", callback=checked_trace_id)]
MaybeTrace = Annotated[str | None, typer.Argument(metavar="[ID]", help="One trace.", callback=checked_trace_id)]
ServerArgument = Annotated[str, typer.Argument(metavar="SERVER", help="A server of the configuration file.")]
ToolArgument = Annotated[str, typer.Argument(metavar="TOOL", help="One of its tools.")]
ArgumentPairs = Annotated[list[str] | None, typer.Option("-a", "--argument", help="name=value; JSON if it reads so.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; needed where there is no terminal.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Of this tenant.")]
SignWith = Annotated[
    Path | None,
    typer.Option("--sign-with", metavar="KEYFILE", help="Sign with your own registered key (see `tga keys make`)."),
]
SignAs = Annotated[
    str | None,
    typer.Option("--as", metavar="PRINCIPAL", help="With --sign-with: who you are to the gateway; it is signed too."),
]
Rationale = Annotated[str | None, typer.Option("-r", "--rationale", help="Why; it goes on the record.")]


def show_error(error: TgaError) -> int:
    """Say it, and return the exit code that it means."""
    errors.print(f"[bold red]error[/] {error.code}", end="")
    errors.print(f": {str(error).removeprefix(error.code + ': ')}", markup=False)
    if isinstance(error, _BAD_USAGE):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, _UNREACHABLE) else EXIT_WRONG


def run(work: Coroutine[Any, Any, bool]) -> NoReturn:
    """Do it, and exit: 0 when it says True, 1 when it says False, else what its error means."""
    try:
        is_fine = uvloop.run(work)
    except TgaError as error:
        raise typer.Exit(show_error(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    raise typer.Exit(0 if is_fine else EXIT_WRONG)


async def cancelled_by_signals(work: Coroutine[Any, Any, bool]) -> bool:
    """Do it. SIGTERM and SIGHUP (a closed terminal) cancel it, as Ctrl-C does, so that what it has started is stopped
    from its first moment on. A second signal ends the process at once.

    Not for work that asks a person: a prompt would not hear the signal.
    """
    received: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def cancel(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # `nohup`, for one, has SIGHUP ignored
            loop.add_signal_handler(number, cancel, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        raise typer.Exit(128 + received[0]) from None


def run_in_gateway(
    context: typer.Context, work: Callable[[Gateway], Coroutine[Any, Any, bool]], *, make: bool = True
) -> NoReturn:
    """On the store, with all that a gateway has: no gateway need be running. Without `make` a home in which no gateway
    ever was is left as it is: StoreUnavailable."""
    settings = context_of(context).settings

    async def opened() -> bool:
        if not make:
            from app.postgres.database import verify_made

            verify_made(settings.home, settings.database_url)
        async with context_of(context).open_gateway() as gateway:
            return await work(gateway)

    run(opened())


def run_over_http(context: typer.Context, work: Callable[[GatewayClient], Coroutine[Any, Any, bool]]) -> NoReturn:
    """Over HTTP, by the gateway that TGA_URL names."""
    # Here, because the HTTP client takes long to load: only who asks a gateway waits for it.
    from app.cli.client import GatewayClient

    async def opened() -> bool:
        async with GatewayClient.open(context_of(context).settings) as client:
            return await work(client)

    run(opened())


def refuse(what: str) -> NoReturn:
    errors.print(f"[bold red]usage[/]: {what}. See `tga --help`.")
    raise typer.Exit(EXIT_USAGE)


def context_of(context: typer.Context) -> Context:
    found = context.find_object(Context)
    if found is None:
        raise RuntimeError("the command was called without its context; call app.main.run")
    return found


def moment(text: str | None, option: str) -> str | None:
    """A moment as the API takes it: `15m`, `2h` and `7d` are so long ago; refused if it is neither."""
    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if ago is None:
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3})?Z", text) is None:
            refuse(f"{option} is a time ago such as 15m, 2h or 7d, or a moment such as 2026-01-31T12:00:00Z")
        return text
    seconds = int(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[ago[2]]
    then = datetime.fromtimestamp(max(0.0, time.time() - seconds), tz=UTC)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")
