"""What erasing a finished stream asks of its kind: to read its records, and to verify them before they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import TgaError, TraceErased, TraceNotFound, TraceUnfinished
from app.domain.ledger.checks import AnyRecord
from app.domain.ledger.plans import Claim
from app.domain.ledger.records import StreamDocuments


@dataclass(frozen=True, slots=True)
class ErasableKind:
    """`verify` is given all records of a stream, its claim if it has one, and the effect that the claim names. It
    returns the head that they fold to, and raises when anything does not hold: a stream that is wrong is not erased.
    None: streams of this kind are long, and are verified by the walk of `tga verify`, in pages.

    `not_found`, `erased`, `unfinished`: what is raised when there is no such stream, its payloads are gone, or it is
    still open."""

    documents: StreamDocuments[Any, Any]
    verify: Callable[[Sequence[AnyRecord], Claim | None, Digest | None], Head] | None
    not_found: type[TgaError] = TraceNotFound
    erased: type[TgaError] = TraceErased
    unfinished: type[TgaError] = TraceUnfinished
