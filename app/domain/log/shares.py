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
from app.core.limits import BUNDLE_FORKS_SHARED_MAX
from app.core.merkle import Hash, leaf_hash
from app.domain.ledger.checks import EntryPlace, Kinds, Report, kind_name
from app.domain.log.bundle import EntryLine
from app.domain.log.streams import BundleWalk, StreamMemory

_FORK: Final = rb"forked_from\":{"  # as a line writes it, in a text within a text
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
        if _FORK not in raw:
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


def walk_share(
    lines: Iterator[bytes],
    share: Share,
    kinds: Kinds,
    *,
    memory: StreamMemory,
    aside: StreamMemory,
    put: Callable[[int, Hash], None],
) -> Report:
    """Judge the share's streams. `memory` holds afterwards what is remembered of them, `put` was told of each of their
    leaves; `aside` is for streams that vouch for others, which whoever gathers the shares judges too."""
    report = Report()
    own = BundleWalk(kinds, report, memory, complete=True)
    vouching = BundleWalk(kinds, Report(), aside, complete=True)
    sources, prefixes = sources_of(share.forks), vouching_prefixes(kinds)
    for fork in share.forks:
        if share.is_of(fork.stream.encode(), sources):
            memory.want_origin(fork.origin)
    for number, stream, raw in covered_lines(lines):
        if stream is None:
            break
        is_vouching = stream.startswith(prefixes)
        if not is_vouching and not share.is_of(stream, sources):
            continue
        line = read_shared(number, stream, raw)
        walk = vouching if is_vouching else own
        walk.pass_over(number)
        if any(True for _ in walk.judge(line)):
            raise NotShared(f"line {number + 1}")
        if not is_vouching:
            put(number, leaf_hash(line.entry))
    return report


class Gathered(NamedTuple):
    """What the shares have counted, and the hashes of their leaves by the number of the line; those of other lines are
    anything."""

    reports: Sequence[Report]
    leaves: Iterator[Hash]


class Shares(Protocol):
    def gather(self) -> Gathered:
        """When all have ended. NotShared if one of them does not accept its share, or if two streams in different ones
        made a call with one key. From then on the walk's memory holds what the shares remember."""
        ...
