"""The blobs to which entries refer, read from the gateway's own store: for `tga export --blobs` and
`tga verify --blobs`. Piece by piece, whatever their size; nothing is opened that is sealed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from app.cli.bundle_files import BlobList, FolderFiles
from app.config import load_config
from app.connectors.blobs import open_object_store
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import BlobDamaged, BlobNotFound, SettingInvalid, TgaError
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.checks import EntryPlace, ReferredBlob, kind_name
from app.domain.log.bundle import EntryLine
from app.domain.log.bundled_blobs import BlobReport, blob_file, verify_blob
from app.domain.runs.blobs import BlobContent, ObjectStore, blob_path
from app.domain.runs.transitions import RUN
from app.domain.runs.verification import stream_checks
from app.domain.system.documents import SYSTEM
from app.settings import Settings

_REFERS: Final = (b'"ref":{', b'"program_source":{')  # in canonical form; few artifacts do
_TOLD_MAX: Final = 20


def open_store(settings: Settings) -> ObjectStore:
    """Where the gateway keeps blobs. SettingInvalid when that is a folder which is not there: none is made."""
    url, folder = load_config(settings.config_file).blobs.url, settings.home / "blobs"
    if url is None and not folder.is_dir():
        raise SettingInvalid(
            f"there is no folder of blobs {folder}",
            expected="what the gateway has stored",
            remedy="Restore it from your backup, or name the place where blobs are in [blobs] url.",
        )
    return open_object_store(url, folder=folder)


def tenant_of(stream: str) -> str:
    """Whose blobs the entries of this stream refer to."""
    if SYSTEM.has(stream):
        return SYSTEM.identity_of(stream)
    tenant, slash, _ = RUN.identity_of(stream).partition("/")
    return tenant if slash else DEFAULT_TENANT


class StoredBlobs:
    """The blobs to which those entries refer that are shown to it; the list is on disk, for there may be any number."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._kinds = stream_checks()
        self._listed = BlobList()
        self.copied = CopiedBlobs()  # by `copy_into`

    @classmethod
    def open(cls, settings: Settings) -> Self:
        return cls(open_store(settings))

    def note(self, place: EntryPlace, blob: ReferredBlob) -> None:
        self._listed.add(place, blob, tenant=tenant_of(place.stream))

    def note_line(self, line: EntryLine) -> None:
        """As `note`, for all that a covered line of a bundle refers to. One that cannot be read refers to nothing."""
        if line.artifact is None or line.leaf_index is None or not any(told in line.artifact for told in _REFERS):
            return
        kind = self._kinds.get(kind_name(line.stream))
        if kind is None:
            return
        with suppress(TgaError):  # said when the bundle is verified
            record = kind.documents.read(line.entry, line.artifact, entry_digest=digest_of_bytes(line.entry))
            for blob in kind.blobs_in(record):
                self.note(EntryPlace(line.stream, line.sequence_number), blob)

    async def verify(self, report: BlobReport) -> AsyncIterator[TgaError]:
        """Every blob that is missing, or not what its digest says."""
        for tenant, place, blob in self._listed.by_tenant():
            try:
                async for _ in stored_pieces(self._objects, tenant, blob):
                    pass
            except (BlobNotFound, BlobDamaged) as error:
                report.missing += isinstance(error, BlobNotFound)
                report.damaged += isinstance(error, BlobDamaged)
                yield error.at(stream=place.stream, sequence_number=place.sequence_number)
            else:
                report.checked += 1
                report.checked_bytes += blob.size_bytes
                report.sealed += blob.is_sealed

    async def copy_into(self, folder: Path) -> None:
        """Into the bundle, each durable before the next. What is there already and right is not read again."""
        copied, files = self.copied, FolderFiles(folder)
        for tenant, place, blob in self._listed.by_tenant():
            try:
                verify_blob(files, blob)
            except TgaError:
                try:
                    await _copy(self._objects, tenant, blob, folder / blob_file(blob.sha256))
                except (BlobNotFound, BlobDamaged) as error:
                    copied.lacking += 1
                    if len(copied.told) < _TOLD_MAX:
                        copied.told.append(error.at(stream=place.stream, sequence_number=place.sequence_number))
                    continue
            copied.blobs += 1
            copied.size_bytes += blob.size_bytes


@dataclass(slots=True)
class CopiedBlobs:
    """`lacking`: that the store does not have as entries refer to them; `told` are the first of those."""

    blobs: int = 0
    size_bytes: int = 0
    lacking: int = 0
    told: list[TgaError] = field(default_factory=list)


async def stored_pieces(objects: ObjectStore, tenant: str, blob: ReferredBlob) -> AsyncIterator[bytes]:
    """Its bytes; the last of them only if all were right. BlobNotFound, or BlobDamaged."""
    path = blob_path(tenant, Digest(blob.sha256))
    try:
        await objects.read(path, start=0, length=0)
    except BlobNotFound:
        raise BlobNotFound(
            "a blob that the entry refers to is not in the store",
            expected=path,
            remedy="Restore it from a backup of the object store: runs that need it stop with BLOB_DAMAGED.",
        ) from None
    async for piece in BlobContent(objects, path, Digest(blob.sha256), blob.size_bytes, None).pieces():
        yield piece


async def _copy(objects: ObjectStore, tenant: str, blob: ReferredBlob, to: Path) -> None:
    """Durable and whole, or not there."""
    to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = to.with_name(to.name + ".new")
    try:
        with beside.open("wb") as file:
            async for piece in stored_pieces(objects, tenant, blob):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(to)
    finally:
        beside.unlink(missing_ok=True)
