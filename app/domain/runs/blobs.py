"""Blobs: large values by their SHA-256, outside the ledger. A journal's entry names a blob; the blob is stored before.

The bytes stand in an object store, and who has them and what refers to them in rows beside the ledger. The order makes
every crash harmless:

- An upload is hashed while it arrives. Only whole and right bytes get a row (`coming`), then become visible as an
  object, then the row says `stored`. A crash leaves no object without a row.
- An entry refers to a blob in the transaction that appends it (`Plan.blobs`), and only to one that is `stored`.
- Collection marks rows `going` that were long untouched and that no entry refers to, deletes the object, then the row.
  An upload of the same bytes waits for that. A crash in between leaves a row `going`, which is taken up again.

What is read is verified first: bytes that do not hash to their digest are never served, nor part of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, NamedTuple, Protocol

from app.core.digest import Digest
from app.core.errors import BlobDamaged, BlobGoing, BlobMismatch, BlobNotFound, InputTooLarge, TgaError
from app.core.limits import (
    BLOB_BYTES_DEFAULT,
    BLOB_DELETE_WITHIN_MS,
    BLOB_GOING_WAIT_MS,
    BLOB_IDLE_MS,
    BLOB_RANGE_BYTES,
    BLOB_RETRY_MS,
    BLOBS_COLLECTED_AT_ONCE,
)
from app.domain.clock import Clock

_GOING_POLL_S: Final = 0.05
_UNSAFE: Final = re.compile(r"[^a-z0-9_-]")
_SEGMENT_CHARS_MAX: Final = 200  # file systems take 255 bytes


class FoundBlob(NamedTuple):
    """What the rows know of a blob that is there, or going."""

    state: str
    size_bytes: int


class TakenBlob(NamedTuple):
    """A blob whose object is to be deleted; `taken_at` tells this taker from the next."""

    tenant: str
    sha256: Digest
    taken_at: object


class BlobRows(Protocol):
    """Which blobs there are, and what refers to them."""

    async def touch(self, tenant: str, sha256: Digest) -> FoundBlob | None:
        """What is there of it, stored or going. One that is stored is kept from now on as long as a fresh one."""
        ...

    async def begin(self, tenant: str, sha256: Digest, size_bytes: int) -> bool:
        """Its object is about to become visible. False: it is going."""
        ...

    async def end(self, tenant: str, sha256: Digest) -> bool:
        """Its object is durable. False: it was collected meanwhile."""
        ...

    async def find(self, tenant: str, sha256: Digest) -> int | None:
        """The size of one that entries can refer to."""
        ...

    async def take_idle(self, *, idle_ms: int, retry_ms: int, at_most: int) -> Sequence[TakenBlob]:
        """Mark as going what is long untouched and unreferred, and take up what another began long ago."""
        ...

    async def forget(self, taken: Sequence[TakenBlob]) -> None:
        """Their objects are deleted."""
        ...


class ObjectStore(Protocol):
    """Bytes under a path. Raises BlobStoreUnavailable when it cannot be used."""

    async def write(
        self, path: str, pieces: AsyncIterator[bytes], *, before_visible: Callable[[], Awaitable[None]]
    ) -> None:
        """All of it or nothing, durable when this returns. `before_visible` runs when the last piece has come and
        nothing can be seen yet. What `pieces` or `before_visible` raises leaves nothing behind."""
        ...

    async def read(self, path: str, *, start: int, length: int) -> bytes:
        """Up to so many bytes from there; BlobNotFound when there is no object."""
        ...

    async def delete(self, path: str) -> None:
        """Gone when this returns, or it was not there."""
        ...

    async def sweep(self, *, older_than_ms: int) -> None:
        """Remove what uploads have left that never ended."""
        ...


def blob_path(tenant: str, sha256: Digest) -> str:
    """Where the blob's object stands. Two tenants never share a folder, also where case makes no difference, and no
    tenant's name leads out of its own."""
    return f"{_segment(tenant)}/sha256/{sha256[:2]}/{sha256}"


def _segment(tenant: str) -> str:
    written = _UNSAFE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), tenant)
    if len(written) <= _SEGMENT_CHARS_MAX and written:
        return written
    return "~" + hashlib.sha256(tenant.encode()).hexdigest()  # no other name begins so


class BlobContent:
    """A verified blob: `async for piece in content.pieces()` gives its bytes."""

    def __init__(self, objects: ObjectStore, path: str, sha256: Digest, size_bytes: int, whole: bytes | None) -> None:
        self._objects = objects
        self._path = path
        self._sha256 = sha256
        self._whole = whole
        self.size_bytes = size_bytes

    async def pieces(self) -> AsyncIterator[bytes]:
        """Read again, and hashed again: the last piece comes only if all of them are right, else BlobDamaged."""
        if self._whole is not None:
            yield self._whole
            return
        hashed, held = hashlib.sha256(), b""
        for start in range(0, self.size_bytes, BLOB_RANGE_BYTES):
            if held:
                yield held
            held = await _range(self._objects, self._path, start, self.size_bytes)
            hashed.update(held)
        if hashed.hexdigest() != self._sha256:
            raise _damaged(self._sha256, hashed.hexdigest())
        yield held


class Blobs:
    """Blobs of every tenant, on rows and an object store."""

    def __init__(
        self,
        rows: BlobRows,
        objects: ObjectStore,
        clock: Clock,
        *,
        size_bytes_max: int = BLOB_BYTES_DEFAULT,
        idle_ms: int = BLOB_IDLE_MS,
        retry_ms: int = BLOB_RETRY_MS,
    ) -> None:
        self._rows = rows
        self._objects = objects
        self._clock = clock
        self._idle_ms = idle_ms
        self._retry_ms = retry_ms
        self.size_bytes_max = size_bytes_max

    async def put(
        self, tenant: str, sha256: Digest, pieces: AsyncIterator[bytes], *, stated_bytes: int | None = None
    ) -> tuple[int, bool]:
        """Store bytes under their digest; their size, and whether they are new. An entry can refer to them when this
        returns, and for a day at least.

        Reads at most `size_bytes_max`, or as much as was stated: InputTooLarge. BlobMismatch when the bytes hash to
        something else; BlobGoing when the same blob is being deleted. Then nothing is stored.
        """
        if stated_bytes is not None and stated_bytes > self.size_bytes_max:
            raise _too_large(self.size_bytes_max, stated_bytes)
        is_stored = await self._is_stored(tenant, sha256)
        upload = _Upload(sha256, self.size_bytes_max if stated_bytes is None else stated_bytes)
        if is_stored:  # read all the same: who sends other bytes is told
            async for _ in upload.verified(pieces):
                pass
            return upload.size_bytes, False

        async def begin() -> None:
            if not await self._rows.begin(tenant, sha256, upload.size_bytes):
                raise _going(sha256)

        await self._objects.write(blob_path(tenant, sha256), upload.verified(pieces), before_visible=begin)
        if not await self._rows.end(tenant, sha256):
            raise _going(sha256)
        return upload.size_bytes, True

    async def find(self, tenant: str, sha256: Digest) -> int:
        """Its size; BlobNotFound when no entry of the tenant could refer to it."""
        size_bytes = await self._rows.find(tenant, sha256)
        if size_bytes is None:
            raise BlobNotFound("no such blob", found=sha256)
        return size_bytes

    async def open(self, tenant: str, sha256: Digest) -> BlobContent:
        """The blob, once all of it was read and found to be right. BlobNotFound, or BlobDamaged."""
        size_bytes, path = await self.find(tenant, sha256), blob_path(tenant, sha256)
        hashed, piece = hashlib.sha256(), b""
        for start in range(0, size_bytes, BLOB_RANGE_BYTES):
            piece = await _range(self._objects, path, start, size_bytes)
            hashed.update(piece)
        if size_bytes == 0:
            await _range(self._objects, path, 0, 0)
        if hashed.hexdigest() != sha256:
            raise _damaged(sha256, hashed.hexdigest())
        whole = piece if size_bytes <= BLOB_RANGE_BYTES else None
        return BlobContent(self._objects, path, sha256, size_bytes, whole)

    async def read(self, tenant: str, sha256: Digest, *, bytes_max: int) -> bytes:
        """All of it, verified; InputTooLarge when it is larger than its reader takes."""
        size_bytes = await self.find(tenant, sha256)
        if size_bytes > bytes_max:
            raise _too_large(bytes_max, size_bytes)
        content = await self.open(tenant, sha256)
        return b"".join([piece async for piece in content.pieces()])

    async def collect(self) -> int:
        """Delete what is long unused, some at a time; how many went. Gateways take turns.

        A deletion whose answer is late is left to be begun again: what is forgotten is certainly deleted, and no
        request that could delete a newer object under the same name is under way any more.
        """
        began_ms = self._clock.monotonic_ms()
        taken = await self._rows.take_idle(
            idle_ms=self._idle_ms, retry_ms=self._retry_ms, at_most=BLOBS_COLLECTED_AT_ONCE
        )
        deleted: list[TakenBlob] = []
        failure: TgaError | None = None
        for blob in taken:
            if self._clock.monotonic_ms() - began_ms > BLOB_DELETE_WITHIN_MS:
                break
            try:
                await self._objects.delete(blob_path(blob.tenant, blob.sha256))
                deleted.append(blob)
            except TgaError as error:
                failure = error
        if deleted:
            await self._rows.forget(deleted)
        await self._objects.sweep(older_than_ms=BLOB_IDLE_MS)
        if failure is not None:
            raise failure
        return len(deleted)

    async def _is_stored(self, tenant: str, sha256: Digest) -> bool:
        """Whether its bytes are there. While they are being deleted, wait a little."""
        until_ms = self._clock.monotonic_ms() + BLOB_GOING_WAIT_MS
        while (found := await self._rows.touch(tenant, sha256)) is not None:
            if found.state != "going":
                return True
            if self._clock.monotonic_ms() >= until_ms:
                raise _going(sha256)
            await self._clock.sleep(_GOING_POLL_S)
        return False


class _Upload:
    """Bytes on their way in, counted and hashed."""

    def __init__(self, sha256: Digest, bytes_max: int) -> None:
        self._sha256 = sha256
        self._bytes_max = bytes_max
        self._hashed = hashlib.sha256()
        self.size_bytes = 0

    async def verified(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            self.size_bytes += len(piece)
            if self.size_bytes > self._bytes_max:
                raise _too_large(self._bytes_max, None)
            self._hashed.update(piece)
            if piece:
                yield piece
        if self._hashed.hexdigest() != self._sha256:
            raise BlobMismatch(
                "the bytes are not those of this digest", expected=self._sha256, found=self._hashed.hexdigest()
            )


async def _range(objects: ObjectStore, path: str, start: int, size_bytes: int) -> bytes:
    length = min(BLOB_RANGE_BYTES, size_bytes - start)
    try:
        piece = await objects.read(path, start=start, length=length)
    except BlobNotFound:
        raise BlobDamaged("the blob's object is missing", expected=path) from None
    if len(piece) != length:
        raise BlobDamaged("the blob's object is too short", expected=f"{size_bytes} bytes", found=start + len(piece))
    return piece


def _damaged(sha256: Digest, found: str) -> BlobDamaged:
    return BlobDamaged("the stored bytes are not those of this digest", expected=sha256, found=found)


def _going(sha256: Digest) -> BlobGoing:
    return BlobGoing("the blob is being deleted", found=sha256)


def _too_large(bytes_max: int, found: int | None) -> InputTooLarge:
    return InputTooLarge("the blob is too large", expected=f"at most {bytes_max} bytes", found=found)
