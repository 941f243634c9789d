"""How long a caller waits, and what it is told when its time is over. What it waits for goes on without it."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from app.core.errors import KeyClaimed, OutcomeUnknown, StoreUnavailable, TgaError
from app.core.limits import FOLLOW_POLL_MS, STORE_ANSWER_MS, UNSETTLED_WAIT_MS
from app.domain.clock import Clock
from app.domain.ledger.owned_stream import OwnedStream

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Execution(Protocol[R_co]):
    """A stream being executed by this process, as far as those who wait for it look at it."""

    @property
    def owned(self) -> OwnedStream: ...

    @property
    def committed(self) -> R_co | None:
        """The last durable answer; None while there is none that a caller may be told."""
        ...


class TimeLimit:
    """What `asyncio.timeout` does, at a third of its cost; a call has two. `async with TimeLimit(seconds, loop):`,
    or `start` and `stop` around it. None: there is no limit.

    When the time is over the task is cancelled, and its CancelledError becomes TimeoutError here. A task that someone
    else has cancelled too stays cancelled.
    """

    __slots__ = ("_cancellations", "_is_over", "_loop", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float | None, loop: asyncio.AbstractEventLoop) -> None:
        # Set here for good.
        self._seconds = seconds
        self._loop = loop
        # Set by `start`: the task, how often others had asked it to end by then, and what ends it.
        self._task: asyncio.Task[Any] | None = None
        self._cancellations = 0
        self._timer: asyncio.TimerHandle | None = None
        # Set by the timer.
        self._is_over = False

    def start(self) -> None:
        task = asyncio.current_task(self._loop)
        if task is None:
            raise RuntimeError("a time limit outside of a task")
        self._task = task
        self._cancellations = task.cancelling()
        if self._seconds is not None:
            self._timer = self._loop.call_later(max(0.0, self._seconds), self._end)

    def stop(self, raised: type[BaseException] | None) -> bool:
        """Whether `raised`, which ends the limited part, is this limit's doing and not another cancellation's."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_over or self._task is None:
            return False
        return self._task.uncancel() <= self._cancellations and raised is asyncio.CancelledError

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stop(kind):
            raise TimeoutError from error

    def _end(self) -> None:
        self._is_over = True
        if self._task is not None:
            self._task.cancel()


class Patience:
    """A caller's `wait_ms`; None: until it is over. Inside it stands all that is done before the caller is answered.

    The answer comes by then, and if the store does not answer, STORE_ANSWER_MS later at the latest: with OutcomeUnknown
    if an execution was begun, whose commits may still happen, else with StoreUnavailable, and nothing was changed.
    """

    __slots__ = ("_awaited", "_began_ms", "_clock", "_ends_ms", "_limit", "_loop", "_remedy")

    def __init__(self, clock: Clock, wait_ms: int | None, loop: asyncio.AbstractEventLoop, *, remedy: str) -> None:
        # Set here for good.
        self._clock = clock
        self._loop = loop
        self._remedy = remedy  # what a caller does whose outcome is unknown
        self._began_ms = clock.monotonic_ms()
        self._ends_ms = math.inf if wait_ms is None else self._began_ms + wait_ms
        self._limit = TimeLimit(None if wait_ms is None else (wait_ms + STORE_ANSWER_MS) / 1000, loop)
        # Set by `wait`: something was begun that may still happen. Cleared when it is known that nothing was stored.
        self._awaited: OwnedStream | None = None

    async def __aenter__(self) -> Self:
        self._limit.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._limit.stop(kind):
            raise self._overdue() from None

    @property
    def is_over(self) -> bool:
        return self._clock.monotonic_ms() >= self._ends_ms

    async def wait(self, execution: Execution[R], task: asyncio.Task[R]) -> R:
        """The execution's answer, or where it durably stands when the time is over.

        Cancelling this wait does not cancel the execution. A call that is not durable yet is given STORE_ANSWER_MS,
        however impatient its caller: without that nothing could be said about it.
        """
        self._awaited = owned = execution.owned
        is_bounded = self._ends_ms < math.inf
        step_ms = max(0.0, self._ends_ms - self._clock.monotonic_ms()) if is_bounded else UNSETTLED_WAIT_MS
        while True:
            if await self._is_done_within(task, step_ms / 1000):
                return self._result_of(task)
            if owned.is_unsettled:
                raise self._overdue()
            if is_bounded:
                if execution.committed is not None:
                    return execution.committed  # never more than what is durable
                if self._clock.monotonic_ms() >= max(self._ends_ms, self._began_ms + STORE_ANSWER_MS):
                    raise self._overdue()
                step_ms = FOLLOW_POLL_MS

    def _result_of(self, task: asyncio.Task[R]) -> R:
        try:
            return task.result()
        except KeyClaimed:
            self._awaited = None  # nothing of it was stored
            raise

    async def _is_done_within(self, task: asyncio.Task[Any], seconds: float) -> bool:
        """asyncio.wait for one task, at half its cost."""
        if not task.done():
            woken: asyncio.Future[None] = self._loop.create_future()

            def wake(_: object = None) -> None:
                if not woken.done():
                    woken.set_result(None)

            task.add_done_callback(wake)
            timer = self._loop.call_later(seconds, wake)
            try:
                await woken
            finally:
                timer.cancel()
                task.remove_done_callback(wake)
        return task.done()

    def _overdue(self) -> TgaError:
        if self._awaited is None:
            return StoreUnavailable("the store did not answer in time; nothing was changed")
        return OutcomeUnknown("the store did not answer in time", remedy=self._remedy, stream=self._awaited.stream)
