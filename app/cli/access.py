"""`tga keys` and `tga tenants`: directly on the database, so that whoever has the machine can always let people in."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.core.errors import StoreUnfit
from app.core.limits import API_KEY_LIFE_DAYS_MAX
from app.domain.identity import ListedKey
from app.postgres.api_keys import PostgresAccess
from app.postgres.database import open_database
from app.postgres.migrate import load_status, migrate
from app.postgres.sessions import Sessions
from app.settings import Settings

output = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)

_CREATED_BY = "cli"


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
    async with _open_access(settings) as access:
        created = await access.create_key(
            name=name, principal_id=principal, roles=roles, tenant=tenant, life_s=life_s, created_by=_CREATED_BY
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
    async with _open_access(settings) as access:
        keys = await access.list_keys()
    if as_json:
        output.print(json.dumps([asdict(key) for key in keys]), markup=False)
        return True
    if not keys:
        output.print("No keys yet.")
        return True
    table = Table(box=None, pad_edge=False)
    for heading in ("key", "state", "name", "principal", "tenant", "roles", "created at", "expires at"):
        table.add_column(heading, no_wrap=True)
    for key in keys:
        until = key.expires_at or "never"
        table.add_row(key.key_id, _state(key), *(_plain(key)), key.created_at, until)
    _wide().print(table)
    return True


async def revoke_key(settings: Settings, key_id: str) -> bool:
    async with _open_access(settings) as access:
        is_new = await access.revoke_key(key_id)
    output.print(f"Key {key_id} is revoked." if is_new else f"Key {key_id} had been revoked before.", markup=False)
    return True


async def create_tenant(settings: Settings, tenant: str) -> bool:
    async with _open_access(settings) as access:
        is_new = await access.create_tenant(tenant)
    output.print(f"Tenant {tenant} is created." if is_new else f"Tenant {tenant} exists already.", markup=False)
    return True


async def list_tenants(settings: Settings, *, as_json: bool) -> bool:
    async with _open_access(settings) as access:
        tenants = await access.list_tenants()
    if as_json:
        output.print(json.dumps([asdict(tenant) for tenant in tenants]), markup=False)
        return True
    for tenant in tenants:
        output.print(f"{tenant.created_at}  {tenant.tenant}", markup=False)
    return True


@asynccontextmanager
async def _open_access(settings: Settings) -> AsyncIterator[PostgresAccess]:
    async with open_database(settings.home, settings.database_url) as database:
        if database.is_embedded:
            await migrate(database.admin_url)
        elif (await load_status(database.admin_url)).pending:
            raise StoreUnfit("the database's schema is not up to date", remedy="Run `tga db migrate` first.")
        async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
            yield PostgresAccess(sessions, database.gateway_url)


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
