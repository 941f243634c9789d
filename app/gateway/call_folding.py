"""The folds behind the sequencer: what lists, statistics and searches read of calls, and what people did. Off the path
of every call."""

from __future__ import annotations

import asyncio
import time

from app.core.errors import TgaError
from app.core.limits import (
    FOLD_BEHIND_MS_MAX,
    FOLD_PAUSE_MS_MAX,
    FOLD_PAUSE_TIMES,
    FOLD_PAUSE_TIMES_WHEN_BEHIND,
    FOLD_ROWS_MAX,
)
from app.edge.read_scheduler import ReadScheduler
from app.edge.replays import ReplayCounts
from app.postgres.call_facts import count_replays, drop_old_counts, fold_acts, fold_calls
from app.postgres.sessions import Sessions

_DROP_EVERY_S = 600.0


class FoldPace:
    """How long the folds leave the store to calls. At first nearly always; once they have been behind for
    FOLD_BEHIND_MS_MAX they take a larger share, so that statistics do not lag more and more while calls never cease."""

    def __init__(self) -> None:
        self._behind_since_s: float | None = None

    def reached_the_end(self) -> None:
        self._behind_since_s = None

    def pause_s(self, now_s: float, *, worked_s: float) -> float:
        """After a batch that has not reached the end of the tree, and took so long."""
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        is_long_behind = now_s - self._behind_since_s > FOLD_BEHIND_MS_MAX / 1000
        times = FOLD_PAUSE_TIMES_WHEN_BEHIND if is_long_behind else FOLD_PAUSE_TIMES
        return min(times * worked_s, FOLD_PAUSE_MS_MAX / 1000)


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
        self._pace = FoldPace()
        self._next_drop = 0.0

    async def once(self) -> None:
        """Until both folds have reached the end of the tree, or the gateway stops. They take turns, so that neither
        waits for the other to reach it."""
        await self._store_replays()
        unfinished = [fold_calls, fold_acts]
        while not self._stopping.is_set():
            began = time.monotonic()
            unfinished = [fold for fold in unfinished if await fold(self._sessions, FOLD_ROWS_MAX) == FOLD_ROWS_MAX]
            if not unfinished:
                self._pace.reached_the_end()
                break
            now = time.monotonic()
            pause_s = self._pace.pause_s(now, worked_s=now - began)
            if self._calls.has_calls:
                await asyncio.sleep(pause_s)
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
