"""A worker inside the program that starts the runs: for scripts, notebooks and examples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tga_sdk.client import AsyncClient
from tga_sdk.settings import api_key, gateway_urls
from tga_sdk.worker import Worker


@asynccontextmanager
async def serving(
    *procedures: Any, url: str | Sequence[str] | None = None, key: str | None = None, slots: int = 32
) -> AsyncIterator[AsyncClient]:
    """Serve these procedures, tasks and flows while the block runs, and get a client of the same gateway.

    Without `url` and `key` it is the gateway that the command `tga` would ask. When the block ends, bodies that are
    under way end and are recorded, and runs that have not ended are given back: another worker goes on with them. For
    anything that is to stay, run `tga-worker` as a process of its own. GatewayError when the gateway refuses the
    worker.
    """
    urls = gateway_urls(url)
    found = api_key(key, urls)
    ready = asyncio.Event()
    worker = Worker(urls, found, procedures, slots=slots, on_ready=ready.set)
    working = asyncio.create_task(worker.run(signals=False))
    async with AsyncClient(urls, found) as client:
        try:
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if working.done():
                working.result()
            yield client
        finally:
            worker.stop()
            await working
