"""A home tells where its database is, and `tga db drop` ends it: nothing of it is met again, no log is signed twice."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.keys.log_signer import LogSigner
from app.postgres.embedded.server import EmbeddedPostgres
from tests.cli.world import World, wait_for
from tests.conftest import make_home


class OwnWorld(World):
    """Whose database is held by nobody but its gateway."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._postgres.stop()


@pytest.fixture
def alone() -> Iterator[World]:
    home = make_home()
    world = OwnWorld(home)
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(home)


def test_the_gateway_the_doctor_and_db_status_say_where_the_database_is(world: World) -> None:
    where = f"embedded, in {EmbeddedPostgres(world.home).data_dir.parent}"
    assert f"The database is {where}" in world.told.read_text()
    assert f"ok     database: {where}\n" in world.tga("doctor").stdout
    assert f"Database: {where}\n" in world.tga("db", "status").stdout
    url = "postgresql://ada:hunter2@127.0.0.1:1/ledger?password=hunter3"
    told = world.tga("db", "status", TGA_DATABASE_URL=url)
    assert "hunter" not in told.stdout + told.stderr


def test_db_drop_asks_and_what_comes_after_it_is_another_log_with_other_keys(alone: World) -> None:
    world = alone
    world.start()
    wait_for(lambda: (world.home / "keys" / "log.head").exists())
    old_key, agent = world.admin_key(), world.new_key("agent-1", "agent")
    origin = LogSigner.open(world.home / "keys", environment={}).origin
    told = world.tga("db", "drop", "--yes")
    assert (told.returncode, "is in use. Stop the gateway first." in told.stderr) == (3, True)
    world.stop()
    for answer in (None, "n\n", "y\n"):
        told = world.tga("db", "drop", stdin=answer)
        assert (told.returncode, "CONFIRMATION_NEEDED" in told.stderr) == (2, True)
    told = world.tga("db", "drop", "--yes", TGA_DATABASE_URL="postgresql://127.0.0.1/x")
    assert (told.returncode, "that server's own tools" in told.stderr) == (2, True)
    assert EmbeddedPostgres(world.home).is_made
    told = world.tga("db", "drop", "--yes")
    assert (told.returncode, "is gone, and so are all API keys" in told.stdout) == (0, True), told.stderr
    assert not (world.home / "postgres").exists()
    assert world.tga("db", "drop", "--yes").returncode == 3

    world.start()
    assert world.admin_key() != old_key
    assert world.tga("traces", TGA_API_KEY=agent).returncode == 1
    wait_for(lambda: (world.home / "keys" / "log.head").exists())
    assert LogSigner.open(world.home / "keys", environment={}).origin != origin
    wait_for(lambda: "ready, and takes the key" in world.tga("doctor").stdout)
    assert world.tga("verify", "--all").returncode == 0


def test_db_drop_does_not_make_a_key_of_the_environment_sign_two_logs(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = alone
    monkeypatch.setenv("TGA_LOG_KEY", "A" * 43 + "=")
    told = world.tga("db", "drop", "--yes")
    assert (told.returncode, "would sign a second history" in told.stderr) == (2, True)
    assert EmbeddedPostgres(world.home).is_made
