"""A gateway's edge on a real socket over a real database, for those who read; and a client for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import aiohttp
import uvicorn
from fastapi import FastAPI

from app.api import events
from app.clock import SystemClock
from app.config import LimitsConfig, load_config
from app.connectors.blobs import FolderStore
from app.connectors.registry import Registry
from app.core.errors import Unauthenticated
from app.domain.identity import Principal
from app.domain.ledger.plans import Plan
from app.domain.runs.blobs import Blobs
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.procedures import Procedures
from app.domain.runs.scheduling import Schedules
from app.domain.system.log import SystemLog
from app.domain.system.pins import Pins
from app.domain.tga.replay import LogRecord
from app.edge.admission import Admission
from app.edge.middleware import GatewayMiddleware, add_exception_handlers
from app.edge.services import Log, Services
from app.gateway.http_server import serve_http
from app.gateway.policy_file import PolicyFile
from app.gateway.runs import RunErasure
from app.postgres.blobs import PostgresBlobRows
from app.postgres.call_facts import fold_all
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.schedules import PostgresSchedules
from app.postgres.sessions import Sessions
from app.postgres.system import PostgresSystemRows
from app.postgres.traces import PostgresTraces
from tests.invariants.plans import plan_of
from tests.log.standing import QuietLog
from tests.patience import HANG_S

CONFIG = """
[servers.pay]
transport = "http"
base_url = "http://127.0.0.1:9001"

[servers.pay.tools.charge]
class = "write"
tags = ["approval"]
description = "Charge a card."
secret_arguments = ["/card"]
input_schema = { type = "object", properties = { amount = { type = "integer" }, card = { type = "string" } } }

[servers.pay.tools.balance]
class = "read"

[tenants.acme]

[servers.crm]
transport = "http"
base_url = "http://127.0.0.1:9002"
tenant = "acme"

[servers.crm.tools.create_ticket]
class = "write"
"""


ACME: dict[str, Any] = {"principal": {"principal_id": "agent-1", "tenant": "acme"}, "server_id": "acme/crm"}


async def folded(sessions: Sessions) -> None:
    """As the sequencer and the fold behind it have done their work."""
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)


def person(name: str, *roles: str, tenant: str = "default") -> Principal:
    return Principal.model_validate({"principal_id": name, "tenant": tenant, "roles": list(roles)})


PEOPLE = {
    "auditor": person("audrey", "auditor"),
    "agent": person("agent-1", "agent"),
    "worker": person("worker-1", "worker"),
    "acme-worker": person("worker-1", "worker", tenant="acme"),
    "agent-2": person("agent-2", "agent"),
    "acme": person("audrey", "auditor", tenant="acme"),
    "acme-agent": person("agent-1", "agent", tenant="acme"),
    "nobody": person("nobody"),
    "supervisor": person("ada", "supervisor"),
    "operator": person("olga", "operator"),
    "acme-operator": person("olga", "operator", tenant="acme"),
    "acme-supervisor": person("ada", "supervisor", tenant="acme"),
}


class Tokens:
    """The token is the name of a principal; `revoked` ones are not."""

    def __init__(self) -> None:
        self.revoked: set[str] = set()

    async def authenticate(self, authorization: str | None) -> Principal:
        token = (authorization or "").removeprefix("Bearer ")
        if token not in PEOPLE or token in self.revoked:
            raise Unauthenticated("the request is not authenticated")
        return PEOPLE[token]


@dataclass(frozen=True)
class Event:
    name: str
    identity: str | None
    data: Any


class Subscriber:
    """Reads server-sent events as the specification says: fields, then a blank line."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_id: str | None = None
        self.beats = 0

    async def next_event(self) -> Event | None:
        """The next event, or None when the stream is over."""
        name, data = "message", []
        async with asyncio.timeout(HANG_S):
            while line := await self.response.content.readline():
                text = line.decode().rstrip("\n")
                if text.startswith(":"):
                    self.beats += 1
                elif text:
                    field, _, value = text.partition(": ")
                    if field == "id":
                        self.last_id = value
                    elif field == "event":
                        name = value
                    elif field == "data":
                        data.append(value)
                elif data:
                    return Event(name, self.last_id, json.loads("\n".join(data)))
        return None

    async def all_events(self) -> list[Event]:
        found = []
        while (event := await self.next_event()) is not None:
            found.append(event)
        return found


@dataclass
class Front:
    """A running edge, a client of it, and the ledger behind it."""

    services: Services
    tokens: Tokens
    ledger: PostgresLedger
    client: aiohttp.ClientSession
    port: int = 0

    async def get(self, path: str, who: str | None = "auditor", **headers: str) -> tuple[int, Any, bytes]:
        """Status, document, and the body as it came."""
        sent = headers if who is None else {"Authorization": f"Bearer {who}", **headers}
        async with self.client.get(f"http://127.0.0.1:{self.port}{path}", headers=sent) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw else None, raw

    async def post(self, path: str, document: Any, who: str = "agent") -> tuple[int, Any]:
        sent = {"Authorization": f"Bearer {who}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.client.post(url, data=json.dumps(document), headers=sent) as response:
            return response.status, json.loads(await response.read())

    async def page(self, path: str, who: str = "auditor") -> Any:
        status, document, raw = await self.get(path, who)
        assert status == 200, raw
        return document

    @asynccontextmanager
    async def follow(self, path: str, who: str = "auditor", **headers: str) -> AsyncIterator[Subscriber]:
        sent = {"Authorization": f"Bearer {who}", "Accept": "text/event-stream", **headers}
        async with self.client.get(f"http://127.0.0.1:{self.port}{path}", headers=sent) as response:
            yield Subscriber(response)

    async def append(self, *plans: Plan) -> None:
        for start in range(0, len(plans), 64):
            batch = plans[start : start + 64]
            assert await self.ledger.commit_batch(batch) == [None] * len(batch)

    async def append_trace(self, records: list[LogRecord]) -> None:
        await self.append(plan_of(records))


def waiting_plan(records: list[LogRecord]) -> Plan:
    return plan_of(records)._replace(waiting_after="supervisor")


class _Serving:
    """The event routes alone, with times of the test's own."""

    def __init__(self, services: Services, **times: int) -> None:
        app = FastAPI(openapi_url=None)
        app.include_router(events.router(services, **times))
        add_exception_handlers(app)
        app.add_middleware(GatewayMiddleware, services=services)
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._server.capture_signals = __import__("contextlib").nullcontext  # type: ignore[method-assign]

    async def __aenter__(self) -> int:
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task


@dataclass
class World:
    """Opens fronts on one database."""

    database: Database
    sessions: Sessions
    ledger: PostgresLedger
    folder: Path
    log: Log = field(default_factory=QuietLog)
    runs: RunEngine | None = None  # for the routes of runs

    @asynccontextmanager
    async def _parts(self, limits: LimitsConfig) -> AsyncIterator[tuple[Services, Tokens, aiohttp.ClientSession]]:
        path = self.folder / "tga.toml"
        path.write_text(CONFIG)
        registry, tokens, clock = Registry.from_config(load_config(path)), Tokens(), SystemClock()
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with (
                await PostgresTraces.open(self.sessions, self.database.gateway_url) as traces,
                aiohttp.ClientSession(connector=connector) as client,
            ):
                system = SystemLog(PostgresSystemRows(self.sessions), self.ledger, clock, traces.executor_id)
                services = Services(
                    runtime=cast("Any", None),
                    traces=traces,
                    sessions=self.sessions,
                    registry=registry,
                    pins=Pins(system, clock, registry.definition),
                    procedures=Procedures(system, clock),
                    submissions=cast("Any", None),
                    schedules=Schedules(system, PostgresSchedules(self.sessions), clock),
                    triggers=cast("Any", None),
                    runs=cast("Any", self.runs),
                    erasure=RunErasure(self.sessions, system, clock, traces.executor_id),
                    stopping=asyncio.Event() if self.runs is None else self.runs.ports.stopping,
                    authenticator=tokens,
                    admission=Admission(limits),
                    clock=clock,
                    log=self.log,
                    policy=PolicyFile.open(None),
                    blobs=Blobs(PostgresBlobRows(self.sessions), FolderStore(self.folder / "blobs"), clock),
                )
                yield services, tokens, client
        finally:
            await registry.close()

    @asynccontextmanager
    async def open(self, limits: LimitsConfig | None = None) -> AsyncIterator[Front]:
        """The whole application."""
        async with self._parts(limits or LimitsConfig(requests_per_second=100_000, burst=100_000)) as parts:
            front = Front(parts[0], parts[1], self.ledger, parts[2])
            ready = asyncio.Event()

            def listens(_: str, port: int) -> None:
                front.port = port
                ready.set()

            serving = asyncio.create_task(serve_http(front.services, host="127.0.0.1", port=0, on_ready=listens))
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait({waiting, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                waiting.cancel()
                await serving
            try:
                yield front
            finally:
                front.services.stopping.set()
                await serving

    @asynccontextmanager
    async def open_events(self, **times: int) -> AsyncIterator[Front]:
        """Only the routes of events, with other times than production's."""
        async with (
            self._parts(LimitsConfig(requests_per_second=100_000, burst=100_000)) as (services, tokens, client),
            _Serving(services, **times) as port,
        ):
            yield Front(services, tokens, self.ledger, client, port)

    @classmethod
    def of(cls, database: Database, sessions: Sessions, ledger: PostgresLedger, folder: Path) -> Self:
        return cls(database, sessions, ledger, folder)
