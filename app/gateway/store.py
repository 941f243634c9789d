"""The database of a gateway, opened, and how much of it each process uses.

Apart from the wiring: a supervisor needs this, and nothing else that is wired.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.config import Config
from app.core.errors import SettingInvalid, StoreUnfit
from app.core.limits import POOL_SESSIONS_MAX, POOL_SESSIONS_MIN, SESSIONS_BESIDE_POOL
from app.postgres.database import Database, open_database
from app.postgres.guards import verify_guards
from app.postgres.migrate import load_status, migrate
from app.settings import Settings


def pool_sessions(config: Config, processes: int) -> int:
    """How large the pool of one process is, so that all of them together stay within `[database] connections`, also
    while they are started anew: then there is one more. SettingInvalid if that leaves too few."""
    at_once = processes if processes == 1 else processes + 1
    share = config.database.connections // at_once - SESSIONS_BESIDE_POOL
    if share < POOL_SESSIONS_MIN:
        needed = at_once * (POOL_SESSIONS_MIN + SESSIONS_BESIDE_POOL)
        raise SettingInvalid(
            f"{config.path}: database.connections are too few for {processes} processes",
            expected=f"at least {needed}, {POOL_SESSIONS_MIN + SESSIONS_BESIDE_POOL} for each and for one more",
            found=config.database.connections,
            remedy="Raise it, and max_connections of PostgreSQL above it; or serve with fewer processes.",
        )
    return min(POOL_SESSIONS_MAX, share)


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Database]:
    """The database, migrated if it is ours, and fit; or the error that says why not."""
    async with open_database(settings.home, settings.database_url) as database:
        if database.is_embedded:
            await migrate(database.admin_url)
        elif (await load_status(database.admin_url)).pending:
            raise StoreUnfit("the database's schema is not up to date", remedy="Run `tga db migrate` first.")
        await verify_guards(database.admin_url)
        yield database
