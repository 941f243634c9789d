"""`tga export`: a bundle that verifies without us. Written line by line; its manifest, which makes it whole, last."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, Protocol, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.cli.bundle_files import own_schemas
from app.cli.installation import VERIFIER, own_command
from app.cli.running import AsJson, checked_run_id, checked_trace_id, context_of, refuse, run
from app.cli.showing import counted, output, print_json, printable
from app.clock import SystemClock
from app.core.errors import BundleInvalid, SettingInvalid, StoreUnfit, TgaError
from app.core.limits import BUNDLE_LINE_BYTES_MAX, BUNDLE_MANIFEST_BYTES_MAX
from app.domain.log.bundle import (
    ENTRIES,
    FORMAT,
    HEADS,
    KEYS,
    MANIFEST,
    SCHEMAS,
    EntryLine,
    FileFacts,
    Filter,
    Manifest,
)
from app.postgres.database import open_database
from app.postgres.export import PostgresExport, open_export, wait_until_erasures_are_covered
from app.postgres.migrate import load_status
from app.postgres.sessions import Sessions
from app.settings import Settings

if TYPE_CHECKING:
    from app.cli.stored_blobs import CopiedBlobs, StoredBlobs

UNFINISHED: Final = "unfinished.json"  # what is being exported, until the manifest stands
_PROGRESS_EVERY: Final = 256


def add_to(application: typer.Typer) -> None:
    application.command("export")(export_bundle_command)


def _moment(text: str | None) -> str | None:
    """An RFC 3339 time or a date as entries write times: UTC, with milliseconds."""
    if text is None:
        return None
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter("a time is written like 2026-11-16 or 2026-11-16T12:00:00Z") from None
    at = read.replace(tzinfo=UTC) if read.tzinfo is None else read.astimezone(UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def export_bundle_command(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the bundle.")],
    since: Annotated[
        str | None,
        typer.Option(help="Only streams that began then or later.", metavar="TIME", callback=_moment),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only streams that began before.", metavar="TIME", callback=_moment)
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only what is this tenant's; of the others, digests.")] = None,
    trace_id: Annotated[
        str | None, typer.Option("--trace", metavar="ID", help="Only this trace.", callback=checked_trace_id)
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="ID", help="Only this run, and the traces and runs that it names.", callback=checked_run_id
        ),
    ] = None,
    with_blobs: Annotated[
        bool, typer.Option("--blobs", help="With the blobs that runs and programs refer to, as they are stored.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Finish an export that was interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a bundle of the ledger that anyone can verify offline: entries, artifacts, proofs, heads, keys, schemas.

    With --blobs also the bytes beside the ledger to which the entries refer; sealed ones stay sealed. Exit 1 if the
    store lacks any, or has other bytes under its digest: the bundle then has the others.
    """
    if trace_id is not None and run_id is not None:
        refuse("name a trace or a run, not both")
    wanted = Filter(since=since, until=until, tenant=tenant, trace_id=trace_id, run_id=run_id)
    settings = context_of(context).settings
    run(export_command(settings, folder, wanted=wanted, with_blobs=with_blobs, resume=resume, as_json=as_json))


async def export_command(
    settings: Settings,
    folder: Path,
    *,
    wanted: Filter | None = None,
    with_blobs: bool = False,
    resume: bool = False,
    as_json: bool = False,
) -> bool:
    """Write a bundle of the ledger into `folder`; with `resume`, finish an interrupted one, up to its own tree.

    False when payloads are missing from it and the head that it goes up to does not cover their erasure, or when blobs
    are missing: the bundle is written, and its verifier is told that they are missing.
    """
    with _files_explained(folder):
        wanted, size, with_blobs = _begin(folder, wanted or Filter(), with_blobs=with_blobs, resume=resume)
        blobs = _open_blobs(settings) if with_blobs else None
        async with open_database(settings.home, settings.database_url, make=False) as database:
            if (await load_status(database.admin_url)).pending:
                raise StoreUnfit("the database's schema is not up to date", remedy="Run `tga db migrate` first.")
            async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
                if size is None:
                    await wait_until_erasures_are_covered(sessions)
                async with open_export(sessions, wanted, size=size) as export:
                    manifest = await write_bundle(folder, export, wanted, blobs)
    copied = None if blobs is None else blobs.copied
    _tell(folder, manifest, unexplained=len(export.unexplained), copied=copied, as_json=as_json)
    return not export.unexplained and (copied is None or not copied.lacking)


class ExportedBlobs(Protocol):
    """The blobs to which the lines of a bundle refer."""

    def note_line(self, line: EntryLine) -> None: ...

    async def copy_into(self, folder: Path) -> None: ...


async def write_bundle(
    folder: Path, export: PostgresExport, wanted: Filter, blobs: ExportedBlobs | None = None
) -> Manifest:
    """Everything but the manifest, made durable; then the manifest, at once or not at all."""
    head = export.signed.head
    unfinished = {"format": FORMAT, "size": head.size, "filter": asdict(wanted), "blobs": blobs is not None}
    _write_whole(folder / UNFINISHED, json.dumps(unfinished).encode("utf-8"))
    files: dict[str, FileFacts] = {}

    def note(line: EntryLine) -> None:
        export.note(line)
        if blobs is not None:
            blobs.note_line(line)

    with _Written.resumed(folder / ENTRIES, note) as entries, _progress(head.size) as advance:
        async for line in export.entries(from_index=entries.next_index):
            entries.write(line.to_line())
            note(line)
            if line.leaf_index is not None and line.leaf_index % _PROGRESS_EVERY == 0:
                advance(line.leaf_index)
        files[ENTRIES] = entries.finish()
    with _Written.anew(folder / HEADS) as heads:
        async for head_line in export.heads():
            heads.write(head_line.to_line())
        files[HEADS] = heads.finish()
    keys = [key.to_text() for key in await export.log_keys()]
    small = {KEYS: json.dumps({"origin": head.origin, "verifier_keys": keys}, indent=2).encode("utf-8") + b"\n"}
    small |= {SCHEMAS + name: raw for name, raw in own_schemas().items()}
    for name, raw in small.items():
        _write_whole(folder / name, raw)
        files[name] = FileFacts.of(raw)
    if blobs is not None:
        await blobs.copy_into(folder)
    now, has_blobs = SystemClock().now(), blobs is not None
    manifest = Manifest(now, head.origin, head.size, head.root, export.wanted, files, has_blobs)
    _write_whole(folder / MANIFEST, manifest.to_bytes())
    (folder / UNFINISHED).unlink()
    return manifest


def _open_blobs(settings: Settings) -> StoredBlobs:
    from app.cli.stored_blobs import StoredBlobs  # with the configuration, and all kinds of documents: few need them

    return StoredBlobs.open(settings)


def _begin(folder: Path, wanted: Filter, *, with_blobs: bool, resume: bool) -> tuple[Filter, int | None, bool]:
    """What to export, up to which size (None: up to the newest head), and whether with blobs."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (folder / MANIFEST).exists():
        raise SettingInvalid(f"{folder} holds a finished bundle", expected="another folder")
    if not resume:
        if any(folder.iterdir()):
            raise SettingInvalid(
                f"{folder} is not empty", remedy="Name another folder, or finish what is there with --resume."
            )
        return wanted, None, with_blobs
    if not (folder / UNFINISHED).exists():
        raise SettingInvalid(f"{folder} holds no unfinished export", remedy="Start one without --resume.")
    try:
        with (folder / UNFINISHED).open("rb") as file:
            said = json.loads(file.read(BUNDLE_MANIFEST_BYTES_MAX))
        begun, size, had_blobs = Filter(**said["filter"]), int(said["size"]), said.get("blobs") is True
    except (ValueError, KeyError, TypeError):
        raise BundleInvalid(f"{UNFINISHED} cannot be read", remedy="Start anew in another folder.") from None
    if wanted not in (Filter(), begun):
        raise SettingInvalid("the unfinished export has another filter", expected=begun, found=wanted)
    if with_blobs and not had_blobs:
        raise SettingInvalid("the unfinished export is one without blobs", remedy="Start anew in another folder.")
    return begun, size, had_blobs


@dataclass(slots=True)
class _Written:
    """A file of lines and its facts; memory does not grow with it."""

    file: BinaryIO
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    size: int = 0
    lines: int = 0
    next_index: int = 0

    @classmethod
    def anew(cls, path: Path) -> Self:
        return cls(path.open("wb"))

    @classmethod
    def resumed(cls, path: Path, seen: Callable[[EntryLine], None]) -> Self:
        """What stands there goes on after its last whole line that has a place in the tree; each is shown to `seen`."""
        path.touch()
        written = cls(path.open("r+b"))
        while raw := written.file.readline(BUNDLE_LINE_BYTES_MAX + 1):
            try:
                line = EntryLine.from_line(raw) if raw.endswith(b"\n") else None
            except TgaError:
                line = None
            if line is None or line.leaf_index is None:
                break
            written.next_index = line.leaf_index + 1
            written._count(raw)
            seen(line)
        written.file.seek(written.size)
        written.file.truncate()
        return written

    def write(self, raw: bytes) -> None:
        self.file.write(raw)
        self._count(raw)

    def _count(self, raw: bytes) -> None:
        self.digest.update(raw)
        self.size += len(raw)
        self.lines += 1

    def finish(self) -> FileFacts:
        self.file.flush()
        os.fsync(self.file.fileno())
        return FileFacts(self.digest.hexdigest(), self.size, self.lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _write_whole(path: Path, raw: bytes) -> None:
    """Durable and whole, or not there."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal of a person; nothing in a pipe."""
    console = Console(stderr=True)
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TextColumn("entries"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda completed: progress.update(task, completed=completed)


def _tell(folder: Path, manifest: Manifest, *, unexplained: int, copied: CopiedBlobs | None, as_json: bool) -> None:
    entries = manifest.files[ENTRIES].lines
    if as_json:
        told: dict[str, Any] = {
            "folder": str(folder),
            "complete": manifest.complete,
            "entries": entries,
            "tree_size": manifest.tree_size,
            "traces_erased_after_head": unexplained,
        }
        if copied is not None:
            lacking = [str(error) for error in copied.told]
            told["blobs"] = {"copied": copied.blobs, "bytes": copied.size_bytes, "lacking": copied.lacking}
            told["blobs_lacking"] = lacking
        print_json(told)
        return
    kind = "complete" if manifest.complete else "partial"
    wrote = counted(entries, "entry", "entries")
    output.print(f"Wrote {wrote} to {folder}: a {kind} bundle, up to tree size {manifest.tree_size:,}.")
    if copied is not None:
        _tell_of_blobs(copied)
    if unexplained:
        erased = counted(unexplained, "stream was", "streams were")
        output.print(
            f"[bold red]✗[/] {erased} erased after the head that this bundle goes up to: it will "
            "not verify. Run `tga serve`, so that the log goes on, and export again into another folder."
        )
    quoted, python, verifier = (shlex.quote(str(path)) for path in (folder, sys.executable, VERIFIER))
    output.print(f"Verify it anywhere: {own_command()} verify --file {quoted} --key PUB", markup=False)
    output.print(f"Or with one file that has none of our code: {python} {verifier} {quoted} PUB", markup=False)


def _tell_of_blobs(copied: CopiedBlobs) -> None:
    output.print(f"With {counted(copied.blobs, 'blob')}, {copied.size_bytes:,} bytes.")
    for error in copied.told:
        output.print(f"[bold red]✗[/] [red]{error.code}[/]", end="  ")
        output.print(printable(f"{error.stream}, entry {error.sequence_number}: {error.what}"), markup=False)
    if copied.lacking:
        output.print(
            f"[bold red]✗[/] {counted(copied.lacking, 'blob')} could not be copied: the bundle says so to whoever "
            "verifies it. Restore what the store lacks, and export again into another folder."
        )


@contextmanager
def _files_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingInvalid(f"{folder} cannot be written", found=error.strerror or error) from None
