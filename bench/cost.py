"""What an append costs, in numbers that do not depend on the machine: round trips, commits, buffers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, quote, urlsplit

import asyncpg

from app.core.limits import LOCK_TIMEOUT_MS
from app.domain.ledger import Plan
from app.postgres.ledger import _APPEND, PostgresLedger, _columns
from app.postgres.sessions import Sessions

_PORT = 5432
_FLUSH_TIMEOUT_S = 10.0


class Relay:
    """A unix socket in front of a server. It counts ReadyForQuery, which ends every round trip of the protocol."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._directory = tempfile.TemporaryDirectory(prefix="tga-relay-")
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.round_trips = 0

    @property
    def url(self) -> str:
        user = self._parts.netloc.rpartition("@")[0]
        netloc = f"{user}@" if user else ""
        query = f"host={quote(self._directory.name, safe='')}&port={_PORT}"
        return f"{self._parts.scheme}://{netloc}{self._parts.path}?{query}"

    async def __aenter__(self) -> Self:
        path = Path(self._directory.name) / f".s.PGSQL.{_PORT}"
        self._server = await asyncio.start_unix_server(self._serve, path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._directory.cleanup()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await self._connect()
        both = (
            asyncio.create_task(self._forward(from_client, to_server)),
            asyncio.create_task(self._forward_counting(from_server, to_client)),
        )
        self._tasks.update(both)
        await asyncio.gather(*both, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        query = parse_qs(self._parts.query)
        host = query["host"][0] if "host" in query else self._parts.hostname or "localhost"
        port = int(query["port"][0]) if "port" in query else self._parts.port or _PORT
        if host.startswith("/"):
            return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        return await asyncio.open_connection(host, port)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.closing(target), contextlib.suppress(OSError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()

    async def _forward_counting(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.closing(target), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await source.readexactly(5)  # a letter, and a length that counts itself
                body = await source.readexactly(int.from_bytes(head[1:]) - 4)
                self.round_trips += head[:1] == b"Z"
                target.write(head + body)
                await target.drain()


async def buffers_of_append(session: asyncpg.Connection[asyncpg.Record], plan: Plan) -> int:
    """Commit the plan, and say how many shared buffers the call touched, planning of it apart."""
    # The real statement with the real parameters; what the function does inside is counted with it.
    rows = await session.fetch(
        f"EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT json) {_APPEND}", LOCK_TIMEOUT_MS, *_columns([plan])
    )
    (explained,) = json.loads(rows[0][0])
    top = explained["Plan"]
    if top["Actual Rows"] != 1:
        raise AssertionError(f"not one result for one plan: {top}")
    return int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])


@asynccontextmanager
async def measuring_session(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    session = await asyncpg.connect(url)
    try:
        yield session
    finally:
        await session.close()


async def commits_of(url: str, observer: asyncpg.Connection[asyncpg.Record], plans: list[Plan]) -> tuple[int, int]:
    """Commit the plans one by one on one session: how many transactions the server counted, and round trips.

    Nothing else may use the database. `observer` is a session to another database. A session counts its transactions
    when it ends, so connecting is measured too, and taken off.
    """
    overhead, trips_overhead = await _counted(url, observer, [])
    total, trips = await _counted(url, observer, plans)
    return total - overhead, trips - trips_overhead


async def _counted(url: str, observer: asyncpg.Connection[asyncpg.Record], plans: list[Plan]) -> tuple[int, int]:
    before = await _commits_when_idle(url, observer)
    async with Relay(url) as relay:
        async with await Sessions.open(relay.url, sessions_max=1) as sessions:
            ledger = PostgresLedger(sessions)
            # A plan without entries for a stream that is not there: prepares the statement and changes nothing.
            with contextlib.suppress(Exception):
                await ledger.commit(Plan(stream="none:0", executor_id="0" * 32, owner_after=None))
            for plan in plans:
                await ledger.commit(plan)
        trips = relay.round_trips
        after = await _commits_when_idle(url, observer)
    return after - before, trips


async def _commits_when_idle(url: str, observer: asyncpg.Connection[asyncpg.Record]) -> int:
    name = urlsplit(url).path.removeprefix("/")
    async with asyncio.timeout(_FLUSH_TIMEOUT_S):
        while True:
            row = await observer.fetchrow(
                "SELECT xact_commit + xact_rollback AS ended, numbackends FROM pg_stat_database WHERE datname = $1",
                name,
            )
            assert row is not None
            if row["numbackends"] == 0:
                return int(row["ended"])
            await asyncio.sleep(0.01)
