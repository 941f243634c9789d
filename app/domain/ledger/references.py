"""What a record says of another stream, compared with where that one stands."""

from __future__ import annotations

from collections.abc import Iterator

from app.core.chain import Head
from app.core.errors import ChecksumMismatch, RecoveryFailed, TgaError
from app.domain.ledger.checks import Reference, StreamChecks


def missing_reference(reference: Reference) -> TgaError:
    return RecoveryFailed("the stream that the record names is missing", expected=reference.stream).at(
        stream=reference.place.stream, sequence_number=reference.place.sequence_number
    )


def reference_errors(reference: Reference, head: Head, own: StreamChecks, *, is_erased: bool) -> Iterator[TgaError]:
    """What a record says of another stream, compared with where that one stands."""
    if reference.what == "begun_by" and is_erased:
        return  # what it began with is gone
    found = {
        "last_artifact": head.artifact_digest,
        "last_entry": head.entry_digest,
        "begun_by": own.begun_by,
    }[reference.what]
    if found != reference.digest:
        words = reference.what.replace("_", " ")
        yield ChecksumMismatch(
            f"the record names another {words} of {reference.stream}", expected=found, found=reference.digest
        ).at(stream=reference.place.stream, sequence_number=reference.place.sequence_number)
