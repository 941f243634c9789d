"""Blobs are what their digest says, or nothing: stored once, verified when read, apart for each tenant."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from app.core.digest import Digest, digest_of_bytes
from app.core.errors import BlobDamaged, BlobMismatch, BlobNotFound, InputTooLarge
from app.core.limits import BLOB_RANGE_BYTES
from app.domain.runs.blobs import BlobContent
from tests.blobs.conftest import Shelf, pieces_of

LARGE = os.urandom(2 * BLOB_RANGE_BYTES + 777)


async def whole(content: BlobContent) -> bytes:
    return b"".join([piece async for piece in content.pieces()])


@pytest.mark.parametrize("data", [b"", b"x", LARGE, LARGE[:BLOB_RANGE_BYTES]], ids=["empty", "one", "large", "range"])
async def test_what_is_put_is_read_and_stored_once(shelf: Shelf, data: bytes) -> None:
    sha256 = digest_of_bytes(data)
    assert await shelf.blobs.put("default", sha256, pieces_of(data), stated_bytes=len(data)) == (len(data), True)
    assert await shelf.blobs.put("default", sha256, pieces_of(data)) == (len(data), False)
    assert len(shelf.objects.written) == 1
    content = await shelf.blobs.open("default", sha256)
    assert content.size_bytes == len(data)
    assert await whole(content) == data
    assert await shelf.blobs.read("default", sha256, bytes_max=len(data)) == data
    if data:
        with pytest.raises(InputTooLarge):
            await shelf.blobs.read("default", sha256, bytes_max=len(data) - 1)


async def test_tenants_see_nothing_of_each_other(shelf: Shelf) -> None:
    sha256 = await shelf.put(b"secret of one", tenant="one")
    for work in (shelf.blobs.find("other", sha256), shelf.blobs.open("other", sha256)):
        with pytest.raises(BlobNotFound):
            await work
    assert await shelf.blobs.put("other", sha256, pieces_of(b"secret of one")) == (13, True)
    with pytest.raises(BlobMismatch):  # it must bring the bytes itself
        await shelf.blobs.put("third", sha256, pieces_of(b""))


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "again"])
async def test_other_bytes_than_the_digests_are_refused(shelf: Shelf, is_there: bool) -> None:
    sha256 = digest_of_bytes(LARGE)
    if is_there:
        await shelf.put(LARGE)
    before = (shelf.files(), await shelf.states())
    for wrong in (LARGE[:-1], LARGE + b"x", LARGE[:-1] + b"x", b""):
        with pytest.raises(BlobMismatch) as refused:
            await shelf.blobs.put("default", sha256, pieces_of(wrong))
        assert refused.value.found == digest_of_bytes(wrong)
    assert (shelf.files(), await shelf.states()) == before, "neither object nor row"


async def test_no_more_is_read_than_was_stated_or_is_admitted(shelf: Shelf) -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 65_536
            yield bytes(65_536)

    sha256 = digest_of_bytes(LARGE)
    with pytest.raises(InputTooLarge):
        await shelf.blobs.put("default", sha256, endless(), stated_bytes=100_000)
    assert taken <= 2 * 65_536
    taken = 0
    with pytest.raises(InputTooLarge):
        await shelf.blobs.put("default", sha256, endless())
    assert taken <= shelf.blobs.size_bytes_max + 2 * 65_536
    taken = 0
    with pytest.raises(InputTooLarge):
        await shelf.blobs.put("default", sha256, endless(), stated_bytes=shelf.blobs.size_bytes_max + 1)
    assert taken == 0
    assert shelf.files() == []
    assert await shelf.states() == {}


def _flip(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("size", [1, 10_000, len(LARGE)])
@pytest.mark.parametrize("damage", ["first", "last", "short", "empty", "missing"])
async def test_damage_is_found_before_anything_is_served(shelf: Shelf, size: int, damage: str) -> None:
    data = LARGE[:size]
    sha256 = await shelf.put(data)
    file = shelf.file(sha256)
    match damage:
        case "first":
            file.write_bytes(_flip(data, 0))
        case "last":
            file.write_bytes(_flip(data, size - 1))
        case "short":
            file.write_bytes(data[:-1])
        case "empty":
            file.write_bytes(b"")
        case "missing":
            file.unlink()
    with pytest.raises(BlobDamaged):
        await shelf.blobs.open("default", sha256)


async def test_damage_between_the_two_readings_is_never_served_whole(shelf: Shelf) -> None:
    sha256 = await shelf.put(LARGE)
    content = await shelf.blobs.open("default", sha256)
    shelf.file(sha256).write_bytes(_flip(LARGE, 5))
    served: list[bytes] = []

    async def serve() -> None:
        async for piece in content.pieces():
            served.append(piece)

    with pytest.raises(BlobDamaged):
        await serve()
    assert sum(map(len, served)) < len(LARGE)


async def test_what_is_not_there_is_not_found(shelf: Shelf) -> None:
    for work in (shelf.blobs.find("default", Digest("ab" * 32)), shelf.blobs.open("default", Digest("ab" * 32))):
        with pytest.raises(BlobNotFound):
            await work
