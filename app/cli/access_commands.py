"""`tga keys` and `tga tenants`: who may do what. Directly on the store and the files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from app.cli import access, keys
from app.cli.running import AsJson, Tenant, context_of, refuse, run, run_in_gateway
from app.domain.identity import DEFAULT_TENANT, Role

KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; the public half goes to FILE.pub.")]
_ROLES = ", ".join(get_args(Role))

keys_commands = typer.Typer(help="API keys, and keys that sign and seal.", no_args_is_help=True)
tenants_commands = typer.Typer(help="Tenants: whose traces, keys and tools are apart.", no_args_is_help=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(keys_commands, name="keys")
    application.add_typer(tenants_commands, name="tenants")


@keys_commands.command("create")
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
        access.create_key(
            settings,
            name=name or principal,
            principal=principal,
            roles=role,
            tenant=tenant,
            expires_in_days=expires_in_days,
            as_json=as_json,
        )
    )


@keys_commands.command("list")
def list_keys_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Every API key, without its secret."""
    run(access.list_keys(context_of(context).settings, as_json=as_json))


@keys_commands.command("revoke")
def revoke_key_command(
    context: typer.Context, key_id: Annotated[str, typer.Argument(metavar="KEY", help="As `tga keys list` names it.")]
) -> None:
    """Revoke an API key, at once and for ever."""
    run(access.revoke_key(context_of(context).settings, key_id))


@keys_commands.command("make")
def make_key_command(file: KeyFile) -> None:
    """Make a signing key of your own, for `tga approve --sign-with`. Nothing is sent anywhere."""

    async def work() -> bool:
        return keys.make_signing_key(file)

    run(work())


@keys_commands.command("register")
def register_key_command(
    context: typer.Context,
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Whose decisions it signs.")],
    public_key: Annotated[Path, typer.Option("--public-key", metavar="FILE", help="The public half, in base64.")],
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """Register a supervisor's own signing key on the system stream: decisions that it signs count from here on."""
    settings = context_of(context).settings
    run_in_gateway(context, lambda gateway: keys.register_key(gateway, settings, principal, public_key, tenant))


@keys_commands.command("retire")
def retire_key_command(
    context: typer.Context,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="The signing key's id, ed25519:...")],
    tenant: Tenant = DEFAULT_TENANT,
) -> None:
    """Retire a signing key: it signs nothing new, and what it signed stays good."""
    settings = context_of(context).settings
    run_in_gateway(context, lambda gateway: keys.retire_key(gateway, settings, key_id, tenant))


@keys_commands.command("rotate")
def rotate_key_command(
    context: typer.Context,
    which: Annotated[str, typer.Argument(metavar="KIND", help="signing, sealing or log.")],
) -> None:
    """A new signing, sealing or log key for the gateway. The old one is kept: it verifies, or opens, what it made."""
    settings = context_of(context).settings
    if which == "signing":
        run_in_gateway(context, lambda gateway: keys.rotate_signing(gateway, settings))
    if which == "log":
        run_in_gateway(context, lambda gateway: keys.rotate_log(gateway, settings))
    if which != "sealing":
        refuse("KIND is signing, sealing or log")

    async def work() -> bool:
        return keys.rotate_sealing(settings)

    run(work())


@tenants_commands.command("create")
def create_tenant_command(
    context: typer.Context, tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Its name.")]
) -> None:
    """Create a tenant. One that exists stays as it is."""
    run(access.create_tenant(context_of(context).settings, tenant))


@tenants_commands.command("list")
def list_tenants_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Every tenant."""
    run(access.list_tenants(context_of(context).settings, as_json=as_json))
