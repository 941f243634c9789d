"""The slots of one tool server: so many calls at once and no more, and what is known of the server's health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from app.domain.tga.documents import ToolCall
from app.domain.tga.ports import Answered, Connector, Dispatched, MaySend, NotSent, Withheld

FailureKind = Literal["not_sent", "timed_out", "disconnected", "retryable_answer"]


@dataclass(frozen=True, slots=True)
class Health:
    """What the last dispatches showed, since the gateway started. Nothing that a server said is in it.

    `dispatching` calls are at the server, `waiting` ones wait for a slot. An answer is a definite one.
    """

    dispatching: int = 0
    waiting: int = 0
    answered: int = 0
    failed: int = 0
    last_answer_at: str | None = None
    last_failure_at: str | None = None
    last_failure_kind: FailureKind | None = None


class ServerSlots:
    """A connector that lets at most `concurrency` dispatches of the one within be under way, first come, first served.

    A call that waits has sent nothing, and waiting takes nothing of `timeout_ms`. A place is given back however the
    dispatch ends. It sends nothing of its own, and nothing twice.
    """

    def __init__(self, inner: Connector, *, concurrency: int, now: Callable[[], str]) -> None:
        self._watched = _Watched(inner, now)
        self._places = asyncio.Semaphore(concurrency)
        self._waiting = self._dispatching = 0

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        async with self.place() as connector:
            return await connector.dispatch(
                call, timeout_ms=timeout_ms, traceparent=traceparent, arguments=arguments, may_send=may_send
            )

    def place(self) -> AbstractAsyncContextManager[Connector]:
        """Wait for a place and hold it: for who must look at something between waiting, which may be long, and
        sending. What it gives sends at once."""
        return _Place(self)

    async def take(self) -> Connector:
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        self._dispatching += 1  # no await since the place was given: nothing can come between
        return self._watched

    def give_back(self) -> None:
        self._dispatching -= 1
        self._places.release()

    def health(self) -> Health:
        return self._watched.health(dispatching=self._dispatching, waiting=self._waiting)


class _Place:
    """A place while it is held. A class, because the loop keeps a book of every generator that a decorated function
    would make."""

    __slots__ = ("_slots",)

    def __init__(self, slots: ServerSlots) -> None:
        self._slots = slots

    async def __aenter__(self) -> Connector:
        return await self._slots.take()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.give_back()


class _Watched:
    def __init__(self, inner: Connector, now: Callable[[], str]) -> None:
        self._inner = inner
        self._now = now
        # As Health has it; each is set by the dispatch that shows it.
        self._answered = self._failed = 0
        self._last_answer_at: str | None = None
        self._last_failure_at: str | None = None
        self._last_failure_kind: FailureKind | None = None

    def health(self, *, dispatching: int, waiting: int) -> Health:
        return Health(
            dispatching=dispatching,
            waiting=waiting,
            answered=self._answered,
            failed=self._failed,
            last_answer_at=self._last_answer_at,
            last_failure_at=self._last_failure_at,
            last_failure_kind=self._last_failure_kind,
        )

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        result = await self._inner.dispatch(
            call, timeout_ms=timeout_ms, traceparent=traceparent, arguments=arguments, may_send=may_send
        )
        if isinstance(result, Withheld):
            return result  # it says nothing of the server
        if isinstance(result, Answered):
            self._answered += 1
            self._last_answer_at = self._now()
        else:
            self._failed += 1
            self._last_failure_at = self._now()
            self._last_failure_kind = "not_sent" if isinstance(result, NotSent) else result.result
        return result
