"""Composition root: the only place that wires things together."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from app.cli.command import command, show_error
from app.cli.context import Context, Gateway
from app.clock import SystemClock
from app.connectors.registry import Registry, load_config
from app.core.errors import StoreUnfit, TgaError
from app.domain.policy.by_tags import TagPolicy
from app.domain.tga.ports import Ports
from app.domain.tga.runtime import TgaRuntime
from app.postgres.database import open_database
from app.postgres.guards import verify_guards
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import load_status, migrate
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer
from app.settings import Settings


def config_path(settings: Settings) -> Path:
    """TGA_CONFIG, else tga.toml in the home directory, else the packaged demonstration."""
    if settings.config is not None:
        return settings.config
    own = settings.home / "tga.toml"
    return own if own.exists() else Path(str(resources.files("app.demo").joinpath("tga.toml")))


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway on its database, fit or refused; closed in the order that loses nothing."""
    registry = Registry.from_config(load_config(config_path(settings)))
    try:
        async with open_database(settings.home, settings.database_url) as database:
            if database.is_embedded:
                await migrate(database.admin_url)
            elif (await load_status(database.admin_url)).pending:
                raise StoreUnfit("the database's schema is not up to date", remedy="Run `tga db migrate` first.")
            await verify_guards(database.admin_url)
            async with (
                await Sessions.open(database.gateway_url) as sessions,
                await PostgresTraces.open(sessions, database.gateway_url) as traces,
            ):
                writer = Writer(PostgresLedger(sessions))
                runtime = TgaRuntime(
                    Ports(
                        ledger=writer,
                        traces=traces,
                        tools=registry,
                        connectors=registry,
                        supervisor=TagPolicy(),
                        clock=SystemClock(),
                    )
                )
                try:
                    yield Gateway(runtime, traces, registry, sessions)
                finally:
                    await runtime.close()
                    await writer.close()
    finally:
        await registry.close()


def run() -> None:
    """The command `tga`."""
    try:
        settings = Settings.from_environment()
    except TgaError as error:
        sys.exit(show_error(error))
    command(obj=Context(settings, lambda: open_gateway(settings)))


if __name__ == "__main__":
    run()
