"""Kept heads against a log: what fits, what was rewritten and what was cut off, with real signatures and proofs."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.console.gateway_api import SessionApi
from app.console.kept_heads import KEPT_MAX, compare_kept, notes_in
from app.core.errors import NoteInvalid
from app.core.merkle import Frontier, Hash, consistency_ranges, leaf_hash
from app.core.note import TreeHead, VerifierKey, sign_note

ORIGIN = "tga.example/log"
SIGNER = Ed25519PrivateKey.generate()
KEY = VerifierKey(ORIGIN, SIGNER.public_key().public_bytes_raw())


def root_of(leaves: list[bytes]) -> Hash:
    tree = Frontier()
    for leaf in leaves:
        tree.append(leaf_hash(leaf))
    return tree.root()


class Log:
    """What the API says of a log with these entries."""

    def __init__(self, entries: list[bytes]) -> None:
        self.entries = entries

    def note(self, size: int, signer: Ed25519PrivateKey = SIGNER, origin: str = ORIGIN) -> str:
        key = VerifierKey(origin, signer.public_key().public_bytes_raw())
        return sign_note(TreeHead(origin, size, root_of(self.entries[:size])).to_text(), key, signer.sign)

    async def text(self, path: str) -> str:
        return f"{KEY.to_text()}\n" if path == "/v1/log/key" else self.note(len(self.entries))

    async def get(self, _: str, *, old: int, new: int) -> Any:
        spans = consistency_ranges(old, new)
        hashes = [root_of(self.entries[span.start : span.end]) for span in spans]
        return {"old": old, "new": new, "hashes": [b64encode(one).decode() for one in hashes]}


def entries(count: int, *, changed_from: int | None = None) -> list[bytes]:
    begin = count if changed_from is None else changed_from
    return [f"{'entry' if n < begin else 'other'} {n}".encode() for n in range(count)]


async def compared(log: Log, *notes: str) -> tuple[list[str], int | None, int | None]:
    found = await compare_kept(cast("SessionApi", log), "\n".join(notes))
    return [one.standing for one in found.heads], found.fits_up_to, found.splits_by


async def test_every_head_that_the_log_ever_had_fits() -> None:
    log = Log(entries(13))
    for size in range(1, 14):
        assert await compared(log, log.note(size)) == (["fits"], size, None)


async def test_a_rewritten_history_splits_between_the_heads_that_stand_around_it() -> None:
    before, now = Log(entries(20)), Log(entries(25, changed_from=9))
    assert await compared(now, before.note(20)) == (["split"], None, 20)
    kept = [before.note(size) for size in (20, 4, 8, 12)]
    assert await compared(now, *kept) == (["split", "fits", "fits", "split"], 8, 12)
    same_size = Log(entries(20, changed_from=9))
    assert await compared(same_size, before.note(20)) == (["split"], None, 20)


async def test_a_log_that_is_shorter_than_a_kept_head_was_cut_off() -> None:
    before, now = Log(entries(20)), Log(entries(12))
    assert await compared(now, before.note(20), before.note(12)) == (["beyond", "fits"], 12, 20)


async def test_what_the_logs_key_did_not_sign_proves_nothing() -> None:
    log = Log(entries(6))
    foreign = log.note(4, Ed25519PrivateKey.generate())
    tampered = log.note(4).replace("\n4\n", "\n5\n")
    elsewhere = log.note(4, origin=f"{ORIGIN}/epoch-2")
    for note in (foreign, tampered, elsewhere, "words", "\n\n", "\u2014 x y\n"):
        standings, fits_up_to, splits_by = await compared(log, note)
        assert set(standings) <= {"invalid"}, note
        assert (fits_up_to, splits_by) == (None, None)


async def test_a_newest_head_that_the_logs_key_did_not_sign_is_compared_with_nothing() -> None:
    class Forged(Log):
        async def text(self, path: str) -> str:
            foreign = self.note(len(self.entries), Ed25519PrivateKey.generate())
            return await super().text(path) if path == "/v1/log/key" else foreign

    with pytest.raises(NoteInvalid):
        await compared(Forged(entries(6)), Log(entries(6)).note(4))


async def test_pasted_notes_are_told_apart_and_only_so_many_are_looked_at() -> None:
    log = Log(entries(3))
    one, two = log.note(1), log.note(2)
    for text in (one + two, f"\n\n{one}\n\n\n{two}\n", (one + two).replace("\n", "\r\n")):
        assert notes_in(text) == [one, two]
    standings, _, _ = await compared(log, *[one] * (KEPT_MAX + 5))
    assert standings == ["fits"] * KEPT_MAX + ["invalid"]
