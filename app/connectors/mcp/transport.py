"""How an MCP server is reached, as its configuration says: a child process, or an address."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from app.config import Config, CredentialConfig, ServerConfig
from app.connectors.credentials import Credentials, CredentialUnavailable
from app.connectors.http_client import HttpPool
from app.connectors.intake import Intake
from app.connectors.mcp.child import Child
from app.connectors.mcp.http import HttpLink
from app.connectors.mcp.server import Transport
from app.connectors.mcp.stdio import StdioLink
from app.connectors.mcp.wire import Inbox, Link


def transport_of(
    config: Config, name: str, server: ServerConfig, *, pool: HttpPool, environment: Mapping[str, str] | None
) -> Transport:
    """Raises SettingInvalid when a credential is not where the configuration says."""
    at = f"{config.path}: servers.{name}"
    if server.command is None:
        credentials = Credentials.open(f"{at}.credentials", server.credentials, environment)
        return HttpTransport(server.url or "", pool=pool, credentials=credentials)
    sources = {variable: source for variable, source in server.env.items() if isinstance(source, CredentialConfig)}
    literals = {variable: value for variable, value in server.env.items() if isinstance(value, str)}
    return StdioTransport(
        server.command,
        literals=literals,
        secrets=Credentials.open(f"{at}.env", sources, environment),
        intake=pool.intake,
        folder=server.folder or config.path.parent,
        inherit=os.environ if environment is None else environment,
    )


class StdioTransport:
    """`mcp-stdio`. Every opening is a new child; what the last one complained of outlives it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        literals: Mapping[str, str],
        secrets: Credentials,
        intake: Intake,
        folder: Path,
        inherit: Mapping[str, str],
    ) -> None:
        self._command = list(command)
        self._literals = dict(literals)
        self._secrets = secrets
        self._intake = intake
        self._folder = folder
        self._inherit = inherit
        self._child: Child | None = None

    @asynccontextmanager
    async def open(self, inbox: Inbox) -> AsyncIterator[Link]:
        try:
            environment = self._literals | self._secrets.headers()
        except CredentialUnavailable as error:
            raise OSError(0, f"no credential: {error}") from None
        child = self._child = await Child.start(
            self._command,
            environment=environment,
            folder=self._folder,
            inherit=self._inherit,
            intake=self._intake,
        )
        link = StdioLink(child, inbox, intake=self._intake)
        try:
            yield link
        finally:
            await link.close()

    def complaints(self) -> str:
        return "" if self._child is None else self._child.stderr_tail()


class HttpTransport:
    """`mcp-http`."""

    def __init__(self, url: str, *, pool: HttpPool, credentials: Credentials) -> None:
        self._url = url
        self._pool = pool
        self._credentials = credentials

    @asynccontextmanager
    async def open(self, inbox: Inbox) -> AsyncIterator[Link]:
        link = HttpLink(self._url, inbox, pool=self._pool, credentials=self._credentials)
        try:
            yield link
        finally:
            await link.close()

    def complaints(self) -> str:
        return ""
