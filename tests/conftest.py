"""Real PostgreSQL for every test: the embedded one, and every other that this machine has.

A test that asks for `database` runs once on each server, in a database of its own. TGA_TEST_DATABASE_URL adds a
server of your own (a superuser's URL; databases are made and dropped there).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import asyncpg
import hypothesis
import pytest

from app.postgres.database import Database
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.ownership import Executor
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from app.postgres.state_store import PostgresStateStore
from tests import leftovers, sampling

# How fast a machine makes examples says nothing about the code.
hypothesis.settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-machine")
IS_SOAK = sampling.IS_SOAK
TEMPLATE = "tga_template"
MEMORY = Path("/dev/shm")  # noqa: S108
_MEMORY_BYTES_MIN = 4 * 2**30
LONG = {
    "test_contracts.py",
    "bench",
    "load",
    "crash",
    "docs",
    "export",
    "cli",
    "mcp",
    "conformance",
    "packaging",
    "runs",
    "sdk",
    "api",
    "attack",
    "users",
    "console",
}
# Where SQL itself is tested, every test runs on every server. Elsewhere `make test` takes one of them for each test.
ON_EVERY_SERVER = {"postgres"}
Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # Under `nohup`: what tests start would inherit that, and tests of SIGHUP would wait for ever. A handler is not
    # inherited, and this one ignores it here as before.
    signal.signal(signal.SIGHUP, lambda *_: None)
_WATCHER: pytest.StashKey[subprocess.Popen[bytes]] = pytest.StashKey()
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Server:
    """A running PostgreSQL with a migrated template; `embedded` is its launcher if it is ours."""

    name: str
    root_url: str
    embedded: EmbeddedPostgres | None

    def url(self, user: str, database: str) -> str:
        if self.embedded is not None:
            return self.embedded.url(user, database)
        return urlsplit(self.root_url)._replace(path=f"/{database}").geturl()

    def database(self, name: str) -> Database:
        gateway = self.url(GATEWAY_ROLE, name)
        return Database(self.url("postgres", name), gateway, is_embedded=self.embedded is not None)

    @contextlib.asynccontextmanager
    async def as_root(self) -> AsyncIterator[Admin]:
        session = await asyncpg.connect(self.root_url)
        try:
            yield session
        finally:
            await session.close()

    async def execute_as_root(self, statement: str) -> None:
        async with self.as_root() as session:
            await session.execute(statement)


def system_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3].split(".")[0]))
    return found[-1].parent if found else None


def pytest_configure(config: pytest.Config) -> None:
    """Where there is room in memory, PostgreSQL makes and drops a database there in a tenth of the time.

    Nothing is tested less: what is killed is a process, never the machine. TMPDIR chooses another place. In it each
    process that runs tests has a folder of its own, and a watcher that ends what is left there when pytest is gone.
    """
    config.addinivalue_line(
        "markers", "one_in(n, of=): costly; `make test` runs it, or its whole file, once in n times"
    )
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= _MEMORY_BYTES_MIN:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)  # for processes of the tests, and for this one
    sampling.seed()  # before the processes start that inherit it
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not config.getoption("numprocesses", None):
        gc.disable()  # until all tests are collected
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # what `tmp_path` keeps of failures stays
        folder = Path(tempfile.mkdtemp(prefix="tga-tests-"))
        folder.chmod(0o711)
        config.stash[_WATCHER] = leftovers.watch(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    if (watcher := config.stash.get(_WATCHER, None)) is not None:
        watcher.communicate()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first: with several workers, none is left alone with it in the end."""
    items.sort(key=lambda item: item.path.parent.name not in LONG and item.path.name not in LONG)
    if sampling.seed() is not None:
        left_out = [item for item in items if _is_on_another_server(item) or _is_of_another_run(item)]
        config.hook.pytest_deselected(items=left_out)
        chosen = set(left_out)
        items[:] = [item for item in items if item not in chosen]


def _is_on_another_server(item: pytest.Item) -> bool:
    callspec: Any = getattr(item, "callspec", None)
    name: str | None = None if callspec is None else callspec.params.get("server")
    if name not in ("embedded", "system") or item.path.parent.name in ON_EVERY_SERVER or system_binaries() is None:
        return False
    others = sorted(
        f"{key}={value!r}" for key, value in callspec.params.items() if key != "server" and _is_plain(value)
    )
    place = f"{item.path.name} {getattr(item, 'originalname', item.name)} {others}"
    return name != ("embedded", "system")[sampling.number(place) % 2]


def _is_of_another_run(item: pytest.Item) -> bool:
    return any(
        not sampling.is_taken(item.path.name if mark.kwargs.get("of") == "file" else item.nodeid, mark.args[0])
        for mark in item.iter_markers("one_in")
    )


def _is_plain(value: object) -> bool:
    """Whether it looks the same in every process."""
    return isinstance(value, str | int | bool | None)


def pytest_report_header() -> str | None:
    seed = sampling.seed()
    return None if seed is None else f"a sample of the suite (`make soak` runs the whole): TGA_SEED={seed}"


def pytest_collection_finish() -> None:
    """While thousands of tests are collected, and in each of them, Python would look through all of it for garbage
    again and again: a quarter of the time. What tests make is looked through as ever."""
    gc.collect()
    gc.freeze()
    gc.enable()


async def copy_template(session: Admin, name: str) -> None:
    """A database like the template. Copying files is faster than logging what is in them; 14 knows nothing else."""
    strategy = " STRATEGY file_copy" if session.get_server_version() >= (15,) else ""
    await session.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}{strategy}")


def make_home() -> Path:
    """A new home directory. pytest's own folders are closed to the account that PostgreSQL runs as under root."""
    home = Path(tempfile.mkdtemp(prefix="tga-test-"))
    home.chmod(0o711)
    return home


@pytest.fixture
def home() -> Iterator[Path]:
    made = make_home()
    yield made
    shutil.rmtree(made)


async def _make_template(server: Server) -> None:
    await server.execute_as_root(f"DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)")
    await server.execute_as_root(f"CREATE DATABASE {TEMPLATE}")
    await migrate(server.url("postgres", TEMPLATE))


_NAMED_URL = os.environ.get("TGA_TEST_DATABASE_URL")


class Servers:
    """The servers that this process has started, each once: they stay up while tests change between them."""

    def __init__(self) -> None:
        self._running: dict[str, Server] = {}
        self._launchers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._launchers.close()

    def named(self, name: str) -> Server:
        if name not in self._running:
            self._running[name] = self._started(name)
        return self._running[name]

    def _started(self, name: str) -> Server:
        if name == "named":
            server = Server(name, str(_NAMED_URL), None)
        else:
            bin_dir = None
            if name == "system" and (bin_dir := system_binaries()) is None:
                pytest.skip("no PostgreSQL under /usr/lib/postgresql: apt-get install postgresql to test on it too")
            home = make_home()
            self._launchers.callback(shutil.rmtree, home)
            launcher = self._launchers.enter_context(EmbeddedPostgres(home, bin_dir=bin_dir))
            server = Server(name, launcher.url(), launcher)
        asyncio.run(_make_template(server))
        return server


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    with Servers() as started:
        yield started


@pytest.fixture(scope="session", params=["embedded", "system", *(["named"] if _NAMED_URL else [])])
def server(request: pytest.FixtureRequest, servers: Servers) -> Server:
    return servers.named(request.param)


@pytest.fixture
async def database(server: Server) -> AsyncIterator[Database]:
    name = f"tga_test_{os.getpid()}_{next(_numbers)}"
    async with server.as_root() as root:
        await copy_template(root, name)
    yield server.database(name)
    await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def admin(database: Database) -> AsyncIterator[Admin]:
    """A superuser's session: what an attacker with the database in their hands can do."""
    session = await asyncpg.connect(database.admin_url)
    yield session
    await session.close()


@pytest.fixture
async def sessions(database: Database) -> AsyncIterator[Sessions]:
    async with await Sessions.open(database.gateway_url, sessions_max=4) as opened:
        yield opened


@pytest.fixture
async def executor(database: Database) -> AsyncIterator[Executor]:
    async with await Executor.open(database.gateway_url) as opened:
        yield opened


@pytest.fixture
def ledger(sessions: Sessions) -> PostgresLedger:
    return PostgresLedger(sessions)


@pytest.fixture
def store(sessions: Sessions, ledger: PostgresLedger, executor: Executor) -> PostgresStateStore:
    return PostgresStateStore(sessions, ledger, executor)
