"""Whose signature counts: keys are announced on the record, registered for one principal, and retired for good."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from app.core.ed25519 import key_id_of
from app.core.errors import AccessNotFound, AlreadyDecided, SettingInvalid, SignatureInvalid
from app.domain.identity import Principal
from app.domain.system.log import KnownKey
from app.domain.system.verification import SigningKeys
from app.postgres.database import Database
from tests.conftest import Admin
from tests.invariants.plans import verify_all
from tests.runtime.scripted import KEYS, WRITE, call, new_key, open_scripted
from tests.runtime.supervised import ADA, Signer, ask, decide


async def count(admin: Admin, tenant: str = "default") -> int:
    return int(await admin.fetchval("SELECT count(*) FROM tga.entries WHERE stream = $1", f"system:{tenant}"))


async def test_gateways_of_one_keyring_announce_its_key_once(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        await asyncio.gather(*(gateway.system.decision_signer.announce() for gateway in (one, other) * 3))
        assert await count(admin) == 1
        assert one.system.log.state_of("default").keys[KEYS.key_id].principal_id is None


async def test_registering_again_says_nothing_new(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        signer = Signer()
        for _ in range(2):
            assert (
                await scripted.system.decision_signer.register("default", "ada", signer.public_key, by="ada")
                == signer.key_id
            )
        assert await count(admin) == 2


async def test_a_key_speaks_for_one_principal(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        signer, decision_signer = Signer(), scripted.system.decision_signer
        await decision_signer.register("default", "ada", signer.public_key, by="ada")
        await decision_signer.retire("default", signer.key_id, by="ada")
        with pytest.raises(AlreadyDecided):
            await decision_signer.register("default", "bob", signer.public_key, by="bob")
        await decision_signer.register("default", "ada", signer.public_key, by="ada")  # back again, for the same one
        assert not scripted.system.log.state_of("default").keys[signer.key_id].is_retired


async def test_a_retired_key_of_the_gateway_is_not_announced_again(database: Database, admin: Admin) -> None:
    """A gateway that starts with it must not undo the retirement, nor sign what nobody will believe."""
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.system.decision_signer.retire("default", KEYS.key_id, by="ada")
        with pytest.raises(SettingInvalid, match="retired"):
            await scripted.system.decision_signer.announce()
        assert await count(admin) == 2


@pytest.mark.parametrize("tenant", ["default", "acme"])
async def test_nobody_can_register_a_gateways_key_as_their_own(tenant: str, database: Database, admin: Admin) -> None:
    """It is on the record for everyone to copy; registered for a person it would no longer speak for the gateway."""
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(AlreadyDecided):
            await scripted.system.decision_signer.register(tenant, "mallory", KEYS.public_key_bytes, by="mallory")
        assert (await count(admin), await count(admin, "acme")) == (1, 0)


async def test_a_gateways_signature_stays_good_whatever_a_tenant_has_registered(database: Database) -> None:
    async with open_scripted(database.gateway_url, tool=replace(WRITE, tenant="acme")) as scripted:
        acme = Principal(principal_id="agent-1", tenant="acme")
        asked = await ask(scripted, principal=acme)
        await decide(scripted, asked, approver=replace_tenant(ADA, "acme"))
        assert (await verify_all(scripted.sessions)).signatures == 1
    keys = SigningKeys()
    keys.add("default", "k", KnownKey(b"gateway", None))
    keys.add("acme", "k", KnownKey(b"gateway", "mallory"))
    assert keys.find("acme", "k") == KnownKey(b"gateway", None)


def replace_tenant(principal: Principal, tenant: str) -> Principal:
    return principal.model_copy(update={"tenant": tenant})


def test_a_persons_key_counts_in_its_own_tenant_only() -> None:
    keys = SigningKeys()
    keys.add("default", "k", KnownKey(b"ada", "ada"))
    assert keys.find("default", "k") == KnownKey(b"ada", "ada")
    assert keys.find("acme", "k") is None
    assert keys.find("nobody", "k") is None


async def test_only_what_is_registered_can_be_retired_and_once(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        signer, decision_signer = Signer(), scripted.system.decision_signer
        with pytest.raises(AccessNotFound):
            await decision_signer.retire("default", signer.key_id, by="olga")
        await decision_signer.register("default", "ada", signer.public_key, by="ada")
        for _ in range(2):
            await decision_signer.retire("default", signer.key_id, by="olga")
        assert await count(admin) == 3


async def test_what_a_retired_key_signed_before_stays_good(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer, decision_signer = await ask(scripted), Signer(), scripted.system.decision_signer
        await decision_signer.register("default", "ada", signer.public_key, by="ada")
        await scripted.runtime.decide(asked, await signer.ruling(scripted, asked))
        await decision_signer.retire("default", signer.key_id, by="olga")
        assert (await verify_all(scripted.sessions)).signatures == 1


@pytest.mark.parametrize("wrong", [b"", bytes(32), b"\x01" + bytes(31), bytes(31), bytes(33)])
async def test_what_is_no_usable_key_is_not_registered(wrong: bytes, database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(SettingInvalid):
            await scripted.system.decision_signer.register("default", "ada", wrong, by="ada")
        assert await count(admin) == 1


async def test_an_unsigned_decision_is_not_verified(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        assert answer.decision is not None
        with pytest.raises(SignatureInvalid):
            await scripted.system.decision_signer.verify(answer.decision, tenant="default")


def test_a_key_id_is_made_from_the_key() -> None:
    assert key_id_of(KEYS.public_key_bytes) == KEYS.key_id
    assert key_id_of(Signer().public_key) != KEYS.key_id
