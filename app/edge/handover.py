"""What becomes of requests that wait for a call to end when the gateway has to go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

_T = TypeVar("_T")


class HandedOver(Exception):
    """The wait was broken off. What was waited for goes on, or recovery continues it."""


class Handover:
    """Requests that wait for a trace to move. Each of them can be told, once and for all, to wait no longer.

    The wait is broken off, never what is waited for: executions are tasks of their own.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._is_due = False

    async def wait(self, awaited: Awaitable[_T]) -> _T:
        """What `awaited` gives, or HandedOver."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("waiting outside of a task")
        self._waiting.add(task)
        if self._is_due:
            task.cancel()  # it runs no further than its first await
        try:
            return await awaited
        except asyncio.CancelledError:
            # Swallow our own cancellation only; if another task cancelled it too, let it go on.
            if self._is_due and task.uncancel() == 0:
                raise HandedOver from None
            raise
        finally:
            self._waiting.discard(task)

    def break_off(self) -> None:
        """Break off every wait, those that are to come too."""
        self._is_due = True
        for task in self._waiting:
            task.cancel()
        self._waiting.clear()
