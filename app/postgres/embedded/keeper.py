"""Keep the embedded server running beside a living process: when it ends, whatever ended it, it is started again.

Sessions that were lost with it come back by themselves, as after every loss of a connection: the executor takes a new
id, listeners listen again, the sequencer takes over, and what was in flight is settled. Only the server is brought back
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time

from app.core.errors import EmbeddedPostgresFailed, StoreUnavailable, TgaError
from app.core.limits import (
    EMBEDDED_LOOK_MS,
    EMBEDDED_PAUSE_FIRST_MS,
    EMBEDDED_PAUSE_MAX_MS,
    EMBEDDED_STEADY_MS,
)
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.sessions import Closing

logger = logging.getLogger("tga")


class ServerKeeper(Closing):
    """Notices the server's end at once (within a second where the system has no pidfd) and starts it again.

    A server that had stayed up for a while is started again at once; one that ends again and again after pauses that
    double, up to a bound. It is never given up: without its store a gateway can do nothing else. `fault` says so
    meanwhile.
    """

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self._fault: TgaError | None = None
        self._ends_in_a_row = 0
        # Runs in a thread, which cannot be cancelled: `close` waits for it.
        self._starting: asyncio.Future[None] | None = None
        self._keeping = asyncio.create_task(self._keep(), name="embedded PostgreSQL")

    @property
    def fault(self) -> TgaError | None:
        """StoreUnavailable from the server's end until it answers again."""
        return self._fault

    async def close(self) -> None:
        """Stop keeping. A start that was under way has ended when this returns: what it started can be stopped."""
        self._keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._keeping
        if self._starting is not None:
            with contextlib.suppress(TgaError):
                await self._starting

    async def _keep(self) -> None:
        while True:
            began = time.monotonic()
            try:
                pid = await self._until_it_ends()
            except EmbeddedPostgresFailed as error:  # its files cannot be read: that says nothing about the server
                logger.warning("the embedded PostgreSQL cannot be watched: %s", error)
                await asyncio.sleep(EMBEDDED_PAUSE_MAX_MS / 1000)
                continue
            lived_ms = (time.monotonic() - began) * 1000
            self._ends_in_a_row = 1 if lived_ms >= EMBEDDED_STEADY_MS else self._ends_in_a_row + 1
            await self._start_again(pid)

    async def _start_again(self, pid: int | None) -> None:
        while True:
            pause_ms = _pause_ms(self._ends_in_a_row)
            when = f"in {pause_ms / 1000:g} s" if pause_ms else "now"
            often = f", the {self._ends_in_a_row}. time in a row" if self._ends_in_a_row > 1 else ""
            what = f"the embedded PostgreSQL ended{often}; it is started again {when}"
            self._fault = StoreUnavailable(
                what, remedy=f"Wait a few seconds and ask again. What it said last is in {self._server.log_file}."
            )
            logger.warning("%s (process %s)", what, pid)
            await asyncio.sleep(pause_ms / 1000)
            self._starting = asyncio.ensure_future(asyncio.to_thread(self._server.start))
            try:
                await asyncio.shield(self._starting)
            except EmbeddedPostgresFailed as error:
                logger.error("the embedded PostgreSQL could not be started again: %s", error)
                self._ends_in_a_row += 1
                continue
            self._starting, self._fault = None, None
            logger.warning("the embedded PostgreSQL runs again")
            return

    async def _until_it_ends(self) -> int | None:
        """The process id that it had; None if it was gone before it could be seen."""
        pid = await asyncio.to_thread(self._server.postmaster_pid)
        if pid is None:
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return pid
        except (AttributeError, OSError):  # another system, an old kernel, or a filter that knows no pidfd
            while await asyncio.to_thread(self._server.postmaster_pid) == pid:  # noqa: ASYNC110
                await asyncio.sleep(EMBEDDED_LOOK_MS / 1000)
            return pid
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            # It may have ended, and its number gone to another process, before the descriptor was opened.
            if await asyncio.to_thread(self._server.postmaster_pid) == pid:
                await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return pid


def _pause_ms(ends_in_a_row: int) -> int:
    if ends_in_a_row <= 1:
        return 0
    return int(min(EMBEDDED_PAUSE_FIRST_MS * 2 ** min(ends_in_a_row - 2, 16), EMBEDDED_PAUSE_MAX_MS))
