"""The first start makes a key for the administrator, and its file always holds one that works."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.errors import SettingInvalid
from app.edge.authentication import Authenticator
from app.gateway.admin_key import ensure_admin_key
from app.keys.admin_key import replace_key_file
from app.postgres.api_keys import PostgresAccess
from app.postgres.database import Database
from app.postgres.sessions import Sessions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin.key"


@pytest.fixture
async def access(sessions: Sessions, database: Database) -> AsyncIterator[PostgresAccess]:
    async with await PostgresAccess.open(sessions, database.gateway_url) as opened:
        yield opened


async def works(access: PostgresAccess, path: Path) -> bool:
    principal = await Authenticator(access).authenticate(f"Bearer {path.read_text().strip()}")
    return principal.to_json() == {"principal_id": "admin", "tenant": "default", "roles": ["admin"]}


async def test_the_first_start_makes_it_for_its_owner_only_and_the_next_keeps_it(
    access: PostgresAccess, path: Path
) -> None:
    umask = os.umask(0)
    try:
        assert await ensure_admin_key(access, path) is True
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await works(access, path)
    text = path.read_text()
    assert await ensure_admin_key(access, path) is False
    assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == ["admin.key"]
    assert len(await access.list_keys()) == 1


async def test_a_file_that_others_could_read_is_closed_to_them(access: PostgresAccess, path: Path) -> None:
    await ensure_admin_key(access, path)
    path.chmod(0o644)
    assert await ensure_admin_key(access, path) is False
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "nonsense", f"tga_{'0' * 16}_{'A' * 43}\n", "\x00" * 1000, "wrong secret"])
async def test_a_file_whose_key_does_not_work_here_is_replaced(
    access: PostgresAccess, path: Path, content: str
) -> None:
    if content == "wrong secret":
        await ensure_admin_key(access, path)
        content = path.read_text()[:-44] + "A" * 43
    path.write_text(content)
    path.chmod(0o644)
    assert await ensure_admin_key(access, path) is True
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await works(access, path)


async def test_a_revoked_key_is_replaced(access: PostgresAccess, path: Path) -> None:
    await ensure_admin_key(access, path)
    (key,) = await access.list_keys()
    await access.revoke_key(key.key_id)
    assert await ensure_admin_key(access, path) is True
    assert await works(access, path)


async def test_gateways_that_start_at_once_share_one_key(database: Database, path: Path) -> None:
    async def start() -> bool:
        async with await Sessions.open(database.gateway_url, sessions_max=2) as sessions:
            return await ensure_admin_key(PostgresAccess(sessions, database.gateway_url), path)

    made = await asyncio.gather(*(start() for _ in range(5)))
    assert sorted(made) == [False, False, False, False, True]
    async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
        access = PostgresAccess(sessions, database.gateway_url)
        assert await works(access, path)
        assert len(await access.list_keys()) == 1


async def test_a_file_that_cannot_be_written_leaves_no_key_that_works(access: PostgresAccess, tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid):
        await ensure_admin_key(access, tmp_path / "missing" / "admin.key")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingInvalid):
        await ensure_admin_key(access, tmp_path / "folder")
    assert [key.is_valid for key in await access.list_keys()] == [False]


def test_a_crash_before_the_file_is_whole_leaves_the_old_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("old\n")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("app.keys.admin_key.Path.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        replace_key_file(path, "new")
    assert path.read_text() == "old\n"
    assert [p.name for p in path.parent.iterdir()] == ["admin.key"]
