"""Entries as they are sent: the stored bytes themselves, so that a client can hash them again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from app.core.digest import digest_of_bytes
from app.core.errors import ChecksumMismatch, SequenceGap, TgaError
from app.domain.ledger.queries import ShownEntry


def entry_item(stored: ShownEntry) -> dict[str, Any]:
    """The item with `entry` and `artifact` embedded byte for byte; ChecksumMismatch when they are not what is recorded.

    SHA-256 over `entry` is `entry_digest`, and over `artifact` the entry's `artifact_digest`. The chain from one entry
    to the next is not judged here.
    """
    body = _verified(stored, stored.entry, stored.entry_digest, "entry")
    if body.get("sequence_number") != stored.sequence_number:
        raise SequenceGap("the entry stands in another's place", found=body.get("sequence_number")).at(
            stream=stored.stream, sequence_number=stored.sequence_number
        )
    if stored.artifact is not None:
        _verified(stored, stored.artifact, str(body.get("artifact_digest")), "artifact")
    return {
        "sequence_number": stored.sequence_number,
        "entry_digest": stored.entry_digest,
        "entry": orjson.Fragment(stored.entry),
        "artifact": None if stored.artifact is None else orjson.Fragment(stored.artifact),
    }


def entry_items(entries: Iterable[ShownEntry], *, after_seq: int) -> list[dict[str, Any]]:
    """Consecutive entries of one stream as items; SequenceGap where one is missing."""
    items = []
    for place, stored in enumerate(entries, after_seq + 1):
        if stored.sequence_number != place:
            raise SequenceGap("an entry is missing", expected=place, found=stored.sequence_number).at(
                stream=stored.stream, sequence_number=place
            )
        items.append(entry_item(stored))
    return items


def feed_item(stored: ShownEntry) -> dict[str, Any]:
    """As `entry_item`, with the stream's name. One that was tampered with says so itself: it must not end a feed that
    others stand on too."""
    try:
        return {"stream": stored.stream, **entry_item(stored), "problem": None}
    except TgaError as error:
        return {
            "stream": stored.stream,
            "sequence_number": stored.sequence_number,
            "entry_digest": stored.entry_digest,
            "entry": None,
            "artifact": None,
            "problem": {"code": error.code, "detail": error.what},
        }


def _verified(stored: ShownEntry, raw: bytes, digest: str, what: str) -> dict[str, Any]:
    found = digest_of_bytes(raw)
    try:
        if found != digest:  # I5
            raise ChecksumMismatch(f"the stored {what} does not hash to its digest", expected=digest, found=found)
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            document = None
        # Canonical JSON stands on one line; another one could end an event and begin a forged one.
        if not isinstance(document, dict) or b"\n" in raw or b"\r" in raw:
            raise ChecksumMismatch(f"the stored {what} is not a canonical document")
    except TgaError as error:
        raise error.at(stream=stored.stream, sequence_number=stored.sequence_number) from None
    return document
