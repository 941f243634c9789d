"""Keys and tenants in the database: what is stored of them, who may change them, and how quickly a change counts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import asyncpg
import pytest

from app.core.errors import AccessNotFound, SchemaViolation
from app.core.limits import ACCESS_CACHE_AGE_MS, ACCESS_CACHE_KEYS_MAX, ACCESS_LOOKUP_KEYS_MAX
from app.domain.identity import ROLES, StoredKey, parse_api_key
from app.postgres import api_keys as access_module
from app.postgres.api_keys import CreatedKey, PostgresAccess
from app.postgres.database import Database
from app.postgres.listener import Listener
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.conftest import Admin
from tests.patience import HANG_S

_LISTENERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'LISTEN%'"


@pytest.fixture
async def access(sessions: Sessions, database: Database) -> AsyncIterator[PostgresAccess]:
    async with await PostgresAccess.open(sessions, database.gateway_url) as opened:
        yield opened


async def create(access: PostgresAccess, **changes: Any) -> CreatedKey:
    fields: dict[str, Any] = {"name": "ci", "principal_id": "bot", "roles": ["agent"], "created_by": "test", **changes}
    return await access.create_key(**fields)


async def until_heard(access: PostgresAccess) -> None:
    for _ in range(200):
        if access._hears():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the listener did not come back")


async def test_a_key_reads_back_as_it_was_made_and_only_its_hash_is_stored(
    access: PostgresAccess, admin: Admin
) -> None:
    created = await create(access, roles=["operator", "agent", "agent"], life_s=60)
    assert re.fullmatch(r"tga_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", created.text)
    secret = created.text.split("_", 2)[2]
    rows = await admin.fetch("SELECT k::text AS everything, to_jsonb(k)::text AS again FROM tga.api_keys k")
    assert len(rows) == 1
    for form in (secret, secret.encode().hex(), created.text):
        assert form not in rows[0]["everything"] + rows[0]["again"]
    assert secret not in repr(created)
    presented = parse_api_key(created.text)
    found = await access.find_key(created.listed.key_id)
    assert presented is not None
    assert found is not None
    assert found.secret_sha256 == presented.secret_sha256
    assert (found.principal.principal_id, found.principal.tenant, found.principal.roles) == (
        "bot",
        "default",
        ["agent", "operator"],
    )
    (listed,) = await access.list_keys()
    assert listed == created.listed
    assert "secret_sha256" not in asdict(listed)
    assert listed.expires_at is not None
    assert listed.expires_at > listed.created_at


async def test_a_principal_may_have_many_keys_of_one_name(access: PostgresAccess) -> None:
    first, second = await create(access), await create(access)
    assert first.text != second.text
    assert await access.revoke_key(first.listed.key_id)
    assert [key.is_valid for key in await access.list_keys()] == [False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"roles": []},
        {"roles": ["agent", "root"]},
        {"name": ""},
        {"name": "x" * 129},
        {"name": " x"},
        {"name": "é"},
        {"principal_id": "two words"},
        {"principal_id": ""},
        {"principal_id": "x" * 129},
        {"tenant": "a b"},
        {"created_by": "a\nb"},
        {"life_s": 0},
        {"life_s": 10**18},
    ],
)
async def test_what_cannot_be_a_key_is_refused_and_nothing_stored(access: PostgresAccess, wrong: Any) -> None:
    with pytest.raises(SchemaViolation):
        await create(access, **wrong)
    assert await access.list_keys() == []


async def test_a_key_needs_a_tenant_that_exists(access: PostgresAccess) -> None:
    with pytest.raises(AccessNotFound):
        await create(access, tenant="acme")
    assert not await access.has_tenant("acme")
    assert await access.create_tenant("acme") is True
    assert await access.create_tenant("acme") is False
    assert await access.has_tenant("acme")
    assert (await create(access, tenant="acme")).listed.tenant == "acme"
    assert [tenant.tenant for tenant in await access.list_tenants()] == ["acme", "default"]


@pytest.mark.parametrize("name", ["", "a b", "a/b", "/", ".", "..", "x" * 129, "é", "a\n", "a\x00"])
async def test_a_tenant_has_a_name_that_can_be_part_of_another(access: PostgresAccess, admin: Admin, name: str) -> None:
    with pytest.raises(SchemaViolation):
        await access.create_tenant(name)
    if "\x00" not in name:
        with pytest.raises(asyncpg.CheckViolationError):
            await admin.execute("INSERT INTO tga.tenants (tenant) VALUES ($1)", name)
    for fine in ("...", "a.b", "~"):
        assert await access.create_tenant(fine)


async def test_a_key_is_revoked_once_by_the_databases_clock(access: PostgresAccess, admin: Admin) -> None:
    created = await create(access)
    assert await access.revoke_key(created.listed.key_id) is True
    (first,) = await access.list_keys()
    assert await access.revoke_key(created.listed.key_id) is False
    assert await access.list_keys() == [first]
    assert await admin.fetchval(
        "SELECT revoked_at BETWEEN clock_timestamp() - interval '5 s' AND clock_timestamp() FROM tga.api_keys"
    )
    with pytest.raises(AccessNotFound):
        await access.revoke_key("0" * 16)


async def test_the_database_alone_admits_no_other_rows(admin: Admin) -> None:
    insert = "INSERT INTO tga.api_keys (key_id, secret_sha256, name, principal_id, tenant, roles, created_by) "
    good = ["'0123456789abcdef'", "sha256('')", "'n'", "'p'", "'default'", "'{agent}'", "'c'"]
    for place, wrong in (
        (0, "'0123456789ABCDEF'"),
        (1, "'\\x00'"),
        (2, "' n'"),
        (3, "'a b'"),
        (4, "'nobody'"),
        (5, "'{}'"),
        (5, "'{root}'"),
        (5, "ARRAY['agent', NULL]"),
        (5, "NULL"),
        (6, "''"),
    ):
        values = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await admin.execute(f"{insert} VALUES ({', '.join(values)})")
    await admin.execute(f"{insert} VALUES ({', '.join(good)})")
    roles = await admin.fetchval("SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname LIKE '%roles%'")
    assert set(re.findall(r"'([a-z]+)'", roles)) == set(ROLES)


_CHANGES = [
    "INSERT INTO tga.tenants VALUES ('x')",
    "UPDATE tga.tenants SET tenant = 'x'",
    "DELETE FROM tga.tenants",
    "TRUNCATE tga.tenants CASCADE",
    "INSERT INTO tga.api_keys SELECT * FROM tga.api_keys",
    "UPDATE tga.api_keys SET revoked_at = NULL",
    "UPDATE tga.api_keys SET roles = '{admin}'",
    "UPDATE tga.api_keys SET roles = '{admin}', revoked_at = now()",
    "UPDATE tga.api_keys SET secret_sha256 = sha256('mine')",
    "UPDATE tga.api_keys SET expires_at = NULL, revoked_at = now()",
    "DELETE FROM tga.api_keys",
    "TRUNCATE tga.api_keys",
]


async def test_the_gateways_role_writes_only_through_the_functions(
    access: PostgresAccess, database: Database, admin: Admin
) -> None:
    await create(access)
    before = await admin.fetch("SELECT * FROM tga.api_keys")
    session = await asyncpg.connect(database.gateway_url, server_settings={"role": GATEWAY_ROLE})
    try:
        for change in [*_CHANGES, "UPDATE tga.api_keys SET revoked_at = now()", "SELECT tga.prepare_transaction(1)"]:
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await session.execute(change)
    finally:
        await session.close()
    assert await admin.fetch("SELECT * FROM tga.api_keys") == before


async def test_even_the_owner_can_only_revoke(access: PostgresAccess, admin: Admin) -> None:
    await create(access)
    await access.revoke_key((await create(access)).listed.key_id)
    before = await admin.fetch("SELECT * FROM tga.api_keys")
    await admin.execute("SET session_replication_role = replica; SET ROLE tga_owner")
    for change in _CHANGES[1:4] + _CHANGES[5:]:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await admin.execute(change)
    await admin.execute("RESET ROLE; RESET session_replication_role")
    assert await admin.fetch("SELECT * FROM tga.api_keys") == before


async def test_an_expired_key_is_not_valid_and_is_not_remembered_past_its_time(
    access: PostgresAccess, admin: Admin
) -> None:
    key_id = (await create(access, life_s=1)).listed.key_id
    found = await access.find_key(key_id)
    assert found is not None
    assert found.is_valid
    while await admin.fetchval("SELECT expires_at > clock_timestamp() FROM tga.api_keys"):
        await asyncio.sleep(0.02)
    expired = await access.find_key(key_id)
    assert expired is not None
    assert not expired.is_valid
    assert [key.is_valid for key in await access.list_keys()] == [False]


async def test_a_known_key_costs_no_query_and_an_old_one_is_asked_for_again(
    access: PostgresAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = (await create(access)).listed.key_id
    await asyncio.sleep(0.1)  # until the announcement of the new key was heard
    asked = count_queries(access, monkeypatch)
    for _ in range(50):
        assert await access.find_key(key_id) is not None
    assert asked == [key_id]
    access._forget(key_id)
    monkeypatch.setattr(access_module, "ACCESS_CACHE_AGE_MS", 50)
    await access.find_key(key_id)
    await access.find_key(key_id)
    assert asked == [key_id] * 2
    await asyncio.sleep(0.06)
    await access.find_key(key_id)
    assert asked == [key_id] * 3
    assert ACCESS_CACHE_AGE_MS <= 5_000


async def test_strangers_do_not_push_known_keys_out_and_memory_is_bounded(
    access: PostgresAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_module, "ACCESS_CACHE_KEYS_MAX", 3)
    known = [(await create(access)).listed.key_id for _ in range(4)]
    await asyncio.sleep(0.1)  # until the announcements of the new keys were heard
    for key_id in known:
        await access.find_key(key_id)
    for number in range(20):
        assert await access.find_key(f"{number:016x}") is None
    assert list(access._known) == known[1:]
    assert ACCESS_CACHE_KEYS_MAX >= 1000


@pytest.fixture
def remembered_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no longer valid was heard of: it did not grow old."""
    monkeypatch.setattr(access_module, "ACCESS_CACHE_AGE_MS", 3_600_000)


@pytest.mark.usefixtures("remembered_for_long")
async def test_a_revocation_counts_at_once_in_another_gateway(
    access: PostgresAccess, sessions: Sessions, database: Database
) -> None:
    async with await PostgresAccess.open(sessions, database.gateway_url) as other:
        for _ in range(5):
            key_id = (await create(access)).listed.key_id
            await valid_in(other, key_id)
            await access.revoke_key(key_id)
            await until_invalid(other, key_id)


@pytest.mark.usefixtures("remembered_for_long")
async def test_a_revocation_by_hand_counts_at_once(access: PostgresAccess, admin: Admin) -> None:
    key_id = (await create(access)).listed.key_id
    await valid_in(access, key_id)
    await admin.execute("UPDATE tga.api_keys SET revoked_at = clock_timestamp() WHERE key_id = $1", key_id)
    await until_invalid(access, key_id)


async def test_while_nothing_is_heard_every_lookup_goes_to_the_database(
    access: PostgresAccess, admin: Admin, sessions: Sessions, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = (await create(access)).listed.key_id
    await valid_in(access, key_id)
    listener = access._listener
    assert listener is not None
    original = listener._listen
    monkeypatch.setattr(listener, "_listen", asyncio.Event().wait)  # it cannot come back
    (pid,) = [row["pid"] for row in await admin.fetch(_LISTENERS)]
    await admin.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
    other = PostgresAccess(sessions, database.gateway_url)
    await other.revoke_key(key_id)
    found = await access.find_key(key_id)
    assert found is not None
    assert not found.is_valid
    asked = count_queries(access, monkeypatch)
    await access.find_key(key_id)
    await access.find_key(key_id)
    assert asked == [key_id, key_id]
    await original()


async def test_memory_is_not_trusted_for_a_moment_without_hearing(
    access: PostgresAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = (await create(access)).listed.key_id
    await valid_in(access, key_id)
    monkeypatch.setattr(Listener, "is_live", False)
    assert access.cached_key(key_id) is None


@pytest.mark.usefixtures("remembered_for_long")
async def test_a_lost_listener_comes_back_and_forgets_what_it_may_have_missed(
    access: PostgresAccess, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id = (await create(access)).listed.key_id
    await valid_in(access, key_id)
    (pid,) = [row["pid"] for row in await admin.fetch(_LISTENERS)]
    await admin.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
    async with asyncio.timeout(HANG_S):
        while access.cached_key(key_id) is not None:
            await asyncio.sleep(0)
    await until_heard(access)
    await valid_in(access, key_id)
    asked = count_queries(access, monkeypatch)
    assert await access.find_key(key_id) is not None
    assert asked == []
    await admin.execute("UPDATE tga.api_keys SET revoked_at = clock_timestamp()")
    await until_invalid(access, key_id)


async def test_an_answer_older_than_a_change_that_was_heard_is_not_remembered(
    access: PostgresAccess, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query is answered, the key is revoked and that is heard, and only then the answer arrives here."""
    key_id = (await create(access)).listed.key_id
    original = sessions.fetch

    async def slow(statement: str, *arguments: Any) -> list[asyncpg.Record]:
        rows = await original(statement, *arguments)
        monkeypatch.setattr(sessions, "fetch", original)
        await access.revoke_key(key_id)
        return rows

    monkeypatch.setattr(sessions, "fetch", slow)
    await access.find_key(key_id)
    found = await access.find_key(key_id)
    assert found is not None
    assert not found.is_valid


async def test_many_look_ups_at_once_are_few_queries_and_a_key_that_exists_is_among_them(
    access: PostgresAccess, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many keys strangers make up, what the database is asked stays bounded, and nobody is turned away."""
    good = (await create(access)).listed.key_id
    access._forget_all()
    queries: list[int] = []
    original = sessions.fetch

    async def counted(statement: str, *arguments: Any) -> list[asyncpg.Record]:
        queries.append(len(arguments[0]))
        return await original(statement, *arguments)

    monkeypatch.setattr(sessions, "fetch", counted)
    made_up = [f"{number:016x}" for number in range(2_000)]
    found = await asyncio.gather(*(access.load_key(key_id) for key_id in (*made_up, good, good)))
    assert found[:2_000] == [None] * 2_000
    assert [key is not None and key.key_id for key in found[2_000:]] == [good, good]
    assert len(queries) <= 12
    assert max(queries) <= ACCESS_LOOKUP_KEYS_MAX


async def test_a_look_up_that_is_given_up_does_not_disturb_the_others(access: PostgresAccess) -> None:
    good = (await create(access)).listed.key_id
    access._forget_all()
    looks = [asyncio.create_task(access.load_key(good)) for _ in range(3)]
    await asyncio.sleep(0)
    looks[1].cancel()
    first, _, third = await asyncio.gather(*looks, return_exceptions=True)
    assert isinstance(first, StoredKey)
    assert first == third


async def valid_in(access: PostgresAccess, key_id: str) -> None:
    """It is valid there, and remembered."""
    for _ in range(100):
        found = await access.find_key(key_id)
        assert found is not None
        assert found.is_valid
        if access.cached_key(key_id) is not None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the key was never remembered")


async def until_invalid(access: PostgresAccess, key_id: str) -> None:
    async with asyncio.timeout(HANG_S):
        while (found := await access.find_key(key_id)) is None or found.is_valid:
            await asyncio.sleep(0)


def count_queries(access: PostgresAccess, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []
    original = access._sessions.fetch

    async def counted(statement: str, *arguments: Any) -> list[asyncpg.Record]:
        asked.extend(arguments[0])
        return await original(statement, *arguments)

    monkeypatch.setattr(access._sessions, "fetch", counted)
    return asked
