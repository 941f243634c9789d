"""A gateway that the SDK's tests kill and start again behind one address, and a bank whose book says what was done."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Self

from tests.bank import AMOUNT_SCHEMA, bank_tables
from tests.runs.world import GatewayProcess, RunsWorld
from tga_sdk import AsyncClient, Client

POLICY = """
@id("tools") permit(principal, action == Action::"call", resource);
@id("unattended") permit(principal, action == Action::"call_unattended", resource)
unless { resource.tags.contains("approval") };
@id("no-thirteen") forbid(principal, action == Action::"call", resource == Tool::"bank/charge")
when { context.arguments.amount == 13 };
@id("start") permit(principal, action == Action::"start", resource);
"""
_numbers = itertools.count(1)


class Relay:
    """Stands before the gateway at an address that stays: passes bytes on, or loses an answer that was due.

    It runs in a thread of its own, so that clients that block can be tested from the same process.
    """

    def __init__(self) -> None:
        self.url = ""
        self.lost = 0
        self._to: tuple[str, int] | None = None
        self._lose = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> Self:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def stop(self) -> None:
        async def close() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def lead_to(self, url: str | None) -> None:
        self._to = None if url is None else ("127.0.0.1", int(url.rpartition(":")[2]))

    def lose(self, answers: int) -> None:
        """Of the next so many requests: each arrives, and its answer does not."""
        self._lose = answers

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            if self._to is None:
                return
            up_reader, up_writer = await asyncio.open_connection(*self._to)
            with contextlib.closing(up_writer):
                ways = [
                    asyncio.ensure_future(self._pass(reader, up_writer, is_answer=False)),
                    asyncio.ensure_future(self._pass(up_reader, writer, is_answer=True)),
                ]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65_536):
                if is_answer and self._lose > 0:
                    self._lose -= 1
                    self.lost += 1
                    return
                writer.write(chunk)
                await writer.drain()


class Gateways:
    """The gateway under test: killed as often as a test likes, and always at `url`."""

    def __init__(self, world: RunsWorld) -> None:
        self.world = world
        self.relay = Relay()
        self.gateway: GatewayProcess | None = None
        self._config = self._written()

    @property
    def url(self) -> str:
        return self.relay.url

    @property
    def direct_url(self) -> str:
        """For workers, so that the answers which a test loses are not theirs."""
        assert self.gateway is not None
        return self.gateway.url

    async def start(self) -> Self:
        if not self.relay.url:
            self.relay.start()
        self.gateway = await self.world.gateway(config=self._config)
        self.relay.lead_to(self.gateway.url)
        return self

    async def kill(self) -> None:
        if self.gateway is not None:
            self.relay.lead_to(None)
            await self.gateway.kill()
            self.gateway = None

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    def executions(self, key: str) -> int:
        return len(self.world.bank.executions(key))

    def _written(self) -> Path:
        path = self.world.place / "sdk.toml"
        (self.world.place / "sdk.cedar").write_text(POLICY)
        settings = {"timeout_ms": 5_000, "max_attempts": 3, "max_concurrency": 64}
        tools = {"charge": f'description = "Charge an amount."\n{AMOUNT_SCHEMA}'}
        tools |= dict.fromkeys(("slow_charge", "flaky", "refund", "balance", "fail"), "")
        text = bank_tables(self.world.bank.url, settings, tools)
        held = {"flaky": 'on_unknown_outcome = "hold"'}
        text += bank_tables(self.world.bank.url, settings, held, server="careful")
        text += '[policy]\nfile = "sdk.cedar"\n\n[runs]\nlease_ms = 5000\n'
        text += "\n[limits]\nrequests_per_second = 100000\nburst = 100000\n"
        path.write_text(text)
        return path


class Subject:
    """One of the two clients, asked in the same way: the blocking one in a thread."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)

        async def asked(*given: Any, **named: Any) -> Any:
            if isinstance(self.client, AsyncClient):
                return await method(*given, **named)
            return await asyncio.to_thread(method, *given, **named)

        return asked

    async def followed(self, name: str, *given: Any, **named: Any) -> list[Any]:
        """Everything that an iterator of the client has, to its end."""
        made = getattr(self.client, name)(*given, **named)
        if isinstance(self.client, AsyncClient):
            return [item async for item in made]
        return await asyncio.to_thread(list, made)

    async def closed(self) -> None:
        if isinstance(self.client, AsyncClient):
            await self.client.close()
        else:
            self.client.close()


KINDS: tuple[type[Client] | type[AsyncClient], ...] = (Client, AsyncClient)


@contextlib.asynccontextmanager
async def subject(
    kind: type[Client] | type[AsyncClient], url: str | list[str], key: str | None = "key", **more: Any
) -> AsyncIterator[Subject]:
    made = Subject(kind(url, key, **more))
    try:
        yield made
    finally:
        await made.closed()


def new_key(name: str = "sdk") -> str:
    return f"{name}-{threading.get_native_id()}-{next(_numbers)}"
