"""A session that hears what is announced on one channel, and comes back after it was lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import asyncpg

from app.core.errors import TgaError
from app.core.limits import BACKOFF_FIRST_MS, LISTENER_BEAT_MS, RECONNECT_MAX_MS
from app.postgres.sessions import GATEWAY_ROLE, LOST, Closing, connect, unavailable


class Listener(Closing):
    """LISTEN on a session of its own.

    `heard` is called with each payload. `changed` is called whenever `is_live` has changed: what was announced while
    it was not live was missed, so whatever rests on having heard everything must be thrown away then. A connection
    that is dead without a word is noticed after two beats.
    """

    def __init__(self, url: str, channel: str, *, heard: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._url = url
        self._channel = channel
        self._heard = heard
        self._changed = changed
        self._session: asyncpg.Connection[asyncpg.Record] | None = None
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_live(self) -> bool:
        return self._session is not None and not self._session.is_closed()

    async def open(self) -> Self:
        """Listening when this returns; StoreUnavailable if the first session cannot be had."""
        await self._listen()
        self._keeping = asyncio.create_task(self._keep(), name=f"listen {self._channel}")
        return self

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping
        session, self._session = self._session, None
        if session is not None:
            session.remove_termination_listener(self._on_terminated)
            try:
                await session.close(timeout=5.0)
            except (*LOST, asyncpg.PostgresError):
                session.terminate()
            self._changed()

    async def _listen(self) -> None:
        session = await connect(self._url, role=GATEWAY_ROLE)
        try:
            await session.add_listener(self._channel, self._on_notice)
        except (*LOST, asyncpg.PostgresError) as error:
            session.terminate()
            raise unavailable(error) from error
        except BaseException:
            session.terminate()
            raise
        self._lost.clear()
        session.add_termination_listener(self._on_terminated)
        self._session = session
        self._changed()

    async def _keep(self) -> None:
        wait_ms = BACKOFF_FIRST_MS
        while True:
            await self._until_lost()
            try:
                await self._listen()
                wait_ms = BACKOFF_FIRST_MS
            except TgaError:
                # Spread, so that all gateways do not come back in the same instant.
                await asyncio.sleep(wait_ms / 1000 * (0.5 + random.random() / 2))  # noqa: S311
                wait_ms = min(2 * wait_ms, RECONNECT_MAX_MS)

    async def _until_lost(self) -> None:
        while self._session is not None:
            try:
                await asyncio.wait_for(self._lost.wait(), LISTENER_BEAT_MS / 1000)
                return
            except TimeoutError:
                pass
            session = self._session
            try:
                await session.fetchval("SELECT 1", timeout=LISTENER_BEAT_MS / 1000)
            except (*LOST, asyncpg.PostgresError):
                session.terminate()
                self._on_terminated(session)

    def _on_notice(self, _session: Any, _pid: int, _channel: str, payload: object) -> None:
        self._heard(str(payload))

    def _on_terminated(self, session: Any) -> None:
        if session is self._session:  # not an earlier one whose end is told late
            self._session = None
            self._lost.set()
            self._changed()
