"""`tga keys register`, `retire`, `make` and `rotate`: keys that sign and seal. Directly on the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.showing import notes, output
from app.cli.signing import load_public_key, make_key
from app.core.errors import AccessNotFound, TgaError
from app.domain.identity import DEFAULT_TENANT, Principal
from app.domain.system.decision_signer import SystemSignatory
from app.domain.system.log_keys import announce_log_key
from app.keys.keyring import Keyring
from app.keys.log_signer import LogSigner
from app.postgres.api_keys import PostgresAccess
from app.settings import Settings

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway

_BY = "cli"


def make_signing_key(path: Path) -> bool:
    key_id = make_key(path)
    output.print(key_id, markup=False)
    notes.print(f"Keep {path} to yourself. Have {path}.pub registered: `tga keys register`.", markup=False)
    return True


async def register_key(gateway: Gateway, settings: Settings, principal: str, public_key: Path, tenant: str) -> bool:
    """From here on, decisions of this principal that are signed with this key count."""
    raw = load_public_key(public_key)
    named = Principal.made(principal_id=principal, tenant=tenant)
    # Only what the database says: a stream for a tenant that nobody made would be nobody's.
    if not await PostgresAccess(gateway.sessions, "").has_tenant(named.tenant):
        raise AccessNotFound(f"there is no tenant {named.tenant}", remedy="See `tga tenants list`.")
    signatory = SystemSignatory(gateway.system, Keyring.open(settings.keys), gateway.clock)
    key_id = await signatory.register(named.tenant, named.principal_id, raw, by=_BY)
    output.print(f"{key_id} signs for {named.principal_id} of tenant {named.tenant}.", markup=False)
    return True


async def retire_key(gateway: Gateway, settings: Settings, key_id: str, tenant: str) -> bool:
    signatory = SystemSignatory(gateway.system, Keyring.open(settings.keys), gateway.clock)
    await gateway.system.refresh(tenant)
    await signatory.retire(tenant, key_id, by=_BY)
    output.print(f"{key_id} signs nothing new from here on; what it signed stays good.", markup=False)
    return True


async def rotate_signing(gateway: Gateway, settings: Settings) -> bool:
    """A new key for the gateway, announced before it signs anything; the old one is retired, unless one that runs
    still signs with it."""
    keyring = Keyring.open(settings.keys)
    old = keyring.key_id
    new = keyring.rotate_signing()
    signatory = SystemSignatory(gateway.system, keyring, gateway.clock)
    await signatory.announce()
    output.print(f"{new} is the gateway's signing key now.", markup=False)
    if await _is_running(settings):
        notes.print(f"A gateway is running with {old}. Restart it, then: tga keys retire {old}", markup=False)
        return True
    await signatory.retire(DEFAULT_TENANT, old, by=_BY)
    output.print(f"{old} is retired.", markup=False)
    return True


async def rotate_log(gateway: Gateway, settings: Settings) -> bool:
    """A new key for tree heads, announced before it signs one. The first head under it carries the old one's signature
    too; heads from before stay verifiable with the old public key."""
    from app.config import load_config  # here, as below: making and listing keys needs neither

    signer = LogSigner.open(settings.keys, origin=load_config(settings.config_file).log.origin)
    old = signer.verifier_key.to_text()
    new = signer.rotate().to_text()
    await announce_log_key(gateway.system, gateway.clock, signer.public_key)
    output.print(new, markup=False)
    notes.print(f"Heads are signed with it when the gateways are restarted. Keep the old one for older heads: {old}")
    return True


def rotate_sealing(settings: Settings) -> bool:
    """A new key for what is sealed from here on; the old one opens what it sealed. Running gateways take it over when
    they start again."""
    keyring = Keyring.open(settings.keys)
    old = keyring.sealing_key_id
    output.print(f"{keyring.rotate_sealing()} seals from here on; {old} still opens what it sealed.", markup=False)
    notes.print("Running gateways seal with the old key until they are restarted.")
    return True


async def _is_running(settings: Settings) -> bool:
    from app.cli.client import GatewayClient

    try:
        async with GatewayClient.open(settings) as client:
            await client.get("/healthz")
    except TgaError:
        return False
    return True
