"""The StreamOwner of executors: a session whose lock says that this process lives, replaced when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from app.core.errors import StoreUnavailable, TgaError
from app.core.limits import BACKOFF_FIRST_MS, LOCK_TIMEOUT_MS, OWNER_BEAT_MS, RECONNECT_MAX_MS
from app.postgres.ownership import Executor, acquire_stream, release_stream
from app.postgres.sessions import Closing, Sessions


class PostgresOwner(Closing):
    """Owns streams of every kind as one executor. Keeps the executor's own session, and replaces it when it is lost."""

    def __init__(
        self, sessions: Sessions, executor: Executor, url: str, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS
    ) -> None:
        # Set here for good.
        self._sessions = sessions
        self._url = url
        self._lock_timeout_ms = lock_timeout_ms
        self._beat = asyncio.get_running_loop().create_task(self._keep_asking())
        # Replaced by the keeper, the task that is started when the executor's session is lost.
        self._executor = executor
        self._keeper: asyncio.Task[None] | None = None
        executor.on_lost(self._replace_executor)

    @classmethod
    async def open(cls, sessions: Sessions, url: str) -> Self:
        return cls(sessions, await Executor.open(url), url)

    async def close(self) -> None:
        """Give up the executor id: every stream it still owns is free at once."""
        self._beat.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
        await self._executor.close()

    def executor_id(self) -> str:
        if self._executor.is_lost():
            raise StoreUnavailable("the executor's own session is lost; a new one is being opened")
        if self._executor.is_overdue():
            raise StoreUnavailable("the executor's own session does not answer; what it owns may be another's by now")
        return self._executor.executor_id

    def incarnation(self) -> str:
        """Of the database, as it was when the executor's session began: the session does not outlive it."""
        return self._executor.incarnation

    async def is_alive(self, executor_id: str) -> bool:
        executor = self._executor
        if executor.executor_id != executor_id or executor.is_lost():
            return False
        try:
            await executor.verify()
        except StoreUnavailable:
            return False
        return True

    async def acquire(self, stream: str) -> str:
        executor_id = self.executor_id()
        await acquire_stream(self._sessions, stream, executor_id, lock_timeout_ms=self._lock_timeout_ms)
        return executor_id

    async def release(self, stream: str, executor_id: str) -> None:
        await release_stream(self._sessions, stream, executor_id, lock_timeout_ms=self._lock_timeout_ms)

    async def list_recoverable(self, kind: str, *, after: str | None, limit: int) -> list[str]:
        rows = await self._sessions.commit(
            "SELECT stream FROM tga.recoverable($1, $2::uuid, $3, $4) AS stream",
            kind,
            self.executor_id(),
            after,
            limit,
        )
        return [row["stream"] for row in rows]

    async def _keep_asking(self) -> None:
        """Notice that the session is lost before PostgreSQL gives it up, also where the network does not say so."""
        while True:
            await asyncio.sleep(OWNER_BEAT_MS / 1000)
            if not self._executor.is_lost():
                with contextlib.suppress(StoreUnavailable):  # being lost, it is replaced
                    await self._executor.verify()

    def _replace_executor(self) -> None:
        self._keeper = asyncio.get_running_loop().create_task(self._open_executor())

    async def _open_executor(self) -> None:
        delay_ms = BACKOFF_FIRST_MS
        while True:
            try:
                self._executor = await Executor.open(self._url)
                self._executor.on_lost(self._replace_executor)
                if not self._executor.is_lost():  # it may have been, before anyone listened
                    return
            except TgaError:
                await asyncio.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, RECONNECT_MAX_MS)
