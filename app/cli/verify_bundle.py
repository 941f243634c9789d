"""`tga verify --file`: judge an exported bundle with a public key; no database, no network."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from app.cli.blob_checking import blobs_in_words
from app.cli.bundle_files import DiskMemory, FolderFiles, own_schemas
from app.cli.bundle_jobs import accept_in_jobs, jobs_for
from app.cli.concerned_call import BundledCalls, ConcernedCall
from app.cli.showing import counted, output, printable
from app.core.errors import BundleInvalid, NoteInvalid, SettingInvalid, TgaError, VerificationUnfinished
from app.core.limits import NOTE_BYTES_MAX
from app.core.merkle import Hash
from app.core.note import PROOF_HEADER, TlogProof, VerifierKey, open_note
from app.domain.ledger.checks import Epoch
from app.domain.log.bundle import ENTRIES, HEADS
from app.domain.log.bundle_report import AfterHead, BundleReport
from app.domain.log.bundle_verification import verify_bundle
from app.domain.log.bundled_blobs import BlobReport
from app.domain.log.epochs import keys_for
from app.domain.log.heads import SignedHead, fits
from app.domain.runs.transitions import RUN
from app.domain.runs.verification import stream_checks
from app.domain.system.documents import SYSTEM
from app.domain.tga.transitions import TRACE

_KEY: Final = "name+id+base64, or a file of them"
_MORE_ROOM: Final = "Make room in the folder for temporary files, or set TMPDIR to another one, and verify again."


async def verify_bundle_command(
    folder: Path,
    key: str,
    *,
    heads: Sequence[Path] = (),
    with_blobs: bool = False,
    as_json: bool = False,
    jobs: int | None = None,
) -> bool:
    """True when the bundle is sound; `with_blobs`: one that was exported without its blobs is not. `key`: the log's
    verifier key, or a file of them, from another source. `heads`: files with heads or receipts that were kept from this
    log. `jobs`: in so many processes (None: as many as are worth it). What is not accepted line by line is judged."""
    keys = load_keys(key)
    held = [read_held(path, keys).head for path in heads]
    calls, out = BundledCalls(FolderFiles(folder)), _Json() if as_json else _Words()
    count = jobs_for(folder, jobs)
    with _progress(folder) as progress:
        task = next(iter(progress.task_ids), None)

        def seen(read: int) -> None:
            if task is not None:
                progress.advance(task, read)

        report = accept_in_jobs(folder, keys, held, count, seen=seen)
        if report is None:
            if task is not None:
                progress.reset(task)
            report, kinds = BundleReport(), stream_checks()
            files, schemas = FolderFiles(folder, seen=seen), own_schemas()
            try:
                with DiskMemory(kinds) as memory:
                    for error in verify_bundle(
                        files, keys, verify=fits, memory=memory, report=report, schemas=schemas, kinds=kinds, held=held
                    ):
                        out.finding(error, calls.of(error))
            except sqlite3.Error as error:
                raise VerificationUnfinished(
                    "what is remembered of the streams could not be kept on disk", found=error, remedy=_MORE_ROOM
                ) from None
        if with_blobs and report.manifest is not None and not report.manifest.blobs:
            report.findings += 1
            out.finding(BundleInvalid("the bundle was exported without blobs", remedy="Export it with --blobs."), None)
    out.end(report, calls)
    return report.is_sound


def load_keys(text: str) -> list[VerifierKey]:
    """The keys in the file of this name, a line each; or the one that the text is."""
    path = Path(text)
    try:
        if path.is_file():
            with path.open("rb") as file:
                text = file.read(NOTE_BYTES_MAX).decode("utf-8")
        keys = [VerifierKey.from_text(line) for line in text.split()]
    except (OSError, UnicodeError, NoteInvalid) as error:
        raise SettingInvalid(
            "the key cannot be read", expected="name+id+base64, or a file of them", found=error
        ) from None
    if not keys:
        raise SettingInvalid("no key was given", expected=_KEY)
    return keys


def read_held(path: Path, keys: Sequence[VerifierKey]) -> SignedHead:
    """The head in a file: a signed note, as /v1/log/checkpoint answers it, or a receipt, which ends with one."""
    try:
        with path.open("rb") as file:
            text = file.read(NOTE_BYTES_MAX + 1).decode("utf-8")
        signed = SignedHead.from_note(TlogProof.from_text(text).note if text.startswith(PROOF_HEADER) else text)
        open_note(signed.note, [*keys, *keys_for(signed.head.origin, keys)], fits)
    except (OSError, UnicodeError, NoteInvalid) as error:
        raise SettingInvalid(f"{path} holds no head that the key signed", found=error) from None
    return signed


def _progress(folder: Path) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    if console.is_terminal:
        sizes = [(folder / name).stat().st_size for name in (ENTRIES, HEADS) if (folder / name).is_file()]
        progress.add_task("", total=sum(sizes))
    return progress


def finding_of(error: TgaError, call: ConcernedCall | None = None) -> dict[str, Any]:
    return {
        "code": error.code,
        "what": error.what,
        "stream": error.stream,
        "sequence_number": error.sequence_number,
        "expected": error.expected,
        "found": error.found,
        "call": None if call is None else call._asdict(),
    }


def checked(report: BundleReport) -> dict[str, Any]:
    streams = report.streams
    return {
        "leaves": report.leaves,
        "heads": report.heads,
        "heads_signed": report.heads_signed,
        "traces": streams.of_kind[TRACE.name],
        "traces_unfinished": streams.unfinished[TRACE.name],
        "runs": streams.of_kind[RUN.name],
        "runs_unfinished": streams.unfinished[RUN.name],
        "system_streams": streams.of_kind[SYSTEM.name],
        "decisions_signed": streams.signatures,
        "decisions_signed_by_retired_keys": streams.signatures_by_retired_keys,
        "payloads_erased": streams.payloads_erased,
        "payloads_withheld": streams.payloads_withheld,
    }


def _counted(count: int, name: str) -> str:
    """`traces_unfinished` as words: 1 trace unfinished, 2 traces unfinished."""
    first, *rest = name.split("_")
    singular = {"leaves": "leaf"}.get(first, first.removesuffix("s"))
    if rest and rest[-1] == "streams":
        return counted(count, f"{first} stream")
    return " ".join([counted(count, singular, first), *rest])


def show_epoch(epoch: Epoch) -> None:
    """A break of the log, for auditors: it is no finding, and every reader who relies on the log must see it."""
    said = epoch.document
    output.print(f"[bold yellow]![/] The log began anew: epoch {epoch.epoch}, {said['recorded_at']}")
    lines = (
        f"{epoch.origin} follows {epoch.former_origin}, whose last head has {epoch.former_size:,} leaves, root "
        f"{epoch.former_root[:16]}…",
        f"Kept are the first {epoch.kept_size:,} leaves; lost of those that were signed: {said['leaves_lost']:,}.",
        f"Because ({said['recorded_by']}): {said['rationale']}",
    )
    for line in lines:
        output.print(f"    {printable(line)}", markup=False)


class _Words:
    def finding(self, error: TgaError, call: ConcernedCall | None) -> None:
        place = f"{error.stream}, entry {error.sequence_number}" if error.stream else "the bundle"
        output.print(f"[bold red]✗[/] [red]{error.code}[/]", end="  ")
        output.print(printable(place), markup=False)
        if call is not None:
            output.print(f"    {printable(call.in_words())}", markup=False)
        output.print(printable(f"    {error.what}"), markup=False)
        for label, value in (("expected", error.expected), ("found", error.found)):
            if value is not None:
                output.print(printable(f"    {label:<9}{value}"), markup=False)

    def end(self, report: BundleReport, calls: BundledCalls) -> None:
        if report.manifest is not None:
            manifest = report.manifest
            kind = "Complete" if manifest.complete else "Partial"
            output.print(
                f"{kind} bundle of {printable(manifest.origin)}, tree size {manifest.tree_size:,}, "
                f"root {Hash(manifest.tree_root).hex()[:16]}…",
                markup=False,
            )
            named = ", ".join(_counted(count, name) for name, count in checked(report).items() if count)
            output.print(f"Checked: {named}.", markup=False)
            for sentence in blobs_in_words(report.blobs):
                output.print(sentence)
            output.print("Schemas, digests, links, transitions, bindings, claims, signatures, inclusion, heads.")
        if report.manifest is None or report.findings:
            output.print(f"[bold red]✗[/] {counted(report.findings, 'finding')}: do not rely on this bundle.")
        elif report.is_sound:
            output.print("[green]✓[/] Sound: these are the entries that the log's key signed, and they hang together.")
        else:
            output.print("The entries that the signed head covers are without findings.")
        for epoch in report.streams.epochs:
            show_epoch(epoch)
        if report.after_head.entries:
            self._tell_after_head(report.after_head, calls)
        if report.unknown:
            output.print("What this bundle cannot tell:")
            for sentence in report.unknown:
                output.print(f"  - {printable(sentence)}", markup=False)

    def _tell_after_head(self, after: AfterHead, calls: BundledCalls) -> None:
        """Apart from the verdict: the exporter of the bundle may have written these entries."""
        entries = counted(after.entries, "entry", "entries")
        output.print(f"After the signed head: {entries} that no signature covers.", markup=False)
        for error in after.findings:
            self.finding(error, calls.of(error))
        if after.findings:
            findings = counted(len(after.findings), "finding")
            output.print(f"[bold red]✗[/] {findings} there: get the bundle again, and ask why.")
        else:
            output.print("  They hang together; nothing above rests on them.", markup=False)


class _Json:
    """One JSON object, written as it is found, so that memory stays flat."""

    def __init__(self) -> None:
        self._separator = '{"findings": ['

    def finding(self, error: TgaError, call: ConcernedCall | None) -> None:
        print(self._separator + json.dumps(finding_of(error, call)), end="")  # noqa: T201
        self._separator = ",\n"

    def end(self, report: BundleReport, calls: BundledCalls) -> None:
        opening = self._separator if self._separator.startswith("{") else ""
        manifest = report.manifest
        rest = {
            "sound": report.is_sound,
            "complete": None if manifest is None else manifest.complete,
            "tree": None if manifest is None else {"size": manifest.tree_size, "root": manifest.tree_root.hex()},
            "checked": checked(report),
            "after_head": {
                "entries": report.after_head.entries,
                "findings": [finding_of(error, calls.of(error)) for error in report.after_head.findings],
            },
            "epochs": [epoch.document for epoch in report.streams.epochs],
            **({} if report.blobs == BlobReport() else {"blobs": asdict(report.blobs)}),
            "unknown": report.unknown,
        }
        print(f"{opening}], " + json.dumps(rest)[1:])  # noqa: T201
