"""Verify a bundle with nothing but its files and a public key, in flat memory.

The log's key signs tree heads. The last head covers leaves, a leaf is an entry, an entry commits to an artifact. That
is the only way by which anything in a bundle is vouched for. In this order:

1. The manifest says what to look for. Nothing vouches for it, so whatever matters in it is compared further on.
2. The bundle's schemas are this version's own.
3. The heads are in order, each continues the one before, and a trusted key has signed the last one.
4. The covered entries come first. Each has its place in the tree, and in its stream: schema, sequence, chain and
   digest, transition, binding, then signature and claim. It rests on covered entries before it, and on nothing else.
5. A payload is missing only where a covered erasure says so, or where the bundle of one tenant withholds another's.
6. Blobs to which covered entries refer are what they say, if the bundle was exported with them.
7. Entries that the head does not cover come last, and only on system streams. They are judged after all the others,
   and what is found about them is told apart: nothing rests on them.

Proves that the covered entries hang together and are exactly those that the log's key signed. What it cannot prove is
said in the report. tools/verify.py says the same of every bundle, and shares no line with this.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, repeat

from app.core.errors import (
    BundleInvalid,
    LogForked,
    NoteInvalid,
    ProofInvalid,
    SequenceGap,
    TgaError,
    VerificationUnfinished,
)
from app.core.limits import BUNDLE_FINDINGS_MAX, BUNDLE_MANIFEST_BYTES_MAX, BUNDLE_VOUCHING_SHARED_MAX
from app.core.merkle import EMPTY_ROOT, Frontier, Hash, leaf_hash, verify_consistency, verify_inclusion
from app.core.note import TreeHead, VerifierKey, Verify, open_note, read_note
from app.domain.ledger.checks import Kinds
from app.domain.log.bundle import ENTRIES, HEADS, MANIFEST, EntryLine, FileFacts, HeadLine, Manifest
from app.domain.log.bundle_report import BundleReport, unknown_of
from app.domain.log.bundle_small_files import BundleFiles, verify_small_files
from app.domain.log.bundled_blobs import verify_blobs
from app.domain.log.epochs import base_of, keys_for, verify_epochs, verify_former
from app.domain.log.shares import NotShared, Shares, covered_lines, forks_in, read_shared, vouching_prefixes
from app.domain.log.streams import BundleWalk, StreamMemory


@dataclass(slots=True)
class _Verification:
    files: BundleFiles
    keys: Sequence[VerifierKey]
    verify: Verify
    report: BundleReport
    manifest: Manifest
    streams: BundleWalk
    held: dict[int, TreeHead]
    former: list[TreeHead]  # that were kept from earlier epochs of the log
    shares: Shares | None = None
    former_roots: dict[int, Hash] = field(default_factory=dict)
    is_complete: bool = True  # every leaf of the tree is here
    frontier: Frontier = field(default_factory=Frontier)
    heads_right: int = 0
    is_tree_known: bool = True
    last_matching_size: int = 0
    last_index: int = -1


def verify_bundle(
    files: BundleFiles,
    keys: Sequence[VerifierKey],
    *,
    verify: Verify,
    memory: StreamMemory,
    report: BundleReport,
    schemas: Mapping[str, bytes],
    kinds: Kinds,
    held: Sequence[TreeHead] = (),
    shares: Shares | None = None,
) -> Iterator[TgaError]:
    """Every finding about the bundle and its covered entries, as it is found, up to a bound. `report` counts along,
    holds what was found about entries that no head covers, and says at the end what is not known.

    `keys` are whom the reader trusts; those in the bundle count for nothing. `schemas` are this version's own,
    `kinds` judge what streams of each kind say. `held` are heads that the reader kept and has opened: an old backup and
    a rewritten history look sound without them. `shares` judge streams that do not vouch for others; NotShared where
    they cannot accept the bundle, or something is found: what was counted until then means nothing.
    """
    try:
        manifest = Manifest.from_bytes(files.read(MANIFEST, bytes_max=BUNDLE_MANIFEST_BYTES_MAX))
    except TgaError as error:
        report.findings += 1
        yield error
        return
    report.manifest = manifest
    streams = BundleWalk(kinds, report.streams, memory, complete=manifest.complete, tenant=manifest.filter.tenant)
    of_now = {head.size: head for head in held if head.origin == manifest.origin}
    former = [head for head in held if head.origin != manifest.origin]
    walk = _Verification(files, keys, verify, report, manifest, streams, of_now, former, shares)
    walk.is_complete = manifest.complete
    if shares is not None and not manifest.complete:
        raise NotShared("a part of a log")
    parts = (
        verify_small_files(files, manifest, schemas),
        _verify_held(walk),
        _verify_heads(walk),
        _verify_entries(walk),
        verify_blobs(memory.blobs(), files, report.blobs, has_blobs=manifest.blobs),
    )
    for part in parts:
        for finding in part:
            if shares is not None:
                raise NotShared(finding.what)
            report.findings += 1
            yield finding
            if report.findings >= BUNDLE_FINDINGS_MAX:
                report.unknown.append("There may be more findings: verification stopped here.")
                return
    report.unknown.extend(unknown_of(report, manifest))


def _lines(walk: _Verification, name: str) -> Iterator[bytes]:
    """The file's lines; when all were read, BundleInvalid unless they are what the manifest says."""
    digest, size, count = hashlib.sha256(), 0, 0
    for line in walk.files.lines(name):
        digest.update(line)
        size += len(line)
        count += 1
        yield line
    found, expected = FileFacts(digest.hexdigest(), size, count), walk.manifest.files[name]
    if found != expected:
        raise BundleInvalid(f"{name} is not the file that was exported", expected=expected, found=found)


def _heads(lines: Iterator[bytes]) -> Iterator[tuple[HeadLine, TreeHead]]:
    """Each larger than the one before. Signatures are not looked at."""
    last = 0
    for line in lines:
        head = HeadLine.from_line(line)
        text, _ = read_note(head.note)
        signed = TreeHead.from_text(text)
        if signed.size != head.size or head.size <= last:
            raise BundleInvalid("the heads are not in order", expected=f"more than {last}", found=signed.size)
        last = head.size
        yield head, signed


def _verify_held(walk: _Verification) -> Iterator[TgaError]:
    """What was kept must be within the bundle's tree. Its root is compared when the tree has grown to it."""
    for size in sorted(walk.held):
        if size > walk.manifest.tree_size:
            yield LogForked(
                "the bundle ends before a head that was kept: it is older, or the log was cut or put back",
                expected=f"at least {size} leaves",
                found=walk.manifest.tree_size,
            )
        elif not walk.is_complete:
            walk.report.unknown.append(
                f"Whether the log continues the head of size {size} that was kept, unless the bundle carries one of "
                "that size: a partial bundle cannot show it."
            )


def _verify_kept(walk: _Verification, size: int, root: Hash) -> Iterator[TgaError]:
    kept = walk.held.get(size)
    if kept is not None and kept.root != root:
        yield LogForked(
            f"the first {size} leaves are not those of the head that was kept",
            expected=kept.root.hex(),
            found=root.hex(),
        )


def _verify_heads(walk: _Verification) -> Iterator[TgaError]:
    """Order, signatures, and in a partial bundle that each continues the one before; the last is the bundle's tree."""
    last: TreeHead | None = None
    last_is_signed = False
    try:
        for line, head in _heads(_lines(walk, HEADS)):
            walk.report.heads += 1
            last_is_signed = _is_signed(walk, line.note)
            walk.report.heads_signed += last_is_signed
            if base_of(head.origin) != base_of(walk.manifest.origin) and last_is_signed:
                raise BundleInvalid("a head is of another log", expected=walk.manifest.origin, found=head.origin[:128])
            if not walk.is_complete and last is not None:
                if line.proof is None:
                    raise ProofInvalid("a head comes without proof that it continues the one before", found=head.size)
                verify_consistency(
                    old=last.size, new=head.size, old_root=last.root, new_root=head.root, proof=line.proof
                )
            yield from _verify_kept(walk, head.size, head.root)
            last = head
            walk.heads_right += 1
        tree = (walk.manifest.tree_size, walk.manifest.tree_root)
        if last is None or (last.origin, last.size, last.root) != (walk.manifest.origin, *tree):
            raise BundleInvalid("the last head is not the bundle's tree", expected=tree[0], found=last and last.size)
        if not last_is_signed:
            raise NoteInvalid("nobody who is trusted has signed the bundle's tree", found=last.size)
    except TgaError as error:
        yield error


def _is_signed(walk: _Verification, note: str) -> bool:
    """Whether a trusted key has signed it; NoteInvalid when a signature under a trusted key does not fit. A key is
    trusted for all epochs of its log: that they follow one another the covered entries say."""
    text, signers = read_note(note)
    keys = [*walk.keys, *keys_for(TreeHead.from_text(text).origin, walk.keys)]
    if not any((key.name, key.key_id) in signers for key in keys):
        return False
    open_note(note, keys, walk.verify)
    return True


def _verify_epochs(walk: _Verification) -> Iterator[TgaError]:
    epochs = walk.report.streams.epochs
    yield from verify_epochs(walk.manifest.origin, epochs)
    for kept in walk.former:
        sentence = yield from verify_former(kept, epochs, root=walk.former_roots.get(kept.size))
        walk.report.unknown.extend([] if sentence is None else [sentence])


def _verify_entries(walk: _Verification) -> Iterator[TgaError]:
    """Covered lines, each in the tree and in its stream; when they end, what rests on all of them; then the others."""
    raw_lines = _lines(walk, ENTRIES)
    lines = (EntryLine.from_line(raw) for raw in raw_lines)
    uncovered: EntryLine | None = None
    try:
        if walk.shares is None:
            # A fork goes on from an entry before it, where its source has long gone on: look for forks first.
            with suppress(TgaError):  # what cannot be read is said when it is read again
                for fork in forks_in(walk.files.lines(ENTRIES), walk.streams.kinds):
                    walk.streams.note_origin(fork.origin)
            uncovered = yield from _verify_covered(walk, lines)
        else:
            uncovered = yield from _verify_shared(walk, raw_lines, walk.shares)
    except VerificationUnfinished:  # no finding: there is no verdict
        raise
    except TgaError as error:
        yield error
    if walk.is_complete and walk.frontier.size != walk.manifest.tree_size:
        yield SequenceGap(
            "the bundle does not hold exactly the leaves of its tree",
            expected=walk.manifest.tree_size,
            found=walk.frontier.size,
        )
    yield from walk.streams.end_covered()
    yield from _verify_epochs(walk)
    if uncovered is not None:
        try:
            _judge_after_head(walk, chain([uncovered], lines))
        except TgaError as error:
            yield error


def _verify_covered(walk: _Verification, lines: Iterator[EntryLine]) -> Generator[TgaError, None, EntryLine | None]:
    """Up to the first line without a leaf, which is returned."""
    uncovered: EntryLine | None = None
    frontier, due = walk.frontier, _Due(walk)
    for line in lines:
        if line.leaf_index is None:
            uncovered = line
            break
        if walk.is_complete and walk.is_tree_known and line.leaf_index == frontier.size:
            _grow(walk, line)
        else:
            yield from _verify_leaf(walk, line, line.leaf_index)
        if frontier.size >= due.size:
            yield from due.compare(walk)
        yield from walk.streams.judge(line)
    return uncovered


class _Due:
    """Signed heads and heads that were kept, in the order of their sizes; `size`: when the next one is to be compared
    with the tree that the entries make."""

    def __init__(self, walk: _Verification) -> None:
        self._heads = islice(_heads(walk.files.lines(HEADS)), walk.heads_right if walk.is_complete else 0)
        self._next = next(self._heads, None)
        self._kept = sorted({*walk.held, *(kept.size for kept in walk.former)}, reverse=True)
        self.size = self._least()

    def _least(self) -> float:
        sizes = [] if self._next is None else [self._next[1].size]
        return min([*sizes, *self._kept[-1:]], default=math.inf)

    def compare(self, walk: _Verification) -> Iterator[TgaError]:
        size = walk.frontier.size
        while self._next is not None and self._next[1].size <= size:
            yield from _verify_root(walk, self._next[1])
            self._next = next(self._heads, None)
        while self._kept and self._kept[-1] <= size:
            if self._kept.pop() == size and walk.is_tree_known:
                yield from _verify_kept(walk, size, walk.frontier.root())
                walk.former_roots[size] = walk.frontier.root()
        self.size = self._least()


def _verify_shared(
    walk: _Verification, raw_lines: Iterator[bytes], shares: Shares
) -> Generator[TgaError, None, EntryLine | None]:
    """As `_verify_covered`; shares judge the streams that do not vouch, and their leaves come when they have ended."""
    own: dict[int, Hash] = {}  # streams that vouch are few, and so are their entries
    covered, uncovered = 0, None
    prefixes, take = vouching_prefixes(walk.streams.kinds), shares.take
    for number, stream, raw in covered_lines(raw_lines):
        if stream is None:
            uncovered = EntryLine.from_line(raw)
            break
        covered = number + 1
        if stream.startswith(prefixes):
            line = read_shared(number, stream, raw)
            own[number] = leaf_hash(line.entry)
            walk.streams.pass_over(number)
            yield from walk.streams.judge(line)
            if len(own) > BUNDLE_VOUCHING_SHARED_MAX:
                raise NotShared("more entries that vouch for others than are kept in memory")
        else:
            take(number, stream, raw)
    gathered, due, frontier = shares.gather(), _Due(walk), walk.frontier
    for report in gathered.reports:
        walk.report.streams.add_counts(report.counts())
    if walk.report.streams.entries != covered:
        raise NotShared("a line was judged twice, or by none")
    # A leaf that no share has told is none of the tree's: then its root is another one.
    vouching = sorted(own.items(), reverse=True)
    for told in chain(gathered.leaves, repeat([EMPTY_ROOT])):
        leaves = list(told[: covered - frontier.size])
        while vouching and vouching[-1][0] < frontier.size + len(leaves):
            number, leaf = vouching.pop()
            leaves[number - frontier.size] = leaf
        while leaves:
            some = len(leaves) if math.isinf(due.size) else max(1, min(len(leaves), int(due.size) - frontier.size))
            frontier.extend(leaves[:some])
            del leaves[:some]
            if frontier.size >= due.size:
                yield from due.compare(walk)
        if frontier.size >= covered:
            break
    walk.report.leaves = frontier.size
    walk.last_index = frontier.size - 1
    walk.streams.pass_over(covered)
    return uncovered


def _grow(walk: _Verification, line: EntryLine) -> None:
    """The leaf that is next in the tree, as nearly all are."""
    walk.report.leaves += 1
    walk.frontier.grow(leaf_hash(line.entry))
    walk.last_index = walk.frontier.size - 1


def _judge_after_head(walk: _Verification, lines: Iterator[EntryLine]) -> None:
    """Nothing covered is judged any more: whatever stands here cannot vouch for it."""
    after = walk.report.after_head
    for line in lines:
        if line.leaf_index is not None:
            raise BundleInvalid(
                "a covered entry stands after one that no head covers",
                expected="entries without leaf_index last",
                stream=line.stream,
                sequence_number=line.sequence_number,
            )
        after.entries += 1
        after.findings.extend(walk.streams.judge_after_head(line))
        if len(after.findings) >= BUNDLE_FINDINGS_MAX:
            raise BundleInvalid("too much is wrong after the head: verification stopped there")


def _verify_leaf(walk: _Verification, line: EntryLine, index: int) -> Iterator[TgaError]:
    walk.report.leaves += 1
    leaf, size = leaf_hash(line.entry), walk.manifest.tree_size
    error: TgaError | None = None
    if walk.is_complete:
        if walk.is_tree_known and index != walk.frontier.size:
            walk.is_tree_known = False
            error = SequenceGap(
                "leaves are missing, repeated or out of order", expected=walk.frontier.size, found=index
            )
        walk.frontier.grow(leaf)
    elif index <= walk.last_index:
        error = SequenceGap("leaves are repeated or out of order", expected=f"more than {walk.last_index}", found=index)
    elif line.proof is None:
        error = ProofInvalid("the entry comes without proof that it is in the tree", found=index)
    else:
        try:
            verify_inclusion(leaf, index=index, size=size, proof=line.proof, root=walk.manifest.tree_root)
        except ProofInvalid as found:
            error = found
    walk.last_index = index
    if error is not None:
        yield error.at(stream=line.stream, sequence_number=line.sequence_number)


def _verify_root(walk: _Verification, head: TreeHead) -> Iterator[TgaError]:
    """The tree that the entries so far make is the one that was signed. After the first that is not, none can be."""
    if not walk.is_tree_known or head.size != walk.frontier.size:
        return
    found = walk.frontier.root()
    if found == head.root:
        walk.last_matching_size = head.size
        return
    walk.is_tree_known = False
    yield ProofInvalid(
        f"the entries are not those that were signed: one from leaf {walk.last_matching_size} "
        f"to {head.size - 1} was changed",
        expected=Hash(head.root).hex(),
        found=found.hex(),
    )
