"""The blobs of a bundle: bytes beside the ledger, each in a file that is named by its digest.

Nothing vouches for these files but the covered entries that refer to them: an entry says the digest and the size, so
whoever has the entry needs neither the manifest nor the store that the bytes came from. A file to which no covered
entry refers is not looked at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from app.core.errors import BlobDamaged, BlobNotFound, BundleInvalid, TgaError
from app.domain.ledger.checks import EntryPlace, ReferredBlob

BLOBS: Final = "blobs/"


class BlobFiles(Protocol):
    def pieces(self, name: str, *, bytes_max: int) -> Iterator[bytes]:
        """At most so many bytes of the file; BundleInvalid when it cannot be read, BlobNotFound when there is none."""
        ...


@dataclass(slots=True)
class BlobReport:
    """`unchecked`: that the covered entries refer to, and that a bundle without blobs does not hold."""

    checked: int = 0
    checked_bytes: int = 0
    sealed: int = 0  # of those that were checked
    unchecked: int = 0
    missing: int = 0
    damaged: int = 0


def blob_file(sha256: str) -> str:
    """Where a bundle has the blob of this digest."""
    return f"{BLOBS}{sha256[:2]}/{sha256}"


def verify_blobs(
    referred: Iterable[tuple[EntryPlace, ReferredBlob]], files: BlobFiles, report: BlobReport, *, has_blobs: bool
) -> Iterator[TgaError]:
    """Every blob that is missing, or not what the entry says that refers to it. A piece of each is in memory at a time.

    Sealed bytes are compared as they are: that needs no key, and shows nothing of what is in them.
    """
    for place, blob in referred:
        if not has_blobs:
            report.unchecked += 1
            continue
        try:
            verify_blob(files, blob)
            report.checked += 1
            report.checked_bytes += blob.size_bytes
            report.sealed += blob.is_sealed
        except TgaError as error:
            report.missing += isinstance(error, BlobNotFound)
            report.damaged += not isinstance(error, BlobNotFound)
            yield error.at(stream=place.stream, sequence_number=place.sequence_number)


def verify_blob(files: BlobFiles, blob: ReferredBlob) -> None:
    """Raise BlobNotFound or BlobDamaged unless the bundle has exactly these bytes."""
    hashed, size = hashlib.sha256(), 0
    try:
        for piece in files.pieces(blob_file(blob.sha256), bytes_max=blob.size_bytes + 1):
            hashed.update(piece)
            size += len(piece)
    except BundleInvalid as error:
        raise BlobDamaged(
            "a blob that the entry refers to cannot be read from the bundle", expected=blob.sha256, found=error.found
        ) from None
    if size != blob.size_bytes or hashed.hexdigest() != blob.sha256:
        is_long = size > blob.size_bytes
        raise BlobDamaged(
            "a blob in the bundle is not the one that the entry refers to",
            expected=f"{blob.sha256}, {blob.size_bytes} bytes",
            found="more bytes" if is_long else f"{hashed.hexdigest()}, {size} bytes",
            remedy="Get the bundle again: the entries are not concerned, these bytes are not what they refer to.",
        )


def missing_from_bundle(sha256: str) -> BlobNotFound:
    return BlobNotFound(
        "a blob that the entry refers to is not in the bundle",
        expected=blob_file(sha256),
        remedy="Ask whoever exported the bundle: `tga export` has said whether its store had it.",
    )
