"""Group commit: what arrives while a commit is in flight goes together in the next one.

A lone plan is committed at once. Thousands of calls in flight need only a few sessions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from app.core.errors import LockAcquireFailed, OutcomeUnknown, StoreBusy, StoreUnavailable, TgaError
from app.core.instruments import Instruments
from app.core.limits import (
    BATCH_BYTES_MAX,
    BATCH_PLANS_MAX,
    WRITER_QUEUE_BYTES_MAX,
    WRITER_QUEUE_PLANS_MAX,
    WRITER_SESSIONS_MAX,
    WRITER_WAIT_MS,
)
from app.domain.ledger.plans import Plan, PlanGroup
from app.postgres.ledger import PostgresLedger

_NO_ANSWER: Final = (LockAcquireFailed, OutcomeUnknown, StoreBusy, StoreUnavailable)
_Waiting = tuple[PlanGroup, int, "asyncio.Future[list[TgaError | None]]"]  # with its size in bytes


class Writer:
    """The Ledger port with group commit and back-pressure.

    More sessions mean smaller batches, which cost PostgreSQL more: while one commits, the others wait. Where a commit
    takes long (a slow disk, a standby, many plans), another session takes what has waited WRITER_WAIT_MS behind it.
    """

    def __init__(self, ledger: PostgresLedger, instruments: Instruments | None = None) -> None:
        # Set here for good.
        self._ledger = ledger
        self._instruments = instruments or Instruments()
        self._loop = asyncio.get_running_loop()  # kept: asking each time costs a system call
        # Plans that no flusher has taken yet: `_commit` adds, `_take_batch` removes, both without a pause in between.
        self._queue: deque[_Waiting] = deque()
        self._queue_plans = 0
        self._queue_bytes = 0
        # Tasks that empty the queue, and how many of them wait for the database: each writes for itself.
        self._flushers: set[asyncio.Task[None]] = set()
        self._committing = 0
        # When the last of them began to wait, and what looks whether that was long ago.
        self._last_began_s = 0.0
        self._looks_again: asyncio.TimerHandle | None = None

    @property
    def queue(self) -> tuple[int, int]:
        """How many plans wait that no flusher has taken yet, and their size in bytes."""
        return self._queue_plans, self._queue_bytes

    async def commit(self, plan: Plan) -> None:
        """As Ledger.commit; StoreBusy at once when the queue is full, and then nothing was stored."""
        (error,) = await self._commit(PlanGroup((plan,)), plan.size_bytes())
        if error is not None:
            raise error

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        """As Ledger.commit_all: the plans stay together. StoreBusy as with `commit`."""
        group = PlanGroup(plans, needs)
        group.verify(BATCH_PLANS_MAX)
        return await self._commit(group, sum(plan.size_bytes() for plan in plans))

    async def _commit(self, group: PlanGroup, size: int) -> list[TgaError | None]:
        if self._queue_plans >= WRITER_QUEUE_PLANS_MAX or self._queue_bytes + size > WRITER_QUEUE_BYTES_MAX:
            self._instruments.commits.add(("failed",), len(group.plans))
            raise StoreBusy(
                "too much is waiting to be committed",
                found=f"{self._queue_plans} plans",
                stream=group.plans[0].stream,
            )
        future: asyncio.Future[list[TgaError | None]] = self._loop.create_future()
        self._queue.append((group, size, future))
        self._queue_plans += len(group.plans)
        self._queue_bytes += size
        self._start_flusher_if_needed()
        # If the caller gives up here its plans stay in the queue, or in the batch that is being committed.
        return await future

    async def close(self) -> None:
        """Wait until everything that was accepted is committed or refused."""
        while self._flushers:
            await asyncio.wait(self._flushers)

    def _start_flusher_if_needed(self) -> None:
        flushers = len(self._flushers)
        if not self._queue or flushers > self._committing or flushers >= WRITER_SESSIONS_MAX:
            return  # nothing waits, or the next flusher to go on takes it
        if flushers > 0:
            wait_s = self._last_began_s + WRITER_WAIT_MS / 1000 - self._loop.time()
            if wait_s > 0:
                if self._looks_again is None:
                    self._looks_again = self._loop.call_later(wait_s, self._look_again)
                return
        flusher = self._loop.create_task(self._flush_all())
        self._flushers.add(flusher)
        # A flusher that is cancelled before it runs does not remove itself.
        flusher.add_done_callback(self._flushers.discard)

    def _look_again(self) -> None:
        self._looks_again = None
        self._start_flusher_if_needed()

    async def _flush_all(self) -> None:
        try:
            while self._queue:
                batch = self._take_batch()
                self._committing += 1
                self._last_began_s = self._loop.time()
                self._start_flusher_if_needed()
                try:
                    await self._flush(batch)
                finally:
                    self._committing -= 1
        finally:
            # Removed in the step that found the queue empty: a plan that arrives before the task's callbacks run
            # would otherwise wait for a flusher that has ended.
            self._flushers -= {asyncio.current_task()}

    async def _flush(self, batch: list[_Waiting]) -> None:
        began = self._loop.time()
        try:
            results = await self._ledger.commit_groups([group for group, _, _ in batch])
            self._count(results, self._loop.time() - began)
        except BaseException as error:
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            # Woken when the loop turns: what waits is on its way to the database before these go on.
            left = iter(results)
            for waiting in batch:
                _give(waiting, [next(left) for _ in waiting[0].plans])

    def _count(self, results: list[TgaError | None], took_s: float) -> None:
        counted = self._instruments
        counted.commit_seconds.observe((), took_s)
        counted.batch_plans.observe((), len(results))
        stored = results.count(None)
        counted.commits.add(("stored",), stored)
        for error in results if stored < len(results) else ():
            if error is not None:
                counted.commits.add(("failed" if isinstance(error, _NO_ANSWER) else "refused",))

    def _take_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        streams: set[str] = set()
        size = 0
        while self._queue:
            (plans, _), group_size, _ = self._queue[0]
            # A group stays whole. Two plans of one stream cannot share a transaction: the second builds on what the
            # first leaves.
            if batch and (
                len(streams) + len(plans) > BATCH_PLANS_MAX
                or size + group_size > BATCH_BYTES_MAX
                or any(plan.stream in streams for plan in plans)
            ):
                break
            batch.append(self._queue.popleft())
            streams.update([plan.stream for plan in plans])
            size += group_size
        self._queue_plans -= len(streams)
        self._queue_bytes -= size
        return batch


def _give(waiting: _Waiting, results: list[TgaError | None]) -> None:
    _, _, future = waiting
    if not future.done():  # its caller may have given up
        future.set_result(results)
