"""The object store for blobs, through obstore: a folder, or S3, Google Cloud Storage or Azure by their URLs.

In a folder an object is first written aside, made durable, and then moved to its place: whatever is cut off, by a crash
or a power failure, no object is there in part. Elsewhere the store itself shows an object when all of it has come.
Credentials for the others come from the gateway's environment, as their own tools read them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from app.core.errors import BlobNotFound, BlobStoreUnavailable, SettingInvalid
from app.core.limits import BLOB_PART_BYTES, BLOB_PARTS_AT_ONCE, BLOB_PIECE_BYTES, BLOB_STORE_TIMEOUT_MS
from app.domain.runs.blobs import ObjectStore

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Bucket

# Where uploads stand until they are whole. No tenant's folder begins with a dot.
_INCOMING: Final = ".incoming"
_SAID_CHARS_MAX: Final = 500
_TIMEOUT: Final = timedelta(milliseconds=BLOB_STORE_TIMEOUT_MS)
_ALLOW_HTTP: Final = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
_RETRY: Final[RetryConfig] = {"max_retries": 3, "retry_timeout": _TIMEOUT}

BeforeVisible = Callable[[], Awaitable[None]]


def open_object_store(url: str | None, *, folder: Path) -> ObjectStore:
    """The store that the URL names; without one, a folder. SettingInvalid when it cannot be one."""
    from obstore.store import from_url  # takes long to load, and few commands need it

    if url is None:
        return FolderStore(folder)
    if urlsplit(url).scheme == "file":
        return FolderStore(Path(unquote(urlsplit(url).path)))
    try:
        return BucketStore(from_url(url, client_options=_client_options(), retry_config=_RETRY))
    except Exception as error:  # obstore has classes of its own for each store's configuration
        raise SettingInvalid(
            f"[blobs] url: no object store can be opened at {url}",
            expected="s3://, gs:// or az:// with its credentials and region in the environment",
            found=type(error).__name__,
            remedy="Set the variables that the store's own tools read, such as AWS_REGION; see docs/configuration.md.",
        ) from None


def _client_options() -> ClientConfig:
    """With options of its own, obstore does not look into the environment whether a store speaks HTTP without TLS."""
    is_http = any(os.environ.get(name, "").lower() in ("1", "true") for name in _ALLOW_HTTP)
    return {"timeout": _TIMEOUT, "connect_timeout": timedelta(seconds=5), "allow_http": is_http}


class FolderStore:
    """Objects as files, readable by the gateway's account alone."""

    def __init__(self, folder: Path) -> None:
        from obstore.store import LocalStore

        self._folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _verify_private(folder)
            (folder / _INCOMING).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SettingInvalid(
                f"the folder of blobs {folder} cannot be used",
                expected="a folder in which the gateway's account may make files",
                found=error.strerror,
                remedy="Let this account write there, or name another place in [blobs] url.",
            ) from None
        self._store = LocalStore(folder)

    async def write(self, path: str, pieces: AsyncIterator[bytes], *, before_visible: BeforeVisible) -> None:
        aside = f"{_INCOMING}/{secrets.token_hex(16)}"
        with _told_as_ours(is_write=True):
            try:
                await self._store.put_async(aside, pieces, chunk_size=BLOB_PIECE_BYTES, max_concurrency=1)
                await asyncio.to_thread(_make_durable, self._folder / aside)
                await before_visible()
                await asyncio.to_thread(_move, self._folder, aside, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(self._folder / aside)
                raise

    async def read(self, path: str, *, start: int, length: int) -> bytes:
        return await _read(self._store, path, start, length)

    async def delete(self, path: str) -> None:
        await _delete(self._store, path)
        with _told_as_ours(), suppress(FileNotFoundError):
            await asyncio.to_thread(_sync_folder, (self._folder / path).parent)

    async def sweep(self, *, older_than_ms: int) -> None:
        with _told_as_ours():
            await asyncio.to_thread(_sweep, self._folder / _INCOMING, time.time() - older_than_ms / 1000)


class BucketStore:
    """Objects in a store that shows them when they are whole."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    async def write(self, path: str, pieces: AsyncIterator[bytes], *, before_visible: BeforeVisible) -> None:
        with _told_as_ours(is_write=True):
            begun, is_whole = await _first_part(pieces)
            if is_whole:  # one request
                await before_visible()
                await self._bucket.put_async(path, begun, use_multipart=False)
                return

            async def all_of_it() -> AsyncIterator[bytes]:
                yield begun
                async for piece in pieces:
                    yield piece
                await before_visible()

            await self._bucket.put_async(
                path, all_of_it(), use_multipart=True, chunk_size=BLOB_PART_BYTES, max_concurrency=BLOB_PARTS_AT_ONCE
            )

    async def read(self, path: str, *, start: int, length: int) -> bytes:
        return await _read(self._bucket, path, start, length)

    async def delete(self, path: str) -> None:
        await _delete(self._bucket, path)

    async def sweep(self, *, older_than_ms: int) -> None:
        """Nothing: parts of uploads that never ended are removed by a lifecycle rule of the bucket."""


async def _first_part(pieces: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """As much as one part holds, and whether that is all."""
    gathered = bytearray()
    async for piece in pieces:
        gathered += piece
        if len(gathered) >= BLOB_PART_BYTES:
            return bytes(gathered), False
    return bytes(gathered), True


async def _read(store: Bucket, path: str, start: int, length: int) -> bytes:
    with _told_as_ours():
        if length == 0:  # there is no range of nothing
            await store.head_async(path)
            return b""
        try:
            return bytes(await store.get_range_async(path, start=start, length=length))
        except Exception:
            # A range beyond the end is an error with some stores and short with others: short it is.
            if (await store.head_async(path))["size"] >= start + length:
                raise
            return b""


async def _delete(store: Bucket, path: str) -> None:
    with _told_as_ours(), suppress(FileNotFoundError):
        await store.delete_async(path)


@contextmanager
def _told_as_ours(*, is_write: bool = False) -> Iterator[None]:
    """Errors of obstore and of the file system as errors of the gateway; whatever else is raised passes."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        if isinstance(error, FileNotFoundError) and not is_write:
            raise BlobNotFound("there is no such object") from None
        said = str(error).partition("\n")[0][:_SAID_CHARS_MAX]  # obstore goes on with its own structures
        raise BlobStoreUnavailable(
            "the object store refused or did not answer", found=f"{type(error).__name__}: {said}"
        ) from None


def _verify_private(folder: Path) -> None:
    """As a folder of keys: what others could have put there, or could read, is not used."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingInvalid(
            f"the folder of blobs {folder} is open to other accounts",
            expected="a folder of the gateway's own account, mode 0700",
            found=f"mode {stat.S_IMODE(found.st_mode):04o} of account {found.st_uid}",
            remedy=f"Look who has used it, then: chmod 700 {folder}",
        )


def _make_durable(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fchmod(descriptor, 0o600)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move(folder: Path, aside: str, path: str) -> None:
    """To its place, durably, with the folders on the way."""
    place = folder / path
    for parent in reversed([*place.relative_to(folder).parents][:-1]):
        try:
            (folder / parent).mkdir(mode=0o700)
        except FileExistsError:
            continue
        _sync_folder((folder / parent).parent)
    os.rename(folder / aside, place)
    _sync_folder(place.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(incoming: Path, before_s: float) -> None:
    for file in incoming.iterdir():
        with suppress(FileNotFoundError):  # it has ended meanwhile
            if file.stat().st_mtime < before_s:
                file.unlink()
