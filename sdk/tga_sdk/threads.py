"""Plain functions of a program: they run in threads, and their operations in the loop of the worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tga_sdk.errors import Stop, TgaError
from tga_sdk.frames import caller, remember_caller

T = TypeVar("T")


class Threads:
    """The threads of one attempt, in the executor that its worker has for all. `why_over`: what has ended the attempt,
    if anything has; an operation that is cancelled raises it in the thread that waits for it."""

    def __init__(self, executor: concurrent.futures.Executor, why_over: Callable[[], BaseException | None]) -> None:
        self._executor = executor
        self._why_over = why_over
        self._loop = asyncio.get_running_loop()

    async def run(self, fn: Callable[[], T]) -> T:
        """Run it in a thread, in this frame. A thread cannot be ended: one that hangs goes on, unheard."""
        context = contextvars.copy_context()
        return await self._loop.run_in_executor(self._executor, context.run, fn)

    async def called(self, fn: Callable[[], Any]) -> Any:
        """What a plain function returns, which runs in a thread; of a coroutine that it returns, what that returns."""
        made: list[Any] = []
        is_left = threading.Event()  # the operation was cancelled, and does not wait for the thread any more

        def call() -> None:
            made.append(fn())
            if is_left.is_set():
                _close(made)

        try:
            await self.run(call)
        except BaseException:
            is_left.set()
            _close(made)  # Python would complain of a coroutine that is never awaited
            raise
        return await made[0] if inspect.isawaitable(made[0]) else made[0]

    def wait_for(self, operation: Coroutine[Any, Any, T]) -> T:
        """The result of an operation, for code in a thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            operation.close()
            raise TgaError(
                "a blocking operation was called in an async body, which it would stop: use await ctx.step(name, fn)",
                code="PROCEDURE_INVALID",
            )
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = contextvars.copy_context()
        context.run(remember_caller, caller())

        def begin() -> None:
            task = self._loop.create_task(operation, context=context)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.set_exception(self._why_over() or Stop("the worker ends"))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        return done.result()


def _close(made: list[Any]) -> None:
    for one in made:
        if inspect.iscoroutine(one):
            one.close()
