"""Backups and restores of a database with open runs: the commands that an operator types, and where they restore to."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.migrate import migrate
from app.postgres.sessions import GATEWAY_ROLE
from tests.conftest import make_home
from tests.crash.world import Database
from tests.runs.world import RunsWorld

ROOT = Path(__file__).parents[2]
_numbers = itertools.count(1)


class Told(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


async def tga(world: RunsWorld, *arguments: str, url: str | None = None, database: Database | None = None) -> Told:
    """A command in a process of its own, on this database."""
    environment = {
        **os.environ,
        "TGA_HOME": str(world.place),
        "TGA_DATABASE_URL": (database or world.database).admin_url,
        "TGA_CONFIG": str(world.config()),
        "TGA_API_KEY": world.keys["admin"],
        **({} if url is None else {"TGA_URL": url}),
    }
    command = [sys.executable, "-m", "app.main", *arguments]
    return await _ran(command, environment)


async def verified_alone(bundle: Path, key: Path) -> dict[str, Any]:
    """What the verifier says that shares no line with the gateway."""
    command = [sys.executable, str(ROOT / "tools" / "verify.py"), str(bundle), str(key), "--json"]
    return dict((await _ran(command, dict(os.environ))).json)


async def _ran(command: list[str], environment: dict[str, str]) -> Told:
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Told(done.returncode, done.stdout, done.stderr)


@contextmanager
def place_to_restore(world: RunsWorld, where: str) -> Iterator[EmbeddedPostgres]:
    """The world's own cluster, or another one that has the roles and nothing else."""
    if where == "another database":
        yield world.postgres
        return
    home = make_home()
    cluster = EmbeddedPostgres(home)
    cluster.start()
    try:
        asyncio.run(migrate(cluster.url()))
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home)


async def restored(world: RunsWorld, file: Path, cluster: EmbeddedPostgres) -> Database:
    name = f"restored_{os.getpid()}_{next(_numbers)}"
    root = await asyncpg.connect(cluster.url())
    try:
        await root.execute(f"CREATE DATABASE {name}")
    finally:
        await root.close()
    database = Database(name, cluster.url(database=name), cluster.url(GATEWAY_ROLE, name))
    told = await tga(world, "db", "restore", str(file), "--yes", database=database)
    assert (told.code, "Restored and verified" in told.stdout) == (0, True), told
    return database
