"""Object stores for blobs: one suite for a folder, for S3 (over its own protocol) and for obstore's memory."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from app.connectors.blobs import BucketStore, FolderStore, open_object_store
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import BlobNotFound, BlobStoreUnavailable, SettingInvalid
from app.core.limits import BLOB_PART_BYTES
from app.domain.runs.blobs import ObjectStore, blob_path
from tests.blobs.s3 import FakeS3, open_s3

SMALL = b"small" * 100
LARGE = os.urandom(2 * BLOB_PART_BYTES + 12_345)
PATH = blob_path("default", digest_of_bytes(SMALL))


@dataclass
class Opened:
    store: ObjectStore
    s3: FakeS3 | None = None
    folder: Path | None = None


@pytest.fixture(params=["folder", "s3", "memory"])
async def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Opened]:
    if request.param == "folder":
        yield Opened(open_object_store(None, folder=tmp_path / "blobs"), folder=tmp_path / "blobs")
    elif request.param == "memory":
        yield Opened(BucketStore(MemoryStore()))
    else:
        async with open_s3() as s3:
            for name, value in s3.environment().items():
                monkeypatch.setenv(name, value)
            yield Opened(open_object_store("s3://bucket/tga", folder=tmp_path), s3=s3)


async def pieces_of(data: bytes, *, size: int = 65_536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def nothing() -> None:
    return None


async def write(opened: Opened, data: bytes, path: str = PATH) -> None:
    await opened.store.write(path, pieces_of(data), before_visible=nothing)


async def is_there(opened: Opened, path: str = PATH) -> bool:
    try:
        await opened.store.read(path, start=0, length=0)
    except BlobNotFound:
        return False
    return True


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
async def test_what_is_written_is_read(opened: Opened, data: bytes) -> None:
    await write(opened, data)
    assert await opened.store.read(PATH, start=0, length=len(data)) == data
    middle = len(data) // 2
    assert await opened.store.read(PATH, start=middle, length=7) == data[middle : middle + 7]
    await write(opened, data)  # again, as two uploads at once would
    await opened.store.delete(PATH)
    assert not await is_there(opened)
    await opened.store.delete(PATH)  # gone is gone


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
async def test_nothing_is_visible_before_it_is_whole(opened: Opened, data: bytes) -> None:
    seen: list[bool] = []

    async def look() -> None:
        seen.append(await is_there(opened))

    await opened.store.write(PATH, pieces_of(data), before_visible=look)
    assert seen == [False], "once, with all bytes there and nothing to be seen"
    assert await is_there(opened)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fault", ["pieces", "before_visible", "cancelled"])
async def test_what_fails_leaves_nothing(opened: Opened, data: bytes, fault: str) -> None:
    began = asyncio.Event()

    async def failing() -> AsyncIterator[bytes]:
        async for piece in pieces_of(data):
            yield piece
        if fault == "pieces":
            raise LookupError("wrong")
        if fault == "cancelled":
            began.set()
            await asyncio.Event().wait()

    async def refuse() -> None:
        if fault == "before_visible":
            raise LookupError("refused")

    writing = asyncio.ensure_future(opened.store.write(PATH, failing(), before_visible=refuse))
    if fault == "cancelled":
        await began.wait()
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    else:
        with pytest.raises(LookupError):
            await writing
    assert not await is_there(opened)
    if opened.folder is not None:
        async with asyncio.timeout(10):  # obstore removes what it wrote itself, on a thread of its own
            while [file for file in opened.folder.rglob("*") if file.is_file()]:
                await asyncio.sleep(0.005)
    if opened.s3 is not None:
        async with asyncio.timeout(10):
            while opened.s3.uploads and fault != "cancelled":
                await asyncio.sleep(0.005)


async def test_what_is_too_short_is_not_filled(opened: Opened) -> None:
    await write(opened, SMALL)
    assert await opened.store.read(PATH, start=0, length=len(SMALL) + 9) == SMALL
    assert await opened.store.read(PATH, start=len(SMALL), length=9) == b""
    with pytest.raises(BlobNotFound):
        await opened.store.read(blob_path("other", digest_of_bytes(SMALL)), start=0, length=9)


async def test_a_store_that_does_not_answer_has_a_stable_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_s3() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        store = open_object_store("s3://bucket/tga", folder=tmp_path)
        s3.fails = True
        for work in (
            store.write(PATH, pieces_of(SMALL), before_visible=nothing),
            store.read(PATH, start=0, length=5),
            store.delete(PATH),
        ):
            with pytest.raises(BlobStoreUnavailable):
                await work


def test_a_url_that_cannot_be_used_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises(SettingInvalid, match="az://container"):
        open_object_store("az://container", folder=tmp_path)


# Paths


def test_no_tenant_leaves_its_folder_or_shares_one() -> None:
    sha256 = digest_of_bytes(b"")
    tenants = ["default", "a", "A", "..", ".", "%2e%2e", "a/b", "a%2Fb", "a\\b", "~", "ü", "incoming", ".incoming"]
    tenants += ["#" * 128, "#" * 127 + "A", "x" * 200, "x" * 201, "~" + "0" * 64, "", "con", "a b", "\n", "\x00"]
    folders = [blob_path(tenant, sha256).removesuffix(f"/sha256/{sha256[:2]}/{sha256}") for tenant in tenants]
    assert len({folder.lower() for folder in folders}) == len(tenants), "also where case makes no difference"
    for folder in folders:
        assert folder not in ("", ".", "..")
        assert not folder.startswith(".")
        assert "/" not in folder
        assert folder.isascii()
        assert folder.isprintable()
        assert len(folder) <= 255


async def test_a_hostile_tenant_writes_into_the_folder_alone(tmp_path: Path) -> None:
    store, sha256 = FolderStore(tmp_path / "blobs"), digest_of_bytes(SMALL)
    for tenant in ("..", "../..", "/etc", ".incoming", "a/../../b", "#" * 128):
        await store.write(blob_path(tenant, sha256), pieces_of(SMALL), before_visible=nothing)
    assert {path.name for path in tmp_path.iterdir()} == {"blobs"}
    assert len([path for path in (tmp_path / "blobs").rglob("*") if path.name == sha256]) == 6


# The folder


async def test_files_and_folders_are_the_accounts_own(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = FolderStore(tmp_path / "home" / "blobs")
        await store.write(PATH, pieces_of(SMALL), before_visible=nothing)
    finally:
        os.umask(old)
    blobs = tmp_path / "home" / "blobs"
    for path in (blobs, *blobs.rglob("*")):
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir(mode=0o755)
    (tmp_path / "blobs").chmod(0o755)
    with pytest.raises(SettingInvalid, match="open to other accounts"):
        FolderStore(tmp_path / "blobs")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingInvalid):
        FolderStore(tmp_path / "file")


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that other accounts can come to."""
    place = Path(tempfile.mkdtemp(prefix="tga-test-"))
    place.chmod(0o711)
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another account")
def test_another_account_than_root_uses_a_folder_of_its_own(open_place: Path) -> None:
    (open_place / "home").mkdir()
    os.chown(open_place / "home", 65534, 65534)
    script = """
        import asyncio, os, sys
        import concurrent.futures.thread, obstore.store, obstore.exceptions
        sys.path.insert(0, sys.argv[2])
        from pathlib import Path
        from app.connectors.blobs import FolderStore
        os.setgid(65534); os.setuid(65534)
        async def main():
            async def pieces():
                yield b"bytes"
            async def nothing():
                pass
            store = FolderStore(Path(sys.argv[1]) / "home" / "blobs")
            await store.write("t/sha256/ab/abc", pieces(), before_visible=nothing)
            print(await store.read("t/sha256/ab/abc", start=0, length=5), os.geteuid())
        asyncio.run(main())
    """
    root = str(Path(__file__).resolve().parents[2])
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(open_place), root], capture_output=True, check=False
    )
    assert found.stdout.strip() == b"b'bytes' 65534", found.stderr


async def test_what_a_killed_upload_left_is_swept_when_it_is_old(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "blobs")
    old, new = (tmp_path / "blobs" / ".incoming" / name for name in ("old", "new#1"))
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    await store.write(PATH, pieces_of(SMALL), before_visible=nothing)
    await store.sweep(older_than_ms=3_600_000)
    assert not old.exists()
    assert new.exists()
    assert await store.read(PATH, start=0, length=len(SMALL)) == SMALL


async def test_a_full_or_vanished_folder_has_a_stable_code(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "blobs")
    (tmp_path / "blobs" / ".incoming").rmdir()
    (tmp_path / "blobs" / ".incoming").write_bytes(b"in the way")
    with pytest.raises(BlobStoreUnavailable):
        await store.write(PATH, pieces_of(SMALL), before_visible=nothing)


def test_the_digest_is_the_name() -> None:
    sha256 = Digest("ab" * 32)
    assert blob_path("default", sha256) == f"default/sha256/ab/{sha256}"
