"""Migrations: plain SQL files, each applied once, in order, in a transaction of its own, and never edited after."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib import resources

import asyncpg

from app.core.errors import MigrationRefused
from app.postgres.sessions import LOST, connect, unavailable

_FILE = re.compile(r"(?P<version>[0-9]{4})_(?P<name>[a-z0-9_]+)\.sql")
# Any number that nothing else locks; two migrations of one database wait for each other.
_LOCK_KEY = 7_386_113_482_001
_LOCK_TIMEOUT_MS = 60_000
_OTHER_TABLES = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace('tga') AND relkind = 'r'"
# The first migration of the stores that were made before the schema was made anew. Nothing was released with it.
_BEFORE_THE_FIRST_RELEASE = "ceab94d6eafb246109868c7c7dd93629dd976ded2d21871875fd41bd50a4ac28"


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Applied:
    version: int
    name: str
    sha256: str
    applied_at: str


@dataclass(frozen=True, slots=True)
class Status:
    applied: tuple[Applied, ...]
    pending: tuple[Migration, ...]


def packaged_migrations() -> tuple[Migration, ...]:
    """The files that came with this version, in order; a gap in their numbers is a packaging error."""
    found = []
    for file in resources.files("app.postgres").joinpath("migrations").iterdir():
        match = _FILE.fullmatch(file.name)
        if match:
            found.append(Migration(int(match["version"]), match["name"], file.read_text("utf-8")))
    found.sort(key=lambda migration: migration.version)
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise MigrationRefused("the migration files have gaps", found=[migration.version for migration in found])
    return tuple(found)


async def load_status(url: str, migrations: tuple[Migration, ...] | None = None) -> Status:
    """What is applied and what is pending; MigrationRefused when the two do not fit together."""
    session = await connect(url)
    try:
        return _compare(await _load_applied(session), migrations or packaged_migrations())
    except asyncpg.PostgresError as error:
        raise unavailable(error, url) from error
    finally:
        await session.close()


async def migrate(url: str, migrations: tuple[Migration, ...] | None = None) -> tuple[Migration, ...]:
    """Apply what is pending and return it. A crash in the middle leaves whole migrations, and running again goes on."""
    packaged = migrations or packaged_migrations()
    session = await connect(url)
    try:
        await session.execute(f"SET lock_timeout = {_LOCK_TIMEOUT_MS}")
        await session.fetchval("SELECT pg_advisory_lock($1)", _LOCK_KEY)
        await _load_applied(session)  # a list that was removed is not begun anew
        bootstrap = resources.files("app.postgres").joinpath("migrations", "bootstrap.sql").read_text("utf-8")
        async with session.transaction():
            await session.execute(bootstrap)
        pending = _compare(await _load_applied(session), packaged).pending
        for migration in pending:
            async with session.transaction():
                await session.execute("SET LOCAL ROLE tga_owner; SET LOCAL search_path = pg_catalog, pg_temp")
                await session.execute(migration.sql)
                await session.execute(
                    "INSERT INTO tga.migrations (version, name, sha256) VALUES ($1, $2, $3)",
                    migration.version,
                    migration.name,
                    migration.sha256,
                )
        return pending
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationRefused(
            "this user may not migrate the database",
            found=error,
            remedy="Run `tga db migrate` once as a superuser, or as a user with CREATEROLE and CREATE on the database.",
        ) from error
    except asyncpg.PostgresError as error:
        raise MigrationRefused("a migration failed, and nothing of it was kept", found=error) from error
    except LOST as error:
        raise unavailable(error) from error
    finally:
        await session.close()


async def _load_applied(session: asyncpg.Connection[asyncpg.Record]) -> tuple[Applied, ...]:
    if await session.fetchval("SELECT to_regclass('tga.migrations')") is None:
        made = await session.fetchval(_OTHER_TABLES)
        if made:
            raise MigrationRefused(
                "table tga.migrations is missing, and the ledger is there",
                expected="the list of the migrations that made it",
                found=f"{made} other tables in schema tga",
                remedy="Find out who removed it. Restore the database from a backup, then run `tga verify --all`.",
            )
        return ()
    rows = await session.fetch("SELECT version, name, sha256, applied_at::text FROM tga.migrations ORDER BY version")
    return tuple(Applied(**dict(row)) for row in rows)


def _compare(applied: tuple[Applied, ...], packaged: tuple[Migration, ...]) -> Status:
    if applied and applied[0].sha256 == _BEFORE_THE_FIRST_RELEASE:
        raise MigrationRefused(
            "the store was made by migrations that are no more",
            expected=f"migration 0001_{packaged[0].name}" if packaged else None,
            found=f"migration 0001_{applied[0].name} of before the first release",
            remedy="Export it with the version that made it (`tga export`), then start with an empty database.",
        )
    for done, file in zip(applied, packaged, strict=False):
        if (done.version, done.sha256) != (file.version, file.sha256):
            raise MigrationRefused(
                f"migration {done.version:04}_{done.name} is not the file that was applied",
                expected=done.sha256,
                found=file.sha256,
            )
    if len(applied) > len(packaged):
        raise MigrationRefused(
            "the database was migrated by a newer version",
            expected=f"at most {len(packaged)} migrations",
            found=len(applied),
            remedy="Start the newer version of the gateway.",
        )
    return Status(applied, packaged[len(applied) :])
