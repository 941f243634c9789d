"""`tga db migrate` and `tga db status`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console

from app.cli.running import AsJson, context_of, run
from app.postgres.database import open_database
from app.postgres.guards import find_problems
from app.postgres.migrate import load_status, migrate
from app.settings import Settings

commands = typer.Typer(
    help="The database: bring its schema up to date, and see whether it is fit.", no_args_is_help=True
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
    async with open_database(settings.home, settings.database_url) as database:
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
    output.print("Database: " + ("embedded, in " + str(settings.home) if database.is_embedded else "TGA_DATABASE_URL"))
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


@commands.command("migrate")
def migrate_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Bring the database's schema up to date. Running it again changes nothing."""
    run(migrate_database(context_of(context).settings, as_json=as_json))


@commands.command("status")
def status_command(context: typer.Context, as_json: AsJson = False) -> None:
    """What is applied, what is pending, and whether server and guards are fit; exit 1 if not."""
    run(load_database_status(context_of(context).settings, as_json=as_json))
