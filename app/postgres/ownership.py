"""Who executes which stream (I6), without a lease clock.

An executor holds one session-level advisory lock on its own id, on a session kept for that alone. A stream's head
names its owner. An executor that wants the stream asks PostgreSQL whether the owner's lock is still held: a dead
process has lost its session, and its streams are free at once; a living one is never robbed.
"""

from __future__ import annotations

import asyncio
import math
import select
import time
from collections.abc import Callable
from typing import Self

import asyncpg
import uuid_utils

from app.core.errors import ConcurrentExecution, SchemaViolation, StoreUnavailable, StoreUnfit
from app.core.limits import LOCK_TIMEOUT_MS, OWNER_OVERDUE_MS
from app.postgres.sessions import GATEWAY_ROLE, LOST, Closing, Sessions, connect, unavailable

_HOLD = "SELECT pg_try_advisory_lock(tga.executor_lock_key($1))"
_STILL_HELD = """
SELECT pg_backend_pid() AS backend_pid, EXISTS (
    SELECT FROM pg_locks
     WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND mode = 'ExclusiveLock' AND granted AND objsubid = 1
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
       AND (classid::bigint << 32 | objid::bigint) = tga.executor_lock_key($1)) AS is_held
"""


# The same for as long as nothing that was committed is lost: another cluster, another database of it (a restored one),
# or another timeline (a standby that was promoted, a point in time that was recovered) is another incarnation.
_INCARNATION = """
SELECT concat_ws('/', tga.cluster_identifier(), (SELECT oid FROM pg_database WHERE datname = current_database()),
                 left(pg_walfile_name(pg_current_wal_lsn()), 8))
"""


class Executor(Closing):
    """This process's right to own streams: an id, and the session whose life is the id's life.

    When the session is lost the id is dead, and so is every ownership under it: open another. Ownership says who may
    act; the fence in the append function says who acted in time.
    """

    def __init__(
        self, session: asyncpg.Connection[asyncpg.Record], executor_id: str, backend_pid: int, incarnation: str
    ) -> None:
        # Set here for good.
        self.executor_id = executor_id
        self.incarnation = incarnation
        self._session = session
        self._backend_pid = backend_pid
        self._cut = _cut_detector(session)
        self._is_closing = False  # set by `close`: then the session's end is no loss
        # Questions to the server whether the lock is held: the one under way, since when, and the one after it.
        self._asking: asyncio.Task[str | None] | None = None
        self._asked_at = math.inf
        self._asked_next: asyncio.Task[str | None] | None = None

    @classmethod
    async def open(cls, url: str) -> Self:
        """A new executor; StoreUnfit behind a proxy that shares sessions between clients."""
        session = await connect(url, role=GATEWAY_ROLE)
        executor_id = str(uuid_utils.uuid7())
        try:
            held = await session.fetchval(_HOLD, executor_id)
            row = await session.fetchrow(_STILL_HELD, executor_id)
            incarnation = await session.fetchval(_INCARNATION)
        except (*LOST, asyncpg.PostgresError) as error:
            session.terminate()
            raise unavailable(error) from error
        backend_pid = session.get_server_pid()
        if not held or row is None or not row["is_held"] or row["backend_pid"] != backend_pid:
            session.terminate()
            raise StoreUnfit(
                "the session is not one backend's for its whole life",
                expected=f"backend {backend_pid}, holding its lock",
                found=None if row is None else f"backend {row['backend_pid']}",
                remedy="Connect to PostgreSQL directly, or through a proxy in session mode.",
            )
        return cls(session, executor_id, backend_pid, incarnation)

    async def verify(self) -> None:
        """Raise StoreUnavailable unless the session lives, is the same backend, and still holds its lock.

        Then it has held it without a break since it was opened, and no other executor has taken a stream of this one's.
        If not, or if the server does not answer at all, the session is given up, and the id with it.
        """
        found = await asyncio.shield(self._question())
        if found is not None:
            raise StoreUnavailable(
                "the executor's own session is lost, and with it every ownership",
                expected=f"backend {self._backend_pid}, holding its lock",
                found=found,
                remedy="Open a new executor and acquire the traces again.",
            )

    def is_lost(self) -> bool:
        """Whether the session is known to be gone, to us or to the kernel; only `verify` asks the server."""
        return self._session.is_closed() or self._cut()

    def is_overdue(self) -> bool:
        """Whether an answer to `verify` should have come by now: perhaps the server has given up this session, and the
        network does not say so."""
        return time.monotonic() - self._asked_at > OWNER_OVERDUE_MS / 1000

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call back once when the session ends without having been closed by us."""

        def lost(_: object) -> None:
            if not self._is_closing:
                callback()

        self._session.add_termination_listener(lost)

    async def close(self) -> None:
        """Give the id up: every stream it still owns is free at once."""
        self._is_closing = True
        try:
            await self._session.close(timeout=5.0)
        except (*LOST, asyncpg.PostgresError):
            self._session.terminate()

    def terminate(self) -> None:
        self._is_closing = True
        self._session.terminate()

    def _question(self) -> asyncio.Task[str | None]:
        """One that is not asked yet. While one is under way, which is older, all who come share the next."""
        if self._asking is None and self._asked_next is None:
            self._asking = asyncio.create_task(self._ask())
            return self._asking
        if self._asked_next is None:
            self._asked_next = asyncio.create_task(self._ask_after(self._asking))
        return self._asked_next

    async def _ask(self) -> str | None:
        """None: the lock is held. Otherwise what is wrong, and the session is ended."""
        self._asked_at = time.monotonic()
        try:
            row = await self._session.fetchrow(_STILL_HELD, self.executor_id)
        except (*LOST, asyncpg.PostgresError) as error:
            found = f"{type(error).__name__}: {error}"
        else:
            if row is not None and row["is_held"] and row["backend_pid"] == self._backend_pid:
                return None
            found = "another backend, or the lock is gone"
        finally:
            self._asking, self._asked_at = None, math.inf
        self._session.terminate()
        return found

    async def _ask_after(self, before: asyncio.Task[str | None] | None) -> str | None:
        if before is not None:
            await asyncio.wait({before})
        self._asking, self._asked_next = self._asked_next, None
        return await self._ask()


def _cut_detector(session: asyncpg.Connection[asyncpg.Record]) -> Callable[[], bool]:
    """Tells whether the server has ended the connection, as the kernel knows it: the event loop may not have come to
    read that yet. Costs one system call. Where asyncpg does not show its socket: never."""
    transport: asyncio.Transport | None = getattr(session, "_transport", None)  # nothing public has it
    connection = None if transport is None else transport.get_extra_info("socket")
    if transport is None or connection is None:
        return lambda: False
    ended = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
    poll = select.poll()
    poll.register(connection.fileno(), ended)
    # A number that is no longer this connection's must not be looked at.
    return lambda: transport.is_closing() or bool(poll.poll(0))


async def acquire_stream(
    sessions: Sessions, stream: str, executor_id: str, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS
) -> str | None:
    """Become the stream's owner; returns the dead owner it was taken from, if any.

    ConcurrentExecution when a living executor owns it; LockAcquireFailed when its lock was not obtained in time.
    """
    (row,) = await sessions.commit("SELECT * FROM tga.acquire($1, $2, $3::uuid)", lock_timeout_ms, stream, executor_id)
    if row["taken"]:
        return None if row["taken_from"] is None else str(row["taken_from"])
    if row["owned_by"] is None:
        raise SchemaViolation("no such kind of stream", found=stream)
    raise ConcurrentExecution("a living executor owns the stream", found=row["owned_by"], stream=stream)


async def release_stream(
    sessions: Sessions, stream: str, executor_id: str, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS
) -> bool:
    """Give the stream back; False when another owns it by now."""
    (row,) = await sessions.commit(
        "SELECT tga.release($1, $2, $3::uuid) AS released", lock_timeout_ms, stream, executor_id
    )
    return bool(row["released"])
