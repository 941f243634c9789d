"""`tga receipt`: proof that the last entry of a trace or run is in the log, as text that any C2SP verifier reads."""

from __future__ import annotations

import asyncio
import sys

import typer

from app.cli.running import StreamArgument, context_of, run, stream_of
from app.core.errors import NotYetLogged, RunNotFound, TraceNotFound
from app.core.limits import RECEIPT_POLL_MS, RECEIPT_WAIT_MS
from app.core.note import TlogProof
from app.domain.runs.transitions import RUN
from app.postgres.database import open_database
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from app.settings import Settings


def add_to(application: typer.Typer) -> None:
    application.command("receipt")(receipt_command)


def receipt_command(context: typer.Context, trace_id: StreamArgument) -> None:
    """Print the proof that the last entry of a trace or run is in the log, with the signed tree head.

    Keep it elsewhere: it shows later what became of the log.

    The entry is in it: `tga verify --receipt FILE --key PUB` judges it alone.
    """
    run(show_receipt(context_of(context).settings, trace_id))


async def show_receipt(settings: Settings, trace_id: str) -> bool:
    """Print the receipt, from the store itself. Keep it elsewhere: its head shows later what became of the log."""
    stream = stream_of(trace_id)
    async with (
        open_database(settings.home, settings.database_url, make=False) as database,
        await Sessions.open(database.gateway_url, sessions_max=1) as sessions,
    ):
        tree = PostgresTree(sessions)
        last = await tree.last_sequence_number(stream)
        if last is None:
            raise (RunNotFound if RUN.has(stream) else TraceNotFound)("nothing is stored about it", stream=stream)
        for _ in range(RECEIPT_WAIT_MS // RECEIPT_POLL_MS):
            place = await tree.place_of(stream, last)
            if place is not None:
                hashes = await tree.inclusion_proof(place.index, place.signed.head.size)
                entry = await tree.entry_bytes(stream, last)
                sys.stdout.write(TlogProof(place.index, hashes, place.signed.note, entry).to_text())
                return True
            await asyncio.sleep(RECEIPT_POLL_MS / 1000)
    raise NotYetLogged("no signed head covers the last entry yet", stream=stream)
