"""What an append or a call costs, in numbers that do not depend on the machine: round trips, commits, buffers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qs, quote, urlsplit

import asyncpg

from app.domain.ledger.plans import Plan
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

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


class _Explaining(Sessions):
    """Runs what the ledger commits under EXPLAIN ANALYZE, which executes it, and keeps what it touched."""

    def __init__(self, session: Session) -> None:
        self._measured = session
        self.buffers = 0

    async def commit(self, statement: str, *arguments: Any) -> list[Any]:
        # The real statement with the real parameters; what the function does inside is counted with it.
        rows = await self._measured.fetch(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT json) {statement}", *arguments
        )
        top = json.loads(rows[0][0])[0]["Plan"]
        self.buffers = int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])
        # What the statement would have returned is lost; `buffers_of_append` looks whether the head has moved.
        return [{"code": None} for _ in range(round(top["Actual Rows"]))]


async def buffers_of_append(session: Session, plan: Plan) -> int:
    """Commit the plan, and say how many shared buffers the call touched, planning of it apart."""
    explaining = _Explaining(session)
    before = await _length(session, plan.stream)
    await PostgresLedger(explaining).commit(plan)
    after = await _length(session, plan.stream)
    if after != before + len(plan.entries):
        raise AssertionError(f"{plan.stream} has {after} entries, not {before} and {len(plan.entries)} more")
    return explaining.buffers


async def _length(session: Session, stream: str) -> int:
    return int(await session.fetchval("SELECT sequence_number FROM tga.heads WHERE stream = $1", stream) or 0)


@asynccontextmanager
async def measuring_session(url: str) -> AsyncIterator[Session]:
    session = await asyncpg.connect(url)
    try:
        yield session
    finally:
        await session.close()


async def commits_of(url: str, observer: Session, plans: Sequence[Plan]) -> tuple[int, int]:
    """Commit the plans one by one on one session: how many transactions the server counted, and round trips."""

    async def commit_all(url: str, count: int) -> None:
        async with await Sessions.open(url, sessions_max=1) as sessions:
            ledger = PostgresLedger(sessions)
            # A plan without entries for a stream that is not there: prepares the statement and changes nothing.
            with contextlib.suppress(Exception):
                await ledger.commit(Plan(stream="none:0", executor_id="0" * 32, owner_after=None))
            for plan in plans[:count]:
                await ledger.commit(plan)

    return await cost_of(url, observer, commit_all, len(plans))


async def cost_of(
    url: str, observer: Session, do: Callable[[str, int], Awaitable[None]], times: int
) -> tuple[int, int]:
    """Transactions that the server counted, and round trips, of `do(url, times)` over `do(url, 0)`.

    Nothing else may use the database. `observer` is a session to another database. A session counts its transactions
    when it ends, so connecting is measured too, and taken off; `do` must close what it opens.
    """
    commits_before, trips_before = await _counted(url, observer, do, 0)
    commits, trips = await _counted(url, observer, do, times)
    return commits - commits_before, trips - trips_before


async def _counted(
    url: str, observer: Session, do: Callable[[str, int], Awaitable[None]], times: int
) -> tuple[int, int]:
    before = await transactions_when_idle(url, observer)
    async with Relay(url) as relay:
        await do(relay.url, times)
        trips = relay.round_trips
        after = await transactions_when_idle(url, observer)
    return after - before, trips


async def transactions_when_idle(url: str, observer: Session) -> int:
    """How many transactions the database of `url` has ended, once nobody uses it any more."""
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
