"""A few sessions to one PostgreSQL, and the translation of its errors into ours."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

import asyncpg

from app.core.errors import (
    InputTooLarge,
    LockAcquireFailed,
    OutcomeUnknown,
    SchemaViolation,
    StoreUnavailable,
    StoreUnfit,
    TgaError,
)
from app.core.limits import READ_LOCK_TIMEOUT_MS, WRITER_SESSIONS_MAX
from app.postgres.refusals import unavailable as unavailable

Record: TypeAlias = asyncpg.Record
_Pooled: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | _Pooled"

GATEWAY_ROLE = "tga_gateway"
COMMAND_TIMEOUT_S = 30.0
_AT_HAND_MAX = WRITER_SESSIONS_MAX

# Seconds, not the hours of the default: a partitioned executor must lose its lock while someone still cares.
_SETTINGS = {
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    # The functions refuse a stricter one: its snapshot would be older than their locks.
    "default_transaction_isolation": "read committed",
    "application_name": "tga",
    # Statements here read few rows, and the planner cannot know it (it takes a span for 1,000 leaves): compiling one
    # takes longer than running it a hundred times.
    "jit": "off",
}
# For one transaction.
_GENERIC = "SET LOCAL plan_cache_mode = force_generic_plan"
IN_ORDER = f"{_GENERIC}; SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off"
# InternalClientError: the server said goodbye and asyncpg has not yet noticed that the connection is over.
LOST = (
    OSError,
    asyncio.TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
)


async def connect(url: str, *, role: str | None = None) -> asyncpg.Connection[asyncpg.Record]:
    """A session of its own, as `role` if one is named; StoreUnavailable if it cannot be had."""
    settings = {**_SETTINGS, **({"role": role} if role else {})}
    try:
        return await asyncpg.connect(url, server_settings=settings, timeout=10.0, command_timeout=COMMAND_TIMEOUT_S)
    except (*LOST, asyncpg.PostgresError, ValueError) as error:
        raise unavailable(error, url) from error


class Closing(abc.ABC):
    """What is closed when its `async with` ends."""

    @abc.abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class PoolUse(NamedTuple):
    """Sessions that are in use, open and unused, how many there may be, and who waits for one."""

    used: int
    idle: int
    max: int
    waiting: int


class Sessions(Closing):
    """A pool of sessions in the gateway's role. They hold no state between uses, so nothing is reset on return.

    A few are kept at hand between uses: going through asyncpg's pool takes two tasks, as long as a small commit.
    """

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._pool = pool  # set here for good
        self._at_hand: list[_Pooled] = []  # sessions between two uses that the pool believes to be used
        self._waiting = 0  # callers that the pool keeps waiting: while there are any, none is kept at hand
        self._releasing: set[asyncio.Task[None]] = set()  # on their way back to the pool
        self._is_closing = False  # set by `close`

    @classmethod
    async def open(cls, url: str, *, sessions_max: int = 8) -> Self:
        async def keep(_: object) -> None:
            return None

        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=sessions_max,
                reset=keep,
                command_timeout=COMMAND_TIMEOUT_S,
                timeout=10.0,
                # Functions that write set one of their own.
                server_settings={**_SETTINGS, "role": GATEWAY_ROLE, "lock_timeout": str(READ_LOCK_TIMEOUT_MS)},
            )
        except (*LOST, asyncpg.PostgresError, ValueError) as error:
            raise unavailable(error, url) from error
        return cls(pool)

    @property
    def use(self) -> PoolUse:
        at_hand, pool = len(self._at_hand), self._pool
        idle = pool.get_idle_size() + at_hand
        return PoolUse(used=pool.get_size() - idle, idle=idle, max=pool.get_max_size(), waiting=self._waiting)

    async def close(self) -> None:
        self._is_closing = True  # from here on none is put by, which the pool would wait for
        try:
            while self._at_hand:
                await self._release(self._at_hand.pop())
            await asyncio.wait_for(self._pool.close(), timeout=10.0)
        except (*LOST, asyncpg.PostgresError):
            self._pool.terminate()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        """A session to read with, in one snapshot; whatever goes wrong, nothing was changed."""
        async with self._session() as connection:
            try:
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    yield connection
            except (*LOST, asyncpg.PostgresError) as error:
                raise unavailable(error) from error

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Read with one statement: one snapshot, one round trip."""
        async with self._session() as connection:
            try:
                return await connection.fetch(statement, *arguments)
            except (*LOST, asyncpg.PostgresError) as error:
                raise unavailable(error) from error

    async def fetch_page(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """As `fetch`, by the generic plan, which follows the index as far as the page needs. A plan for these very
        values takes a page for all the rows that it may look at, and sorts them (docs/adr/0059-generic-plans.md)."""
        return await self._fetch_with(_GENERIC, statement, *arguments)

    async def fetch_in_order(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """As `fetch_page`, by an index that gives the order but for rows with the same first part: neither all rows of
        what is asked for are gathered, nor sorted, however few of them PostgreSQL expects."""
        return await self._fetch_with(IN_ORDER, statement, *arguments)

    async def _fetch_with(self, settings: str, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        async with self._session() as connection:
            try:
                async with connection.transaction():
                    await connection.execute(settings)
                    return await connection.fetch(statement, *arguments)
            except (*LOST, asyncpg.PostgresError) as error:
                raise unavailable(error) from error

    async def commit(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run one statement as one transaction; it is durable when this returns.

        OutcomeUnknown when the answer is lost after it was sent: it may have been committed, or may still be.
        """
        async with self._session() as connection:
            try:
                return await connection.fetch(statement, *arguments)
            except (*LOST, asyncpg.PostgresError) as error:
                raise _refused(error) from error

    def _session(self) -> _Session:
        return _Session(self)

    async def _put_by(self, connection: _Pooled) -> None:
        """Keep it at hand, or give it back: a task that waits for one waits at the pool."""
        if self._waiting or self._is_closing or len(self._at_hand) >= _AT_HAND_MAX:
            await self._release(connection)
        else:
            self._at_hand.append(connection)

    def _give_up(self, connection: _Pooled, error: BaseException | None) -> None:
        """What was done with it has failed."""
        if error is not None and isinstance(error.__cause__, asyncpg.InternalClientError):
            connection.terminate()  # it would be handed out again, and fail again
        self._release_later(connection)

    async def _take(self) -> _Pooled:
        while self._at_hand:
            connection = self._at_hand.pop()
            if not _is_lost(connection):
                return connection
            await self._release(connection)
        self._waiting += 1
        try:
            return await self._pool.acquire(timeout=COMMAND_TIMEOUT_S)
        except (*LOST, asyncpg.PostgresError) as error:
            raise unavailable(error) from error
        finally:
            self._waiting -= 1

    def _release_later(self, connection: _Pooled) -> None:
        """A statement that was given up must first be cancelled at the server, which may not answer. A caller that has
        run out of time must not wait for that."""
        releasing = asyncio.get_running_loop().create_task(self._release(connection))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)

    async def _release(self, connection: _Pooled) -> None:
        try:
            await self._pool.release(connection)
        except (*LOST, asyncpg.PostgresError):
            connection.terminate()


class _Session:
    """A session for one use. A class: the loop keeps a book of generators."""

    __slots__ = ("_connection", "_sessions")

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def __aenter__(self) -> Connection:
        self._connection = await self._sessions._take()
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self._sessions._put_by(self._connection)
        else:
            self._sessions._give_up(self._connection, error)


def _is_lost(connection: _Pooled) -> bool:
    try:
        return connection.is_closed()
    except asyncpg.InterfaceError:  # the pool noticed it first, and has taken it back
        return True


def _refused(error: BaseException) -> TgaError:
    """What a failed commit means. An error that the server sent before committing is final; silence is not."""
    if isinstance(error, (*LOST, asyncpg.OperatorInterventionError)):
        return OutcomeUnknown("the commit's answer was lost", found=f"{type(error).__name__}: {error}")
    if isinstance(error, (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)):
        return LockAcquireFailed("the stream's lock was not obtained in time", found=error)
    if isinstance(error, asyncpg.StringDataRightTruncationError):
        return InputTooLarge("a value is beyond what its column holds", found=error)
    if isinstance(error, (asyncpg.DataError, asyncpg.NotNullViolationError)):
        return SchemaViolation("the database cannot read the documents", found=error)
    if isinstance(error, asyncpg.CheckViolationError):
        return InputTooLarge("a value is beyond what its column holds", found=error)
    if isinstance(
        error, (asyncpg.UndefinedFunctionError, asyncpg.InvalidSchemaNameError, asyncpg.InsufficientPrivilegeError)
    ):
        return StoreUnfit(
            "the ledger's functions are missing or not ours to call",
            found=error,
            remedy="Run `tga db migrate`, and `tga db status` to see what is missing.",
        )
    return StoreUnavailable("PostgreSQL refused the commit", found=f"{type(error).__name__}: {error}")
