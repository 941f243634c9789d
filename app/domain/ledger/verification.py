"""Verify streams of every kind, in one walk: each kind registers its own checks, a database or a bundle feeds it.

Theory, before the steps:

1. A row is believed for nothing. It is judged by what stands before it in its stream, by the table of its kind, and by
   what vouching streams have said; never by another row that nothing vouches for.
2. Every kind of stream has entries, links, transitions, payloads, checkpoints and a head, so the walk judges those.
   What an artifact means only its kind knows: a kind registers `KindChecks`, and for each of its streams the walk asks
   `StreamChecks` at fixed steps (checks.py has both). No field of a kind's documents is named here.
3. A kind that vouches for others (it announces keys, it records erasures) is walked before them: in a database by the
   order of its reader, in a bundle by the order of the tree. It is never erased, and its first wrong entry ends it:
   what stands behind that entry vouches for nothing.
4. A database holds each stream whole, with more beside it: head, claim, checkpoints. So there the walk goes on after a
   finding, from what the row claims to be: one wrong entry is one finding, and a second wrong one is found too. A
   bundle holds all streams through one another, and what follows a wrong entry proves nothing: that stream has ended.
5. A payload that is not there was erased, or withheld from another tenant's bundle, or removed by an attacker. A
   database says beforehand whether the stream was erased; in a bundle that is known when all covered entries were seen.

The steps. Of each row, in `follow`; the first check that fails is the row's finding:

1. place: it has an entry, with the number after the last one (STATE_SEQUENCE_GAP)
2. reading: bytes hash to their digests and follow their schemas
3. stream: the entry says of itself where it stands
4. link: sequence, chain and digest, transition, binding (app/core/chain.py)
5. payload: it is there, unless it may be missing; it is not there if it was erased
6. meaning: the kind folds the record into its state, then judges what the record rests on (signatures, claims)
7. checkpoints: those up to this entry say what the log folds to, and one stands where one is due (I4)

Of each stream of a database, in `end`, when all its rows were seen:

8. head: it stands on the last entry, in its state, and is found where streams in that state are looked for
9. checkpoints: none stands on an entry that is missing
10. erasure: the stream that vouches for it says so, of exactly this stream
11. what the kind knows to stand beside a stream: claim, summary, seals, dispatch attempts

Of all of them: a key is claimed by one stream (I2). A bundle's end is in app/domain/log/streams.py.

Proves that what is stored hangs together; not that nothing was cut off a tail together with its head, nor that nobody
recomputed all of it: signed tree heads show that. Memory is flat.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import ClassVar, Final

from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import (
    CheckpointMissing,
    ChecksumMismatch,
    InvalidTransition,
    RecoveryFailed,
    SchemaViolation,
    SequenceGap,
    TgaError,
)
from app.core.limits import ERASURE_DIGESTS_MAX
from app.domain.ledger.checks import (
    AnyRecord,
    EntryPlace,
    Erased,
    Kinds,
    NoteBlob,
    Origin,
    Reference,
    Report,
    Standing,
    kind_name,
    with_payload,
)
from app.domain.ledger.plans import Claim
from app.domain.ledger.references import missing_reference, reference_errors
from app.domain.ledger.stored import ClaimedKey, LedgerReader, StoredEntry, StoredErasure, StoredStream

ORIGINS_DEPTH_MAX: Final = 100  # forks of forks


class Walk:
    """Steps 1 to 11, stream by stream. The caller brings the rows of each stream in their order."""

    goes_on_after_findings: ClassVar[bool] = True
    tenant: str | None = None  # what is walked is the bundle of this tenant
    is_covered: bool = True  # by a signed head, or by no less than a database can say

    def __init__(self, kinds: Kinds, report: Report) -> None:
        self.kinds = kinds
        self.report = report
        self.origins: dict[EntryPlace, Origin] = {}  # on which the next row rests
        self.references: list[Reference] = []  # that the last row made
        self.on_blob: NoteBlob | None = None  # told of the bytes beside the ledger to which sound entries refer

    def begin(self, stream: str, stored: StoredStream | None = None) -> Standing:
        kind = self.kinds.get(kind_name(stream))
        if kind is None:
            raise SchemaViolation("no such kind of stream", stream=stream)
        at = Standing(
            stream,
            kind,
            kind.begin(stored),
            Head.unborn(kind.documents.kind),
            goes_on=self.goes_on_after_findings and not kind.vouches_for_others,
        )
        if stored is not None:
            at.stored, at.checkpoints = stored, iter(stored.checkpoints)
            at.next_checkpoint = next(at.checkpoints, None)
        return at

    def claim_holder(self, claim: Claim, stream: str) -> str:
        """Which stream made a call with this key first. A database keeps claims, which are compared at its end."""
        return stream

    def note_erasure(self, erased: Erased) -> None:
        """A vouching stream says so. A database brings the erasure with the stream that was erased."""

    def origin(self, place: EntryPlace) -> Origin:
        """A database's reader has looked it up before the row that rests on it."""
        return self.origins.get(place, Origin())

    def may_lack_streams(self) -> bool:
        return False

    def refer(self, reference: Reference) -> None:
        """A database's reader looks it up after the row that says so."""
        self.references.append(reference)

    def may_lack_payload(self, at: Standing) -> bool:
        return at.stored is not None and at.stored.erasure is not None and not at.kind.vouches_for_others

    def accepts_whole(self, stored: StoredStream) -> bool:
        """Steps 1 to 11 at once, for a stream that has ended and is what nearly all are. False says nothing."""
        kind = None if stored.rows is None else self.kinds.get(kind_name(stored.stream))
        if stored.rows is None or kind is None or not kind.accepts_whole(stored):
            return False
        self.report.entries += len(stored.rows)
        return True

    def follow(self, at: Standing, row: StoredEntry) -> Iterable[TgaError]:
        """Steps 1 to 7, for one row. A row that its kind knows to be right at once takes a tenth of the time; whatever
        is rare or wrong is judged step by step."""
        if not self._is_usual(at, row):
            return self._follow(at, row)
        return () if at.stored is None else _checkpoint_errors(at)  # step 7

    def _is_usual(self, at: Standing, row: StoredEntry) -> bool:
        """Steps 1 to 6 at once. False says nothing, and has changed nothing."""
        stored = at.stored
        if not at.is_sound or at.resumes or at.payloads_missing or row.entry is None:
            return False
        if stored is not None and (stored.erasure is not None or digest_of_bytes(row.entry) != row.entry_digest):
            return False
        head = at.own.follow_usual(at, row, self)
        if head is None:
            return False
        at.head = head
        at.payloads_present += 1
        if stored is None and head.artifact_digest is not None:
            at.payloads = with_payload(at.payloads, head.artifact_digest)
        return True

    def _follow(self, at: Standing, row: StoredEntry) -> Iterator[TgaError]:
        if at.is_ended:
            return
        expected = at.head.sequence_number + 1
        if row.entry is None or row.entry_digest is None:  # step 1
            gap = SequenceGap("an artifact has no entry", expected="an entry", found="nothing")
            yield at.finding(gap, row.sequence_number)
            return
        # In a bundle an entry is read first, but for those of vouching streams: tools/verify.py does so too.
        is_counted = self.goes_on_after_findings or at.kind.vouches_for_others
        if is_counted and row.sequence_number != expected:
            gap = SequenceGap("entries are missing", expected=expected, found=row.sequence_number)
            yield at.finding(gap, expected)
            at.resumes = True
            if at.is_ended:
                return
        # What the row claims to be, for whatever follows it if the row itself cannot be read.
        claimed = Head(row.sequence_number, row.entry_digest, at.head.state, at.head.artifact_digest)
        resumes, at.resumes = at.resumes, True
        documents = at.kind.documents
        try:
            record = documents.read(row.entry, row.artifact, entry_digest=row.entry_digest)  # step 2
            entry = record.entry
            _verify_stream(at, row, record, is_counted=is_counted)  # step 3
            claimed = Head(row.sequence_number, row.entry_digest, entry.to_state, Digest(entry.artifact_digest))
            at.resumes = False
            at.own.note(record)
            documents.verify_next(_head_that_fits(record, row) if resumes else at.head, record)  # step 4
            self._verify_payload(at, record)  # step 5
            if record.artifact is not None:  # step 6
                if at.is_sound and not at.payloads_missing:
                    at.own.fold(record)
                at.own.verify(record, row, self)
                if self.on_blob is not None:
                    for blob in at.kind.blobs_in(record):
                        self.on_blob(EntryPlace(at.stream, row.sequence_number), blob)
        except TgaError as error:
            yield at.finding(error, row.sequence_number)
            if at.is_ended:
                return
        at.head = claimed
        if at.stored is not None:
            yield from _checkpoint_errors(at)  # step 7

    def _verify_payload(self, at: Standing, record: AnyRecord) -> None:
        digest = record.entry.artifact_digest
        is_erased = at.stored is not None and self.may_lack_payload(at)
        if at.stored is None or is_erased:
            at.payloads = with_payload(at.payloads, digest)
        if is_erased and len(at.artifact_digests) < ERASURE_DIGESTS_MAX:
            at.artifact_digests.append(digest)
        if record.artifact is not None:
            if is_erased:
                raise RecoveryFailed("a payload stands that was erased", expected="nothing")
            at.payloads_present += 1
        elif self._is_withheld(at):
            self.report.payloads_withheld += 1
        elif self.may_lack_payload(at):
            at.payloads_missing += 1
            at.own.lose_payload()
        elif at.kind.vouches_for_others:
            raise ChecksumMismatch("the artifact is missing", expected=digest, found="nothing")
        else:
            raise RecoveryFailed("the artifact's payload is missing", expected=digest, found="nothing")

    def _is_withheld(self, at: Standing) -> bool:
        return self.tenant is not None and self.is_covered and at.kind.may_withhold(at.stream, tenant=self.tenant)

    def end(self, at: Standing, stored: StoredStream) -> Iterator[TgaError]:
        """Steps 8 to 11, when all rows of a database's stream were seen."""
        if at.is_ended:
            return
        for error in _head_errors(at, stored):  # step 8
            yield at.finding(error, at.head.sequence_number or None)
        for error in _leftover_checkpoints(at):  # step 9
            yield at.at_last(error)
        if stored.erasure is not None and not at.kind.vouches_for_others:  # step 10
            self.report.erased_streams += 1
            for error in self._erasure_errors(stored.erasure, stored, at):
                yield at.at_last(error)
        yield from at.own.end(stored, at, self)  # step 11

    def _erasure_errors(self, erasure: StoredErasure, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        holder = self.kinds.get(kind_name(erasure.system_stream))
        if holder is None:
            yield RecoveryFailed("no kind of stream holds such an erasure", found=erasure.system_stream)
        else:
            yield from holder.erasure_errors(erasure, stored, at)


def _verify_stream(at: Standing, row: StoredEntry, record: AnyRecord, *, is_counted: bool) -> None:
    if record.stream != at.stream:
        raise SchemaViolation("the entry is of another stream", expected=at.stream, found=record.stream)
    number = record.entry.sequence_number
    if not is_counted and row.sequence_number != number:
        raise SequenceGap("the entry has another number", expected=row.sequence_number, found=number)


def _head_that_fits(record: AnyRecord, row: StoredEntry) -> Head:
    """A head that this record would follow: behind a broken place only what it says of itself can be judged."""
    entry = record.entry
    rule = entry.kind.rule_of.get(entry.artifact_type)
    bound = None if rule is None or rule.binds_field is None else getattr(record.artifact, rule.binds_field, None)
    return Head(row.sequence_number - 1, Digest(entry.prev_entry_digest), entry.from_state, bound)


def _checkpoint_errors(at: Standing) -> Iterator[TgaError]:
    place, stands = at.head.sequence_number, False
    while at.next_checkpoint is not None and at.next_checkpoint.sequence_number <= place:
        checkpoint, at.next_checkpoint = at.next_checkpoint, next(at.checkpoints, None)
        stands |= checkpoint.sequence_number == place
        try:
            at.own.verify_checkpoint(checkpoint, at)
        except TgaError as error:
            yield error.at(stream=at.stream, sequence_number=checkpoint.sequence_number)
    if not stands and at.is_sound and at.own.is_checkpoint_due(at.head.state):
        yield CheckpointMissing(
            "the execution checkpoint of the entry is missing", expected=f"one that stands on entry {place}"
        ).at(stream=at.stream, sequence_number=place)


def _leftover_checkpoints(at: Standing) -> Iterator[TgaError]:
    while at.next_checkpoint is not None:
        beyond, at.next_checkpoint = at.next_checkpoint, next(at.checkpoints, None)
        yield SequenceGap(
            "a checkpoint stands on an entry that is missing",
            expected=f"an entry {beyond.sequence_number}",
            found=f"{at.head.sequence_number} entries",
            sequence_number=at.head.sequence_number + 1,
        )


def _head_errors(at: Standing, stored: StoredStream) -> Iterator[TgaError]:
    head, last = stored.head, at.head
    if at.kind.vouches_for_others and head != last:
        # Whatever differs, from here on nothing that rests on the stream can be believed.
        yield ChecksumMismatch("the log does not end where its head stands", expected=head, found=last)
    elif head is None:
        if last.sequence_number > 0:
            yield SequenceGap("the stream has no head", expected=last.sequence_number, found="nothing")
    elif head.sequence_number != last.sequence_number:
        yield SequenceGap(
            "the log does not end where its head stands",
            expected=head.sequence_number,
            found=last.sequence_number,
            sequence_number=min(head.sequence_number, last.sequence_number) + 1,
        )
    elif head.entry_digest != last.entry_digest:
        yield ChecksumMismatch(
            "the log's last entry is not the head's", expected=head.entry_digest, found=last.entry_digest
        )
    elif at.is_sound and (head.state, head.artifact_digest) != (last.state, last.artifact_digest):
        yield InvalidTransition("the head is in another state than the log", expected=last.state, found=head.state)
    elif at.is_sound and last.sequence_number > 0:
        yield from _recovery_errors(at, stored)


def _recovery_errors(at: Standing, stored: StoredStream) -> Iterator[TgaError]:
    """Recovery goes by the head: a stream that is wrongly closed or waiting would be left alone for ever. So would one
    that it does not find, because the copy of the head by which it looks says something else."""
    state, name = at.head.state, at.kind.name
    should_be_open = state not in at.kind.documents.kind.terminal_states
    if stored.is_open != should_be_open:
        yield InvalidTransition(
            f"the head says wrongly whether the {name} is finished", expected=should_be_open, found=stored.is_open
        )
    may_wait_for = at.kind.waits_for.get(state, frozenset())
    if stored.waiting is not None and stored.waiting not in may_wait_for:
        yield InvalidTransition(
            f"a {name} that is {state} does not wait for that",
            expected=" or ".join(sorted(may_wait_for)) or "nobody",
            found=stored.waiting,
        )
    elif stored.misplaced_in is not None:
        yield RecoveryFailed(
            "recovery, expiry or lists would not find the stream as its head stands",
            expected=f"{state}, waiting for {stored.waiting or 'nobody'}",
            found=f"something else in tga.{stored.misplaced_in}",
        )


async def verify_ledger(
    reader: LedgerReader, kinds: Kinds, report: Report, *, on_blob: NoteBlob | None = None
) -> AsyncIterator[TgaError]:
    """Every finding about what a database holds, as it is found; `report` counts along. `on_blob` is told of the bytes
    beside the ledger to which entries refer: whether they are there is not looked at here."""
    walk = Walk(kinds, report)
    walk.on_blob = on_blob
    async for error in verify_streams(reader.streams(), walk, reader):
        yield error
    async for error in verify_keys_once(reader, report):
        yield error


async def verify_streams(
    streams: AsyncIterator[StoredStream], walk: Walk, reader: LedgerReader
) -> AsyncGenerator[TgaError, None]:
    """Every finding about these streams. Those that vouch for others must have been walked before."""
    report = walk.report
    async for stored in streams:
        entries, is_asked_for = report.entries, reader.is_asked_for(stored.stream)
        report.streams += is_asked_for
        if walk.accepts_whole(stored):
            continue
        found = 0
        async for error in verify_stream(stored, walk, reader):
            found += 1
            yield error
        if not is_asked_for:  # it only vouches for what is
            report.entries = entries
        # What is wrong with a stream that vouches is wrong with whatever rests on it.
        report.findings += found
        report.broken_streams += found > 0


async def verify_stream(
    stored: StoredStream, walk: Walk, reader: LedgerReader | None = None
) -> AsyncIterator[TgaError]:
    """Every finding about one stream, each naming the entry where it is, what was expected and what was found.

    Without a reader the places of entries in the tree are not known: a key then counts whenever it was announced.
    """
    for table in stored.rows_repeated:
        yield RecoveryFailed("the stream has more than one row", expected="one", found=table, stream=stored.stream)
    try:
        at = walk.begin(stored.stream, stored)
    except SchemaViolation as unknown:
        yield unknown
        return
    if stored.erasure is not None and at.kind.vouches_for_others:
        yield RecoveryFailed(f"a {at.kind.name} stream is never erased", expected="no erasure", stream=stored.stream)
    async for row in stored.entries:
        walk.report.entries += row.entry is not None
        if reader is not None and at.kind.rests_on_order(row):
            row = row._replace(leaf_index=await reader.leaf_index(stored.stream, row.sequence_number))
        if reader is not None:
            await _look_up_origin(walk, reader, at, row)
        for error in walk.follow(at, row):
            yield error
        if reader is not None:
            async for error in _reference_errors(walk, reader):
                yield error
        walk.references.clear()
        if at.is_ended:
            break
    for error in walk.end(at, stored):
        yield error


async def _look_up_origin(walk: Walk, reader: LedgerReader, at: Standing, row: StoredEntry, *, depth: int = 0) -> None:
    """If the row begins a stream that goes on from another's entry: what that stream folds to there, from its rows."""
    walk.origins.clear()
    place = None if row.artifact is None or row.sequence_number != 1 else at.kind.origin_of(row.artifact)
    if place is None or depth >= ORIGINS_DEPTH_MAX:
        return
    aside = Walk(walk.kinds, Report())  # what is wrong with the origin is said where it is walked itself
    try:
        origin = aside.begin(place.stream)
    except SchemaViolation:
        return
    async for before in reader.entries_of(place.stream, up_to=place.sequence_number):
        await _look_up_origin(aside, reader, origin, before, depth=depth + 1)
        for _ in aside.follow(origin, before):
            pass
        aside.references.clear()
    if origin.head.sequence_number == place.sequence_number:
        is_known = origin.is_sound and not origin.payloads_missing
        walk.origins[place] = Origin(origin.head.entry_digest, origin.own.to_json() if is_known else None)


async def _reference_errors(walk: Walk, reader: LedgerReader) -> AsyncIterator[TgaError]:
    for reference in walk.references:
        kind = walk.kinds.get(kind_name(reference.stream))
        referred = None if kind is None else await reader.referred(reference.stream)
        if kind is None or referred is None:
            yield missing_reference(reference)
            continue
        own = kind.begin()
        first = referred.first
        if first is not None and first.entry is not None and first.entry_digest is not None:
            with suppress(TgaError):  # said where the stream is walked itself
                own.note(kind.documents.read(first.entry, first.artifact, entry_digest=first.entry_digest))
        for error in reference_errors(reference, referred.head, own, is_erased=referred.is_erased):
            yield error


async def verify_keys_once(reader: LedgerReader, report: Report) -> AsyncIterator[TgaError]:
    """I2: a key has one stream. The index that sees to it can be dropped; here only neighbours are compared."""
    before: ClaimedKey | None = None
    async for claimed in reader.claimed_keys():
        if before is not None and before[:3] == claimed[:3]:
            report.findings += 1
            report.broken_streams += 1
            yield RecoveryFailed(
                f"two {kind_name(claimed.stream)}s hold the claim of one key",
                expected=before.stream,
                found=f"{claimed.stream}, for {claimed.server_id}, {claimed.tool_name}, {claimed.idempotency_key}",
                stream=claimed.stream,
            )
        before = claimed
