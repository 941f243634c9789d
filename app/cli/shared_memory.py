"""What is remembered of a bundle's streams, where shares of them were judged by themselves."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

from app.cli.bundle_files import DiskMemory
from app.domain.ledger.checks import (
    EntryPlace,
    Erased,
    Kinds,
    Origin,
    Reference,
    ReferredBlob,
    Standing,
    WholeStream,
    kind_name,
)
from app.domain.log.shares import NotShared


class SharedMemory:
    """The StreamMemory of the process that gathers the shares: its own, and from `join` on theirs behind it.

    `share_of` says which share remembers a stream; streams that vouch for others are remembered here.
    """

    def __init__(self, kinds: Kinds, own: DiskMemory, share_of: Callable[[str], int]) -> None:
        self._kinds = kinds
        self._own = own
        self._share_of = share_of
        self._shares: Sequence[DiskMemory] = ()

    def join(self, shares: Sequence[DiskMemory]) -> None:
        """NotShared if two streams in different shares claimed one key."""
        before: tuple[str, str] = ("", "")
        for key, stream in heapq.merge(*(share.claims() for share in shares)):
            if key == before[0] and stream != before[1]:
                raise NotShared("a key was claimed in two shares")
            before = key, stream
        self._shares = shares

    def _of(self, stream: str) -> DiskMemory:
        kind = self._kinds.get(kind_name(stream))
        is_here = not self._shares or kind is None or kind.vouches_for_others
        return self._own if is_here else self._shares[self._share_of(stream)]

    def load(self, stream: str) -> Standing | None:
        return self._of(stream).load(stream)

    def store(self, stream: str, standing: Standing) -> None:
        self._of(stream).store(stream, standing)

    def all(self) -> Iterator[tuple[str, Standing]]:
        every = [memory.all() for memory in (self._own, *self._shares)]
        return heapq.merge(*every, key=lambda found: found[0])

    def remember_whole(self, stream: str, whole: WholeStream) -> None:
        self._of(stream).remember_whole(stream, whole)

    def count_whole(self) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for memory in (self._own, *self._shares):
            found.update(memory.count_whole())
        return found

    def claim(self, key: str, stream: str) -> str:
        holders = (share.claimed_by(key) for share in self._shares)
        return next((holder for holder in holders if holder is not None), None) or self._own.claim(key, stream)

    def remember_erasure(self, erased: Erased) -> None:
        self._own.remember_erasure(erased)

    def erasures(self) -> Iterator[Erased]:
        return self._own.erasures()

    def want_origin(self, place: EntryPlace) -> None:
        self._own.want_origin(place)

    def is_wanted(self, place: EntryPlace) -> bool:
        return self._own.is_wanted(place)

    def remember_origin(self, place: EntryPlace, origin: Origin) -> None:
        self._own.remember_origin(place, origin)

    def origin(self, place: EntryPlace) -> Origin:
        return self._own.origin(place)

    def remember_reference(self, reference: Reference) -> None:
        self._own.remember_reference(reference)

    def references(self) -> Iterator[Reference]:
        return chain(self._own.references(), *(share.references() for share in self._shares))

    def remember_blob(self, place: EntryPlace, blob: ReferredBlob) -> None:
        self._own.remember_blob(place, blob)

    def blobs(self) -> Iterator[tuple[EntryPlace, ReferredBlob]]:
        """Each once, in the order of digests, as each share has them."""
        before: ReferredBlob | None = None
        every = (memory.blobs() for memory in (self._own, *self._shares))
        for place, blob in heapq.merge(*every, key=lambda found: found[1][:2]):
            if before is None or before[:2] != blob[:2]:
                yield place, blob
            elif before != blob:
                raise NotShared("a blob is sealed in one share, and not in another")
            before = blob
