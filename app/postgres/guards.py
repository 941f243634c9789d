"""Is this PostgreSQL fit to keep the promises? Asked at every start, by `tga db status` and by `tga doctor`."""

from __future__ import annotations

import logging
from typing import Final

import asyncpg

from app.core.errors import StoreUnfit
from app.postgres.comparison import Problem, compare, expected_schema
from app.postgres.inventory import load_inventory
from app.postgres.migrate import packaged_migrations
from app.postgres.sessions import LOST, connect, unavailable

logger = logging.getLogger("tga")
SERVER_VERSION_MIN: Final = 140_000
_SAFE_SETTINGS: Final = {"fsync": "on", "full_page_writes": "on", "session_replication_role": "origin"}
_UNSAFE: Final = {
    "fsync": "without it a crash loses what was acknowledged",
    "full_page_writes": "without it a crash loses what was acknowledged",
    "session_replication_role": "as a replica a session skips foreign keys and triggers that are not ENABLE ALWAYS",
}


async def find_problems(url: str) -> list[Problem]:
    """Everything about the server and the schema that would let a promise be broken; empty when it is fit.

    Read at one moment, as the role that the URL names: a superuser can change it again the moment after.
    """
    session = await connect(url)
    try:
        return await _server_problems(session) + await schema_problems(session)
    except (*LOST, asyncpg.PostgresError) as error:
        raise unavailable(error) from error
    finally:
        await session.close()


async def verify_guards(url: str) -> None:
    """Raise StoreUnfit naming the first problem that refuses a start and how many there are; tell of the others."""
    problems = await find_problems(url)
    refusing = [problem for problem in problems if problem.refuses]
    if refusing:
        first = refusing[0]
        more = f" ({len(refusing) - 1} more: `tga db status`)" if len(refusing) > 1 else ""
        raise StoreUnfit(first.what + more, expected=first.expected, found=first.found, remedy=first.remedy)
    for problem in problems:
        logger.warning(
            "the database: %s; expected %s, found %s. %s", problem.what, problem.expected, problem.found, problem.remedy
        )


async def schema_problems(session: asyncpg.Connection[asyncpg.Record]) -> list[Problem]:
    """What is not as the migrations made it. Nothing while some are pending: `tga db migrate` comes first."""
    known = expected_schema()
    if await session.fetchval("SELECT to_regnamespace('tga')") is None:
        return []
    applied = 0
    if await session.fetchval("SELECT to_regclass('tga.migrations')") is not None:
        applied = await session.fetchval("SELECT count(*) FROM tga.migrations")
    found = await load_inventory(session, known.rule_tables)
    is_made = sum(key in found for key in known.objects if key.startswith("table ")) > 1
    # A ledger without its list of migrations has lost it; with a part of them it is of an older version.
    if 0 < applied < len(packaged_migrations()) or not is_made:
        return []
    return compare(known.objects, found)


async def _server_problems(session: asyncpg.Connection[asyncpg.Record]) -> list[Problem]:
    problems = []
    version = int(await session.fetchval("SELECT current_setting('server_version_num')"))
    if version < SERVER_VERSION_MIN:
        problems.append(Problem("the server is too old", "PostgreSQL 14 or newer", str(version), "Upgrade PostgreSQL."))
    for name, safe in _SAFE_SETTINGS.items():
        found = await session.fetchval("SELECT current_setting($1)", name)
        if found != safe:
            remedy = f"Set {name} = {safe} in postgresql.conf: {_UNSAFE[name]}."
            problems.append(Problem(f"the server runs with an unsafe {name}", safe, found, remedy))
    encoding = await session.fetchval("SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        problems.append(Problem("the database is not UTF-8", "UTF8", encoding, "Create it with ENCODING 'UTF8'."))
    return problems
