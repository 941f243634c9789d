"""What a kind of stream registers with the verification walk, and what the walk remembers of one stream.

app/domain/ledger/verification.py has the theory and the steps; the numbers here are those of its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import orjson

from app.core.canonical import JsonValue
from app.core.chain import Head
from app.core.digest import GENESIS, Digest, digest_of_bytes
from app.core.errors import RecoveryFailed, TgaError
from app.domain.ledger.plans import Claim
from app.domain.ledger.records import Record, StreamDocuments
from app.domain.ledger.stored import StoredCheckpoint, StoredEntry, StoredErasure, StoredStream

AnyRecord = Record[Any, Any]


class Epoch(NamedTuple):
    """The log began anew, as a covered entry tells it; `document` is what it says, verbatim."""

    epoch: int
    origin: str
    former_origin: str
    former_size: int
    former_root: str
    kept_size: int
    document: Mapping[str, Any]


@dataclass(slots=True)
class Report:
    """What was checked, and what was found to be wrong."""

    streams: int = 0
    entries: int = 0
    broken_streams: int = 0
    findings: int = 0
    erased_streams: int = 0
    signatures: int = 0
    signatures_by_retired_keys: int = 0
    seals_unopened: int = 0  # there, but without their key it cannot be told whether they are the right ones
    payloads_erased: int = 0
    payloads_withheld: int = 0
    references_unknown: int = 0  # to streams that a part of the ledger does not hold
    runs_unfolded: int = 0  # forks of which the source is not there, or erased: their journals cannot be folded
    of_kind: Counter[str] = field(default_factory=Counter)  # streams of a bundle, by kind
    unfinished: Counter[str] = field(default_factory=Counter)  # those of them in no final state
    epochs: list[Epoch] = field(default_factory=list)  # how often the log began anew

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """What another process has counted (`counts`) in streams that do not vouch for others."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def counts(self) -> dict[str, int]:
        return {name: found for name in self.__slots__ if isinstance(found := getattr(self, name), int)}


class Erased(NamedTuple):
    """What an erasure says of the stream that it erased, and where it stands itself."""

    stream: str
    last_sequence_number: int
    last_entry_digest: str
    payloads: str  # the digests that its entries commit to, folded by `with_payload`
    key_digest: str | None  # of the claim that the stream had
    system_stream: str
    sequence_number: int


class EntryPlace(NamedTuple):
    """An entry of a stream."""

    stream: str
    sequence_number: int


class ReferredBlob(NamedTuple):
    """Bytes beside the ledger to which an entry refers by their digest; `is_sealed`: only a key opens them."""

    sha256: str
    size_bytes: int
    is_sealed: bool = False


class WholeStream(NamedTuple):
    """A stream that has ended, of which every row was right and every payload there. `key_digest`: of the key with
    which it made a call, if it did with one."""

    head: Head
    key_digest: str | None
    entries: Sequence[bytes]


class Origin(NamedTuple):
    """What the walk knows of an entry from which another stream goes on. `entry_digest` None: there is no such entry.
    `kept`: what the checks of its stream held after it (`StreamChecks.to_json`); None where that is not known."""

    entry_digest: str | None = None
    kept: JsonValue = None


class Reference(NamedTuple):
    """A record says of another stream that this is its last artifact, its last entry, or the artifact that began it.

    Both may be appended in one commit, in either order: it is judged when both were seen.
    """

    place: EntryPlace  # of the record that says so
    stream: str
    what: Literal["last_artifact", "last_entry", "begun_by"]
    digest: str


class Walking(Protocol):
    """What the walk tells a kind's checks, and what they tell it."""

    report: Report
    tenant: str | None  # what is walked is the bundle of this tenant alone
    is_covered: bool  # by a signed head; True for a database, whose tree is compared apart

    def claim_holder(self, claim: Claim, stream: str) -> str:
        """Which stream made a call with this key first: this one, unless another did."""
        ...

    def note_erasure(self, erased: Erased) -> None:
        """A stream that vouches for others says that one of them was erased."""
        ...

    def origin(self, place: EntryPlace) -> Origin:
        """An entry that `KindChecks.origin_of` has asked for."""
        ...

    def may_lack_streams(self) -> bool:
        """Whether a stream that another one names need not be there: what is walked is a part."""
        ...

    def refer(self, reference: Reference) -> None:
        """Compare it with what the other stream is, once that is known."""
        ...


class StreamChecks:
    """A kind's own checks of one stream, and what they remember of it. A kind overrides those that it needs."""

    begun_by: str | None = None  # the digest of the artifact of another stream that began this one, if one did

    def note(self, record: AnyRecord) -> None:
        """Step 3 is done: remember what the record says, whether or not its link is right."""

    def follow_usual(self, at: Standing, row: StoredEntry, walk: Walking) -> Head | None:
        """Steps 2 to 6 at once, for a row that is what nearly all are: the head after it. None says nothing, and has
        changed nothing: the walk must judge the row step by step. Asked only of a row with entry and artifact whose
        entry hashes to its digest, while all before it was right and every payload there."""
        return None

    def fold(self, record: AnyRecord) -> None:
        """Step 6: the state after it. Asked only while all before it was right, and every payload there."""

    def verify(self, record: AnyRecord, row: StoredEntry, walk: Walking) -> None:
        """Step 6: raise unless that on which the record rests is right."""

    def lose_payload(self) -> None:
        """Step 5: a payload is missing; what the stream folds to is not known from here on."""

    def is_checkpoint_due(self, state: str) -> bool:
        """Step 7: whether the entry that leads to this state is written together with a checkpoint."""
        return False

    def verify_checkpoint(self, checkpoint: StoredCheckpoint, at: Standing) -> None:
        """Step 7: raise unless it is what the log folds to at its entry."""
        raise RecoveryFailed(f"a {at.kind.name} stream has no execution checkpoints", expected="none")

    def end(self, stored: StoredStream, at: Standing, walk: Walking) -> Iterator[TgaError]:
        """Step 11: what is wrong with that which stands beside the stream."""
        yield from ()

    def to_json(self) -> JsonValue:
        """What the checks of later entries need, for a walk that comes back to the stream (`KindChecks.restore`)."""
        return None


class KindChecks:
    """What a kind registers: its documents, and what distinguishes its streams from others."""

    documents: StreamDocuments[Any, Any]
    vouches_for_others: bool = False
    has_whole_streams: bool = False  # that `read_whole` reads
    waits_for: Mapping[str, frozenset[str]] = {}  # state to whom a stream in it may wait for

    @property
    def name(self) -> str:
        return self.documents.kind.name

    def begin(self, stored: StoredStream | None = None) -> StreamChecks:
        """The checks of one more stream. Without `stored`, nothing need be remembered for `end`."""
        return StreamChecks()

    def restore(self, kept: JsonValue) -> StreamChecks:
        """What `StreamChecks.to_json` gave, for as long as it takes to come to the stream's next entry."""
        return self.begin()

    def may_be_whole(self, rows: int, line: bytes) -> bool:
        """Whether a stream may have ended with its so-manieth row, which stands in this line of a bundle."""
        return False

    def read_whole(self, stream: str, spelled: Sequence[bytes], artifacts: Sequence[bytes]) -> WholeStream | None:
        """Steps 1 to 6 of all rows of a bundle's stream at once, if it has ended and is what nearly all are: entries as
        lines spell them, as texts within a text, and artifacts. None says nothing: the walk must judge its rows one
        after the other. That no other stream made a call with its key is not looked at here."""
        return None

    def accepts_whole(self, stored: StoredStream) -> bool:
        """Steps 1 to 11 at once, for a stream of a database that comes with all its rows. False says nothing."""
        return False

    def rests_on_order(self, row: StoredEntry) -> bool:
        """Whether the row's place in the tree matters to the checks: if so, the feed looks it up."""
        return False

    def blobs_in(self, record: AnyRecord) -> Iterable[ReferredBlob]:
        """The bytes beside the ledger to which the record refers."""
        return ()

    def origin_of(self, artifact: bytes) -> EntryPlace | None:
        """The entry of another stream from which a stream that begins with this artifact goes on."""
        return None

    def may_withhold(self, stream: str, *, tenant: str) -> bool:
        """Whether the bundle of this tenant may hold the stream's entries without their payloads."""
        return False

    def erasure_errors(self, erasure: StoredErasure, stored: StoredStream, at: Standing) -> Iterator[TgaError]:
        """Step 10, asked of the kind of stream that holds the erasure."""
        yield RecoveryFailed(
            f"a {self.name} stream holds no erasures", expected="a stream that does", found=erasure.system_stream
        )


Kinds = Mapping[str, KindChecks]  # by name
NoteBlob = Callable[[EntryPlace, ReferredBlob], None]


@dataclass(slots=True)
class Standing:
    """Where the walk stands in one stream.

    The walk alone writes it; a kind's checks read it. After a finding `is_sound` is False for good: the folded state is
    no longer known, and `head` is what the last row claims to be.
    """

    stream: str
    kind: KindChecks
    own: StreamChecks
    head: Head
    goes_on: bool  # after a finding
    is_sound: bool = True
    resumes: bool = False  # the row before could not be read, or is missing
    is_erased: bool = False  # a covered erasure of a bundle says so
    payloads: Digest = GENESIS  # of a bundle, and of an erased stream
    payloads_present: int = 0
    payloads_missing: int = 0
    stored: StoredStream | None = None  # of a database
    artifact_digests: list[str] = field(default_factory=list)  # of an erased stream of a database, the first ones
    checkpoints: Iterator[StoredCheckpoint] = field(default_factory=lambda: iter(()))
    next_checkpoint: StoredCheckpoint | None = None

    @property
    def is_ended(self) -> bool:
        return not self.is_sound and not self.goes_on

    def finding(self, error: TgaError, sequence_number: int | None) -> TgaError:
        self.is_sound = False
        return error.at(stream=self.stream, sequence_number=sequence_number)

    def at_last(self, error: TgaError) -> TgaError:
        """The error, at the stream's last entry unless it says another; what was folded stays known."""
        return error.at(stream=self.stream, sequence_number=self.head.sequence_number or None)

    def to_bytes(self) -> bytes:
        """What a bundle's walk needs when it comes back to the stream."""
        head = self.head
        payloads = [self.payloads, self.payloads_present, self.payloads_missing]
        return orjson.dumps([[*head], self.own.to_json(), payloads, [self.is_sound, self.is_erased]])

    @classmethod
    def from_bytes(cls, stream: str, raw: bytes, kinds: Kinds) -> Standing:
        """Only for what `to_bytes` wrote: nothing is judged here."""
        kind, (head, own, payloads, flags) = kinds[kind_name(stream)], orjson.loads(raw)
        at = cls(stream, kind, kind.restore(own), Head(*head), goes_on=False)
        at.payloads, at.payloads_present, at.payloads_missing = payloads
        at.is_sound, at.is_erased = flags
        return at


def kind_name(stream: str) -> str:
    return stream.partition(":")[0]


def with_payload(payloads: Digest, digest: str) -> Digest:
    """The digests that a stream's entries commit to, folded into one."""
    return digest_of_bytes((payloads + digest).encode("ascii"))
