"""`tga verify`: show what app.domain.tga.verification finds."""

from __future__ import annotations

import json
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.core.errors import StoreUnfit, TgaError, TraceNotFound
from app.domain.tga.transitions import TRACE
from app.domain.tga.verification import Report, verify_ledger
from app.postgres.database import open_database
from app.postgres.migrate import load_status
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.settings import Settings


class _Out(Protocol):
    def finding(self, error: TgaError) -> None: ...

    def end(self, report: Report) -> None: ...


async def verify(settings: Settings, trace_id: str | None, *, as_json: bool) -> bool:
    """True when everything that was looked at is sound."""
    stream = None if trace_id is None else TRACE.stream(trace_id)
    out: _Out = _Json() if as_json else _Words()
    report = Report()
    async with open_database(settings.home, settings.database_url) as database:
        if not (await load_status(database.admin_url)).applied:
            raise StoreUnfit("the database holds no ledger", remedy="Run `tga db migrate` first.")
        async with (
            await Sessions.open(database.gateway_url, sessions_max=1) as sessions,
            open_reader(sessions, stream=stream) as reader,
        ):
            with _progress() as progress:
                task = progress.add_task("verifying", total=reader.count_streams())
                async for error in verify_ledger(reader, report):
                    out.finding(error)
                    progress.update(task, completed=report.streams)
                progress.update(task, completed=report.streams)
    if stream is not None and report.streams == 0:
        raise TraceNotFound("nothing is stored about it", stream=stream)
    out.end(report)
    return report.findings == 0


def _progress() -> Progress:
    """A bar on the terminal of a person; nothing in a pipe."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("streams"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class _Words:
    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def finding(self, error: TgaError) -> None:
        where = f"entry {error.sequence_number}" if error.sequence_number is not None else "the stream"
        self._console.print(f"[bold red]✗[/] {error.stream}  [bold]{where}[/]  [red]{error.code}[/]")
        self._console.print(f"    {error.what}", markup=False)
        for label, value in (("expected", error.expected), ("found", error.found)):
            if value is not None:
                self._console.print(f"    {label:<9}{value}", markup=False)

    def end(self, report: Report) -> None:
        looked_at = f"{_count(report.streams, 'stream')}, {_count(report.entries, 'entry', 'entries')}"
        if report.findings == 0:
            self._console.print(f"[green]✓[/] {looked_at}: every digest, link, transition, claim and head is right.")
        else:
            self._console.print(
                f"[bold red]✗[/] {looked_at}: {_count(report.findings, 'finding')} in "
                f"{_count(report.broken_streams, 'stream')}. Keep the database as it is; see SECURITY.md."
            )


class _Json:
    """One JSON object, written as it is found, so that memory stays flat."""

    def __init__(self) -> None:
        self._separator = '{"findings": ['

    def finding(self, error: TgaError) -> None:
        document = {
            "stream": error.stream,
            "sequence_number": error.sequence_number,
            "code": error.code,
            "what": error.what,
            "expected": error.expected,
            "found": error.found,
        }
        print(self._separator + json.dumps(document), end="")  # noqa: T201
        self._separator = ",\n"

    def end(self, report: Report) -> None:
        opening = self._separator if self._separator.startswith("{") else ""
        counts = {"streams": report.streams, "entries": report.entries, "broken_streams": report.broken_streams}
        print(f"{opening}], " + json.dumps(counts)[1:])  # noqa: T201


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
