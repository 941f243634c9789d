"""RFC 6962 and 9162: roots and proofs are the published ones, what is proven verifies, and nothing else does."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import ProofInvalid
from app.core.merkle import (
    EMPTY_ROOT,
    TREE_SIZE_MAX,
    Frontier,
    Hash,
    Node,
    Range,
    consistency_ranges,
    fold_nodes,
    inclusion_ranges,
    leaf_hash,
    node_hash,
    nodes_of,
    verify_consistency,
    verify_inclusion,
)

PUBLISHED: Final = Path(__file__).parents[3] / "shared" / "data" / "rfc6962"
GARBAGE: Final = bytes(32)

# The tree of the reference implementation's tests: eight leaves, and the root of each beginning.
DATA: Final = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
ROOTS: Final = [
    bytes.fromhex(text)
    for text in (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    )
]
LEAVES: Final = [leaf_hash(data) for data in DATA]

thorough = settings(deadline=None, max_examples=300)


class Plain:
    """MTH, PATH and PROOF of RFC 6962, section 2.1, as they are written there; over leaf hashes."""

    def __init__(self, leaves: list[Hash]) -> None:
        self.leaves = leaves

    def root(self, start: int, end: int) -> bytes:
        if start == end:
            return hashlib.sha256(b"").digest()
        if end - start == 1:
            return self.leaves[start]
        k = self._split(end - start)
        return hashlib.sha256(b"\x01" + self.root(start, start + k) + self.root(start + k, end)).digest()

    def path(self, m: int, start: int, end: int) -> list[bytes]:
        if end - start == 1:
            return []
        k = self._split(end - start)
        if m < k:
            return [*self.path(m, start, start + k), self.root(start + k, end)]
        return [*self.path(m - k, start + k, end), self.root(start, start + k)]

    def proof(self, m: int, n: int) -> list[bytes]:
        return [] if m in (0, n) else self._subproof(m, 0, n, is_whole=True)

    def _subproof(self, m: int, start: int, end: int, *, is_whole: bool) -> list[bytes]:
        n = end - start
        if m == n:
            return [] if is_whole else [self.root(start, end)]
        k = self._split(n)
        if m <= k:
            return [*self._subproof(m, start, start + k, is_whole=is_whole), self.root(start + k, end)]
        return [*self._subproof(m - k, start + k, end, is_whole=False), self.root(start, start + k)]

    @staticmethod
    def _split(n: int) -> int:
        return 1 << ((n - 1).bit_length() - 1)


def plain_of(size: int) -> Plain:
    return Plain([leaf_hash(b"leaf %d" % n) for n in range(size)])


def folded(plain: Plain, ranges: list[Range]) -> list[bytes]:
    """What a keeper of nodes makes of the ranges."""
    return [
        fold_nodes([plain.root(n.index << n.level, (n.index + 1) << n.level) for n in nodes_of(one)]) for one in ranges
    ]


def flipped(value: bytes, bit: int) -> bytes:
    bit %= len(value) * 8
    return value[: bit // 8] + bytes([value[bit // 8] ^ 1 << bit % 8]) + value[bit // 8 + 1 :]


# Published vectors


def published() -> list[Path]:
    return sorted(PUBLISHED.rglob("*.json")) if PUBLISHED.is_dir() else []


def test_every_published_vector_is_judged_as_published() -> None:
    files = published()
    if not files:
        pytest.skip(f"the published RFC 6962 vectors are not beside this clone: {PUBLISHED} is missing")
    refused = 0
    for file in files:
        vector = json.loads(file.read_text())
        try:
            _judge(vector)
            is_refused = False
        except ProofInvalid:
            is_refused = True
        assert is_refused == vector["wantErr"], f"{file}: {vector['desc']}"
        refused += is_refused
    assert (len(files), refused) == (196, 184)


def _judge(vector: dict[str, Any]) -> None:
    def decoded(name: str) -> bytes:
        return b64decode(vector[name]) if vector[name] else b""

    proof = [b64decode(one) for one in vector["proof"] or []]
    if "leafIdx" in vector:
        verify_inclusion(
            decoded("leafHash"),
            index=vector["leafIdx"],
            size=vector["treeSize"],
            proof=proof,
            root=decoded("root"),
        )
    else:
        verify_consistency(
            old=vector["size1"],
            new=vector["size2"],
            old_root=decoded("root1"),
            new_root=decoded("root2"),
            proof=proof,
        )


# Our own, for a clone without them: the same tree, and the same ways to spoil a proof.


def test_the_roots_of_the_reference_tree_come_out() -> None:
    frontier = Frontier()
    assert frontier.root() == EMPTY_ROOT == ROOTS[0]
    for leaf, root in zip(LEAVES, ROOTS[1:], strict=True):
        frontier.append(leaf)
        assert frontier.root() == root


def spoiled_proofs(proof: list[bytes], *others: bytes) -> Iterator[list[bytes]]:
    for place, one in enumerate(proof):
        yield [*proof[:place], flipped(one, 4), *proof[place + 1 :]]
    if proof:
        yield []
        yield proof[:-1]
        yield proof[1:]
        yield [proof[0], *proof]
        yield [*proof, *proof[::-1]]
        yield [*proof[:-1], proof[-1][:31]]
        yield [*proof[:-1], proof[-1] + b"\x00"]
    for other in (GARBAGE, b"", *others):
        yield [*proof, other]
        yield [other, *proof]


SIZES = [(index, size) for size in range(1, 9) for index in range(size)]


@pytest.mark.parametrize(("index", "size"), SIZES)
def test_a_spoiled_inclusion_proof_is_refused(index: int, size: int) -> None:
    leaf, root = LEAVES[index], ROOTS[size]
    proof = Plain(LEAVES).path(index, 0, size)
    verify_inclusion(leaf, index=index, size=size, proof=proof, root=root)
    for wrong in spoiled_proofs(proof, leaf, root):
        with pytest.raises(ProofInvalid):
            verify_inclusion(leaf, index=index, size=size, proof=wrong, root=root)
    for wrong_index in ({-1, index + 1, index - 1, index ^ 2, size, size + 1, TREE_SIZE_MAX} | {*range(size)}) - {
        index
    }:
        with pytest.raises(ProofInvalid):
            verify_inclusion(leaf, index=wrong_index, size=size, proof=proof, root=root)
    for wrong_size in (index, 0, -1, size * 4, TREE_SIZE_MAX, TREE_SIZE_MAX + 1):
        with pytest.raises(ProofInvalid):
            verify_inclusion(leaf, index=index, size=wrong_size, proof=proof, root=root)
    wrongs: list[tuple[bytes, bytes]] = [(leaf, GARBAGE), (GARBAGE, root), (leaf, b""), (b"", root), (leaf, root[:31])]
    wrongs += [(leaf_hash(b"other"), root)] + ([(root, leaf)] if leaf != root else [])
    for wrong_leaf, wrong_root in wrongs:
        with pytest.raises(ProofInvalid):
            verify_inclusion(wrong_leaf, index=index, size=size, proof=proof, root=wrong_root)


@pytest.mark.parametrize(("old", "new"), [(old, new) for new in range(1, 9) for old in range(new + 1)])
def test_a_spoiled_consistency_proof_is_refused(old: int, new: int) -> None:
    roots: dict[str, bytes] = {"old_root": ROOTS[old], "new_root": ROOTS[new]}
    proof = Plain(LEAVES).proof(old, new)
    verify_consistency(old=old, new=new, proof=proof, **roots)
    for wrong in spoiled_proofs(proof, *roots.values()):
        with pytest.raises(ProofInvalid):
            verify_consistency(old=old, new=new, proof=wrong, **roots)
    for wrong_old, wrong_new in [(-1, new), (new + 1, new), (new, old - 1), (0, TREE_SIZE_MAX + 1), (old, -1)]:
        with pytest.raises(ProofInvalid):
            verify_consistency(old=wrong_old, new=wrong_new, proof=proof, **roots)
    if old:
        for wrong_old in {*range(1, new + 1)} - {old}:
            with pytest.raises(ProofInvalid):
                verify_consistency(old=wrong_old, new=new, proof=proof, **roots)
    spoiled = [{**roots, "old_root": GARBAGE}]
    if old:  # every tree begins with the empty one, whatever its root
        spoiled += [{**roots, "new_root": GARBAGE}]
        spoiled += [{"old_root": ROOTS[new], "new_root": ROOTS[old]}] if old != new else []
    for wrong_roots in spoiled:
        with pytest.raises(ProofInvalid):
            verify_consistency(old=old, new=new, proof=proof, **wrong_roots)


# Any tree


@thorough
@given(st.data())
def test_our_proofs_are_those_of_the_rfc_and_verify(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 200))
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size))
    plain = plain_of(size)
    root = plain.root(0, size)
    inclusion = folded(plain, inclusion_ranges(index, size))
    assert inclusion == plain.path(index, 0, size)
    verify_inclusion(plain.leaves[index], index=index, size=size, proof=inclusion, root=root)
    consistency = folded(plain, consistency_ranges(old, size))
    assert consistency == plain.proof(old, size)
    verify_consistency(old=old, new=size, old_root=plain.root(0, old), new_root=root, proof=consistency)


@thorough
@given(st.data())
def test_one_flipped_bit_anywhere_is_refused(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 200))
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size - 1))
    bit = data.draw(st.integers(0, 64 * 256))
    plain = plain_of(size)
    root, old_root = plain.root(0, size), plain.root(0, old)
    parts = [plain.leaves[index], root, *plain.path(index, 0, size)]
    place = data.draw(st.integers(0, len(parts) - 1))
    parts[place] = flipped(parts[place], bit)
    with pytest.raises(ProofInvalid):
        verify_inclusion(parts[0], index=index, size=size, root=parts[1], proof=parts[2:])
    parts = [old_root, root, *plain.proof(old, size)]
    place = data.draw(st.integers(0, len(parts) - 1))
    parts[place] = flipped(parts[place], bit)
    with pytest.raises(ProofInvalid):
        verify_consistency(old=old, new=size, old_root=parts[0], new_root=parts[1], proof=parts[2:])


def read_scheduler(index: int, size: int) -> list[bool]:
    """On which side of the path each hash of an inclusion proof stands."""
    return [one.start > index for one in inclusion_ranges(index, size)]


@thorough
@given(st.integers(1, 200), st.data())
def test_another_index_or_size_is_refused_unless_the_path_is_the_same(size: int, data: st.DataObject) -> None:
    """A root alone does not fix its tree's size; a signed head does, which is why heads carry both."""
    plain = plain_of(size)
    index = data.draw(st.integers(0, size - 1))
    proof, root = plain.path(index, 0, size), plain.root(0, size)
    wrong_index = data.draw(st.integers(0, size + 3).filter(lambda n: n != index))
    with pytest.raises(ProofInvalid):
        verify_inclusion(plain.leaves[index], index=wrong_index, size=size, proof=proof, root=root)
    wrong_size = data.draw(st.integers(index + 1, 2 * size + 3))
    if read_scheduler(index, wrong_size) != read_scheduler(index, size):
        with pytest.raises(ProofInvalid):
            verify_inclusion(plain.leaves[index], index=index, size=wrong_size, proof=proof, root=root)
    old = data.draw(st.integers(1, size))
    wrong_old = data.draw(st.integers(1, size + 3))
    if wrong_old != old:
        with pytest.raises(ProofInvalid):
            verify_consistency(
                old=wrong_old, new=size, old_root=plain.root(0, old), new_root=root, proof=plain.proof(old, size)
            )


@thorough
@given(
    st.integers(-(2**65), 2**65), st.integers(-(2**65), 2**65), st.lists(st.binary(max_size=33), max_size=70), st.data()
)
def test_whatever_is_handed_in_only_proof_invalid_escapes(
    one: int, other: int, proof: list[bytes], data: st.DataObject
) -> None:
    first, second = data.draw(st.binary(max_size=33)), data.draw(st.binary(max_size=33))
    with suppress(ProofInvalid):
        verify_inclusion(first, index=one, size=other, proof=proof, root=second)
        assert (one, other, proof, first) == (0, 1, [], second), "a tree of one leaf needs no proof"
    with suppress(ProofInvalid):
        verify_consistency(old=one, new=other, old_root=first, new_root=second, proof=proof)
        assert (one, first) == (other, second), "nor does a tree that is the same"


@thorough
@given(st.integers(0, 2**20), st.integers(0, 64))
def test_a_range_falls_into_complete_subtrees_from_left_to_right(start: int, count: int) -> None:
    nodes = nodes_of(Range(start, start + count))
    covered = [leaf for node in nodes for leaf in range(node.index << node.level, (node.index + 1) << node.level)]
    assert covered == list(range(start, start + count))


def test_a_frontier_tells_of_every_node_that_a_leaf_completes() -> None:
    plain, frontier = plain_of(70), Frontier()
    told = {}
    for leaf in plain.leaves:
        for node, found in frontier.append(leaf):
            told[node] = found
        assert frontier.root() == plain.root(0, frontier.size)
        assert len(frontier.hashes) == frontier.size.bit_count()
    assert told == {
        Node(level, index): plain.root(index << level, (index + 1) << level)
        for level in range(1, 7)
        for index in range(70 >> level)
    }


def test_a_leaf_is_never_taken_for_a_node() -> None:
    left, right = LEAVES[:2]
    assert node_hash(left, right) != leaf_hash(left + right)
    assert node_hash(left, right) != node_hash(right, left)
