"""Which reader is next: only so many read at once, and principals take turns, so that readers never delay calls.

Readers share the database's sessions and the one event loop with calls, decisions and recovery. Those do not pass here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

from app.core.errors import GatewayBusy
from app.core.limits import READ_PAUSE_MS_MAX, READ_PAUSE_TIMES, READ_WAIT_MS, READS_AT_ONCE_MAX
from app.postgres.sessions import Connection, Record, Sessions

# The principal, set when its request is admitted. Work for all readers together has none, and takes a turn of its own.
reader: ContextVar[tuple[str, str] | None] = ContextVar("reader", default=None)


class ReadScheduler:
    """Places for readers. Principals that wait are served in turn; the requests of one principal in order."""

    def __init__(self, at_once: int = READS_AT_ONCE_MAX, *, wait_ms: int = READ_WAIT_MS) -> None:
        self._wait_s = wait_ms / 1000  # set here for good
        self._free = at_once  # places: taken by `taken`, freed by `_pass_on` when no reader waits
        self._calls = 0  # calls that are being answered: counted by `behind`
        # By principal, the next one first: `_turn` adds, `_pass_on` removes.
        self._waiting: OrderedDict[tuple[str, str] | None, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """A place, for as long as one query takes; GatewayBusy when none is had in time."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._turn()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            if self._calls and self._waiting:
                # Pause first: leave the processor to the calls that are being answered.
                pause_s = min(READ_PAUSE_TIMES * (loop.time() - began), READ_PAUSE_MS_MAX / 1000)
                loop.call_later(pause_s, self._pass_on)
            else:
                self._pass_on()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """While a call is being answered readers pause between their turns."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    @property
    def has_calls(self) -> bool:
        """Whether calls are being answered now."""
        return self._calls > 0

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(reader.get(), deque()).append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the place was given in the moment that the wait ended
            if isinstance(error, TimeoutError):
                raise GatewayBusy("too many are reading", expected=f"a turn within {self._wait_s:g} s") from None
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            whose, line = self._waiting.popitem(last=False)
            turn = line.popleft()
            if line:
                self._waiting[whose] = line  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class ReadingSessions(Sessions):
    """The same sessions, each used in turn. Closing them is their owner's business."""

    def __init__(self, sessions: Sessions, read_scheduler: ReadScheduler) -> None:
        self._sessions = sessions
        self._read_scheduler = read_scheduler

    async def close(self) -> None:
        return None

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        async with self._read_scheduler.taken(), self._sessions.reading() as connection:
            yield connection

    async def fetch(self, statement: str, *arguments: Any) -> list[Record]:
        async with self._read_scheduler.taken():
            return await self._sessions.fetch(statement, *arguments)

    async def fetch_page(self, statement: str, *arguments: Any) -> list[Record]:
        async with self._read_scheduler.taken():
            return await self._sessions.fetch_page(statement, *arguments)

    async def fetch_in_order(self, statement: str, *arguments: Any) -> list[Record]:
        async with self._read_scheduler.taken():
            return await self._sessions.fetch_in_order(statement, *arguments)

    async def commit(self, statement: str, *arguments: Any) -> list[Record]:
        raise RuntimeError("what only reads commits nothing")
