"""The command `tga` as a person or a script meets it: words, JSON and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.postgres.database import Database
from app.postgres.migrate import packaged_migrations
from app.postgres.state_store import PostgresStateStore
from tests.attacker import disarm, rearm
from tests.conftest import Admin, Server
from tests.traces import completed_trace, trace_id


def tga(*arguments: str, url: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    named = {"TGA_DATABASE_URL": url} if url else {}
    return subprocess.run(
        [sys.executable, "-m", "app.main", *arguments],
        env={**inherited, **named, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def fill(store: PostgresStateStore) -> None:
    for number in (1, 2, 3):
        for record in completed_trace(number):
            await store.append_log_entry(record)


async def change_an_artifact(admin: Admin) -> None:
    await disarm(admin)
    await admin.execute(
        "UPDATE tga.artifacts SET artifact = set_byte(artifact, 9, 0) WHERE stream = $1 AND sequence_number = 3",
        f"trace:{trace_id(2)}",
    )
    await rearm(admin)


async def test_a_sound_ledger_is_said_to_be_sound(database: Database, store: PostgresStateStore) -> None:
    await fill(store)
    told = tga("verify", "--all", url=database.admin_url)
    assert (told.returncode, told.stderr) == (0, "")
    sound, unsigned = told.stdout.splitlines()
    assert sound == "✓ 3 streams, 12 entries: every digest, link, transition, claim and head is right."
    assert unsigned == "0 leaves, 0 signed heads: there is no signed head to compare the tree with."
    told = tga("verify", trace_id(2), "--json", url=database.admin_url)
    assert told.returncode == 0
    assert json.loads(told.stdout) == {"findings": [], "streams": 1, "entries": 4, "broken_streams": 0}


async def test_a_broken_entry_is_named_with_what_was_expected(
    database: Database, store: PostgresStateStore, admin: Admin
) -> None:
    await fill(store)
    await change_an_artifact(admin)
    digest = completed_trace(2)[2].entry.artifact_digest
    told = tga("verify", "--all", url=database.admin_url)
    assert told.returncode == 1
    assert f"trace:{trace_id(2)}  entry 3  STATE_CHECKSUM_MISMATCH" in told.stdout
    assert f"expected {digest}" in told.stdout
    assert "\x1b" not in told.stdout
    told = tga("verify", "--all", "--json", url=database.admin_url)
    assert told.returncode == 1
    (finding,) = json.loads(told.stdout)["findings"]
    assert (finding["stream"], finding["sequence_number"]) == (f"trace:{trace_id(2)}", 3)
    assert (finding["code"], finding["expected"]) == ("STATE_CHECKSUM_MISMATCH", digest)
    assert tga("verify", trace_id(1), url=database.admin_url).returncode == 0
    assert tga("verify", f"trace:{trace_id(2)}", url=database.admin_url).returncode == 1


async def test_an_unknown_trace_is_not_found(database: Database) -> None:
    told = tga("verify", trace_id(1), url=database.admin_url)
    assert told.returncode == 1
    assert "TRACE_NOT_FOUND" in told.stderr


@pytest.mark.parametrize("arguments", [(), ("--all", "an-id"), ("--nonsense",)])
def test_bad_usage_is_exit_2(arguments: tuple[str, ...]) -> None:
    told = tga("verify", *arguments)
    assert told.returncode == 2
    assert told.stdout == ""
    assert told.stderr


def test_an_unreachable_server_is_exit_3_and_says_what_to_do() -> None:
    for arguments in (("verify", "--all"), ("db", "status"), ("db", "migrate")):
        told = tga(*arguments, url="postgresql://nobody@127.0.0.1:1/none")
        assert told.returncode == 3
        assert "STORE_UNAVAILABLE" in told.stderr
        assert "TGA_DATABASE_URL" in told.stderr
        assert "Traceback" not in told.stderr


def test_a_malformed_url_is_exit_3_without_a_traceback() -> None:
    told = tga("db", "status", url="mysql://nowhere")
    assert told.returncode == 3
    assert "Traceback" not in told.stderr


async def test_status_and_migrate_tell_the_same_story(server: Server) -> None:
    name = f"tga_cli_{os.getpid()}"
    await server.execute_as_root(f"CREATE DATABASE {name}")
    url = server.url("postgres", name)
    try:
        assert tga("verify", "--all", url=url).returncode == 3
        pending = tga("db", "status", "--json", url=url)
        assert pending.returncode == 1
        assert json.loads(pending.stdout)["pending"] == [f"{m.version:04}_{m.name}" for m in packaged_migrations()]
        assert json.loads(tga("db", "migrate", "--json", url=url).stdout)["applied"][0] == "0001_rules"
        assert tga("db", "migrate", url=url).stdout == "The schema is up to date.\n"
        status = tga("db", "status", url=url)
        assert status.returncode == 0
        assert "Fit:" in status.stdout
        assert tga("verify", "--all", url=url).stdout.startswith("✓ 0 streams, 0 entries")
    finally:
        await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")


async def test_status_tells_of_a_missing_guard(database: Database, admin: Admin) -> None:
    await admin.execute("ALTER TABLE tga.links DISABLE TRIGGER append_only")
    told = tga("db", "status", url=database.admin_url)
    assert told.returncode == 1
    assert "trigger append_only of tga.links was changed: enabled: expected always, found never" in told.stdout
    assert "ENABLE ALWAYS TRIGGER" in told.stdout


def test_the_embedded_server_is_used_when_none_is_named_and_stopped_after(home: Path) -> None:
    migrated = tga("db", "migrate", TGA_HOME=str(home))
    assert (migrated.returncode, migrated.stdout.count("applied")) == (0, len(packaged_migrations())), migrated.stderr
    assert tga("verify", "--all", TGA_HOME=str(home)).returncode == 0
    assert "postmaster.pid" not in {file.name for file in home.rglob("*")}


def test_the_version_is_there() -> None:
    assert tga("--version").stdout.startswith("tga ")


def test_a_config_that_cannot_be_used_is_exit_2(tmp_path: Path, database: Database) -> None:
    config = tmp_path / "tga.toml"
    config.write_text('[servers.pay]\ntransport = "carrier pigeon"\n')
    told = tga("recover", "--all", url=database.admin_url, TGA_CONFIG=str(config), TGA_HOME=str(tmp_path))
    assert told.returncode == 2
    assert "SETTING_INVALID" in told.stderr
    assert "Traceback" not in told.stderr
