"""`tga runs` and `tga run`: the commands; what they do is in run_looking.py, run_acting.py and run_comparing.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from app.cli.client import GatewayClient
from app.cli.run_acting import (
    answer_run,
    cancel_run,
    fork_run,
    parsed_input,
    retry_run,
    signal_run,
    signing_with,
    start_run,
)
from app.cli.run_comparing import diff_runs
from app.cli.run_looking import show_run, show_runs, show_state, watch_run
from app.cli.running import AsJson, Limit, Rationale, SignAs, SignWith, Yes, checked_run_id, refuse, run_over_http
from app.cli.submitting import is_program_file, read_program, submit_program

STATUSES: Final = (
    *("running", "waiting", "waiting_for_human", "completed", "failed", "cancelled", "parked", "diverged"),
)
RunArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The run, as `tga runs` shows it.", callback=checked_run_id)
]

commands = typer.Typer(
    help="One run: start it, look at it, answer what it asks, end it, have it tried again.", no_args_is_help=True
)


def add_to(application: typer.Typer) -> None:
    application.command("runs")(runs_command)
    application.add_typer(commands, name="run")


def runs_command(
    context: typer.Context,
    status: Annotated[str | None, typer.Option(help=f"One of {', '.join(STATUSES)}.")] = None,
    procedure: Annotated[str | None, typer.Option(help="Only runs of this procedure.")] = None,
    prefix: Annotated[str | None, typer.Option(help="Only runs whose id begins so.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """The newest runs, and what each waits for."""
    wanted = None if status is None else status.lower().replace("-", "_")
    if wanted is not None and wanted not in STATUSES:
        refuse(f"--status is one of {', '.join(STATUSES)}")
    filters = {"status": wanted, "procedure": procedure, "prefix": prefix}
    run_over_http(context, lambda client: show_runs(client, limit=limit, as_json=as_json, **filters))


@commands.command("start")
def start_command(
    context: typer.Context,
    procedure: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE.lua", help="A procedure, as `tga procedures` shows it; or a program to submit first."
        ),
    ],
    given: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="What it is started with; - reads stdin.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--id", help="The run's id: a repeat with the same input is the same run.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Not the newest version, but this one; of FILE.lua: submitted as this one.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="[NAME=]PATH", help="With FILE.lua: a file that the program reads. Repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="With FILE.lua: the procedure's name, if not the file's.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict-determinism", help="What a replay would not repeat stops this run, with its line."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it rests, and print its output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run. Its id goes to stdout, with --wait its output; all else to stderr.

    FILE.lua is submitted first, with its files: the gateway compiles and lints it, and executes it (docs/lua.md).

    With --wait exit 0 when it is completed, and when it waits for a person or a signal (there is no output then);
    exit 1 when it failed, was cancelled or parked, or has diverged.
    """
    is_file = is_program_file(procedure)
    if not is_file and (file or name):
        refuse("--file and --name go with a program: tga run start FILE.lua --file PATH")

    async def start(client: GatewayClient) -> bool:
        if not is_file:
            return await start_run(
                client,
                procedure,
                given=given,
                run_id=run_id,
                version=version,
                wait=wait,
                as_json=as_json,
                is_strict=strict,
            )
        if given is not None and given != "-":
            parsed_input(given)  # a slip in it is told before anything is sent
        path = Path(procedure)
        program = await submit_program(client, path, read_program(path, file or [], name=name), version)
        return await start_run(
            client,
            program["name"],
            given=given,
            run_id=run_id,
            version=program["version"],
            program_digest=program["program_digest"],
            wait=wait,
            as_json=as_json,
            is_strict=strict,
        )

    run_over_http(context, start)


@commands.command("show")
def show_command(
    context: typer.Context,
    run_id: RunArgument,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Only so many of its last entries.")] = 1_000,
    as_json: AsJson = False,
) -> None:
    """One run as a timeline: its operations nested as the program nests them, with durations, tries and results, its
    attempts, and what it waits for.

    With --json one document, its journal in it.
    """
    run_over_http(context, lambda client: show_run(client, run_id, limit=limit, as_json=as_json))


@commands.command("watch")
def watch_command(
    context: typer.Context,
    run_id: RunArgument,
    to_end: Annotated[
        bool, typer.Option("--to-end", help="Also while it waits for a person or a signal: until it has ended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a run until it rests: it has ended, or waits for a person or a signal.

    With --json one line for each entry as it comes. Exit 1 when it failed, was cancelled or parked, or has diverged.
    """
    run_over_http(context, lambda client: watch_run(client, run_id, to_end=to_end, as_json=as_json))


@commands.command("answer")
def answer_command(
    context: typer.Context,
    run_id: RunArgument,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Which question: its address, as `tga run show` says.")],
    value: Annotated[
        str | None, typer.Argument(metavar="[VALUE]", help="The answer; asked for on a terminal if not given.")
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--json", help="VALUE is JSON; without it the question says what it means.")
    ] = False,
    sign_with: SignWith = None,
    principal: SignAs = None,
) -> None:
    """Answer a question of a run. On a terminal the question is shown first; the first answer counts, and one that does
    not fit leaves the question open.

    Where the question wants text VALUE is text, where it wants true or false yes and no do too; else it is JSON if it
    reads so.
    """
    signing = signing_with(sign_with, principal)
    run_over_http(context, lambda client: answer_run(client, run_id, path, value, is_json=is_json, signing=signing))


@commands.command("signal")
def signal_command(
    context: typer.Context,
    run_id: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which signal.")],
    value: Annotated[
        str | None, typer.Argument(metavar="[VALUE]", help="What it carries; JSON if it reads so, null if not given.")
    ] = None,
    signal_id: Annotated[
        str | None, typer.Option("--signal-id", help="Sent once for its id: a repeat changes nothing.")
    ] = None,
) -> None:
    """Send a run a signal; it is kept until the run waits for it."""
    run_over_http(context, lambda client: signal_run(client, run_id, name, value, signal_id=signal_id))


@commands.command("cancel")
def cancel_command(context: typer.Context, run_id: RunArgument, rationale: Rationale = None, yes: Yes = False) -> None:
    """End a run now, for good; its worker is told at its next contact.

    It asks first; without a terminal it does nothing unless given --yes.
    """
    run_over_http(context, lambda client: cancel_run(client, run_id, rationale=rationale, yes=yes))


@commands.command("retry")
def retry_command(
    context: typer.Context,
    run_id: RunArgument,
    rationale: Rationale = None,
    accept_version: Annotated[
        str | None,
        typer.Option("--accept-version", metavar="V", help="The newest program of this version may go on with it."),
    ] = None,
) -> None:
    """Have a run that failed, was parked or has diverged go on: what failed last is performed again, what is recorded
    before it stays."""
    run_over_http(context, lambda client: retry_run(client, run_id, rationale=rationale, accept_version=accept_version))


@commands.command("fork")
def fork_command(
    context: typer.Context,
    run_id: RunArgument,
    at: Annotated[
        int | None, typer.Option("--at", metavar="N", min=1, help="After this entry; after the last if not given.")
    ] = None,
    new_id: Annotated[str | None, typer.Option("--id", help="The new run's id.")] = None,
    version: Annotated[str | None, typer.Option(help="The new run's version, if not the same.")] = None,
    as_json: AsJson = False,
) -> None:
    """Start a run that goes on from an entry of this one's journal; this one stays as it is. The new one's id goes to
    stdout."""
    run_over_http(
        context, lambda client: fork_run(client, run_id, at=at, new_id=new_id, version=version, as_json=as_json)
    )


@commands.command("state")
def state_command(
    context: typer.Context,
    run_id: RunArgument,
    at: Annotated[
        int | None, typer.Option("--at", metavar="N", min=1, help="As it was after this entry; now if not given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The state that the program keeps, now or after an entry of the journal; nothing is executed for it."""
    run_over_http(context, lambda client: show_state(client, run_id, at=at, as_json=as_json))


@commands.command("diff")
def diff_command(
    context: typer.Context,
    left: Annotated[str, typer.Argument(metavar="ID", help="A run.")],
    right: Annotated[str, typer.Argument(metavar="OTHER", help="The run to compare it with, as its fork.")],
    as_json: AsJson = False,
) -> None:
    """Two runs compared address by address: the first difference, then all. Exit 1 if there is any, as diff does.

    Inputs are compared between a fork and its source; those of other runs are keyed apart.
    """
    run_over_http(context, lambda client: diff_runs(client, left, right, as_json=as_json))
