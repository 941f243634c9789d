"""The processes of bench.http: a gateway with an instant tool, an empty FastAPI route, and a client that is cheap."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from fastapi import FastAPI

from app.connectors.http import HttpConnector
from app.core.limits import KEEP_ALIVE_S
from app.domain.tga.documents import JsonOutput, ToolCall
from app.domain.tga.ports import Answered, Dispatched, MaySend, Withheld
from app.gateway.serving import serve
from app.main import open_gateway
from app.postgres.embedded.server import EmbeddedPostgres
from app.settings import Settings
from bench.measure import WARMUP_STEPS, Server
from bench.phases import Phases

PATH: Final = "/v1/tool-calls"
CONFIG: Final = """
[servers.crm]
transport = "http"
base_url = "http://127.0.0.1:9"
max_concurrency = 256
max_in_flight = 1000
[servers.crm.tools.create_ticket]
class = "write"
input_schema = { type = "object", required = ["title"], properties = { title = { type = "string" } } }
[limits]
requests_per_second = 1000000
burst = 1000000
"""
_OUTPUT: Final = JsonOutput(encoding="json", value={"ticket_id": "T-1"})


async def _answer_at_once(
    self: HttpConnector,
    call: ToolCall,
    *,
    timeout_ms: int,
    traceparent: str | None = None,
    arguments: dict[str, Any] | None = None,
    may_send: MaySend | None = None,
) -> Dispatched:
    if may_send is not None and not await may_send():
        return Withheld()
    return Answered("SUCCESS", _OUTPUT)


async def run_gateway(*, is_watched: bool) -> str | None:
    """The whole gateway as `tga serve` runs it, but for the wire to the tool server. Returns, if it is watched, its CPU
    by phase since the last SIGUSR1."""
    HttpConnector.dispatch = _answer_at_once  # type: ignore[method-assign]
    settings, phases = Settings.from_environment(), Phases()
    began_s = time.process_time()

    def count_anew() -> None:
        nonlocal began_s
        phases.reset()
        began_s = time.process_time()

    if is_watched:
        phases.watch()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, count_anew)

    async def listening(url: str) -> None:
        _say(url)

    async with open_gateway(settings) as gateway:
        await serve(gateway, settings, on_listening=listening)
        whole_s = time.process_time() - began_s
    return json.dumps({"cpu_s": phases.cpu_s, "calls": phases.calls, "whole_s": whole_s}) if is_watched else None


async def run_empty_route() -> None:
    """FastAPI with one route that does nothing, under the gateway's settings of uvicorn."""
    app = FastAPI(openapi_url=None)

    @app.post(PATH)
    async def empty() -> dict[str, str]:
        return {}

    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    _say(f"http://127.0.0.1:{bound.getsockname()[1]}")
    await uvicorn.Server(config).serve([bound])


class Connection(asyncio.Protocol):
    """Asks, and asks again as soon as it is answered. Reads no more of an answer than it must."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._number = number
        self._count = 0
        self._buffer = b""
        self._asked_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self) -> None:
        self._count += 1
        self._asked_s = time.perf_counter()
        self._transport.write(self._load.request(self._number, self._count))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        place = head.index(b"content-length: ") + 16
        if len(rest) < int(head[place : place + 8].partition(b"\r")[0]):
            return
        if not self._buffer.startswith(b"HTTP/1.1 200 "):
            self._load.fail(self._buffer)
            return
        self._buffer = b""
        if self._load.took(time.perf_counter() - self._asked_s):
            self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._load.is_over:
            self._load.fail(b"the connection was lost")

    def close(self) -> None:
        self._transport.close()


class Load:
    """So many connections, each with one request in flight, for so long."""

    def __init__(self, key: str, name: str, at_once: int) -> None:
        self._head = (
            f"POST {PATH} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._name = name
        self._at_once = at_once
        self._left = 0
        self._until_s = float("inf")
        self._idle = 0
        self._over = asyncio.Event()
        self._failed: bytes | None = None
        self.is_over = False
        self.latencies: list[float] = []

    def request(self, connection: int, count: int) -> bytes:
        body = (
            f'{{"server_id":"crm","tool_name":"create_ticket","idempotency_key":"{self._name}-{connection}-{count}",'
            f'"arguments":{{"title":"ticket {count}","priority":2,"text":"{"It does not work. " * 4}"}}}}'
        ).encode()
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    def took(self, seconds: float) -> bool:
        self.latencies.append(seconds)
        self._left -= 1
        if time.perf_counter() < self._until_s and self._left >= self._at_once - 1 - self._idle:
            return True
        self._idle += 1
        if self._idle == self._at_once:
            self._over.set()
        return False

    def fail(self, answer: bytes) -> None:
        self._failed = self._failed or answer[:2000]
        self._over.set()

    async def run(self, connections: list[Connection], *, steps: int, seconds: float) -> None:
        self.latencies, self._left, self._idle = [], steps, 0
        self._until_s = time.perf_counter() + seconds
        self._over.clear()
        for connection in connections:
            connection.ask()
        await self._over.wait()
        if self._failed is not None:
            raise RuntimeError(f"not answered with 200: {self._failed!r}")


async def run_client(url: str, key: str, name: str, at_once: int, seconds: float, pid: int, home: Path) -> None:
    """Prints a bench.measure.Timing as JSON: CPU is of the answering process and of PostgreSQL."""
    host, _, port = url.removeprefix("http://").partition(":")
    load, server = Load(key, name, at_once), Server(EmbeddedPostgres(home))
    loop = asyncio.get_running_loop()
    connections = []
    for number in range(at_once):
        _, connection = await loop.create_connection(lambda n=number: Connection(load, n), host, int(port))  # type: ignore[misc]
        connections.append(connection)
    await load.run(connections, steps=WARMUP_STEPS * at_once, seconds=60)
    database_before, answering_before, began_s = server.cpu_s(), cpu_s_of(pid), time.perf_counter()
    await load.run(connections, steps=2**62, seconds=seconds)
    elapsed_s = time.perf_counter() - began_s
    timing = {
        "steps": len(load.latencies),
        "seconds": elapsed_s,
        "client_cpu_s": cpu_s_of(pid) - answering_before,
        "server_cpu_s": server.cpu_s() - database_before,
        "latencies_s": load.latencies,
    }
    _say(json.dumps(timing))


def cpu_s_of(pid: int) -> float:
    facts = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
