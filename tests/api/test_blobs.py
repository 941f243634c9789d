"""Blobs over HTTP: streamed both ways, refused in time, apart for each tenant."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from app.api import blobs as blobs_api
from app.core.digest import digest_of_bytes
from app.core.limits import BLOB_RANGE_BYTES
from app.domain.runs.blobs import Blobs, blob_path
from app.edge import protocol
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World
from tests.api.wire import Wire, open_front
from tests.conftest import Admin
from tests.patience import HANG_S

LARGE = os.urandom(2 * BLOB_RANGE_BYTES + 777)
SMALL = b"abc"
SHA256 = digest_of_bytes(SMALL)


@pytest.fixture
def world(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> World:
    return World.of(database, sessions, ledger, tmp_path)


@pytest.fixture
async def front(world: World) -> AsyncIterator[Front]:
    async with world.open() as opened:
        yield opened


async def ask(
    front: Front, method: str, path: str, body: Any = None, *, who: str = "agent", **headers: str
) -> tuple[int, bytes, Mapping[str, str]]:
    url = f"http://127.0.0.1:{front.port}{path}"
    sent = {"Authorization": f"Bearer {who}", **headers}
    body = io.BytesIO(body) if isinstance(body, bytes) else body
    async with asyncio.timeout(HANG_S), front.client.request(method, url, data=body, headers=sent) as response:
        return response.status, await response.read(), response.headers


async def put(front: Front, data: bytes, *, who: str = "agent") -> int:
    status, body, _ = await ask(front, "PUT", f"/v1/blobs/{digest_of_bytes(data)}", data, who=who)
    if status in (200, 201):
        assert json.loads(body) == {"sha256": digest_of_bytes(data), "size_bytes": len(data)}
    return status


def code_of(body: bytes) -> str:
    return str(json.loads(body)["code"])


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
async def test_bytes_are_stored_once_and_come_back(front: Front, data: bytes) -> None:
    assert await put(front, data) == 201
    assert await put(front, data) == 200, "a repeat is harmless"
    path = f"/v1/blobs/{digest_of_bytes(data)}"
    status, body, headers = await ask(front, "GET", path)
    assert (status, body) == (200, data)
    assert headers["Content-Length"] == str(len(data))
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["ETag"] == f'"{digest_of_bytes(data)}"'
    status, body, headers = await ask(front, "HEAD", path)
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(data)))


async def test_a_body_in_chunks_of_unknown_length_is_taken(front: Front) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), 100_000):
            yield LARGE[start : start + 100_000]

    status, _, _ = await ask(front, "PUT", f"/v1/blobs/{digest_of_bytes(LARGE)}", pieces())
    assert status == 201


async def test_head_reads_no_object(front: Front, world: World) -> None:
    await put(front, SMALL)
    (world.folder / "blobs" / blob_path("default", SHA256)).unlink()
    assert (await ask(front, "HEAD", f"/v1/blobs/{SHA256}"))[0] == 200
    status, body, _ = await ask(front, "GET", f"/v1/blobs/{SHA256}")
    assert (status, code_of(body)) == (409, "BLOB_DAMAGED")


async def test_tenants_see_nothing_of_each_other(front: Front) -> None:
    await put(front, SMALL, who="agent")
    for method in ("GET", "HEAD"):
        assert (await ask(front, method, f"/v1/blobs/{SHA256}", who="acme-agent"))[0] == 404
    assert await put(front, SMALL, who="acme-agent") == 201, "that it is there already is not told"


@pytest.mark.parametrize(
    ("who", "stores", "reads"),
    [("agent", 201, 200), ("auditor", 403, 200), ("nobody", 403, 403), ("stranger", 401, 401)],
)
async def test_who_may_store_and_read(front: Front, who: str, stores: int, reads: int) -> None:
    assert await put(front, SMALL, who=who) == stores
    await put(front, SMALL)
    assert (await ask(front, "GET", f"/v1/blobs/{SHA256}", who=who))[0] == reads
    assert (await ask(front, "HEAD", f"/v1/blobs/{SHA256}", who=who))[0] == reads


async def test_what_cannot_be_stored_is_refused_by_its_name(front: Front, admin: Admin) -> None:
    object.__setattr__(front.services.blobs, "size_bytes_max", 1_000_000)
    cases: list[tuple[str, Any, dict[str, str], int, str]] = [
        (f"/v1/blobs/{SHA256}", b"abd", {}, 422, "BLOB_MISMATCH"),
        (f"/v1/blobs/{SHA256}", LARGE, {}, 413, "INPUT_TOO_LARGE"),
        (f"/v1/blobs/{SHA256.upper()}", SMALL, {}, 400, "INPUT_MALFORMED"),
        ("/v1/blobs/abc", SMALL, {}, 400, "INPUT_MALFORMED"),
        (f"/v1/blobs/{SHA256}?x=1", SMALL, {}, 400, "INPUT_MALFORMED"),
        (f"/v1/blobs/{SHA256}", SMALL, {"Content-Encoding": "gzip"}, 400, "INPUT_MALFORMED"),
    ]
    for path, body, headers, status, code in cases:
        found, said, _ = await ask(front, "PUT", path, body, **headers)
        assert (found, code_of(said)) == (status, code), path
    assert await admin.fetchval("SELECT count(*) FROM tga.blobs") == 0
    assert (await ask(front, "GET", f"/v1/blobs/{SHA256}"))[0] == 404


async def test_a_chunked_body_beyond_the_bound_is_broken_off(front: Front) -> None:
    object.__setattr__(front.services.blobs, "size_bytes_max", 1_000_000)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 100_000_000:
            sent += 65_536
            yield bytes(65_536)

    status, body, _ = await ask(front, "PUT", f"/v1/blobs/{SHA256}", endless())
    assert (status, code_of(body)) == (413, "INPUT_TOO_LARGE")
    assert sent < 30_000_000


async def test_damage_during_an_answer_cuts_it_off(front: Front, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it was verified; the second reading finds other bytes. The client never has a whole wrong answer."""
    await put(front, LARGE)
    sha256 = digest_of_bytes(LARGE)
    file = world.folder / "blobs" / blob_path("default", sha256)
    opened = Blobs.open

    async def and_damaged(blobs: Blobs, tenant: str, digest: Any) -> Any:
        content = await opened(blobs, tenant, digest)
        file.write_bytes(LARGE[:-1] + bytes([LARGE[-1] ^ 1]))
        return content

    monkeypatch.setattr(Blobs, "open", and_damaged)
    with pytest.raises(aiohttp.ClientPayloadError):
        await ask(front, "GET", f"/v1/blobs/{sha256}")


async def test_too_many_transfers_at_once_are_told_to_come_back(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_api, "BLOB_TRANSFERS_MAX", 1)
    started, may_end = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield SMALL[:1]
        started.set()
        await may_end.wait()
        yield SMALL[1:]

    uploading = asyncio.create_task(ask(front, "PUT", f"/v1/blobs/{SHA256}", slow()))
    await started.wait()
    async with asyncio.timeout(HANG_S):
        while True:  # until the gateway has begun with it
            status, body, headers = await ask(front, "PUT", f"/v1/blobs/{digest_of_bytes(b'x')}", b"x")
            if status == 503:
                break
    assert (code_of(body), headers["Retry-After"]) == ("GATEWAY_BUSY", "1")
    may_end.set()
    assert (await uploading)[0] == 201
    assert await put(front, b"x") in (200, 201)


def head_of_upload(size_bytes: int) -> bytes:
    return (
        f"PUT /v1/blobs/{SHA256} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer agent\r\n"
        f"Content-Length: {size_bytes}\r\n\r\n"
    ).encode()


async def test_a_client_that_goes_away_leaves_nothing(front: Front, world: World, admin: Admin) -> None:
    async with await Wire.open(front.port) as wire:
        await wire.send(head_of_upload(3) + b"a")
        async with asyncio.timeout(HANG_S):
            while not list((world.folder / "blobs" / ".incoming").iterdir()):
                await asyncio.sleep(0.005)
    async with asyncio.timeout(HANG_S):
        while list((world.folder / "blobs" / ".incoming").iterdir()):
            await asyncio.sleep(0.005)
    assert await admin.fetchval("SELECT count(*) FROM tga.blobs") == 0


class Hasty(protocol.BoundedProtocol):
    body_wait_ms = 300


class SlowBlobs:
    """Takes what comes."""

    size_bytes_max = 10_000_000

    async def put(self, tenant: str, sha256: str, pieces: AsyncIterator[bytes], **_: Any) -> tuple[int, bool]:
        size = 0
        async for piece in pieces:
            size += len(piece)
        return size, True


@pytest.mark.parametrize(("bytes_min", "status"), [(1_000, 201), (1_000_000, 408)], ids=["coming", "trickling"])
async def test_an_upload_may_take_long_while_it_keeps_coming(
    monkeypatch: pytest.MonkeyPatch, bytes_min: int, status: int
) -> None:
    """Every other body must be there within `body_wait_ms`; an upload must go on coming in each such time."""
    monkeypatch.setattr(protocol, "BLOB_BODY_BYTES_MIN", bytes_min)
    async with open_front(protocol=Hasty, blobs=SlowBlobs()) as front, await front.open() as wire:
        await wire.send(head_of_upload(60_000))
        for _ in range(10):
            await wire.send(bytes(6_000))
            await asyncio.sleep(0.1)
        assert (await wire.reply()).status == status
