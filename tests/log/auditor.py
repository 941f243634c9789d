"""Someone who reads the tables, hashes everything again in the plainest way, and compares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import asyncpg

from app.core.merkle import leaf_hash, verify_consistency, verify_inclusion
from app.core.note import TreeHead, VerifierKey, open_note
from app.domain.log.heads import fits
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


def plain_root(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 6962, section 2.1, as it is written there; `leaves` are leaf hashes."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1 << ((len(leaves) - 1).bit_length() - 1)
    return hashlib.sha256(b"\x01" + plain_root(leaves[:k]) + plain_root(leaves[k:])).digest()


async def stored_leaves(admin: Admin) -> list[tuple[str, int, bytes]]:
    """Stream, number and entry of each leaf, in their order; indices without gaps."""
    rows = await admin.fetch(
        "SELECT l.leaf_index, stream, sequence_number, e.entry"
        " FROM tga.leaves l LEFT JOIN tga.entries e USING (stream, sequence_number) ORDER BY leaf_index"
    )
    assert [row["leaf_index"] for row in rows] == list(range(len(rows)))
    return [(row["stream"], row["sequence_number"], row["entry"]) for row in rows]


async def published_notes(admin: Admin) -> list[str]:
    return [row["note"] for row in await admin.fetch("SELECT note FROM tga.tree_heads ORDER BY size")]


async def verify_log(
    admin: Admin, sessions: Sessions, keys: Sequence[VerifierKey], *, seen: Sequence[str] = (), is_whole: bool = True
) -> list[TreeHead]:
    """Every entry is a leaf once, in order within its stream; every head is signed, is the root of its leaves, and
    is proven to follow from each one before it; what a client has `seen` is among them. The heads, by size."""
    leaves = await stored_leaves(admin)
    entries = {
        (row["stream"], row["sequence_number"])
        for row in await admin.fetch("SELECT stream, sequence_number FROM tga.entries")
    }
    placed = [(stream, number) for stream, number, _ in leaves]
    assert len(set(placed)) == len(placed), "an entry stands twice"
    assert set(placed) <= entries
    if is_whole:
        assert set(placed) == entries, "an entry is missing"
    by_stream: dict[str, int] = {}
    for stream, number in placed:
        assert number == by_stream.get(stream, 0) + 1, "the order of a stream is kept"
        by_stream[stream] = number
    hashes = [hashlib.sha256(b"\x00" + entry).digest() for _, _, entry in leaves]
    notes = await published_notes(admin)
    assert set(seen) <= set(notes), "a head that was seen is gone or changed"
    heads = [TreeHead.from_text(open_note(note, keys, fits)) for note in notes]
    tree = PostgresTree(sessions)
    for head in heads:
        assert head.root == plain_root(hashes[: head.size])
    for old, new in pairwise(heads):
        proof = await tree.consistency_proof(old.size, new.size)
        verify_consistency(old=old.size, new=new.size, old_root=old.root, new_root=new.root, proof=proof)
    if heads:
        last = heads[-1]
        if is_whole:
            assert last.size == len(leaves), "the last head covers everything"
        for old in heads[:: max(1, len(heads) // 10)]:
            proof = await tree.consistency_proof(old.size, last.size)
            verify_consistency(old=old.size, new=last.size, old_root=old.root, new_root=last.root, proof=proof)
        for index in {*range(0, last.size, max(1, last.size // 20)), last.size - 1}:
            proof = await tree.inclusion_proof(index, last.size)
            leaf = leaf_hash(leaves[index][2])
            verify_inclusion(leaf, index=index, size=last.size, proof=proof, root=last.root)
    return heads
