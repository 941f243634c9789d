"""Verify a complete bundle in shares: each judges the streams that fall to it, wherever it runs.

A share only accepts. It walks its own streams with the checks that one process would use, and streams that vouch for
others along with them, for their keys. Whatever it finds wrong, or spelled in another way than an export writes it,
ends the attempt (`NotShared`): then one walk judges the whole bundle from its first line, and its findings are the ones
that count. So the verdict, its findings and their order do not depend on the number of shares.

What a share cannot know is compared when all have ended, over what they remember: that of all streams with one key one
made a call, references between streams, erasures, the tree over all leaves. A fork goes on from what its source folds
to, so it falls to the share of its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Protocol
from zlib import crc32

from app.core.errors import TgaError
from app.core.limits import BUNDLE_FORKS_SHARED_MAX, WHOLE_BYTES_MAX, WHOLE_LINES_MAX
from app.core.merkle import Hash, leaf_hash
from app.domain.ledger.checks import EntryPlace, KindChecks, Kinds, Report, kind_name
from app.domain.log.bundle import EntryLine, split_usual_lines
from app.domain.log.streams import BundleWalk, StreamMemory

FORK: Final = rb"forked_from\":{"  # as a line writes it, in a text within a text
UNCOVERED: Final = b'{"leaf_index":null,'


class NotShared(Exception):
    """Shares cannot accept the bundle. That says nothing about it: one walk must judge it."""


class Forked(NamedTuple):
    """A stream that goes on from an entry of another one."""

    stream: str
    origin: EntryPlace


@dataclass(frozen=True, slots=True)
class Share:
    """One of `of` shares of a bundle's streams, and all forks in the bundle."""

    index: int
    of: int
    forks: Sequence[Forked] = ()

    def is_of(self, stream: bytes, sources: Mapping[bytes, bytes]) -> bool:
        return share_of(stream, self.of, sources) == self.index


def share_of(stream: bytes, shares: int, sources: Mapping[bytes, bytes]) -> int:
    return crc32(sources.get(stream, stream)) % shares


def sources_of(forks: Sequence[Forked]) -> dict[bytes, bytes]:
    """By the name of a fork: that of the stream from which its line of forks began."""
    before = {fork.stream.encode(): fork.origin.stream.encode() for fork in forks}
    found = {}
    for stream, source in before.items():
        passed = {stream}
        while source in before and source not in passed:
            passed.add(source)
            source = before[source]
        found[stream] = min(passed) if source in passed else source  # forks in a circle are wrong, and stay together
    return found


def forks_in(lines: Iterator[bytes], kinds: Kinds) -> Iterator[Forked]:
    for raw in lines:
        if FORK not in raw:
            continue
        try:
            line = EntryLine.from_line(raw)
        except TgaError:  # said where it is judged
            continue
        kind = kinds.get(kind_name(line.stream))
        if kind is not None and line.artifact is not None and line.sequence_number == 1:
            place = kind.origin_of(line.artifact)
            if place is not None:
                yield Forked(line.stream, place)


def find_forks(lines: Iterator[bytes], kinds: Kinds) -> list[Forked]:
    found = list(islice(forks_in(lines, kinds), BUNDLE_FORKS_SHARED_MAX + 1))
    if len(found) > BUNDLE_FORKS_SHARED_MAX:
        raise NotShared("more forks than are kept in memory")
    return found


def vouching_prefixes(kinds: Kinds) -> tuple[bytes, ...]:
    return tuple(f"{kind.name}:".encode() for kind in kinds.values() if kind.vouches_for_others)


def covered_lines(lines: Iterator[bytes]) -> Iterator[tuple[int, bytes | None, bytes]]:
    """The covered lines of a complete bundle: number, stream as it is spelled, line. The last may be the first that no
    head covers, with None for its stream. NotShared at one that is out of order, or not spelled as an export does it.
    """
    for number, raw in enumerate(lines):
        begin = b'{"leaf_index":%d,"stream":"' % number
        if not raw.startswith(begin):
            if not raw.startswith(UNCOVERED):
                raise NotShared(f"line {number + 1}")
            yield number, None, raw
            return
        at = len(begin)
        yield number, raw[at : raw.find(b'"', at)], raw


def read_shared(number: int, stream: bytes, raw: bytes) -> EntryLine:
    """The line, if it is of the stream that decided who reads it."""
    try:
        line = EntryLine.from_line(raw)
    except TgaError:
        raise NotShared(f"line {number + 1}") from None
    if line.leaf_index != number or line.stream.encode() != stream:
        raise NotShared(f"line {number + 1}")
    return line


class ShareWalk:
    """Judges a share's lines, in the order of the tree. `memory` holds at the end what is remembered of its streams,
    `put` was told of each of their leaves.

    Streams that end soon after they began are held back until all their rows are there, and then read at once where
    their kind can. Their rows are judged later than others of the bundle: a walk that only accepts may do so, since no
    check of such a stream depends on when it is made.
    """

    def __init__(self, share: Share, kinds: Kinds, *, memory: StreamMemory, put: Callable[[int, Hash], None]) -> None:
        self.report = Report()
        self._walk = BundleWalk(kinds, self.report, memory, complete=True)
        self._memory = memory
        self._put = put
        self._whole = {f"{kind.name}:".encode(): kind for kind in kinds.values() if kind.has_whole_streams}
        self._prefixes = tuple(self._whole)
        self._held: dict[bytes, tuple[KindChecks, list[tuple[int, bytes]]]] = {}
        self._held_bytes = 0
        self._looks_at = WHOLE_LINES_MAX
        sources = sources_of(share.forks)
        for fork in share.forks:
            if share.is_of(fork.stream.encode(), sources):
                memory.want_origin(fork.origin)

    def take(self, number: int, stream: bytes, raw: bytes) -> None:
        """The line of this number, if it is of a stream of the share. NotShared if it is not accepted."""
        held = self._held.get(stream)
        if held is not None:
            kind, lines = held
            lines.append((number, raw))
            self._held_bytes += len(raw)
            if kind.may_be_whole(len(lines), raw):
                self._release(stream, is_whole=True)
        elif stream.startswith(self._prefixes):
            self._held[stream] = self._whole[stream[: stream.index(b":") + 1]], [(number, raw)]
            self._held_bytes += len(raw)
            if number >= self._looks_at or self._held_bytes > WHOLE_BYTES_MAX:
                self._release_old(number)
        else:
            self._judge(number, stream, raw)

    def end(self) -> Report:
        for stream in list(self._held):
            self._release(stream)
        return self.report

    def _release_old(self, number: int) -> None:
        """Those that wait for something (a person, a tool) are no longer waited for."""
        self._looks_at = number + WHOLE_LINES_MAX // 2
        for stream, (_, lines) in list(self._held.items()):
            if lines[0][0] > number - WHOLE_LINES_MAX and self._held_bytes <= WHOLE_BYTES_MAX:
                break
            self._release(stream)

    def _release(self, stream: bytes, *, is_whole: bool = False) -> None:
        kind, lines = self._held.pop(stream)
        self._held_bytes -= sum(len(raw) for _, raw in lines)
        rows = split_usual_lines(stream, lines) if is_whole else None
        if rows is not None:
            name = stream.decode("utf-8", "replace")
            whole = kind.read_whole(name, *rows)
            if whole is not None:
                self.report.entries += len(lines)
                self._memory.remember_whole(name, whole)
                for (number, _), entry in zip(lines, whole.entries, strict=True):
                    self._put(number, leaf_hash(entry))
                return
        for number, raw in lines:
            self._judge(number, stream, raw)

    def _judge(self, number: int, stream: bytes, raw: bytes) -> None:
        line = read_shared(number, stream, raw)
        self._walk.pass_over(number)
        if any(True for _ in self._walk.judge(line)):
            raise NotShared(f"line {number + 1}")
        self._put(number, leaf_hash(line.entry))


def walk_share(
    lines: Iterator[bytes],
    share: Share,
    kinds: Kinds,
    *,
    memory: StreamMemory,
    aside: StreamMemory,
    put: Callable[[int, Hash], None],
) -> Report:
    """Judge the share's streams among these lines. `aside` is for streams that vouch for others, which whoever gathers
    the shares judges too."""
    own = ShareWalk(share, kinds, memory=memory, put=put)
    vouching = BundleWalk(kinds, Report(), aside, complete=True)
    sources, prefixes = sources_of(share.forks), vouching_prefixes(kinds)
    for number, stream, raw in covered_lines(lines):
        if stream is None:
            break
        if stream.startswith(prefixes):
            vouching.pass_over(number)
            if any(True for _ in vouching.judge(read_shared(number, stream, raw))):
                raise NotShared(f"line {number + 1}")
        elif share.is_of(stream, sources):
            own.take(number, stream, raw)
    return own.end()


class Gathered(NamedTuple):
    """What the shares have counted, and the hashes of their leaves by the number of the line, some at a time; those of
    other lines are anything."""

    reports: Sequence[Report]
    leaves: Iterator[Sequence[Hash]]


class Shares(Protocol):
    def take(self, number: int, stream: bytes, raw: bytes) -> None:
        """A covered line of a stream that does not vouch for others, for shares that are judged by this process."""
        ...

    def gather(self) -> Gathered:
        """When all have ended. NotShared if one of them does not accept its share, or if two streams in different ones
        made a call with one key. From then on the walk's memory holds what the shares remember."""
        ...
