"""Compare the stored tree with the heads that were signed, and say what happened to it, and since when.

The tree is rebuilt from the entries' own bytes. Every signed head that anyone kept (a client, the signer, the database
itself) is a place where it must have exactly one root; up to the last one that fits, the log can be trusted, and from
the first one that does not, it cannot. What is in between cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol

from app.core.canonical import parse_object
from app.core.errors import EntryUnlogged, NoteInvalid, TgaError
from app.core.merkle import TREE_SIZE_MAX, Frontier, Hash, Node, leaf_hash
from app.core.note import TreeHead, VerifierKey, open_note, read_note
from app.domain.log.heads import SignedHead, fits

KEPT_LEVEL: Final = 8  # hashes of subtrees are stored from here on
STREAMS_NAMED_MAX: Final = 20

Kind = Literal[
    "sound",
    "changed_entry",
    "deleted_entry",
    "deleted_trace",
    "truncated_tail",
    "forked_history",
    "old_backup",
    "unlogged_entry",
]


class StoredLeaf(NamedTuple):
    leaf_index: int
    stream: str
    sequence_number: int
    entry: bytes | None


@dataclass(frozen=True, slots=True)
class StoredHead:
    """As it stands in the database: `note` may be anything."""

    size: int
    root: Hash
    note: str


@dataclass(frozen=True, slots=True)
class EntryWithoutLeaf:
    """`is_skipped`: the sequencer never comes to it, because it stands before the tree's cursor, or far ahead of it.
    False: it is on its way. None: not known, as long as the sequencer has not looked through a restored ledger.
    """

    stream: str
    sequence_number: int
    is_skipped: bool | None


class TreeReader(Protocol):
    """The stored tree, from one snapshot."""

    def leaves(self) -> AsyncIterator[Sequence[StoredLeaf]]:
        """In the order of their indices, some at a time."""
        ...

    def nodes(self) -> AsyncIterator[tuple[Node, Hash]]:
        """In the order of the leaves that complete them, the smallest first."""
        ...

    def heads(self) -> AsyncIterator[StoredHead]:
        """The smallest first."""
        ...

    async def has_entries(self, stream: str) -> bool: ...

    def entries_without_leaf(self, stream: str | None = None) -> AsyncIterator[EntryWithoutLeaf]:
        """Of one stream, or of all of them, in the order of streams."""
        ...


@dataclass(frozen=True, slots=True)
class HeldHead:
    """A head that someone kept outside the database; its signature was verified when it was read."""

    signed: SignedHead
    holder: str


@dataclass(slots=True)
class Diagnosis:
    """What happened, and how far the log can be trusted. `trusted_until`: when the last trusted entry was recorded."""

    kind: Kind = "sound"
    what: str = ""
    tree_size: int = 0
    entries_without_leaf: int = 0
    heads_fit: int = 0
    trusted_size: int = 0
    trusted_until: str | None = None
    broken_size: int | None = None  # the smallest signed head that does not fit
    streams: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return self.kind == "sound"


class _FirstBroken(NamedTuple):
    """The first leaf of an entry that something is wrong with, and when the entry before it was recorded."""

    leaf_index: int
    stream: str
    sequence_number: int
    trusted_until: str | None


@dataclass(slots=True)
class _Examination:
    keys: Sequence[VerifierKey]
    diagnosis: Diagnosis
    frontier: Frontier = field(default_factory=Frontier)
    is_tree_known: bool = True
    missing: int = 0
    first_missing: int = -1
    whole_streams_missing: int = 0
    leaf_gaps: int = 0
    contradicts_itself: bool = False
    forged_heads: int = 0
    unvouched_heads: int = 0
    stored_beyond: int = 0
    held_beyond: int = 0
    fits_no_more: bool = False
    unlogged: int = 0
    first_broken: _FirstBroken | None = None

    def note(self, sentence: str) -> None:
        if len(self.diagnosis.evidence) < 2 * STREAMS_NAMED_MAX:
            self.diagnosis.evidence.append(sentence)

    def name(self, stream: str) -> None:
        named = self.diagnosis.streams
        if stream not in named and len(named) < STREAMS_NAMED_MAX:
            named.append(stream)


@dataclass(slots=True)
class Unlogged:
    """Entries without a leaf, counted while they are looked for."""

    entries: int = 0
    entries_unknown: int = 0
    entries_skipped: int = 0


async def find_unlogged(reader: TreeReader, found: Unlogged, stream: str | None = None) -> AsyncIterator[TgaError]:
    """A finding for each stream with entries that the sequencer never saw; `found` counts along."""
    skipped, first = 0, None
    async for entry in reader.entries_without_leaf(stream):
        found.entries += 1
        found.entries_unknown += entry.is_skipped is None
        if not entry.is_skipped:
            continue
        found.entries_skipped += 1
        if first is not None and first.stream != entry.stream:
            yield _unlogged(first, skipped)
            skipped, first = 0, None
        skipped, first = skipped + 1, first or entry
    if first is not None:
        yield _unlogged(first, skipped)


def _unlogged(first: EntryWithoutLeaf, count: int) -> TgaError:
    return EntryUnlogged(
        "the sequencer never saw the entry: it is older than the tree's cursor, or newer than any, and has no leaf",
        expected="a leaf for every entry up to the cursor",
        found=f"{count} of the stream's entries without one",
        stream=first.stream,
        sequence_number=first.sequence_number,
    )


async def examine_tree(
    reader: TreeReader,
    held: Sequence[HeldHead],
    *,
    keys: Sequence[VerifierKey],
    broken: Mapping[str, int] | None = None,
    on_finding: Callable[[TgaError], None] | None = None,
) -> Diagnosis:
    """The diagnosis. `keys` verify stored heads; `broken` are streams in which something was found wrong, each with the
    first entry that is concerned; `on_finding` is told of streams that the tree should hold and does not."""
    broken = broken or {}
    walk = _Examination(keys, Diagnosis())
    checkpoints = _Checkpoints(reader, sorted(held, key=lambda one: one.signed.head.size))
    nodes = aiter(reader.nodes())
    next_node = await anext(nodes, None)
    last_entry: bytes | None = None
    async for page in reader.leaves():
        for leaves in _runs(walk, checkpoints, page, is_whole=not broken):
            last = leaves[-1]
            if walk.first_broken is None and last.sequence_number >= broken.get(last.stream, math.inf):
                until = _recorded_at(last_entry)
                walk.first_broken = _FirstBroken(last.leaf_index, last.stream, last.sequence_number, until)
            if len(leaves) > 1:
                walk.diagnosis.tree_size += len(leaves)
            else:
                await _examine_leaf(walk, reader, last)
            if last.entry is not None:
                last_entry = last.entry
            for node, found in _completed(walk, leaves):
                while next_node is not None and _order(next_node[0]) < _order(node):
                    walk.contradicts_itself = True
                    next_node = await anext(nodes, None)
                if walk.is_tree_known and (next_node is None or next_node[0] != node or next_node[1] != found):
                    _contradict(walk, node)
                if next_node is not None and next_node[0] == node:
                    next_node = await anext(nodes, None)
            if checkpoints.is_due(walk.diagnosis.tree_size):
                async for source, size, root in checkpoints.up_to(walk.diagnosis.tree_size, walk):
                    _compare(walk, source, size, root, last_entry)
    async for source, size, _ in checkpoints.up_to(None, walk):
        walk.diagnosis.broken_size = min(size, walk.diagnosis.broken_size or size)
        walk.stored_beyond += source is None
        walk.held_beyond += source is not None
        walk.note(f"{_holder(source)} has signed {size} leaves; there are {walk.diagnosis.tree_size}.")
    if next_node is not None:
        walk.stored_beyond += 1
        walk.note(f"Hashes of leaves are stored beyond leaf {walk.diagnosis.tree_size - 1}, the last one there is.")
    unlogged = Unlogged()
    async for finding in find_unlogged(reader, unlogged):
        walk.name(str(finding.stream))
        if on_finding is not None:
            on_finding(finding)
    walk.unlogged = unlogged.entries_skipped
    walk.diagnosis.entries_without_leaf = unlogged.entries
    if unlogged.entries_unknown:
        walk.note(
            f"{unlogged.entries_unknown} entries have no leaf yet, and the sequencer has not looked through the ledger "
            "since it was restored: start a gateway, and verify again."
        )
    _conclude(walk, list(broken))
    _bound(walk)
    return walk.diagnosis


def _bound(walk: _Examination) -> None:
    """What an entry says can be trusted only as far as everything that belongs to it is as it was."""
    diagnosis, first = walk.diagnosis, walk.first_broken
    if first is None or first.leaf_index >= diagnosis.trusted_size:
        return
    diagnosis.trusted_size, diagnosis.trusted_until = first.leaf_index, first.trusted_until
    where = f"entry {first.sequence_number} of {first.stream}"
    walk.note(f"Leaf {first.leaf_index} is {where}: the first that something is wrong with.")


async def _examine_leaf(walk: _Examination, reader: TreeReader, leaf: StoredLeaf) -> None:
    diagnosis = walk.diagnosis
    if leaf.leaf_index != diagnosis.tree_size:
        walk.leaf_gaps += leaf.leaf_index - diagnosis.tree_size
        walk.is_tree_known = False
        walk.note(f"Leaves {diagnosis.tree_size} to {leaf.leaf_index - 1} are missing.")
    diagnosis.tree_size = leaf.leaf_index + 1
    if leaf.entry is not None:
        return
    walk.missing += 1
    walk.is_tree_known = False
    if walk.first_missing < 0:
        walk.first_missing = leaf.leaf_index
    if leaf.stream not in diagnosis.streams:
        walk.whole_streams_missing += not await reader.has_entries(leaf.stream)
    walk.name(leaf.stream)
    walk.note(f"Leaf {leaf.leaf_index} is entry {leaf.sequence_number} of {leaf.stream}, which is missing.")


def _runs(
    walk: _Examination, checkpoints: _Checkpoints, page: Sequence[StoredLeaf], *, is_whole: bool
) -> Iterator[Sequence[StoredLeaf]]:
    """The leaves of a page: together those that follow one another with their entries, up to the size of the next head;
    any other by itself. Not `is_whole`: each by itself."""
    at = 0
    while at < len(page):
        first = page[at].leaf_index
        size = walk.diagnosis.tree_size
        most = min(len(page) - at, max(1, checkpoints.next_size() - size)) if is_whole and first == size else 1
        count = 1
        while count < most and page[at + count].entry is not None and page[at + count].leaf_index == first + count:
            count += 1
        if page[at].entry is None:
            count = 1
        yield page[at : at + count]
        at += count


def _completed(walk: _Examination, leaves: Sequence[StoredLeaf]) -> list[tuple[Node, Hash]]:
    entries = [leaf.entry for leaf in leaves if leaf.entry is not None]
    if len(entries) != len(leaves) or not walk.is_tree_known:
        return []
    return walk.frontier.extend([leaf_hash(entry) for entry in entries], from_level=KEPT_LEVEL)


def _order(node: Node) -> tuple[int, int]:
    return ((node.index + 1) << node.level, node.level)


def _contradict(walk: _Examination, node: Node) -> None:
    walk.contradicts_itself = True
    if node.level == KEPT_LEVEL:
        first = node.index << node.level
        walk.note(f"The entries of leaves {first} to {first + (1 << node.level) - 1} are not those that were hashed.")


class _Checkpoints:
    """Every signed head in the order of sizes: those that were kept outside, and the stored ones with a signature."""

    def __init__(self, reader: TreeReader, held: Sequence[HeldHead]) -> None:
        self._stored = aiter(reader.heads())
        self._next_stored: StoredHead | None = None
        self._is_begun = False
        self._held = list(held)

    def is_due(self, size: int) -> bool:
        """Whether `up_to` may give one of at most this size."""
        return not self._is_begun or self.next_size() <= size

    def next_size(self) -> int:
        """The smallest size of which `up_to` may give one."""
        if not self._is_begun:
            return 0
        stored, held = self._next_stored, self._held
        sizes = [*([] if stored is None else [stored.size]), *(kept.signed.head.size for kept in held[:1])]
        return min(sizes, default=TREE_SIZE_MAX)

    async def up_to(self, size: int | None, walk: _Examination) -> AsyncIterator[tuple[HeldHead | None, int, Hash]]:
        """Those of at most this size that were not given before; None: all others."""
        if not self._is_begun:
            self._is_begun, self._next_stored = True, await anext(self._stored, None)
        while self._next_stored is not None and (size is None or self._next_stored.size <= size):
            stored, self._next_stored = self._next_stored, await anext(self._stored, None)
            if _is_signed(walk, stored):
                yield None, stored.size, stored.root
        while self._held and (size is None or self._held[0].signed.head.size <= size):
            kept = self._held.pop(0)
            yield kept, kept.signed.head.size, kept.signed.head.root


def _is_signed(walk: _Examination, stored: StoredHead) -> bool:
    """Whether the row is what a signed note says. Without any key nothing vouches for it, but it may contradict."""
    try:
        text, signers = read_note(stored.note)
        if walk.keys and not any((key.name, key.key_id) in signers for key in walk.keys):
            walk.unvouched_heads += 1
            return False
        if walk.keys:
            open_note(stored.note, walk.keys, fits)
        head = TreeHead.from_text(text)
        is_right = (head.size, head.root) == (stored.size, stored.root)
    except NoteInvalid:
        is_right = False
    if not is_right:
        walk.forged_heads += 1
        walk.note(f"The stored head of {stored.size} leaves is not one that the log's key signed.")
    return is_right


def _compare(walk: _Examination, source: HeldHead | None, size: int, root: Hash, last_entry: bytes | None) -> None:
    diagnosis = walk.diagnosis
    if walk.is_tree_known and not walk.fits_no_more and walk.frontier.size == size and walk.frontier.root() == root:
        diagnosis.heads_fit += 1
        diagnosis.trusted_size, diagnosis.trusted_until = size, _recorded_at(last_entry)
        return
    diagnosis.broken_size = min(size, diagnosis.broken_size or size)
    walk.fits_no_more = True
    if walk.is_tree_known:
        walk.contradicts_itself |= source is None
        walk.note(f"{_holder(source)} has signed {size} leaves with another root.")


def _holder(source: HeldHead | None) -> str:
    return "A stored head" if source is None else f"The head of {source.holder}"


def _recorded_at(entry: bytes | None) -> str | None:
    try:
        return None if entry is None else str(parse_object(entry)["recorded_at"])
    except (TgaError, KeyError):
        return None


def _were(number: int, one: str, many: str) -> str:
    return f"{number} {one} was" if number == 1 else f"{number} {many} were"


def _conclude(walk: _Examination, broken_streams: Sequence[str]) -> None:
    """The first that applies; what was found first-hand before what follows from a missing or another root."""
    diagnosis = walk.diagnosis
    size = diagnosis.tree_size
    if walk.unvouched_heads:
        walk.note(f"{walk.unvouched_heads} stored heads are signed by keys that were not given; they were left aside.")
    if walk.missing and size - walk.first_missing == walk.missing:
        diagnosis.kind = "truncated_tail"
        cut_off = _were(walk.missing, "entry", "entries")
        diagnosis.what = f"{cut_off} cut off at the end: leaves from {walk.first_missing} on name them."
    elif walk.missing and walk.whole_streams_missing:
        diagnosis.kind = "deleted_trace"
        deleted = _were(walk.whole_streams_missing, "trace", "traces")
        diagnosis.what = f"{deleted} deleted whole; leaves that name them: {walk.missing}."
    elif walk.missing or walk.leaf_gaps:
        diagnosis.kind = "deleted_entry"
        diagnosis.what = (
            f"{_were(walk.missing or walk.leaf_gaps, 'entry', 'entries')} deleted from the middle of the log."
        )
    elif walk.contradicts_itself:
        diagnosis.kind = "changed_entry"
        diagnosis.what = (
            "Entries were changed after they were signed: the database contradicts hashes or signed heads of its own."
        )
    elif walk.fits_no_more or (walk.forged_heads and not walk.held_beyond and not walk.stored_beyond):
        diagnosis.kind = "forked_history"
        diagnosis.what = (
            "The database agrees with itself, but not with what was signed: an old backup was restored and went on, or "
            "everything from some entry on was rewritten."
        )
    elif walk.stored_beyond:
        diagnosis.kind = "truncated_tail"
        diagnosis.what = (
            f"The log was cut off after {size} leaves: what is stored beside it shows that there were more."
        )
    elif walk.held_beyond:
        diagnosis.kind = "old_backup"
        diagnosis.what = (
            f"The database is a former state of itself, of {size} leaves: an old backup was restored, or the tail was "
            "removed with everything that belonged to it."
        )
    elif walk.unlogged:
        diagnosis.kind = "unlogged_entry"
        unlogged = _were(walk.unlogged, "entry", "entries")
        diagnosis.what = (
            f"{unlogged} put into the tables behind the sequencer's back, with transaction numbers "
            "that it had passed or that were never given. No signed head covers them, and no export holds them: "
            "believe nothing that they say, and find out who has the superuser's rights."
        )
    elif broken_streams:
        diagnosis.kind = "changed_entry"
        diagnosis.what = (
            "The tree is the one that was signed, but what stands beside the entries was changed."
            if diagnosis.heads_fit
            else "Streams were changed, and there is no signed head to compare the tree with."
        )
    if diagnosis.kind != "sound":
        for stream in broken_streams:
            walk.name(stream)
