"""The folds behind the sequencer: what lists, statistics and searches read of calls, and what people did. Off the path
of every call."""

from __future__ import annotations

import asyncio
import time

from app.core.errors import TgaError
from app.core.limits import FOLD_PAUSE_MS_MAX, FOLD_PAUSE_TIMES, FOLD_ROWS_MAX
from app.edge.read_scheduler import ReadScheduler
from app.edge.replays import ReplayCounts
from app.postgres.call_facts import count_replays, drop_old_counts, fold_acts, fold_calls
from app.postgres.sessions import Sessions

_DROP_EVERY_S = 600.0


class CallFolding:
    """One gateway folds at a time, whichever is quicker; the others find nothing to do. While calls are being answered
    here it pauses after each batch for several times as long as the batch took: then statistics lag, and say so."""

    def __init__(
        self, sessions: Sessions, replays: ReplayCounts, calls: ReadScheduler, stopping: asyncio.Event
    ) -> None:
        self._sessions = sessions
        self._replays = replays
        self._calls = calls
        self._stopping = stopping
        self._next_drop = 0.0

    async def once(self) -> None:
        """Until both folds have reached the end of the tree, or the gateway stops."""
        await self._store_replays()
        for fold in (fold_calls, fold_acts):
            while not self._stopping.is_set():
                began = time.monotonic()
                if await fold(self._sessions, FOLD_ROWS_MAX) < FOLD_ROWS_MAX:
                    break
                if self._calls.has_calls:
                    await asyncio.sleep(min(FOLD_PAUSE_TIMES * (time.monotonic() - began), FOLD_PAUSE_MS_MAX / 1000))
        if time.monotonic() >= self._next_drop:
            await drop_old_counts(self._sessions)
            self._next_drop = time.monotonic() + _DROP_EVERY_S

    async def _store_replays(self) -> None:
        if counts := self._replays.take():
            try:
                await count_replays(self._sessions, counts)
            except TgaError:
                self._replays.restore(counts)
                raise
