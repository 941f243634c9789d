"""A worker in the benchmark's own process that tells of each attempt's end.

Nothing asks the gateway how a run stands while the worker's CPU is measured: the answer names up to 1,000 steps, and
to read those again and again cost more than the steps did.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.runs.world import RunsWorld
from tga_sdk import Worker


class ToldWorker(Worker):
    """`ends` has, of each run, how its attempts here have ended."""

    ends: defaultdict[str, asyncio.Queue[str]]

    def _ended(self, task: asyncio.Task[str]) -> None:
        attempt = self._running.get(task)
        super()._ended(task)
        if attempt is not None and not task.cancelled() and task.exception() is None:
            self.ends[attempt.run_id].put_nowait(task.result())

    async def ended(self, run_id: str, how: str) -> None:
        """Until an attempt has ended so: COMPLETED, or SUSPENDED."""
        found = await self.ends[run_id].get()
        if found != how:
            raise RuntimeError(f"run {run_id}: expected an attempt that ends {how}, found {found}")


@contextlib.asynccontextmanager
async def serving(world: RunsWorld, url: str, programs: Sequence[Any]) -> AsyncIterator[ToldWorker]:
    ready = asyncio.Event()
    worker = ToldWorker(url, world.keys["worker"], programs, on_ready=ready.set)
    worker.ends = defaultdict(asyncio.Queue)
    task = asyncio.create_task(worker.run(signals=False))
    await ready.wait()
    try:
        yield worker
    finally:
        worker.stop()
        worker.stop()
        await task
