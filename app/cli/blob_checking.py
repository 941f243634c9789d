"""What `tga verify` does about blobs: reads those to which entries refer, or says that it has not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Protocol

from app.cli.showing import counted
from app.core.errors import TgaError
from app.domain.ledger.checks import EntryPlace, ReferredBlob
from app.domain.log.bundled_blobs import BlobReport
from app.postgres.blobs import load_references
from app.postgres.sessions import Sessions
from app.settings import Settings

if TYPE_CHECKING:
    from app.cli.stored_blobs import StoredBlobs


class VerifiedBlobs(Protocol):
    """`note` is told of what entries refer to while they are verified; `findings` comes when all were."""

    report: BlobReport

    def note(self, place: EntryPlace, blob: ReferredBlob) -> None: ...

    def findings(self, sessions: Sessions, stream: str | None) -> AsyncIterator[TgaError]: ...


class UncheckedBlobs:
    """Counts references, so that a reader does not take silence for a verdict."""

    def __init__(self) -> None:
        self.report = BlobReport()

    def note(self, place: EntryPlace, blob: ReferredBlob) -> None:
        self.report.unchecked += 1

    async def findings(self, sessions: Sessions, stream: str | None) -> AsyncIterator[TgaError]:
        nothing: tuple[TgaError, ...] = ()
        for error in nothing:
            yield error


class CheckedBlobs:
    """Reads every blob to which an entry refers; and those of execution checkpoints, which no artifact names: a run
    whose state is large goes on from them."""

    def __init__(self, stored: StoredBlobs) -> None:
        self.report = BlobReport()
        self.note = stored.note
        self._stored = stored

    async def findings(self, sessions: Sessions, stream: str | None) -> AsyncIterator[TgaError]:
        async for referring, sequence_number, sha256, size_bytes in load_references(sessions, stream):
            self.note(EntryPlace(referring, sequence_number), ReferredBlob(sha256, size_bytes))
        async for error in self._stored.verify(self.report):
            yield error


def open_referred_blobs(settings: Settings) -> VerifiedBlobs:
    from app.cli.stored_blobs import StoredBlobs  # with the configuration and the object store: few need them

    return CheckedBlobs(StoredBlobs.open(settings))


def blobs_in_words(report: BlobReport) -> Iterator[str]:
    """What was read of them; nothing where nothing was."""
    if report.checked or report.missing or report.damaged:
        wrong = [
            f"{count:,} {what}" for count, what in ((report.missing, "missing"), (report.damaged, "damaged")) if count
        ]
        sealed = f", {report.sealed:,} of them sealed" if report.sealed else ""
        sign = "[bold red]✗[/]" if wrong else "[green]✓[/]"
        read = f"{counted(report.checked, 'blob')}{sealed}, {report.checked_bytes:,} bytes: as the entries say"
        yield f"{sign} {'; '.join([read, *wrong])}."


def unchecked_in_words(report: BlobReport) -> Iterator[str]:
    """That a database's blobs were not read, where entries refer to any."""
    if report.unchecked:
        times = counted(report.unchecked, "reference to a blob was", "references to blobs were")
        yield f"    - {times} not followed: --blobs reads and hashes them."
