"""`tga keys` and `tga tenants`, as functions: what goes to stdout, what to stderr, and what never."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import keys, tenants
from app.core.errors import AccessNotFound, SchemaViolation, StoreUnfit
from app.edge.authentication import Authenticator
from app.postgres.api_keys import PostgresAccess
from app.postgres.database import Database
from app.postgres.sessions import Sessions
from app.settings import Settings
from tests.conftest import Server


def settings_of(home: Path, url: str | None) -> Settings:
    return Settings.from_environment({"TGA_HOME": str(home), **({"TGA_DATABASE_URL": url} if url else {})})


async def create(settings: Settings, **changes: Any) -> bool:
    fields: dict[str, Any] = {
        "name": "ci [bold]key",
        "principal": "bot",
        "roles": ["agent"],
        "tenant": "default",
        "expires_in_days": None,
        "as_json": False,
        **changes,
    }
    return await keys.create_key(settings, **fields)


async def check_life_of_a_key(settings: Settings, capsys: pytest.CaptureFixture[str]) -> str:
    assert await create(settings, expires_in_days=30)
    told = capsys.readouterr()
    key = told.out.strip()
    assert told.out.count("\n") == 1
    assert key.startswith("tga_")
    secret = key.split("_", 2)[2]
    assert secret not in told.err
    assert "cannot be shown again" in told.err
    await keys.list_keys(settings, as_json=False)
    listed = capsys.readouterr().out
    assert key.split("_")[1] in listed
    assert "ci [bold]key" in listed
    assert secret not in listed
    await keys.list_keys(settings, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["principal_id"], row["roles"], row["is_valid"], row["created_by"]) == ("bot", ["agent"], True, "cli")
    assert "secret" not in json.dumps(row)
    return key


async def test_a_key_is_shown_once_and_then_never(
    database: Database, sessions: Sessions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, database.gateway_url)
    key = await check_life_of_a_key(settings, capsys)
    authenticator = Authenticator(PostgresAccess(sessions, database.gateway_url))
    assert (await authenticator.authenticate(f"Bearer {key}")).principal_id == "bot"
    key_id = key.split("_")[1]
    for word in ("is revoked", "had been revoked before"):
        await keys.revoke_key(settings, key_id)
        assert word in capsys.readouterr().out
    await keys.list_keys(settings, as_json=False)
    assert "revoked" in capsys.readouterr().out


async def test_a_key_as_json(database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = settings_of(tmp_path, database.gateway_url)
    await create(settings, as_json=True, roles=["auditor", "admin"])
    told = capsys.readouterr()
    document = json.loads(told.out)
    assert document["key"].startswith(f"tga_{document['key_id']}_")
    assert (document["roles"], document["expires_at"], told.err) == (["auditor", "admin"], None, "")


async def test_tenants_are_created_once_and_listed(
    database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(tmp_path, database.gateway_url)
    with pytest.raises(AccessNotFound):
        await create(settings, tenant="acme")
    await tenants.create_tenant(settings, "acme")
    await tenants.create_tenant(settings, "acme")
    assert capsys.readouterr().out == "Tenant acme is created.\nTenant acme exists already.\n"
    await create(settings, tenant="acme")
    capsys.readouterr()
    await tenants.list_tenants(settings, as_json=True)
    assert [tenant["tenant"] for tenant in json.loads(capsys.readouterr().out)] == ["acme", "default"]
    await tenants.list_tenants(settings, as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    "wrong", [{"roles": ["root"]}, {"principal": "a b"}, {"expires_in_days": 0}, {"expires_in_days": 10**30}]
)
async def test_what_cannot_be_is_refused(database: Database, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SchemaViolation):
        await create(settings_of(tmp_path, database.gateway_url), **wrong)


async def test_a_key_that_does_not_exist_cannot_be_revoked(database: Database, tmp_path: Path) -> None:
    for key_id in ("0" * 16, "x", ""):
        with pytest.raises(AccessNotFound):
            await keys.revoke_key(settings_of(tmp_path, database.gateway_url), key_id)


async def test_an_embedded_database_is_made_ready_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await check_life_of_a_key(settings_of(home, None), capsys)


async def test_a_named_database_that_is_not_migrated_is_said_to_be(server: Server, tmp_path: Path) -> None:
    await server.execute_as_root("DROP DATABASE IF EXISTS tga_bare")
    await server.execute_as_root("CREATE DATABASE tga_bare")
    try:
        with pytest.raises(StoreUnfit, match="tga db migrate"):
            await keys.list_keys(settings_of(tmp_path, server.url("postgres", "tga_bare")), as_json=False)
    finally:
        await server.execute_as_root("DROP DATABASE tga_bare WITH (FORCE)")
