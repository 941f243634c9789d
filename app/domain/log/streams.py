"""Feed the verification walk with a bundle: its entries come in the order of the tree, all streams through one another.

Only entries that the signed head covers are walked at first, so nothing else can vouch for them: a decision rests on
keys that a covered entry announced before it, a missing payload on a covered erasure. When they have ended, erasures
and what is missing are compared (`end_covered`). Then come the entries after the head, on which nothing rests.

What is remembered of a stream between two of its entries is small and goes through a port, so that memory stays flat
however many streams are open at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from app.core.digest import digest_of_bytes
from app.core.errors import RecoveryFailed, SchemaViolation, SequenceGap, TgaError
from app.domain.ledger.checks import (
    EntryPlace,
    Erased,
    Kinds,
    Origin,
    Reference,
    ReferredBlob,
    Report,
    Standing,
    WholeStream,
    kind_name,
)
from app.domain.ledger.plans import Claim
from app.domain.ledger.references import missing_reference, reference_errors
from app.domain.ledger.stored import StoredEntry
from app.domain.ledger.verification import Walk
from app.domain.log.bundle import EntryLine


class NotRemembered(Exception):
    """A stream that was remembered whole is not the only one of its name, or of its key. One walk must judge them."""


class StreamMemory(Protocol):
    """What is remembered about streams; in flat memory, so probably on disk."""

    def load(self, stream: str) -> Standing | None: ...

    def store(self, stream: str, standing: Standing) -> None: ...

    def all(self) -> Iterator[tuple[str, Standing]]:
        """In the order of names, but for those that were remembered whole."""
        ...

    def remember_whole(self, stream: str, whole: WholeStream) -> None:
        """A stream of which nothing was remembered before. NotRemembered, then or later, if something was, or if
        another stream made a call with its key."""
        ...

    def count_whole(self) -> Mapping[str, int]:
        """How many streams of each kind were remembered whole. NotRemembered as above: from here on it is known."""
        ...

    def remember_erasure(self, erased: Erased) -> None: ...

    def erasures(self) -> Iterator[Erased]: ...

    def want_origin(self, place: EntryPlace) -> None:
        """A stream that begins further on goes on from this entry."""
        ...

    def is_wanted(self, place: EntryPlace) -> bool: ...

    def remember_origin(self, place: EntryPlace, origin: Origin) -> None: ...

    def origin(self, place: EntryPlace) -> Origin: ...

    def remember_reference(self, reference: Reference) -> None: ...

    def references(self) -> Iterator[Reference]: ...

    def remember_blob(self, place: EntryPlace, blob: ReferredBlob) -> None:
        """The entry refers to it. Once is enough for each blob."""
        ...

    def blobs(self) -> Iterator[tuple[EntryPlace, ReferredBlob]]:
        """Each once, with an entry that refers to it."""
        ...

    def claim(self, key: str, stream: str) -> str:
        """The stream that claimed `key` first: this one, unless another did."""
        ...


class BundleWalk(Walk):
    """Steps 1 to 6 of the walk, over the lines of a bundle. The first wrong entry ends its stream: nothing that follows
    it can be judged.

    `complete`: every stream is here. `tenant`: the bundle is this tenant's alone; streams that vouch may then come
    without the payloads of others.
    """

    goes_on_after_findings = False

    def __init__(
        self, kinds: Kinds, report: Report, memory: StreamMemory, *, complete: bool, tenant: str | None = None
    ) -> None:
        super().__init__(kinds, report)
        self.tenant = tenant
        self._memory = memory
        self._complete = complete
        self._lines = 0
        self.on_blob = memory.remember_blob

    def claim_holder(self, claim: Claim, stream: str) -> str:
        return self._memory.claim(claim.key_digest(), stream)

    def note_erasure(self, erased: Erased) -> None:
        self._memory.remember_erasure(erased)

    def note_origin(self, place: EntryPlace) -> None:
        """Before all lines are judged: a stream goes on from this entry, so what is known there is kept."""
        self._memory.want_origin(place)

    def origin(self, place: EntryPlace) -> Origin:
        return self._memory.origin(place)

    def may_lack_streams(self) -> bool:
        return not self._complete

    def refer(self, reference: Reference) -> None:
        if self.is_covered:
            self._memory.remember_reference(reference)

    def may_lack_payload(self, at: Standing) -> bool:
        return not at.kind.vouches_for_others  # whether it was erased is known when all covered entries were seen

    def judge(self, line: EntryLine) -> Iterable[TgaError]:
        """Every finding about the next covered line."""
        self.report.entries += 1
        return self._judge(line)

    def pass_over(self, lines: int) -> None:
        """The next line is the one after so many: those that were not given here were judged elsewhere."""
        self._lines = lines

    def judge_after_head(self, line: EntryLine) -> Iterator[TgaError]:
        """As `judge`, when all covered lines were seen: continues the streams that vouch, and vouches for nothing."""
        self.is_covered = False
        self.on_blob = None
        kind = self.kinds.get(kind_name(line.stream))
        if kind is not None and kind.vouches_for_others:
            yield from self._judge(line)
        else:
            vouching = " or ".join(sorted(kind.name for kind in self.kinds.values() if kind.vouches_for_others))
            yield _at(line, SequenceGap(f"only {vouching} entries may be newer than the tree"))

    def _judge(self, line: EntryLine) -> Iterable[TgaError]:
        # The order of lines is compared with the tree's elsewhere: here a line's place is where it stands.
        self._lines += 1
        stream, number = line.stream, line.sequence_number
        row = StoredEntry(number, line.entry, digest_of_bytes(line.entry), line.artifact, leaf_index=self._lines)
        try:
            at = self._memory.load(stream) or self.begin(stream)
        except SchemaViolation as unknown:
            return [_at(line, unknown)]
        if at.is_ended:
            return ()
        found = [_at(line, error) for error in self.follow(at, row)]
        place = EntryPlace(stream, number)
        if self.is_covered and at.is_sound and self._memory.is_wanted(place):
            kept = None if at.payloads_missing else at.own.to_json()
            self._memory.remember_origin(place, Origin(at.head.entry_digest, kept))
        self._memory.store(stream, at)
        return found

    def end_covered(self) -> Iterator[TgaError]:
        """What can be said only when all covered entries were seen: a payload is missing only where it was erased."""
        for kind, count in self._memory.count_whole().items():
            self.report.of_kind[kind] += count
        for erased in self._memory.erasures():
            for error in self._erased_errors(erased):
                yield error.at(stream=erased.system_stream, sequence_number=erased.sequence_number)
        for reference in self._memory.references():
            yield from self._reference_errors(reference)
        for stream, at in self._memory.all():
            self.report.of_kind[at.kind.name] += 1
            self.report.unfinished[at.kind.name] += at.head.state not in at.kind.documents.kind.terminal_states
            if at.is_erased:
                self.report.payloads_erased += at.payloads_missing
            elif at.payloads_missing and at.is_sound:
                yield RecoveryFailed(
                    "payloads are missing, and no covered erasure says so",
                    expected="an erasure on a system stream, covered by the signed head",
                    found="nothing",
                    stream=stream,
                    sequence_number=at.head.sequence_number,
                )

    def _reference_errors(self, reference: Reference) -> Iterator[TgaError]:
        at = self._memory.load(reference.stream)
        if at is not None and at.is_sound:
            yield from reference_errors(reference, at.head, at.own, is_erased=at.is_erased)
        elif at is None and self._complete:
            yield missing_reference(reference)
        elif at is None:
            self.report.references_unknown += 1

    def _erased_errors(self, erased: Erased) -> Iterator[TgaError]:
        stream = erased.stream
        holder = stream if erased.key_digest is None else self._memory.claim(erased.key_digest, stream)
        if holder != stream:  # I2
            yield RecoveryFailed("the erased trace had the claim of a key with which another made a call", found=holder)
            return
        at = self._memory.load(stream)
        if at is None:
            if self._complete:
                yield RecoveryFailed("the erasure is of a stream that is not here", found=stream)
            return
        if not at.is_sound:
            return
        expected = (at.head.sequence_number, at.head.entry_digest, at.payloads)
        found = (erased.last_sequence_number, erased.last_entry_digest, erased.payloads)
        if found != expected:
            yield RecoveryFailed("the erasure is of something else", expected=expected, found=found)
        elif at.payloads_present:
            yield RecoveryFailed("a payload stands that was erased", found=stream)
        else:
            at.is_erased = True
            self._memory.store(stream, at)


def _at(line: EntryLine, error: TgaError) -> TgaError:
    """The error at the line that was judged, not at the place where the entry should have stood."""
    error.stream, error.sequence_number = line.stream, line.sequence_number
    return error
