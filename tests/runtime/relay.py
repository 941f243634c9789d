"""A network between a gateway and PostgreSQL that can lose what is said, without a word to either side."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


@dataclass
class Line:
    """One session. Open, it carries bytes both ways. Silent, it carries nothing, and tells neither side that the other
    has gone; the bytes that were held are carried once it is open again."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    is_open: asyncio.Event
    tells_the_client_when_it_speaks: bool = False

    def silence(self, *, until_the_client_speaks: bool = False) -> None:
        """`until_the_client_speaks`: then its connection is reset, as by a server that has forgotten it."""
        self.is_open.clear()
        self.tells_the_client_when_it_speaks = until_the_client_speaks


class Between:
    """A place between clients and a PostgreSQL: clients come to `url`, `connect` goes on to the server behind it."""

    upstream: str
    directory: Path

    @property
    def url(self) -> str:
        split = urlsplit(self.upstream)
        user = split.netloc.rpartition("@")[0]
        host = f"host={self.directory}&port=5432&sslmode=disable"
        return f"postgresql://{user + '@' if user else ''}/{split.path.lstrip('/')}?{host}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        split = urlsplit(self.upstream)
        named = parse_qs(split.query)
        if "host" in named:
            return await asyncio.open_unix_connection(f"{named['host'][0]}/.s.PGSQL.{named.get('port', ['5432'])[0]}")
        return await asyncio.open_connection(split.hostname, split.port or 5432)


@dataclass
class Relay(Between):
    upstream: str
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tga-test-")))
    lines: list[Line] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_silent: bool = False  # new sessions are, from their beginning

    async def serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await self.connect()
        line = Line(to_client, to_server, asyncio.Event())
        if not self.is_silent:
            line.is_open.set()
        self.lines.append(line)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                chunk = await reader.read(65536)
                if not line.is_open.is_set() and reader is from_client and line.tells_the_client_when_it_speaks:
                    return
                await line.is_open.wait()
                if not chunk:
                    return
                writer.write(chunk)

        ways = [
            asyncio.ensure_future(carry(from_client, to_server)),
            asyncio.ensure_future(carry(from_server, to_client)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for writer in (to_client, to_server):
                writer.close()


@asynccontextmanager
async def open_relay(upstream: str) -> AsyncIterator[Relay]:
    relay = Relay(upstream)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(relay.serve(reader, writer))
        relay.tasks.add(task)
        task.add_done_callback(relay.tasks.discard)

    server = await asyncio.start_unix_server(accept, relay.directory / ".s.PGSQL.5432")
    try:
        yield relay
    finally:
        server.close()
        for task in list(relay.tasks):
            task.cancel()
        with contextlib.suppress(OSError):
            await asyncio.gather(*relay.tasks, return_exceptions=True)
        shutil.rmtree(relay.directory)
