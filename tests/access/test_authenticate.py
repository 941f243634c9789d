"""The Authorization header: one principal, or one error that never says why."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.errors import StoreUnavailable, Unauthenticated
from app.core.limits import CREDENTIAL_CHARS_MAX
from app.domain.identity import StoredKey, secret_digest
from app.edge import authentication as auth
from app.edge.authentication import Authenticator
from app.edge.tokens import JwtVerifier
from app.postgres.api_keys import PostgresAccess
from app.postgres.database import Database
from app.postgres.sessions import Sessions
from tests.access.issuer import ALL_KEYS, JwtFields, token
from tests.access.test_keys import create
from tests.conftest import Admin

SECRET = "s" * 43
KNOWN = "00000000000000aa"
UNKNOWN = "00000000000000bb"


class Book:
    """Keys in memory, and what was asked of them."""

    def __init__(self, *, remembers: bool) -> None:
        self.key = StoredKey(KNOWN, secret_digest(SECRET), "bot", "acme", ("agent",), is_valid=True)
        self.remembers = remembers
        self.asked: list[str] = []

    def cached_key(self, key_id: str) -> StoredKey | None:
        return self.key if self.remembers and key_id == KNOWN else None

    async def load_key(self, key_id: str) -> StoredKey | None:
        self.asked.append(key_id)
        return self.key if key_id == KNOWN else None


@pytest.fixture
async def access(sessions: Sessions, database: Database) -> AsyncIterator[PostgresAccess]:
    async with await PostgresAccess.open(sessions, database.gateway_url) as opened:
        yield opened


@pytest.fixture
def authenticator(access: PostgresAccess, tmp_path: Path) -> Authenticator:
    path = tmp_path / "keys.json"
    path.write_bytes(ALL_KEYS)
    return Authenticator(access, JwtVerifier(JwtFields(jwks_file=path), has_tenant=access.has_tenant))


async def refusal(authenticator: Authenticator, authorization: str | None) -> dict[str, Any]:
    with pytest.raises(Unauthenticated) as caught:
        await authenticator.authenticate(authorization)
    error = caught.value
    return {**vars(error), "text": str(error), "args": error.args, "cause": error.__cause__}


async def test_a_key_and_a_token_name_their_principal(authenticator: Authenticator, access: PostgresAccess) -> None:
    await access.create_tenant("acme")
    key = (await create(access, principal_id="robot", tenant="acme", roles=["worker", "agent"])).text
    for scheme in ("Bearer", "bearer", "BEARER", "Bearer  "):
        principal = await authenticator.authenticate(f"{scheme} {key}")
        assert principal.to_json() == {"principal_id": "robot", "tenant": "acme", "roles": ["agent", "worker"]}
    principal = await authenticator.authenticate(f"Bearer {token(tenant='acme')}")
    assert principal.to_json() == {"principal_id": "ada", "tenant": "acme", "roles": ["agent"]}


async def test_every_cause_of_refusal_gives_the_identical_error(
    authenticator: Authenticator, access: PostgresAccess, admin: Admin
) -> None:
    good = (await create(access)).text
    revoked = await create(access)
    await access.revoke_key(revoked.listed.key_id)
    expired = await create(access, life_s=1)
    while await admin.fetchval("SELECT bool_or(expires_at > clock_timestamp()) FROM tga.api_keys"):
        await asyncio.sleep(0.05)
    other = (await create(access)).text
    _, key_id, _ = good.split("_", 2)
    causes = {
        "missing": None,
        "empty": "",
        "no credential": "Bearer",
        "blank credential": "Bearer  ",
        "another scheme": f"Basic {good}",
        "no scheme": good,
        "malformed": "Bearer tga_x",
        "upper case id": f"Bearer tga_{key_id.upper()}_{'A' * 43}",
        "unknown id": f"Bearer tga_{'0' * 16}_{'A' * 43}",
        "wrong secret": f"Bearer {good[:-1]}{'A' if good[-1] != 'A' else 'B'}",
        "another key's secret": f"Bearer tga_{key_id}_{other.split('_', 2)[2]}",
        "too long a secret": f"Bearer {good}A",
        "a line end": f"Bearer {good}\n",
        "expired": f"Bearer {expired.text}",
        "revoked": f"Bearer {revoked.text}",
        "bad token": f"Bearer {token()[:-5]}",
        "expired token": f"Bearer {token(exp=1)}",
        "token of no tenant": f"Bearer {token(tenant='nobody')}",
        "token without roles": f"Bearer {token(roles=[])}",
        "huge": "Bearer " + "A" * CREDENTIAL_CHARS_MAX,
        "not ASCII": f"Bearer {good[:-1]}é",
        "lone surrogate": "Bearer \ud800",
    }
    refusals = [await refusal(authenticator, sent) for sent in causes.values()]
    assert all(told == refusals[0] for told in refusals)
    for part in (good, key_id, "expired", "revoked", "unknown key"):
        assert part not in refusals[0]["what"]
    await authenticator.authenticate(f"Bearer {good}")


async def test_without_an_issuer_no_token_is_accepted(access: PostgresAccess) -> None:
    assert await refusal(Authenticator(access), f"Bearer {token()}") == await refusal(Authenticator(access), None)


@pytest.mark.parametrize("remembers", [True, False])
async def test_an_unknown_key_and_a_wrong_secret_go_the_same_way(
    remembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many comparisons in constant time, of as many bytes, and as many looks at the database."""
    compared: list[tuple[int, int]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((len(left), len(right)))
        return hmac.compare_digest(left, right)

    class Watched:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Watched)
    ways = []
    for key_id in (KNOWN, UNKNOWN):
        book = Book(remembers=remembers)
        await refusal(Authenticator(book), f"Bearer tga_{key_id}_{'w' * 43}")
        assert book.asked == [key_id]
        ways.append(list(compared))
        compared.clear()
    assert ways[0] == ways[1] == [(32, 32), (32, 32)]
    assert (
        await Authenticator(Book(remembers=remembers)).authenticate(f"Bearer tga_{KNOWN}_{SECRET}")
    ).tenant == "acme"


async def test_a_right_key_that_is_remembered_asks_nobody() -> None:
    book = Book(remembers=True)
    await Authenticator(book).authenticate(f"Bearer tga_{KNOWN}_{SECRET}")
    assert book.asked == []


async def test_a_revoked_key_is_refused_at_once(authenticator: Authenticator, access: PostgresAccess) -> None:
    created = await create(access)
    await authenticator.authenticate(f"Bearer {created.text}")
    await access.revoke_key(created.listed.key_id)
    await refusal(authenticator, f"Bearer {created.text}")


async def test_a_database_dump_does_not_open_the_door(
    authenticator: Authenticator, access: PostgresAccess, admin: Admin
) -> None:
    await create(access, roles=["admin"])
    row = await admin.fetchrow("SELECT * FROM tga.api_keys")
    assert row is not None
    for stolen in (row["secret_sha256"].hex(), row["secret_sha256"].hex()[:43], "A" * 43):
        await refusal(authenticator, f"Bearer tga_{row['key_id']}_{stolen}")


async def test_a_store_that_is_down_is_not_called_a_bad_credential(sessions: Sessions, database: Database) -> None:
    access = PostgresAccess(sessions, database.gateway_url)
    text = (await create(access)).text
    await sessions.close()
    for credential in (text, f"tga_{UNKNOWN}_{SECRET}"):
        with pytest.raises(StoreUnavailable):
            await Authenticator(access).authenticate(f"Bearer {credential}")


@given(st.text() | st.builds("Bearer tga_{}".format, st.text()) | st.builds("Bearer {}".format, st.text()))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_refused_and_nothing_else_happens(garbage: str) -> None:
    book = Book(remembers=True)
    asyncio.run(refusal(Authenticator(book), garbage))
    assert book.asked == []
