"""Blobs on a real database and a folder, with a clock whose waiting is only noted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.clock import SystemClock
from app.connectors.blobs import FolderStore
from app.core.digest import Digest, digest_of_bytes
from app.domain.runs.blobs import Blobs, blob_path
from app.postgres.blobs import PostgresBlobRows
from app.postgres.sessions import Sessions
from tests.conftest import Admin


class HastyClock(SystemClock):
    """Waiting takes no time, but time is over after it."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_ms = 0.0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.slept_ms

    async def sleep(self, seconds: float) -> None:
        self.slept_ms += 1000 * seconds


class WatchedStore:
    """An object store that counts, and stops where a test wants."""

    def __init__(self, inner: FolderStore) -> None:
        self._inner = inner
        self.written: list[str] = []
        self.deleted: list[str] = []
        self.at_delete: Callable[[str], Awaitable[None]] | None = None  # before it
        self.at_written: Callable[[], Awaitable[None]] | None = None  # it is visible, and nobody knows
        self.after_delete: Callable[[str], Awaitable[None]] | None = None

    async def write(
        self, path: str, pieces: AsyncIterator[bytes], *, before_visible: Callable[[], Awaitable[None]]
    ) -> None:
        await self._inner.write(path, pieces, before_visible=before_visible)
        self.written.append(path)
        if self.at_written is not None:
            await self.at_written()

    async def read(self, path: str, *, start: int, length: int) -> bytes:
        return await self._inner.read(path, start=start, length=length)

    async def delete(self, path: str) -> None:
        if self.at_delete is not None:
            await self.at_delete(path)
        await self._inner.delete(path)
        self.deleted.append(path)
        if self.after_delete is not None:
            await self.after_delete(path)

    async def sweep(self, *, older_than_ms: int) -> None:
        await self._inner.sweep(older_than_ms=older_than_ms)


@dataclass
class Shelf:
    """Blobs, and how a test looks at them."""

    blobs: Blobs
    objects: WatchedStore
    rows: PostgresBlobRows
    folder: Path
    admin: Admin

    def again(self, **changed: int) -> Blobs:
        """Another gateway on the same store. `idle_ms` and `retry_ms` are of its collection."""
        return Blobs(self.rows, self.objects, HastyClock(), **changed)

    async def put(self, data: bytes, *, tenant: str = "default") -> Digest:
        sha256 = digest_of_bytes(data)
        assert (await self.blobs.put(tenant, sha256, pieces_of(data)))[0] == len(data)
        return sha256

    async def states(self) -> dict[Digest, str]:
        rows = await self.admin.fetch("SELECT encode(sha256, 'hex') AS sha256, state FROM tga.blobs")
        return {Digest(row["sha256"]): row["state"] for row in rows}

    def file(self, sha256: Digest, *, tenant: str = "default") -> Path:
        return self.folder / blob_path(tenant, sha256)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*") if path.is_file())


async def pieces_of(data: bytes, *, size: int = 65_536) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.fixture
def shelf(sessions: Sessions, admin: Admin, tmp_path: Path) -> Shelf:
    objects, rows = WatchedStore(FolderStore(tmp_path / "blobs")), PostgresBlobRows(sessions)
    blobs = Blobs(rows, objects, HastyClock(), size_bytes_max=32 * 1024 * 1024)
    return Shelf(blobs, objects, rows, tmp_path / "blobs", admin)
