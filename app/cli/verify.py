"""`tga verify`: show what app.domain.ledger.verification finds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.cli.blob_checking import UncheckedBlobs, VerifiedBlobs, blobs_in_words, open_referred_blobs, unchecked_in_words
from app.cli.concerned_call import ConcernedCall
from app.cli.held_heads import load_held
from app.cli.ledger_jobs import jobs_for, open_ledger_jobs
from app.cli.running import AsJson, MaybeStream, context_of, refuse, run, stream_of
from app.cli.showing import counted, printable
from app.cli.tree_examination import TreeExamination
from app.cli.verify_bundle import show_epoch, verify_bundle_command
from app.cli.verify_receipt import verify_receipt_command
from app.core.errors import RunNotFound, StoreUnfit, TgaError, TraceNotFound
from app.core.limits import VERIFY_JOBS_MAX
from app.domain.ledger.checks import Epoch, Kinds, NoteBlob, Report
from app.domain.ledger.verification import verify_ledger
from app.domain.log.bundled_blobs import BlobReport
from app.domain.log.forensics import Diagnosis, Unlogged, find_unlogged
from app.domain.runs.transitions import RUN
from app.domain.runs.verification import stream_checks
from app.domain.tga.documents import TraceId
from app.domain.tga.transitions import TRACE
from app.keys.keyring import Unsealer
from app.postgres.database import open_database
from app.postgres.listing import load_head
from app.postgres.migrate import load_status
from app.postgres.reader import PostgresLedgerReader, open_reader
from app.postgres.sessions import Sessions
from app.postgres.tree_reader import open_tree_reader
from app.settings import Settings


class _Out(Protocol):
    def finding(self, error: TgaError, call: ConcernedCall | None) -> None: ...

    def end(self, report: Report, diagnosis: Diagnosis | None, epochs: Sequence[Epoch], blobs: BlobReport) -> None: ...


def add_to(application: typer.Typer) -> None:
    application.command("verify")(verify_command)


def verify_command(
    context: typer.Context,
    trace_id: MaybeStream = None,
    everything: Annotated[bool, typer.Option("--all", help="Every stream, and the tree over them.")] = False,
    file: Annotated[Path | None, typer.Option("--file", help="An exported bundle; needs no database.")] = None,
    receipt: Annotated[
        Path | None, typer.Option("--receipt", metavar="FILE", help="A receipt; needs --key and no database.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="PUB", help="The log's public key, or a file of such keys.")
    ] = None,
    head: Annotated[
        list[Path] | None, typer.Option("--head", help="A tree head or receipt that was kept; may be repeated.")
    ] = None,
    with_blobs: Annotated[
        bool, typer.Option("--blobs", help="Also read and hash the blobs that entries refer to; of a bundle: insist.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            max=VERIFY_JOBS_MAX,
            metavar="N",
            help="With --all or --file: so many processes (default: all cores; 1 stays in this one).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, link, transition, artifact, claim, checkpoint and head; exit 1 if anything is wrong.

    With --all the tree is compared with every signed head that is stored, that the signer remembers and that --head
    names: a truncated, deleted, changed, forked or restored log is told apart, and since when it cannot be trusted.
    With --file an exported bundle, and with --receipt one receipt, is judged by --key alone: the log's public key, as
    `tga keys show log` prints it.

    With --blobs the bytes beside the ledger to which entries refer are read from the store and compared with their
    digests. A bundle that was exported with blobs is always judged with them; with --blobs one without is refused.

    With --jobs several processes share the work: findings, their order and the exit code are the same for every number.
    Whatever they do not accept is judged by one. A small ledger or bundle is verified in one unless --jobs is given.
    """
    heads = head or []
    if (trace_id is not None) + everything + (file is not None) + (receipt is not None) != 1:
        refuse("name one trace or run, or say --all, --file or --receipt")
    if jobs is not None and not everything and file is None:
        refuse("--jobs goes with --all or --file")
    if receipt is not None:
        if with_blobs:
            refuse("--blobs goes with a run, --all or --file")
        if key is None or heads:
            refuse("--receipt needs --key: the log's public key, from somewhere else than the receipt")
        run(verify_receipt_command(receipt, key, as_json=as_json))
    if file is not None:
        if key is None:
            refuse("--file needs --key: the log's public key, from somewhere else than the bundle")
        run(verify_bundle_command(file, key, heads=heads, with_blobs=with_blobs, as_json=as_json, jobs=jobs))
    if not everything and (heads or key is not None):
        refuse("--head and --key go with --all or --file")
    settings = context_of(context).settings
    run(verify(settings, trace_id, as_json=as_json, heads=heads, key=key, with_blobs=with_blobs, jobs=jobs))


async def verify(
    settings: Settings,
    trace_id: str | None,
    *,
    as_json: bool,
    heads: Sequence[Path] = (),
    key: str | None = None,
    with_memory: bool = True,
    with_blobs: bool = False,
    jobs: int | None = None,
) -> bool:
    """True when everything that was looked at is sound. Without a trace the tree is compared too: with the heads in
    these files (signed notes or receipts), with what the signer remembers (unless that is not wanted), and with the
    stored heads."""
    stream = None if trace_id is None else stream_of(trace_id)
    out: _Out = _Json() if as_json else _Words()
    report, broken, diagnosis = Report(), _Broken(), None
    kinds = stream_checks(unseals=Unsealer.find(settings.keys))
    epochs: Sequence[Epoch] = ()
    keys, held = load_held(settings, heads, key) if stream is None else ([], [])
    held = held if with_memory else []

    blobs: VerifiedBlobs = open_referred_blobs(settings) if with_blobs else UncheckedBlobs()
    unlogged: list[TgaError] = []  # of streams that the tree should hold and does not
    async with open_database(settings.home, settings.database_url, make=False) as database:
        if not (await load_status(database.admin_url)).applied:
            raise StoreUnfit("the database holds no ledger", remedy="Run `tga db migrate` first.")
        async with await Sessions.open(database.gateway_url, sessions_max=4) as sessions:
            calls = _StoredCalls(sessions)
            tree = TreeExamination(sessions, report, keys, held)
            async with tree, open_reader(sessions, stream=stream) as reader:
                count = jobs_for(reader.count_streams(), jobs) if stream is None else 1
                async with _findings(
                    reader, kinds, report, blobs.note, tree, database.gateway_url, settings, count
                ) as found:
                    with _progress() as progress:
                        task = progress.add_task("verifying", total=reader.count_streams())
                        async for error in found:
                            out.finding(error, await calls.of(error))
                            broken.add(error)
                            progress.update(task, completed=report.streams)
                        progress.update(task, completed=report.streams)
                if stream is None:
                    diagnosis, epochs, unlogged = await tree.examined(broken.first_entries)
            if stream is not None:
                async with open_tree_reader(sessions) as leaves:
                    unlogged = [error async for error in find_unlogged(leaves, Unlogged(), stream)]
            async for error in blobs.findings(sessions, stream):
                unlogged.append(error)
            for error in unlogged:
                out.finding(error, await calls.of(error))
                report.findings += 1
                report.broken_streams += error.stream not in broken.first_entries
    if stream is not None and report.streams == 0:
        raise (RunNotFound if RUN.has(stream) else TraceNotFound)("nothing is stored about it", stream=stream)
    out.end(report, diagnosis, epochs, blobs.report)
    return report.findings == 0 and (diagnosis is None or diagnosis.is_sound)


@asynccontextmanager
async def _findings(
    reader: PostgresLedgerReader,
    kinds: Kinds,
    report: Report,
    on_blob: NoteBlob,
    tree: TreeExamination,
    url: str,
    settings: Settings,
    count: int,
) -> AsyncIterator[AsyncIterator[TgaError]]:
    """What is wrong with streams, found by one process or by several."""
    if count > 1:
        async with open_ledger_jobs(reader, url, settings.keys, count) as jobs:
            if jobs is not None:
                yield jobs.verify(reader, kinds, report, on_blob, tree.begin)
                return
    yield verify_ledger(reader, kinds, report, on_blob=on_blob)


class _Broken:
    """The streams that findings name, each with the first entry that is concerned."""

    def __init__(self) -> None:
        self.first_entries: dict[str, int] = {}

    def add(self, error: TgaError) -> None:
        if error.stream is not None:
            known = self.first_entries.get(error.stream, error.sequence_number or 1)
            self.first_entries[error.stream] = min(known, error.sequence_number or 1)


class _StoredCalls:
    """The calls of a database's traces, from their heads."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._known: tuple[str | None, ConcernedCall | None] = (None, None)

    async def of(self, error: TgaError) -> ConcernedCall | None:
        stream = error.stream
        if stream is None or not TRACE.has(stream):
            return None
        if self._known[0] != stream:  # findings of one stream come together
            self._known = stream, await self._load(TraceId(TRACE.identity_of(stream)))
        return self._known[1]

    async def _load(self, trace_id: TraceId) -> ConcernedCall | None:
        head = await load_head(self._sessions, trace_id)
        if head is None or head.tool_name is None:
            return None
        return ConcernedCall(head.server_id or "", head.tool_name, head.principal_id or "", head.idempotency_key)


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

    def finding(self, error: TgaError, call: ConcernedCall | None) -> None:
        where = f"entry {error.sequence_number}" if error.sequence_number is not None else "the stream"
        self._console.print(f"[bold red]✗[/] {error.stream}  [bold]{where}[/]  [red]{error.code}[/]")
        if call is not None:
            self._console.print(f"    {printable(call.in_words())}", markup=False)
        self._console.print(f"    {error.what}", markup=False)
        for label, value in (("expected", error.expected), ("found", error.found)):
            if value is not None:
                self._console.print(f"    {label:<9}{value}", markup=False)

    def end(self, report: Report, diagnosis: Diagnosis | None, epochs: Sequence[Epoch], blobs: BlobReport) -> None:
        looked_at = f"{counted(report.streams, 'stream')}, {counted(report.entries, 'entry', 'entries')}"
        if report.findings == 0:
            self._console.print(f"[green]✓[/] {looked_at}: every digest, link, transition, claim and head is right.")
        else:
            self._console.print(
                f"[bold red]✗[/] {looked_at}: {counted(report.findings, 'finding')} in "
                f"{counted(report.broken_streams, 'stream')}. Keep the database as it is; see SECURITY.md."
            )
        if report.seals_unopened:
            self._console.print(
                f"    - {counted(report.seals_unopened, 'sealed salt')} could not be opened: no sealing key is in "
                "TGA_KEYS. Whether they are the right ones is not known."
            )
        for sentence in (*blobs_in_words(blobs), *unchecked_in_words(blobs)):
            self._console.print(sentence)
        if diagnosis is not None:
            self._tell(diagnosis)
        for epoch in epochs:
            show_epoch(epoch)

    def _tell(self, found: Diagnosis) -> None:
        tree = f"{counted(found.tree_size, 'leaf', 'leaves')}, {counted(found.heads_fit, 'signed head')}"
        if found.is_sound and found.heads_fit:
            self._console.print(
                f"[green]✓[/] {tree}: the tree is the one that was signed, up to {found.trusted_size:,}."
            )
        elif found.is_sound:
            self._console.print(f"{tree}: there is no signed head to compare the tree with.")
        else:
            self._console.print(f"[bold red]✗[/] [bold]{found.kind.replace('_', ' ')}[/]: {found.what}")
            until = f", recorded until {found.trusted_until}" if found.trusted_until else ""
            since = f" Not from the head of size {found.broken_size:,} on." if found.broken_size else ""
            self._console.print(f"    Trust it up to tree size {found.trusted_size:,}{until}.{since}")
        for sentence in (*found.evidence, *(f"concerns {stream}" for stream in found.streams)):
            self._console.print(f"    - {printable(sentence)}", markup=False)


class _Json:
    """One JSON object, written as it is found, so that memory stays flat."""

    def __init__(self) -> None:
        self._separator = '{"findings": ['

    def finding(self, error: TgaError, call: ConcernedCall | None) -> None:
        document = {
            "stream": error.stream,
            "sequence_number": error.sequence_number,
            "code": error.code,
            "what": error.what,
            "expected": error.expected,
            "found": error.found,
            "call": None if call is None else call._asdict(),
        }
        print(self._separator + json.dumps(document), end="")  # noqa: T201
        self._separator = ",\n"

    def end(self, report: Report, diagnosis: Diagnosis | None, epochs: Sequence[Epoch], blobs: BlobReport) -> None:
        opening = self._separator if self._separator.startswith("{") else ""
        counts: dict[str, object] = {
            "streams": report.streams,
            "entries": report.entries,
            "broken_streams": report.broken_streams,
        }
        if report.seals_unopened:
            counts["seals_unopened"] = report.seals_unopened
        if blobs != BlobReport():
            counts["blobs"] = asdict(blobs)
        if diagnosis is not None:
            counts["tree"] = asdict(diagnosis)
        if epochs:
            counts["epochs"] = [epoch.document for epoch in epochs]
        print(f"{opening}], " + json.dumps(counts)[1:])  # noqa: T201
