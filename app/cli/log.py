"""`tga log`: what an operator does with the log itself."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.running import Yes, context_of, run
from app.cli.showing import confirmed, notes, output
from app.clock import SystemClock
from app.config import load_config
from app.core.errors import SettingInvalid, StoreUnfit
from app.domain.log.epochs import epoch_of
from app.domain.system.log import SystemLog
from app.keys.log_signer import LogSigner
from app.postgres.database import open_database
from app.postgres.epochs import EpochBeginning, LogBreak
from app.postgres.guards import verify_guards
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import load_status
from app.postgres.ownership import Executor
from app.postgres.sequencer import TreeSession
from app.postgres.sessions import Sessions
from app.postgres.system import PostgresSystemRows
from app.settings import Settings

commands = typer.Typer(
    help="The verifiable log: begin a new epoch when entries that were signed are lost.", no_args_is_help=True
)
_BY = "cli"


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="log")


@commands.callback()
def log() -> None:
    """The verifiable log: begin a new epoch when entries that were signed are lost."""


@commands.command("new-epoch")
def new_epoch_command(
    context: typer.Context,
    rationale: Annotated[str, typer.Option("-r", "--rationale", help="Why; it goes on the record, for every auditor.")],
    yes: Yes = False,
) -> None:
    """Go on with a database that lacks what was signed, as after the restore of an old backup: the log begins anew
    under another origin, and says which head the former one ended with, what is lost, and why.

    It asks first; without a terminal it does nothing unless given --yes. A log that is not forked is left as it is.
    """
    run(new_epoch(context_of(context).settings, rationale=rationale, yes=yes))


async def new_epoch(settings: Settings, *, rationale: str, yes: bool) -> bool:
    """True when the new epoch has begun. Nothing is lost by a crash in between: doing it again finishes it."""
    if not rationale.strip():
        raise SettingInvalid("a new epoch needs a reason", expected="--rationale, in words that an auditor understands")
    signer = LogSigner.open(settings.keys, origin=load_config(settings.config_file).log.origin)
    clock = SystemClock()
    async with open_database(settings.home, settings.database_url, make=False) as database:
        if (await load_status(database.admin_url)).pending:
            raise StoreUnfit("the database's schema is not up to date", remedy="Run `tga db migrate` first.")
        await verify_guards(database.admin_url)
        async with (
            await Sessions.open(database.gateway_url, sessions_max=2) as sessions,
            await Executor.open(database.gateway_url) as executor,
            await TreeSession.open(database.gateway_url) as session,
        ):
            rows, ledger = PostgresSystemRows(sessions), PostgresLedger(sessions)
            system = SystemLog(rows, ledger, clock, lambda: executor.executor_id)
            beginning = EpochBeginning(session, signer, system, clock)
            await beginning.lock()
            found = await beginning.find_break()
            if found is None:
                output.print("The log is not forked: it continues all that was signed. Nothing was done.")
                return False
            _show(found, database.where)
            if not confirmed(f"Begin epoch {epoch_of(found.origin)} of the log?", yes=yes):
                notes.print("Nothing was done.")
                return False
            signed = await beginning.begin(found, rationale=rationale, by=_BY)
    output.print(f"Epoch {epoch_of(found.origin)} has begun, with {signed.head.size:,} leaves. Its key:", markup=False)
    output.print(signer.verifier_key.to_text(), markup=False)
    notes.print("Give the key to everyone who verifies. Gateways that run go on by themselves.")
    return True


def _show(found: LogBreak, where: str) -> None:
    former = found.former.head
    rows = (
        ("database", where),
        ("former log", former.origin),
        ("its last head", f"{former.size:,} leaves, root {former.root.hex()}"),
        ("kept", f"the first {found.kept_size:,} leaves: a signed head in the database vouches for them"),
        ("lost", f"{found.leaves_lost:,} of the leaves that were signed: entries that nobody can vouch for any more"),
        ("new origin", found.origin),
    )
    for name, value in rows:
        notes.print(f"{name:<14}", end="", style="dim")
        notes.print(value, markup=False)
    notes.print("Calls on the lost entries were executed, and their keys are free again: a repeat executes them again.")
