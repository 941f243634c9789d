"""A PostgreSQL of one's own that cannot be used: the cause by its name, and the command that mends it."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.migrate import migrate
from tests.cli.test_looking import tga
from tests.conftest import make_home

ROOT = Path(__file__).parents[2]


class OwnServer:
    """A server that is like one of the operator's own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.server = EmbeddedPostgres(home / "server")
        self.server.start()

    def fill(self) -> None:
        """A ledger in the database `ledger`, and logins; `ada` needs a password."""
        self.execute("CREATE DATABASE ledger")
        asyncio.run(migrate(self.server.url("postgres", "ledger")))
        self.execute(
            "CREATE ROLE ada LOGIN PASSWORD 'heliotrope'", "CREATE ROLE bare LOGIN", 'CREATE ROLE "Odd One" LOGIN'
        )
        hba = self.server.data_dir / "pg_hba.conf"
        hba.write_text("local all ada scram-sha-256\n" + hba.read_text())
        self.execute("SELECT pg_reload_conf()")

    def execute(self, *statements: str) -> None:
        async def work() -> None:
            session = await asyncpg.connect(self.server.url())
            for statement in statements:
                await session.execute(statement)
            await session.close()

        asyncio.run(work())

    def url(self, user: str, database: str = "ledger", password: str | None = None) -> str:
        url = self.server.url(user, database)
        return url if password is None else url.replace("@", f":{password}@", 1)

    def status(self, url: str) -> tuple[int, str]:
        told = tga(self.home / "home", "db", "status", TGA_DATABASE_URL=url)
        assert "Check that the server runs" not in told.stderr
        assert "heliotrope" not in told.stdout + told.stderr
        return told.returncode, told.stdout + told.stderr


@contextmanager
def running() -> Iterator[OwnServer]:
    home = make_home()
    server = OwnServer(home)
    try:
        yield server
    finally:
        server.server.stop()
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def own() -> Iterator[OwnServer]:
    with running() as server:
        server.fill()
        yield server


@pytest.fixture
def new() -> Iterator[OwnServer]:
    with running() as server:
        yield server


def test_a_wrong_password_a_wrong_name_and_a_missing_role_are_told_apart(own: OwnServer) -> None:
    code, said = own.status(own.url("ada", password="wrong"))  # noqa: S106
    assert (code, "the server refuses the password of ada;" in said) == (3, True), said
    assert "ALTER ROLE ada PASSWORD '…'" in said
    code, said = own.status(own.url("bare", "ledgre"))
    assert (code, "the server has no database ledgre;" in said, "CREATE DATABASE ledgre" in said) == (3, True, True)
    code, said = own.status(own.url("ghost"))
    assert (code, "the server does not let ghost in;" in said, "CREATE ROLE ghost LOGIN" in said) == (3, True, True)


def test_a_server_that_is_not_there_is_told_from_a_host_that_is_not_and_a_url_that_is_none(own: OwnServer) -> None:
    for url, words in (
        ("postgresql://ada@127.0.0.1:1/ledger", "no server listens at ada@127.0.0.1:1/ledger"),
        ("postgresql://ada@nowhere.invalid/ledger", "has no address: ada@nowhere.invalid/ledger"),
        (f"postgresql://ada@/ledger?host={own.home}/none&port=5432", f"no socket of a server at ada@{own.home}/none"),
        ("mysql://ada:heliotrope@127.0.0.1/ledger", "TGA_DATABASE_URL is no address of a PostgreSQL database"),
    ):
        code, said = own.status(url)
        assert (code, words in said) == (3, True), said


@pytest.mark.parametrize("user", ["bare", "Odd One"])
def test_a_login_without_grants_is_told_the_grant_and_with_it_all_is_well(own: OwnServer, user: str) -> None:
    code, said = own.status(own.url(user))
    assert (code, "may not use the ledger in ledger" in said) == (3, True), said
    remedy = re.search(r"As an administrator: (GRANT .*?; ALTER ROLE .*? INHERIT)\.", said)
    assert remedy is not None
    own.execute(*remedy[1].split("; "))
    code, said = own.status(own.url(user))
    assert (code, "Fit: " in said) == (0, True), said


def test_the_roles_and_grants_of_the_document_work_as_printed(new: OwnServer) -> None:
    """An administrator migrates; the gateway logs in with as little as the document gives it, and serves."""
    section = (ROOT / "docs" / "operations.md").read_text("utf-8").split("## Roles and grants")[1].split("\n## ")[0]
    first, second = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    new.execute(*first.splitlines())
    admin, gateway = new.url("tga_admin", "tga"), new.url("tga_app", "tga")
    assert tga(new.home / "home", "db", "migrate", TGA_DATABASE_URL=admin).returncode == 0
    new.execute(*second.splitlines())
    for arguments, url in (
        (("db", "status"), gateway),
        (("keys", "create", "agent-7", "--role", "agent"), gateway),
        (("verify", "--all"), gateway),
    ):
        told = tga(new.home / "home", *arguments, TGA_DATABASE_URL=url)
        assert told.returncode == 0, told.stderr
    told = tga(new.home / "home", "db", "migrate", TGA_DATABASE_URL=new.url("tga_app", "postgres"))
    assert (told.returncode, "MIGRATION_REFUSED" in told.stderr) == (3, True)
