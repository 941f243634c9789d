"""`tga db`: the schema, whether the database is fit, and its end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.cli.running import AsJson, Yes, context_of, run
from app.cli.showing import confirmed, notes
from app.core.errors import SettingInvalid
from app.postgres.database import open_database, verify_made
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.guards import find_problems
from app.postgres.migrate import load_status, migrate
from app.settings import Settings

commands = typer.Typer(
    help="The database: its schema, whether it is fit, backup, restore, rebuild, and its end.", no_args_is_help=True
)
output = Console(highlight=False, soft_wrap=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="db")


async def migrate_database(settings: Settings, *, as_json: bool) -> bool:
    async with open_database(settings.home, settings.database_url) as database:
        applied = await migrate(database.admin_url)
    names = [f"{migration.version:04}_{migration.name}" for migration in applied]
    if as_json:
        output.print(json.dumps({"applied": names}), markup=False)
    elif names:
        for name in names:
            output.print(f"[green]applied[/] {name}")
    else:
        output.print("The schema is up to date.")
    return True


async def load_database_status(settings: Settings, *, as_json: bool) -> bool:
    async with open_database(settings.home, settings.database_url, make=False) as database:
        status = await load_status(database.admin_url)
        problems = await find_problems(database.admin_url)
    is_fit = not status.pending and not any(problem.refuses for problem in problems)
    if as_json:
        document = {
            "database": "embedded" if database.is_embedded else "named",
            "applied": [asdict(applied) for applied in status.applied],
            "pending": [f"{migration.version:04}_{migration.name}" for migration in status.pending],
            "problems": [asdict(problem) for problem in problems],
        }
        output.print(json.dumps(document), markup=False)
        return is_fit
    output.print(f"Database: {database.where}", markup=False)
    for applied in status.applied:
        output.print(f"[green]applied[/] {applied.version:04}_{applied.name}  {applied.applied_at}")
    for migration in status.pending:
        output.print(f"[yellow]pending[/] {migration.version:04}_{migration.name}")
    for problem in problems:
        output.print("[bold red]unfit[/]  " if problem.refuses else "[yellow]warn[/]   ", end=" ")
        output.print(f"{problem.what}: expected {problem.expected}, found {problem.found}", markup=False)
        output.print(f"        {problem.remedy}", markup=False)
    if status.pending:
        output.print("Run `tga db migrate`.")
    elif is_fit:
        output.print("Fit: the server's settings are safe, and the schema is as its migrations made it.")
    return is_fit


async def drop_database(settings: Settings, *, yes: bool) -> bool:
    """True when it is gone. The log ends with it: the next one has a key of its own."""
    from app.keys.log_signer import end_log, verify_log_can_end  # here: `tga db status` needs no cryptography

    if settings.database_url is not None:
        raise SettingInvalid(
            "TGA_DATABASE_URL names a server of your own, and only an embedded database is dropped here",
            remedy="Use that server's own tools, as `dropdb`. Unset TGA_DATABASE_URL to drop the one in TGA_HOME.",
        )
    verify_made(settings.home, None)
    verify_log_can_end()
    server = EmbeddedPostgres(settings.home)
    place = server.place
    question = f"Drop the database in {place}: every trace, key and record in it, for ever?"
    if not confirmed(question, yes=yes):
        notes.print("Nothing was dropped.")
        return False
    server.drop()
    ended = end_log(settings.keys) if settings.keys.is_dir() else None
    output.print(f"The database in {place} is gone, and so are all API keys.", markup=False)
    if ended is not None:
        aside = settings.keys / f"log.{ended}.retired"
        output.print(f"Its log has ended: the key is kept as {aside}. A next start begins a new log.", markup=False)
    return True


@commands.command("backup")
def backup_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; it must not be there yet.")],
) -> None:
    """Write the database to a file, with the pg_dump that fits its server, and read all of it again. The keys folder is
    not in it. A gateway may run meanwhile."""
    from app.cli.backup import back_up  # here, as below: `tga db status` needs none of it

    run(back_up(context_of(context).settings, file))


@commands.command("restore")
def restore_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `tga db backup` or pg_dump -Fc has written.")],
    yes: Yes = False,
) -> None:
    """Restore a backup, verify it, and only then put it in place. Stop the gateway first.

    It asks first; without a terminal it does nothing unless given --yes. The embedded database that was there is kept
    under another name; a server of your own needs an empty database. Keys and log.head are left as they are.
    """
    from app.cli.backup import restore

    run(restore(context_of(context).settings, file, yes=yes))


@commands.command("rebuild")
def rebuild_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Make anew, from the streams, what is kept of them beside the ledger: which run is due when and for whom, open
    questions, references to blobs; facts, counts and digests of calls. Exit 1 if a run cannot be folded. A gateway may
    run meanwhile."""
    run(rebuild(context_of(context).settings, as_json=as_json))


async def rebuild(settings: Settings, *, as_json: bool) -> bool:
    """True when every run was folded. The streams themselves are only read."""
    from app.clock import SystemClock
    from app.postgres.call_facts import rebuild_calls
    from app.postgres.run_rows import rebuild_runs
    from app.postgres.sessions import Sessions

    done, failed = 0, []
    async with (
        open_database(settings.home, settings.database_url, make=False) as database,
        await Sessions.open(database.gateway_url, sessions_max=2) as sessions,
    ):
        async for one in rebuild_runs(sessions, database.admin_url, SystemClock()):
            done += one.error is None
            if one.error is not None:
                failed.append({"run_id": one.run_id, "error": str(one.error)})
                if not as_json:
                    output.print(f"[bold red]left[/] {one.run_id}: ", end="")
                    output.print(str(one.error), markup=False)
        calls = await rebuild_calls(sessions, database.admin_url)
    if as_json:
        output.print(json.dumps({"rebuilt": done, "failed": failed, "calls": calls}), markup=False)
    else:
        output.print(f"{done} runs folded anew, {len(failed)} left as they were. Their streams were only read.")
        output.print(f"Facts and counts of {calls} calls folded anew.")
    return not failed


@commands.command("drop")
def drop_command(context: typer.Context, yes: Yes = False) -> None:
    """Remove the embedded database and all that is in it, for ever. Stop the gateway first.

    It asks first; without a terminal it does nothing unless given --yes.
    """
    run(drop_database(context_of(context).settings, yes=yes))


@commands.command("migrate")
def migrate_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Bring the database's schema up to date. Running it again changes nothing."""
    run(migrate_database(context_of(context).settings, as_json=as_json))


@commands.command("status")
def status_command(context: typer.Context, as_json: AsJson = False) -> None:
    """What is applied, what is pending, and whether server and guards are fit; exit 1 if not."""
    run(load_database_status(context_of(context).settings, as_json=as_json))
