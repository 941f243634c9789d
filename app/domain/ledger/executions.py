"""The streams of one kind that this process executes: taken, started, waited for, followed, recovered, given back.

A kind brings an executor: how one of its streams is loaded, run to where it rests, and told about. Nothing here knows
what it does on the way. Recovery is no second path: it takes a stream as every other caller does, and starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from app.core.errors import ConcurrentExecution, KeyClaimed, OutcomeUnknown, RecoveryFailed, TgaError
from app.core.limits import (
    CLOSE_WAIT_MS,
    FOLLOW_POLL_MAX_MS,
    FOLLOW_POLL_MS,
    RECOVERIES_AT_ONCE_MAX,
    RECOVERY_PAGE_STREAMS,
)
from app.domain.ledger.owned_stream import NO_ANSWER, StreamPorts, give_back
from app.domain.ledger.waiting import Execution, Patience


class Rests(Protocol):
    """An answer of any kind of stream."""

    @property
    def is_at_rest(self) -> bool:
        """Whether the stream is finished, or waits for a person: no executor needs to continue it now."""
        ...


R = TypeVar("R", bound=Rests)
R_co = TypeVar("R_co", bound=Rests, covariant=True)
X = TypeVar("X", bound=Execution[Any])


class Executor(Protocol[X, R_co]):
    """What a kind of stream brings."""

    async def load(self, stream: str, *, executor_id: str) -> X:
        """The stream, verified, as the owner with this id continues it."""
        ...

    async def load_answer(self, stream: str) -> R_co:
        """What is recorded of the stream; for a caller in a process that does not own it."""
        ...

    async def run(self, execution: X) -> R_co:
        """Execute it to where it rests, and give it back there."""
        ...

    def group_of(self, execution: X) -> str:
        """What executions are counted by."""
        ...


class Recovery(NamedTuple, Generic[R]):
    """What recovery found, did and why; `error` when it could not."""

    stream: str
    found: str | None
    answer: R | None
    error: TgaError | None = None


class Executions(Generic[X, R]):
    """Executes each stream in one task at a time (I6), which goes on when the caller that started it gives up."""

    def __init__(self, ports: StreamPorts, executor: Executor[X, R], *, remedy: str) -> None:
        # Set here for good.
        self._loop = asyncio.get_running_loop()  # kept: asking each time costs a system call
        self._kind = ports.kind.name
        self._owner = ports.owner
        self._clock = ports.clock
        self._executor = executor
        self._remedy = remedy  # what a caller is told to do whose outcome is unknown
        # I6: the process-local table, by stream; the store takes two tasks of one executor for the same owner. A stream
        # in any of the three is busy. `start` and the task's end write the first, `taken` the second, `_give_back` the
        # third.
        self._running: dict[str, tuple[X, asyncio.Task[R]]] = {}
        self._being_taken: set[str] = set()
        self._being_given_back: dict[str, asyncio.Task[None]] = {}
        self._at_work: Counter[str] = Counter()  # by group; those of `_running`

    def at_work(self, group: str) -> int:
        """How many of this group are being executed here, whether or not a caller waits for them."""
        return self._at_work[group]

    def is_busy_with(self, stream: str) -> bool:
        """Whether a task of this process takes, executes or gives back the stream."""
        return stream in self._running or stream in self._being_taken or stream in self._being_given_back

    def patience(self, wait_ms: int | None) -> Patience:
        return Patience(self._clock, wait_ms, self._loop, remedy=self._remedy)

    @contextlib.asynccontextmanager
    async def taken(self, stream: str) -> AsyncIterator[X]:
        """Own the stream and load it, one task at a time; given back unless it is started inside.

        ConcurrentExecution when this process executes it already, or a living executor owns it.
        """
        if self.is_busy_with(stream):
            raise self._already_executed(stream)
        self._being_taken.add(stream)
        try:
            executor_id = await self._acquired(stream)
            try:
                yield await self._executor.load(stream, executor_id=executor_id)
            except BaseException as error:
                await self._give_back(stream, executor_id, after=error)
                if isinstance(error, TgaError):
                    error.at(stream=stream)
                raise
        finally:
            self._being_taken.discard(stream)

    def start(self, execution: X) -> asyncio.Task[R]:
        """Execute it in a task of its own: a caller that gives up does not interrupt what is under way."""
        stream = execution.owned.stream
        if stream in self._running:
            raise self._already_executed(stream)
        group = self._executor.group_of(execution)
        task = self._loop.create_task(self._executed_to_the_end(execution, group))
        task.add_done_callback(_seen)
        self._running[stream] = (execution, task)
        self._at_work[group] += 1
        return task

    async def follow(self, stream: str, patience: Patience) -> R | None:
        """The answer of a stream at rest, waited for; None when the patience is over before.

        A stream whose executor is dead is executed here.
        """
        poll_ms = FOLLOW_POLL_MS
        while True:
            running = self._running.get(stream)
            if running is not None:
                with contextlib.suppress(ConcurrentExecution):  # it was fenced: another executor continues it
                    answer = await patience.wait(*running)
                    if not answer.is_at_rest:
                        return None
            answer = await self._executor.load_answer(stream)
            if answer.is_at_rest:
                return answer
            # Refused while its executor lives, or while this process is getting a new executor id.
            with contextlib.suppress(ConcurrentExecution, *NO_ANSWER):
                async with self.taken(stream) as execution:
                    self.start(execution)
                continue
            if patience.is_over:
                return None
            await self._clock.sleep(poll_ms / 1000)
            poll_ms = min(poll_ms * 2, FOLLOW_POLL_MAX_MS)

    async def recover_all(self, *, at_once: int = RECOVERIES_AT_ONCE_MAX) -> AsyncGenerator[Recovery[R], None]:
        """Every stream that no executor works on and that waits for no person, oldest first, a bounded number at a
        time.

        One that cannot be recovered is reported, and does not stop the others.
        """
        after: str | None = None
        running: set[asyncio.Task[Recovery[R]]] = set()
        while page := await self._owner.list_recoverable(self._kind, after=after, limit=RECOVERY_PAGE_STREAMS):
            after = page[-1]
            for stream in page:
                # The list holds what this process owns and has lost sight of, and what it is executing.
                if self.is_busy_with(stream):
                    continue
                if len(running) >= at_once:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
                running.add(self._loop.create_task(self._recovered(stream)))
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()

    async def close(self) -> None:
        """Wait a while for what is being executed. What takes longer, or waits for the store, is left to recovery."""
        waited_ms, step_ms = 0, 1_000
        while tasks := [task for execution, task in self._running.values() if not execution.owned.is_unsettled]:
            if waited_ms >= CLOSE_WAIT_MS:
                break
            await asyncio.wait(tasks, timeout=step_ms / 1000)
            waited_ms += step_ms
        for task in [*(task for _, task in self._running.values()), *self._being_given_back.values()]:
            task.cancel()

    async def _acquired(self, stream: str) -> str:
        executor_id = self._owner.executor_id()
        try:
            return await self._owner.acquire(stream)
        except (OutcomeUnknown, asyncio.CancelledError) as error:
            # The stream may be ours now without being executed. If giving it back fails too, the next sweep finds it.
            await self._give_back(stream, executor_id, after=error)
            raise

    async def _give_back(self, stream: str, executor_id: str, *, after: BaseException) -> None:
        """A caller that is cancelled does not wait for it. Until it is done no task here takes the stream: it would be
        given away while it is executed."""
        giving = self._loop.create_task(give_back(self._owner, stream, executor_id))
        self._being_given_back[stream] = giving
        giving.add_done_callback(lambda _: self._being_given_back.pop(stream, None))
        if not isinstance(after, asyncio.CancelledError):
            await asyncio.shield(giving)

    def _already_executed(self, stream: str) -> ConcurrentExecution:
        return ConcurrentExecution(f"this process already executes the {self._kind}", stream=stream)

    async def _executed_to_the_end(self, execution: X, group: str) -> R:
        owned = execution.owned
        try:
            return await self._executor.run(execution)
        except ConcurrentExecution:
            raise  # nothing of ours is there to give back
        except Exception as error:
            if owned.may_be_stored:
                await owned.give_back()
            if isinstance(error, TgaError) and not isinstance(error, KeyClaimed):
                error.at(stream=owned.stream)
            raise
        finally:
            del self._running[owned.stream]
            self._at_work[group] -= 1
            if not self._at_work[group]:
                del self._at_work[group]

    async def _recovered(self, stream: str) -> Recovery[R]:
        found: str | None = None
        try:
            async with self.taken(stream) as execution:
                found = execution.owned.head.state
                task = self.start(execution)
            return Recovery(stream, found, await self.patience(None).wait(execution, task))
        except TgaError as error:
            return Recovery(stream, found, None, error)
        except Exception as error:  # whatever is wrong with one stream must not stop the others
            wrong = RecoveryFailed(
                f"the {self._kind} cannot be executed", found=f"{type(error).__name__}: {error}", stream=stream
            )
            return Recovery(stream, found, None, wrong)


def _seen(task: asyncio.Task[Any]) -> None:
    """Callers that wait for the task are told how it failed. Without any, the next sweep looks at the stream again."""
    if not task.cancelled():
        task.exception()
