"""`tga keys`: API keys, which let people in, and keys that sign and seal.

Directly on the database and the files, so that an operator on the machine can always let people in.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.cli.running import AsJson, Tenant, context_of, refuse, run, run_in_gateway
from app.cli.showing import notes, output
from app.cli.signing import load_public_key, make_key
from app.cli.tenants import open_access, open_sessions
from app.clock import SystemClock
from app.core.errors import AccessNotFound, SettingInvalid, TgaError
from app.core.limits import API_KEY_LIFE_DAYS_MAX
from app.domain.identity import DEFAULT_TENANT, ListedKey, Principal, Role
from app.domain.system.decision_signer import SystemDecisionSigner
from app.domain.system.log import SystemLog
from app.domain.system.log_keys import announce_log_key
from app.keys.keyring import Keyring
from app.keys.log_signer import LogSigner
from app.postgres.api_keys import PostgresAccess
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.system import PostgresSystemRows
from app.settings import Settings

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; the public half goes to FILE.pub.")]
_ROLES = ", ".join(get_args(Role))
_BY = "cli"

commands = typer.Typer(help="API keys, and keys that sign and seal.", no_args_is_help=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="keys")


@commands.command("create")
def create_key_command(
    context: typer.Context,
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Whose key it is.")],
    role: Annotated[list[str], typer.Option("--role", help=f"One of {_ROLES}; more than once for several.")],
    name: Annotated[str | None, typer.Option("--name", help="To tell it from others; else the principal's.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    expires_in_days: Annotated[int | None, typer.Option("--expires-in-days", help="Else it does not expire.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key. It goes to stdout, once: only its hash is stored."""
    settings = context_of(context).settings
    run(
        create_key(
            settings,
            name=name or principal,
            principal=principal,
            roles=role,
            tenant=tenant,
            expires_in_days=expires_in_days,
            as_json=as_json,
        )
    )


@commands.command("list")
def list_keys_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Every API key, without its secret, and every signing key: the gateways' own, and those of people."""
    run(list_keys(context_of(context).settings, as_json=as_json))


@commands.command("show")
def show_key_command(
    context: typer.Context,
    which: Annotated[str, typer.Argument(metavar="KIND", help="log or signing.")],
) -> None:
    """Print the public key that verifies the log's heads and receipts, or the one that decisions and webhooks are
    signed with. Only from this machine's own files."""
    settings = context_of(context).settings
    if which not in ("log", "signing"):
        refuse("KIND is log or signing")

    async def work() -> bool:
        return show_log_key(settings) if which == "log" else show_signing_key(settings)

    run(work())


@commands.command("revoke")
def revoke_key_command(
    context: typer.Context, key_id: Annotated[str, typer.Argument(metavar="KEY", help="As `tga keys list` names it.")]
) -> None:
    """Revoke an API key, at once and for ever."""
    run(revoke_key(context_of(context).settings, key_id))


@commands.command("make")
def make_key_command(file: KeyFile) -> None:
    """Make a signing key of your own, for `tga approve --sign-with`. Nothing is sent anywhere."""

    async def work() -> bool:
        return make_signing_key(file)

    run(work())


@commands.command("register")
def register_key_command(
    context: typer.Context,
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Whose decisions it signs.")],
    public_key: Annotated[Path, typer.Option("--public-key", metavar="FILE", help="The public half, in base64.")],
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """Register a supervisor's own signing key on the system stream: decisions that it signs count from here on."""
    settings = context_of(context).settings
    run_in_gateway(context, lambda gateway: register_key(gateway, settings, principal, public_key, tenant))


@commands.command("retire")
def retire_key_command(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="The signing key's id, ed25519:...")],
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """Retire a signing key: it signs nothing new, and what it signed stays good."""
    settings = context_of(context).settings
    run_in_gateway(context, lambda gateway: retire_key(gateway, settings, key_id, tenant))


@commands.command("rotate")
def rotate_key_command(
    context: typer.Context,
    which: Annotated[str, typer.Argument(metavar="KIND", help="signing, sealing or log.")],
) -> None:
    """A new signing, sealing or log key for the gateway. The old one is kept: it verifies, or opens, what it made."""
    settings = context_of(context).settings
    if which == "signing":
        run_in_gateway(context, lambda gateway: rotate_signing(gateway, settings))
    if which == "log":
        run_in_gateway(context, lambda gateway: rotate_log(gateway, settings))
    if which != "sealing":
        refuse("KIND is signing, sealing or log")

    async def work() -> bool:
        return rotate_sealing(settings)

    run(work())


async def create_key(
    settings: Settings,
    *,
    name: str,
    principal: str,
    roles: Sequence[str],
    tenant: str,
    expires_in_days: int | None,
    as_json: bool,
) -> bool:
    """Nothing but the key goes to stdout, so that it can be piped; it is never shown again."""
    # Beyond the limit is refused where the other fields are; a number of days without bound would not even multiply.
    life_s = None if expires_in_days is None else min(expires_in_days, API_KEY_LIFE_DAYS_MAX + 1) * 86_400
    async with open_access(settings) as access:
        created = await access.create_key(
            name=name, principal_id=principal, roles=roles, tenant=tenant, life_s=life_s, created_by=_BY
        )
    if as_json:
        output.print(json.dumps({"key": created.text, **asdict(created.listed)}), markup=False)
        return True
    output.print(created.text, markup=False)
    until = f"until {created.listed.expires_at}" if created.listed.expires_at else "until it is revoked"
    notes.print(
        f"Key {created.listed.key_id} of {principal} in tenant {tenant} ({', '.join(created.listed.roles)}), {until}.",
        markup=False,
    )
    notes.print("Keep it now: only its hash is stored, and it cannot be shown again.")
    return True


async def list_keys(settings: Settings, *, as_json: bool) -> bool:
    async with open_sessions(settings, make=False) as (sessions, url):
        access = PostgresAccess(sessions, url)
        keys = await access.list_keys()
        signing = await load_signing_keys(sessions, [tenant.tenant for tenant in await access.list_tenants()])
    if as_json:
        listed = [{"kind": "api", **asdict(key)} for key in keys]
        listed += [{"kind": "signing", **asdict(key)} for key in signing]
        output.print(json.dumps(listed), markup=False)
        return True
    _show_api_keys(keys)
    if signing:
        output.print()
        _show_signing_keys(signing)
    return True


@dataclass(frozen=True, slots=True)
class ListedSigningKey:
    """`signs_for`: a person; null for a gateway's own, of which one signs the log's heads."""

    key_id: str
    is_retired: bool
    signs_for: str | None
    tenant: str
    public_key: str


async def load_signing_keys(sessions: Sessions, tenants: list[str]) -> list[ListedSigningKey]:
    """As the system streams announce them, verified."""
    system = SystemLog(
        PostgresSystemRows(sessions), PostgresLedger(sessions), SystemClock(), lambda: _BY
    )  # it is only read
    found = []
    for tenant in sorted({DEFAULT_TENANT, *tenants}):
        for key_id, key in (await system.refresh(tenant)).keys.items():
            public = b64encode(key.public_key).decode("ascii")
            found.append(ListedSigningKey(key_id, key.is_retired, key.principal_id, tenant, public))
    return found


def _show_signing_keys(keys: list[ListedSigningKey]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("signing key", "state", "signs for", "tenant", "public key"):
        table.add_column(heading, no_wrap=True)
    for key in keys:
        state = "[yellow]retired[/]" if key.is_retired else "[green]valid[/]"
        whom = "the gateway" if key.signs_for is None else escape(key.signs_for)
        table.add_row(key.key_id, state, whom, escape(key.tenant), key.public_key)
    _wide().print(table)


def _show_api_keys(keys: Sequence[ListedKey]) -> None:
    if not keys:
        output.print("No API keys yet: `tga keys create`.")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "state", "name", "principal", "tenant", "roles", "created at", "expires at"):
        table.add_column(heading, no_wrap=True)
    for key in keys:
        until = key.expires_at or "never"
        table.add_row(key.key_id, _state(key), *(_plain(key)), key.created_at, until)
    _wide().print(table)


def show_log_key(settings: Settings) -> bool:
    """The verifier key of the heads that are signed from here on; what `--key` of `tga verify` takes."""
    from app.config import load_config

    _expect_key(settings, "log.key", "TGA_LOG_KEY")
    signer = LogSigner.open(settings.keys, origin=load_config(settings.config_file).log.origin)
    output.print(signer.verifier_key.to_text(), markup=False)
    return True


def show_signing_key(settings: Settings) -> bool:
    _expect_key(settings, "signing.key", "TGA_SIGNING_KEY")
    keyring = Keyring.open(settings.keys)
    output.print(b64encode(keyring.public_key_bytes).decode("ascii"), markup=False)
    notes.print(f"Ed25519, 32 bytes in base64; its id is {keyring.key_id}.", markup=False)
    return True


def _expect_key(settings: Settings, name: str, variable: str) -> None:
    """Looking makes nothing: a key that is not there is made when a gateway first starts."""
    if not os.environ.get(variable) and not (settings.keys / name).exists():
        raise SettingInvalid(
            "there is no such key yet",
            expected=f"{settings.keys / name}, or {variable}",
            found="neither",
            remedy="It is made when the gateway starts for the first time: `tga serve`.",
        )


async def revoke_key(settings: Settings, key_id: str) -> bool:
    async with open_access(settings, make=False) as access:
        is_new = await access.revoke_key(key_id)
    output.print(f"Key {key_id} is revoked." if is_new else f"Key {key_id} had been revoked before.", markup=False)
    return True


def make_signing_key(path: Path) -> bool:
    key_id = make_key(path)
    output.print(key_id, markup=False)
    notes.print(f"Keep {path} to yourself. Have {path}.pub registered: `tga keys register`.", markup=False)
    return True


async def register_key(gateway: Gateway, settings: Settings, principal: str, public_key: Path, tenant: str) -> bool:
    """From here on, decisions of this principal that are signed with this key count."""
    raw = load_public_key(public_key)
    named = Principal.made(principal_id=principal, tenant=tenant)
    # Only tenants that the database knows: the stream of another one would belong to no tenant.
    if not await PostgresAccess(gateway.sessions, "").has_tenant(named.tenant):
        raise AccessNotFound(f"there is no tenant {named.tenant}", remedy="See `tga tenants list`.")
    decision_signer = SystemDecisionSigner(gateway.system, Keyring.open(settings.keys), gateway.clock)
    key_id = await decision_signer.register(named.tenant, named.principal_id, raw, by=_BY)
    output.print(f"{key_id} signs for {named.principal_id} of tenant {named.tenant}.", markup=False)
    return True


async def retire_key(gateway: Gateway, settings: Settings, key_id: str, tenant: str) -> bool:
    decision_signer = SystemDecisionSigner(gateway.system, Keyring.open(settings.keys), gateway.clock)
    await gateway.system.refresh(tenant)
    await decision_signer.retire(tenant, key_id, by=_BY)
    output.print(f"{key_id} signs nothing new from here on; what it signed stays good.", markup=False)
    return True


async def rotate_signing(gateway: Gateway, settings: Settings) -> bool:
    """A new key for the gateway, announced before it signs anything; the old one is retired, unless one that runs
    still signs with it."""
    keyring = Keyring.open(settings.keys)
    old = keyring.key_id
    new = keyring.rotate_signing()
    decision_signer = SystemDecisionSigner(gateway.system, keyring, gateway.clock)
    await decision_signer.announce()
    output.print(f"{new} is the gateway's signing key now.", markup=False)
    if await _is_running(settings):
        notes.print(f"A gateway is running with {old}. Restart it, then: tga keys retire {old}", markup=False)
        return True
    await decision_signer.retire(DEFAULT_TENANT, old, by=_BY)
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


def _state(key: ListedKey) -> str:
    if key.revoked_at is not None:
        return "[red]revoked[/]"
    return "[green]valid[/]" if key.is_valid else "[yellow]expired[/]"


def _plain(key: ListedKey) -> tuple[str, str, str, str]:
    """Names may have brackets in them, which are no markup."""
    return escape(key.name), escape(key.principal_id), escape(key.tenant), " ".join(key.roles)


def _wide() -> Console:
    # In a pipe nothing is cut off; on a terminal its width decides.
    return output if output.is_terminal else Console(highlight=False, width=400)
