"""What a document must agree on with the journal that it is added to: in numbers, and otherwise."""

from __future__ import annotations

from app.core.errors import ChecksumMismatch


class Miscounted(ChecksumMismatch):
    """A number in a document is not what the journal counts. Of a stored document that is a broken record; of one that
    is about to be stored its worker's mistake, which the engine says."""


def verify_same(what: str, expected: object, found: object) -> None:
    if found != expected:
        raise ChecksumMismatch(f"{what} does not agree with the journal", expected=expected, found=found)


def verify_count(what: str, expected: int, found: int) -> None:
    if found != expected:
        raise Miscounted(f"{what} does not agree with the journal", expected=expected, found=found)
