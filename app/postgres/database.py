"""Which PostgreSQL: the one that is named, or the embedded one in the home directory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from app.core.errors import StoreUnavailable, TgaError
from app.postgres.embedded.keeper import ServerKeeper
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.refusals import shown_url, unavailable
from app.postgres.sessions import GATEWAY_ROLE, connect

EMBEDDED_DATABASE = "tga"


@dataclass(frozen=True, slots=True)
class Database:
    """`admin_url` migrates and inspects; `gateway_url` appends and reads. With a named server both are the same URL,
    and sessions put on the gateway's role themselves. `keeper` starts the embedded server again when it ends."""

    admin_url: str
    gateway_url: str
    is_embedded: bool
    keeper: ServerKeeper | None = None
    place: Path | None = None

    @property
    def where(self) -> str:
        """For people; without the password."""
        return f"embedded, in {self.place}" if self.is_embedded else shown_url(self.admin_url)

    @property
    def fault(self) -> TgaError | None:
        """Why there is no store at this moment, as far as that is known without asking it."""
        return None if self.keeper is None else self.keeper.fault


def is_made(home: Path, url: str | None) -> bool:
    """Whether there is a database to look at: a server that is named, or an embedded cluster that was made before."""
    return url is not None or EmbeddedPostgres(home).is_made


def verify_made(home: Path, url: str | None) -> None:
    """For commands that only look, and must make nothing: StoreUnavailable when there is nothing to look at."""
    if not is_made(home, url):
        raise StoreUnavailable(
            f"there is no database in {home} yet",
            remedy="`tga serve` makes it at its first start. If there should be one, check TGA_HOME.",
        )


@asynccontextmanager
async def open_database(
    home: Path, url: str | None, *, database: str = EMBEDDED_DATABASE, make: bool = True
) -> AsyncIterator[Database]:
    """The database to use. The embedded server is started for it, again if it ends, and stopped after its last user.

    Without `make`, for who only looks: an embedded cluster that was never made is StoreUnavailable, and is not made."""
    if url is not None:
        yield Database(url, url, is_embedded=False)
        return
    if not make:
        verify_made(home, url)
    server = EmbeddedPostgres(home)
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        # Shielded: if we are cancelled here the thread goes on, and what it starts is stopped below.
        await asyncio.shield(starting)
        await _create_if_absent(server.url(), database)
        async with ServerKeeper(server) as keeper:
            yield Database(
                server.url("postgres", database),
                server.url(GATEWAY_ROLE, database),
                is_embedded=True,
                keeper=keeper,
                place=server.place,
            )
    finally:
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.to_thread(server.stop)


async def _create_if_absent(url: str, database: str) -> None:
    session = await connect(url)
    try:
        if await session.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", database) is None:
            await session.execute(f'CREATE DATABASE "{database}"')
    except asyncpg.DuplicateDatabaseError:
        pass  # another process was faster
    except asyncpg.UniqueViolationError:
        pass  # and at the same instant
    except asyncpg.PostgresError as error:
        raise unavailable(error) from error
    finally:
        await session.close()
