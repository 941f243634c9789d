"""One put request in flight for a run; what arrives meanwhile goes together in the next.

The gateway recognises a repeated put by what stands after `after_seq`, so there is never a second request of the same
run under way. What is deferred waits for company: it rides in front of the next put.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tga_sdk import guard

PUTS_MAX: Final = 64
BYTES_MAX: Final = 245_000  # of 262,144; the rest is for what is around the puts

Put = dict[str, Any]


@dataclass(slots=True)
class Sent:
    """One put. `is_kept`: a retry of the operation around will ask for its record again."""

    put: Put
    is_kept: bool
    encoded: bytes = b""

    def __post_init__(self) -> None:
        self.encoded = encode(self.put)


@dataclass(slots=True)
class _Waiting:
    sent: list[Sent]
    then: Put | None
    answered: asyncio.Future[dict[str, Any]]


@dataclass(slots=True)
class Pipe:
    """`send` makes one request with these puts, and what comes then, and answers when all of it is stored."""

    send: Callable[[Sequence[Sent], Put | None], Awaitable[dict[str, Any]]]
    _deferred: list[Sent] = field(default_factory=list)
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _sending: asyncio.Task[None] | None = None
    _carrying: asyncio.Future[dict[str, Any]] | None = None  # the answer to the last request with deferred puts

    def defer(self, sent: Sent) -> None:
        self._deferred.append(sent)

    def forget_deferred(self) -> None:
        self._deferred.clear()

    @property
    def is_idle(self) -> bool:
        return self._sending is None

    def start(self, sent: Sequence[Sent] = (), then: Put | None = None) -> asyncio.Future[dict[str, Any]]:
        """Put what is deferred, these, and what comes then; the future has the answer."""
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting([*self._deferred, *sent], then, answered))
        if self._deferred:
            self._carrying = answered
            self._deferred.clear()
        if self._sending is None:
            with guard.off():
                self._sending = asyncio.create_task(self._send_all())
        return answered

    async def put(self, sent: Sequence[Sent] = (), then: Put | None = None) -> dict[str, Any]:
        """The answer. A caller that is cancelled meanwhile does not take its put back."""
        return await asyncio.shield(self.start(sent, then))

    async def flush(self) -> None:
        """Until everything that was deferred so far is stored."""
        if self._deferred:
            await self.put()
        elif self._carrying is not None:
            await asyncio.shield(self._carrying)
            self._carrying = None

    async def settle(self) -> None:
        """Until no request is under way."""
        while self._sending is not None:
            await asyncio.wait({self._sending})

    async def _send_all(self) -> None:
        batch: list[_Waiting] = []
        try:
            while self._waiting:
                batch = self._next()
                answer = await self.send([sent for one in batch for sent in one.sent], batch[-1].then)
                for one in batch:
                    if not one.answered.done():
                        one.answered.set_result(answer)
                batch = []
        except BaseException as error:
            for one in [*batch, *self._waiting]:
                if not one.answered.done():
                    one.answered.set_exception(error)
                    one.answered.exception()  # the operation that waited for it may be gone
            self._waiting.clear()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._sending = None

    def _next(self) -> list[_Waiting]:
        """As many as fit into one request, up to the first with something that comes then."""
        batch, count, size = [self._waiting.popleft()], 0, 0
        batch = self._split(batch[0])
        count = sum(len(one.sent) for one in batch)
        size = sum(len(sent.encoded) for one in batch for sent in one.sent)
        while self._waiting and batch[-1].then is None:
            following = self._waiting[0]
            count += len(following.sent)
            size += sum(len(sent.encoded) + 1 for sent in following.sent)
            if count > PUTS_MAX or size > BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _split(self, one: _Waiting) -> list[_Waiting]:
        """More than one request can take, because much was deferred: what fits, and the rest is next."""
        size = 0
        for place, sent in enumerate(one.sent):
            size += len(sent.encoded) + 1
            if place and (place == PUTS_MAX or size > BYTES_MAX):
                self._waiting.appendleft(_Waiting(one.sent[place:], one.then, one.answered))
                unheard: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
                return [_Waiting(one.sent[:place], None, unheard)]
        return [one]


def encode(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
