"""`tga tenants`: whose traces, keys and tools are apart. Directly on the database."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from app.cli.running import AsJson, context_of, run
from app.cli.showing import output
from app.core.errors import StoreUnfit
from app.postgres.api_keys import PostgresAccess
from app.postgres.database import open_database
from app.postgres.migrate import load_status, migrate
from app.postgres.sessions import Sessions
from app.settings import Settings

commands = typer.Typer(help="Tenants: whose traces, keys and tools are apart.", no_args_is_help=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="tenants")


@commands.command("create")
def create_tenant_command(
    context: typer.Context, tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Its name.")]
) -> None:
    """Create a tenant. One that exists stays as it is."""
    run(create_tenant(context_of(context).settings, tenant))


@commands.command("list")
def list_tenants_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Every tenant."""
    run(list_tenants(context_of(context).settings, as_json=as_json))


async def create_tenant(settings: Settings, tenant: str) -> bool:
    async with open_access(settings) as access:
        is_new = await access.create_tenant(tenant)
    output.print(f"Tenant {tenant} is created." if is_new else f"Tenant {tenant} exists already.", markup=False)
    return True


async def list_tenants(settings: Settings, *, as_json: bool) -> bool:
    async with open_access(settings, make=False) as access:
        tenants = await access.list_tenants()
    if as_json:
        output.print(json.dumps([asdict(tenant) for tenant in tenants]), markup=False)
        return True
    for tenant in tenants:
        output.print(f"{tenant.created_at}  {tenant.tenant}", markup=False)
    return True


@asynccontextmanager
async def open_access(settings: Settings, *, make: bool = True) -> AsyncIterator[PostgresAccess]:
    async with open_sessions(settings, make=make) as (sessions, url):
        yield PostgresAccess(sessions, url)


@asynccontextmanager
async def open_sessions(settings: Settings, *, make: bool = True) -> AsyncIterator[tuple[Sessions, str]]:
    """On a database whose schema is this version's; and the URL that they were opened with."""
    async with open_database(settings.home, settings.database_url, make=make) as database:
        if database.is_embedded:
            await migrate(database.admin_url)
        elif (await load_status(database.admin_url)).pending:
            raise StoreUnfit("the database's schema is not up to date", remedy="Run `tga db migrate` first.")
        async with await Sessions.open(database.gateway_url, sessions_max=1) as sessions:
            yield sessions, database.gateway_url
