"""The in-memory gateway behind httpx: transports that hand each request to it in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import httpx2

from tga_sdk.testing.routes import Reply, answer

if TYPE_CHECKING:
    from tga_sdk.testing.gateway import MemoryGateway


class AsyncMemoryTransport(httpx2.AsyncBaseTransport):
    """For `Worker(..., transport=...)` and `AsyncClient(..., transport=...)`."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self.gateway = gateway

    def now(self) -> float:
        """The gateway's time, in seconds: a worker that speaks to it has the same."""
        return self.gateway.clock.now_ms() / 1000

    async def pause(self, seconds: float) -> None:
        """Let so much time pass between two tries; at once where the gateway skips waiting."""
        if self.gateway.skip_waiting:
            self.gateway.clock.move_ms(seconds * 1000)
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(seconds)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        reply = await answer(self.gateway, request, await request.aread())
        if reply.events is None:
            return _response(reply)
        return httpx2.Response(reply.status, headers=reply.headers, stream=_AsyncEvents(reply.events))


class MemoryTransport(httpx2.BaseTransport):
    """For `Client(..., transport=...)`: blocks the thread that asks, and no other."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self.gateway = gateway

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        reply = self.gateway.in_background(answer(self.gateway, request, request.read()))
        if reply.events is None:
            return _response(reply)
        return httpx2.Response(reply.status, headers=reply.headers, stream=_Events(self.gateway, reply.events))


def _response(reply: Reply) -> httpx2.Response:
    return httpx2.Response(reply.status, headers=reply.headers, content=reply.content)


class _AsyncEvents(httpx2.AsyncByteStream):
    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            yield event

    async def aclose(self) -> None:
        await self._events.aclose()


class _Events(httpx2.SyncByteStream):
    def __init__(self, gateway: MemoryGateway, events: AsyncGenerator[bytes, None]) -> None:
        self._gateway = gateway
        self._events = events

    def __iter__(self) -> Iterator[bytes]:
        while True:
            event = self._gateway.in_background(_next(self._events))
            if event is None:
                return
            yield event

    def close(self) -> None:
        self._gateway.in_background(self._events.aclose())


async def _next(events: AsyncGenerator[bytes, Any]) -> bytes | None:
    return await anext(events, None)
