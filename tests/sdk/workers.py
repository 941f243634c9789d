"""Workers of the SDK for tests, which die or stop at named boundaries. Nothing in the SDK knows of them.

lease, page, blob              the question for runs, a page of the journal, a blob: `.before` and `.answered`
put, tool, child, suspend,     a request with puts, by what comes then
complete, fail, release
body.before, body.done         a body is about to run; has run, and nothing is recorded of its end
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2

from tests.runs.processes import SdkWorkerOptions
from tests.runs.worker import Boundaries
from tests.runs.world import RunsWorld
from tests.sdk.programs import PROCEDURES
from tga_sdk import AsyncClient, Worker
from tga_sdk.attempt import Attempt
from tga_sdk.testing import MemoryGateway


class Crossing(httpx2.AsyncBaseTransport):
    """A real connection, with a boundary before each request and after each answer."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self._inner = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=100))

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        name = await _name_of(request)
        if name:
            self._boundaries.cross(f"{name}.before")
        response = await self._inner.handle_async_request(request)
        if name == "lease":
            await response.aread()
            name = name if json.loads(response.content)["runs"] else ""
        if name:
            self._boundaries.cross(f"{name}.answered")
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _name_of(request: httpx2.Request) -> str:
    path = request.url.path
    if path == "/v1/worker/lease":
        return "lease"
    if path.startswith("/v1/blobs/"):
        return "blob"
    if re.fullmatch(r"/v1/runs/[^/]+/checkpoints", path):
        if request.method == "GET":
            return "page"
        then = json.loads(await request.aread()).get("then")
        return "put" if then is None else str(then["type"])
    return ""


def worker_of(urls: Sequence[str], key: str, boundaries: Boundaries | None = None, **more: Any) -> Worker:
    boundaries = boundaries or Boundaries()
    return Worker(urls, key, more.pop("procedures", PROCEDURES), transport=Crossing(boundaries), **more)


async def serve(options: SdkWorkerOptions) -> None:
    """A worker, until its process is ended."""
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    boundaries = Boundaries(options.die_at, options.stop_at)
    notes = os.open(options.notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def tell(said: dict[str, Any]) -> None:
        os.write(notes, json.dumps(said).encode() + b"\n")

    run_body = Attempt.run_body

    async def crossing(self: Attempt, frame: Any, *rest: Any) -> Any:
        boundaries.cross("body.before")
        tell({"body": frame.scope.address})
        made = await run_body(self, frame, *rest)
        boundaries.cross("body.done")
        return made

    setattr(Attempt, "run_body", crossing)  # noqa: B010
    ready = lambda: tell({"ready": True})  # noqa: E731
    await worker_of(options.urls, options.key, boundaries, on_ready=ready, **options.more).run()
    tell({"ended": boundaries.passed})


@contextlib.asynccontextmanager
async def sdk_working(world: RunsWorld, *urls: str, **more: Any) -> AsyncIterator[Worker]:
    """A worker of the SDK in this process, until the block ends."""
    ready = asyncio.Event()
    worker = worker_of(urls, world.keys["worker"], on_ready=ready.set, **more)
    task = asyncio.create_task(worker.run(signals=False))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        if task.done():
            task.result()
        yield worker
    finally:
        worker.stop()
        worker.stop()
        await task


@contextlib.asynccontextmanager
async def memory_working(gateway: MemoryGateway, *procedures: Any) -> AsyncIterator[AsyncClient]:
    """A worker of a gateway in memory, until the block ends; and a client of it."""
    ready = asyncio.Event()
    worker = Worker(gateway.url, gateway.key, procedures, transport=gateway.transport, on_ready=ready.set)
    task = asyncio.create_task(worker.run(signals=False))
    await ready.wait()
    try:
        async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
            yield client
    finally:
        worker.stop()
        await task
