"""Hashes of a bundle's leaves on the way from the shares that judge its lines to the tree that is built of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import reduce
from operator import or_
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from app.core.merkle import HASH_BYTES, Hash

_WINDOW_LEAVES: Final = 32_768
_READ_LEAVES: Final = 4_096


class LeafFile(AbstractContextManager["LeafFile"]):
    """A share's leaves, each at its number, and nothing (zeros) at those of others. They come nearly in their order:
    those near one another are written together."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._first = 0
        self._window = bytearray(_WINDOW_LEAVES * HASH_BYTES)
        self._end = 0

    def put(self, number: int, leaf: Hash) -> None:
        at = (number - self._first) * HASH_BYTES
        if at < 0:  # one that was waited for
            self._write(leaf, number)
            return
        if at >= len(self._window):
            self.flush()
            self._first = number - number % _WINDOW_LEAVES
            at = (number - self._first) * HASH_BYTES
        self._window[at : at + HASH_BYTES] = leaf
        self._end = max(self._end, at + HASH_BYTES)

    def flush(self) -> None:
        self._write(self._window[: self._end], self._first)
        self._window[: self._end] = bytes(self._end)
        self._end = 0

    def _write(self, raw: bytes | bytearray, number: int) -> None:
        if os.pwrite(self._file, raw, number * HASH_BYTES) != len(raw):
            raise OSError("hashes of leaves could not be written: is the disk full?")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def read_leaves(paths: Sequence[Path]) -> Iterator[Sequence[Hash]]:
    """As `joined_leaves`, of the files of these names."""
    with ExitStack() as stack:
        yield from joined_leaves([stack.enter_context(path.open("rb")) for path in paths])


def joined_leaves(files: Sequence[BinaryIO]) -> Iterator[Sequence[Hash]]:
    """The leaves of all shares in their order, some at a time; zeros where none has told one. Two that tell the same
    place give what is no hash of either."""
    while any(pieces := [file.read(HASH_BYTES * _READ_LEAVES) for file in files]):
        size = max(len(piece) for piece in pieces)
        # A shorter piece is one that ends with zeros.
        told = reduce(or_, (int.from_bytes(piece, "little") for piece in pieces)).to_bytes(size, "little")
        yield [Hash(told[at : at + HASH_BYTES]) for at in range(0, size, HASH_BYTES)]
