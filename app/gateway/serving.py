"""Serving: the gateway over HTTP with its background work, until it is told to stop.

It ends on SIGINT or SIGTERM: nothing new is taken, what is in flight is answered, what still runs is finished or left
to recovery. A second signal ends it at once, which loses nothing that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from rich.console import Console
from starlette.types import ASGIApp

from app.console.rendering import PATH as CONSOLE_PATH
from app.console.site import ConsoleSite
from app.core.limits import CONNECTIONS_MAX, DESCRIPTORS_RESERVED
from app.edge.processes import METRICS
from app.edge.protocol import BoundedProtocol
from app.gateway.background import BackgroundWork
from app.gateway.http_server import Router, serve_http
from app.gateway.memory import spare_what_is_loaded
from app.gateway.serving_process import ServingProcess
from app.gateway.telemetry import telling
from app.gateway.wiring import Gateway
from app.mcp_server.server import PATH as MCP_PATH
from app.settings import Settings

output = Console(highlight=False, soft_wrap=True)
logger = logging.getLogger("tga")

OnListening = Callable[[str], Awaitable[None]]
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


async def serve(
    gateway: Gateway,
    settings: Settings,
    *,
    on_listening: OnListening | None = None,
    process: ServingProcess | None = None,
) -> bool:
    """Until a signal. `on_listening` is told the address once requests are taken; what it raises ends the gateway.
    `process`: this is one of several, which its supervisor starts, greets for, and ends."""
    spare_what_is_loaded()
    descriptors = _raise_descriptors()
    stopping = gateway.services.stopping
    background = BackgroundWork(gateway)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ending = _stopped_by_signals(stopping) if process is None else _retired_by_signals(process)
    if process is not None:
        if gateway.services.metrics is not None:
            gateway.services.processes.shows[METRICS] = gateway.services.metrics.render
        process.join(gateway.services.processes)
    with telling(gateway.services, gateway.telemetry), ending:
        serving = asyncio.create_task(_serve_http(gateway, settings, listening, descriptors, process))
        tasks = [asyncio.create_task(work) for work in background.all()]
        hosting = [asyncio.create_task(gateway.lua.host.run(stopping))] if gateway.lua.host is not None else []
        if process is None:
            tasks.append(asyncio.create_task(_greet(gateway, listening, settings, on_listening)))
        else:
            tasks.append(asyncio.create_task(_tell_ready(process, listening)))
        try:
            await _until_the_end(serving, tasks[-1])
        finally:
            stopping.set()
            # The edge first, and programs in Lua: what they have taken may still need what works behind it.
            ended = await asyncio.gather(serving, *hosting, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    if process is None:
        output.print("Stopped taking requests; finishing what is under way.")
    return True


async def _serve_http(
    gateway: Gateway,
    settings: Settings,
    listening: asyncio.Future[str],
    descriptors: int,
    process: ServingProcess | None,
) -> None:
    class Protocol(BoundedProtocol):
        connections_max = connections_within(
            descriptors, dispatching=sum(server.max_concurrency for server in gateway.registry.servers())
        )

    if process is not None:
        Protocol.on_lost = process.connection_lost

    def on_ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        listening.set_result(f"http://{shown}:{port}")

    console = ConsoleSite(gateway.services, gateway.console_sessions, Router, gateway.provider)
    mounted: dict[str, ASGIApp] = {MCP_PATH: gateway.mcp, CONSOLE_PATH: console}
    await serve_http(
        gateway.services,
        host=settings.host,
        port=settings.port,
        on_ready=on_ready,
        protocol=Protocol,
        mounted=mounted,
        process=process,
    )


def connections_within(descriptors: int, *, dispatching: int) -> int:
    """How many connections clients may hold, so that dispatch, the database and files always find descriptors.

    A quarter stays free for what is accepted and refused in the same moment. Where there are too few descriptors for
    all this, half of them.
    """
    left = max(descriptors - DESCRIPTORS_RESERVED - dispatching, descriptors // 2)
    return min(CONNECTIONS_MAX, left * 3 // 4)


def _raise_descriptors() -> int:
    """As many as the system lets us have; the usual soft limit is far below that. Children are started before this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # some systems name no bound and have one
        return soft
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


async def _until_the_end(serving: asyncio.Task[None], greeting: asyncio.Task[None]) -> None:
    """Until the server has ended, or greeting has failed."""
    await asyncio.wait({serving, greeting}, return_when=asyncio.FIRST_COMPLETED)
    if greeting.done() and not greeting.cancelled():
        greeting.result()
    if not serving.done():
        await asyncio.wait({serving})


async def _tell_ready(process: ServingProcess, listening: asyncio.Future[str]) -> None:
    await listening
    process.tell_ready()


async def _greet(
    gateway: Gateway, listening: asyncio.Future[str], settings: Settings, on_listening: OnListening | None
) -> None:
    url = await listening
    output.print(f"Listening on [bold]{url}[/]  (console: {url}/console, API: {url}/docs)")
    output.print(f"The database is {gateway.database.where}", markup=False)
    _tell_of_starting(gateway)
    output.print(f"The administrator's key is in {settings.admin_key_file}: Authorization: Bearer <key>", markup=False)
    if on_listening is not None:
        await on_listening(url)


def _tell_of_starting(gateway: Gateway) -> None:
    """Which servers are not ready yet; of those that are down, and why, the log has told already."""
    starting = [server.server_id for server in gateway.registry.servers() if server.status.state == "starting"]
    if starting:
        output.print(f"Still starting: {', '.join(starting)}. Tools appear as their servers get ready.", markup=False)


@contextlib.contextmanager
def _stopped_by_signals(stopping: asyncio.Event) -> Iterator[None]:
    def stop() -> None:
        output.print("\nStopping; once more to stop at once.")
        stopping.set()

    with _once_by_signals(stop):
        yield


@contextlib.contextmanager
def _retired_by_signals(process: ServingProcess) -> Iterator[None]:
    """The supervisor uses no signals: this one is meant for this process alone, and the others go on."""
    with _once_by_signals(process.retire):
        yield


@contextlib.contextmanager
def _once_by_signals(act: Callable[[], None]) -> Iterator[None]:
    """The first signal acts; the second does what it does to any process."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        remove()
        act()

    def remove() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, once)
    try:
        yield
    finally:
        remove()
