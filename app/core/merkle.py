"""The Merkle tree of RFC 6962 (section 2.1; RFC 9162 says the same): hashes, roots, proofs, and their verification.

A *node* is a complete subtree: `Node(level, index)` covers the leaves from `index * 2**level` on, `2**level` of them.
The store keeps the tree's nodes; a proof is a list of *ranges*, each folded from the nodes that make it up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NewType

from app.core.errors import ProofInvalid

Hash = NewType("Hash", bytes)

HASH_BYTES: Final = 32
TREE_SIZE_MAX: Final = 2**63 - 1
EMPTY_ROOT: Final = Hash(hashlib.sha256(b"").digest())


_TOGETHER: Final = 10  # levels that `Frontier.extend` makes at once


def leaf_hash(data: bytes) -> Hash:
    return Hash(hashlib.sha256(b"\x00" + data).digest())


def node_hash(left: bytes, right: bytes) -> Hash:
    return Hash(hashlib.sha256(b"\x01" + left + right).digest())


@dataclass(frozen=True, slots=True, order=True)
class Node:
    level: int
    index: int

    @property
    def leaves(self) -> Range:
        return Range(self.index << self.level, (self.index + 1) << self.level)


@dataclass(frozen=True, slots=True)
class Range:
    """The leaves from `start` to before `end`. Where it stands in a proof it is a subtree of the whole tree."""

    start: int
    end: int


def nodes_of(leaves: Range) -> list[Node]:
    """The complete subtrees that make up a subtree of the tree, from left to right."""
    nodes, start = [], leaves.start
    while start < leaves.end:
        level = (leaves.end - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


def fold_nodes(hashes: Sequence[bytes]) -> Hash:
    """The root over complete subtrees that stand side by side, each smaller than the one to its left."""
    if not hashes:
        return EMPTY_ROOT
    root = Hash(hashes[-1])
    for left in reversed(hashes[:-1]):
        root = node_hash(left, root)
    return root


@dataclass(slots=True)
class Frontier:
    """The right edge of a growing tree: enough to append to it and to know its root, in logarithmic memory."""

    size: int = 0
    hashes: list[Hash] = field(default_factory=list)  # of nodes_of(Range(0, size))

    def append(self, leaf: Hash, *, from_level: int = 1) -> list[tuple[Node, Hash]]:
        """One leaf more; the nodes that it completes, from the smallest on, without those below `from_level`."""
        completed, hashes, index, level = [], self.hashes, self.size, 0
        while index & 1:
            leaf = node_hash(hashes.pop(), leaf)
            index >>= 1
            level += 1
            if level >= from_level:
                completed.append((Node(level, index), leaf))
        hashes.append(leaf)
        self.size += 1
        return completed

    def grow(self, leaf: Hash) -> None:
        """As `append`, for callers that keep no nodes."""
        hashes, index = self.hashes, self.size
        while index & 1:
            leaf = node_hash(hashes.pop(), leaf)
            index >>= 1
        hashes.append(leaf)
        self.size += 1

    def extend(self, leaves: Sequence[Hash], *, from_level: int = _TOGETHER) -> list[tuple[Node, Hash]]:
        """As `append` for each of them; most nodes below `from_level` are made level by level."""
        completed, at = [], 0
        while at < len(leaves):
            level = together = min(from_level, (len(leaves) - at).bit_length() - 1, _trailing_zeros(self.size))
            nodes = leaves[at : at + (1 << together)]
            at += len(nodes)
            while len(nodes) > 1:
                nodes = [Hash(sha256(b"\x01" + nodes[i] + nodes[i + 1]).digest()) for i in range(0, len(nodes), 2)]
            node, index = nodes[0], self.size >> together
            if level >= from_level:
                completed.append((Node(level, index), node))
            while index & 1:
                node = node_hash(self.hashes.pop(), node)
                index >>= 1
                level += 1
                if level >= from_level:
                    completed.append((Node(level, index), node))
            self.hashes.append(node)
            self.size += 1 << together
        return completed

    def root(self) -> Hash:
        return fold_nodes(self.hashes)


def inclusion_ranges(index: int, size: int) -> list[Range]:
    """The subtrees whose hashes prove that leaf `index` is in the tree of `size`, from the leaf's sibling up."""
    _verify_size(size)
    if not 0 <= index < size:
        raise ProofInvalid("no such leaf in this tree", expected=f"an index below {size}", found=index)
    ranges, start, end = [], 0, size
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            ranges.append(Range(middle, end))
            end = middle
        else:
            ranges.append(Range(start, middle))
            start = middle
    return ranges[::-1]


def consistency_ranges(old: int, new: int) -> list[Range]:
    """The subtrees whose hashes prove that the tree of `new` leaves begins with the tree of `old` ones."""
    _verify_size(new)
    if not 0 <= old <= new:
        raise ProofInvalid("the old tree is larger than the new one", expected=f"at most {new}", found=old)
    if old in (0, new):
        return []
    ranges, start, end, is_old_whole = [], 0, new, True
    while old != end:
        middle = start + _split(end - start)
        if old <= middle:
            ranges.append(Range(middle, end))
            end = middle
        else:
            ranges.append(Range(start, middle))
            start, is_old_whole = middle, False
    if not is_old_whole:
        ranges.append(Range(start, end))
    return ranges[::-1]


def verify_inclusion(leaf: bytes, *, index: int, size: int, proof: Sequence[bytes], root: bytes) -> None:
    """Raise ProofInvalid unless `proof` shows that the leaf hash stands at `index` of the tree with this root.

    RFC 9162, section 2.1.3.2. An index beyond the tree is refused before anything is hashed.
    """
    _verify_hashes(leaf, root, *proof)
    expected = len(inclusion_ranges(index, size))
    if len(proof) != expected:
        raise ProofInvalid("the proof has the wrong length", expected=expected, found=len(proof))
    found, fn, sn = leaf, index, size - 1
    for sibling in proof:
        if fn & 1 or fn == sn:
            found = node_hash(sibling, found)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            found = node_hash(found, sibling)
        fn, sn = fn >> 1, sn >> 1
    if sn != 0 or found != root:
        raise ProofInvalid("the proof does not lead to the root", expected=root.hex(), found=found.hex())


def verify_consistency(*, old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Raise ProofInvalid unless `proof` shows that the new tree begins with the old one (RFC 9162, section 2.1.4.2)."""
    _verify_hashes(*proof)
    expected = len(consistency_ranges(old, new))
    if len(proof) != expected:
        raise ProofInvalid("the proof has the wrong length", expected=expected, found=len(proof))
    if old == 0 and old_root != EMPTY_ROOT:
        raise ProofInvalid("that is not the root of an empty tree", expected=EMPTY_ROOT.hex(), found=old_root.hex())
    if old == new:
        if old_root != new_root:
            raise ProofInvalid("one size, two roots", expected=old_root.hex(), found=new_root.hex())
        return
    _verify_hashes(old_root, new_root)
    if old == 0:
        return
    path = list(proof) if old & (old - 1) else [old_root, *proof]
    fn, sn = old - 1, new - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    found_old = found_new = path[0]
    for sibling in path[1:]:
        if sn == 0:
            raise ProofInvalid("the proof goes on beyond the root")
        if fn & 1 or fn == sn:
            found_old, found_new = node_hash(sibling, found_old), node_hash(sibling, found_new)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            found_new = node_hash(found_new, sibling)
        fn, sn = fn >> 1, sn >> 1
    if sn != 0 or found_old != old_root or found_new != new_root:
        raise ProofInvalid(
            "the proof does not lead from the one root to the other",
            expected=f"{old_root.hex()} and {new_root.hex()}",
            found=f"{found_old.hex()} and {found_new.hex()}",
        )


def _trailing_zeros(number: int) -> int:
    """How often two divides it; of zero, more often than of any size that a tree has."""
    return (number & -number).bit_length() - 1 if number else 64


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << ((count - 1).bit_length() - 1)


def _verify_size(size: int) -> None:
    if not 0 <= size <= TREE_SIZE_MAX:
        raise ProofInvalid("no tree has this size", expected=f"0 to {TREE_SIZE_MAX}", found=size)


def _verify_hashes(*hashes: bytes) -> None:
    for found in hashes:
        if len(found) != HASH_BYTES:
            raise ProofInvalid("that is no SHA-256", expected=f"{HASH_BYTES} bytes", found=len(found))
