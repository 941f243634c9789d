"""The servers and tools of a configuration, each tenant's its own, and the way to each server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Self

from jsonschema.exceptions import ValidationError

from app.clock import SystemClock
from app.config import DEFAULT_TENANT, Config, ServerConfig, ToolConfig, qualify
from app.config.input_schema import mismatch, validator_of
from app.config.tables import split_pointer
from app.config.wording import one_of, pointer_to, shown
from app.connectors.credentials import Credentials
from app.connectors.http import HttpConnector, HttpPool
from app.connectors.line import Health, Line
from app.core.digest import digest_of
from app.core.errors import ArgumentsInvalid, ToolNotFound
from app.domain.tga.ports import Connector, Tool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server as it may be shown to its tenant: `name` is what its tenant calls it, `server_id` what the log does."""

    server_id: str
    name: str
    tenant: str
    transport: Literal["http"]
    base_url: str
    timeout_ms: int
    max_attempts: int
    max_concurrency: int
    max_in_flight: int
    health: Health


class Registry:
    """Tools and connectors of one configuration (the ports Tools and Connectors).

    Ids are qualified (`app.config.qualify`), except where a tenant stands beside them.
    """

    def __init__(
        self,
        servers: Mapping[str, tuple[str, ServerConfig]],
        tools: Iterable[Tool],
        lines: Mapping[str, Line],
        *,
        pool: HttpPool,
    ) -> None:
        self._servers = dict(servers)  # qualified id to own name and table
        self._tools = {(tool.server_id, tool.tool_name): tool for tool in tools}
        self._validators = {key: validator_of(tool.input_schema) for key, tool in self._tools.items()}
        self._lines = dict(lines)
        self._pool = pool

    @classmethod
    def from_config(cls, config: Config, *, environment: Mapping[str, str] | None = None) -> Self:
        """Raises SettingInvalid when a credential is not where the configuration says."""
        # No server waits for another's connections: its line bounds its own.
        pool = HttpPool(connections_per_server=sum(server.max_concurrency for server in config.servers.values()) or 1)
        now = SystemClock().now
        servers, tools, lines = {}, [], {}
        for name, server in config.servers.items():
            server_id = qualify(server.tenant, name)
            at = f"{config.path}: servers.{name}.credentials"
            credentials = Credentials.open(at, server.credentials, environment)
            connector = HttpConnector(server.base_url, pool=pool, credentials=credentials)
            servers[server_id] = (name, server)
            tools += [_tool(server_id, server, tool_name, tool) for tool_name, tool in server.tools.items()]
            lines[server_id] = Line(connector, concurrency=server.max_concurrency, now=now)
        return cls(servers, tools, lines, pool=pool)

    def tools(self, tenant: str | None = None) -> list[Tool]:
        """Of one tenant, or all."""
        return [tool for tool in self._tools.values() if tenant is None or tool.tenant == tenant]

    def servers(self, tenant: str | None = None) -> list[ServerInfo]:
        """Of one tenant, or all."""
        return [
            _info(server_id, name, server, self._lines[server_id].health())
            for server_id, (name, server) in self._servers.items()
            if tenant is None or server.tenant == tenant
        ]

    def resolve(self, server_id: str, tool_name: str) -> Tool:
        """The tool of the qualified server id, or ToolNotFound naming what its tenant has instead."""
        tool = self._tools.get((server_id, tool_name))
        if tool is None:
            tenant, _, _ = server_id.rpartition("/")
            raise self._not_found(tenant or DEFAULT_TENANT, server_id, server_id, tool_name)
        return tool

    def resolve_for(self, tenant: str, server_id: str, tool_name: str) -> Tool:
        """The tool of the tenant's own server, or ToolNotFound naming what the tenant has instead.

        What another tenant has is answered exactly as what nobody has.
        """
        qualified = qualify(tenant, server_id)
        tool = self._tools.get((qualified, tool_name))
        if tool is None or tool.tenant != tenant:
            raise self._not_found(tenant, qualified, server_id, tool_name)
        return tool

    def definition(self, tool: Tool) -> dict[str, Any]:
        """What the tool is, whose digest is its `definition_digest`."""
        return _definition(tool.server_id, tool.tool_name, tool.tool_class, tool.input_schema, tool.description)

    def verify_arguments(self, tool: Tool, arguments: dict[str, Any]) -> None:
        """Raise ArgumentsInvalid at the first path that does not fit the tool's schema. No secret is shown."""
        validator = self._validators.get((tool.server_id, tool.tool_name))
        if validator is None or validator.schema is not tool.input_schema:
            validator = validator_of(tool.input_schema)
        what = f"arguments of {tool.server_id}/{tool.tool_name}"
        try:
            error = next(validator.iter_errors(arguments), None)
        except RecursionError:
            raise ArgumentsInvalid(f"{what} nest deeper than the schema can follow") from None
        if error is not None:
            at, expected, found = _misfit(tool, error)
            raise ArgumentsInvalid(f"{what} at {at}", expected=expected, found=found)

    def of(self, server_id: str) -> Line:
        """The line to the server of the qualified id."""
        line = self._lines.get(server_id)
        if line is None:
            tenant, _, _ = server_id.rpartition("/")
            raise self._not_found(tenant or DEFAULT_TENANT, server_id, server_id, "")
        return line

    def place(self, server_id: str) -> AbstractAsyncContextManager[Connector]:
        return self.of(server_id).place()

    async def close(self) -> None:
        await self._pool.close()

    def _not_found(self, tenant: str, qualified: str, server_id: str, tool_name: str) -> ToolNotFound:
        own = {name for name, server in self._servers.values() if server.tenant == tenant}
        _, server = self._servers.get(qualified, ("", None))
        if server is None or server.tenant != tenant:
            _, _, name = server_id.rpartition("/")
            return ToolNotFound(f"no server {shown(server_id)}", expected=one_of("a configured server", name, own))
        return ToolNotFound(
            f"server {server_id} has no tool {shown(tool_name)}",
            expected=one_of("a configured tool", tool_name, server.tools),
        )


def _info(server_id: str, name: str, server: ServerConfig, health: Health) -> ServerInfo:
    return ServerInfo(
        server_id=server_id,
        name=name,
        tenant=server.tenant,
        transport=server.transport,
        base_url=server.base_url,
        timeout_ms=server.timeout_ms,
        max_attempts=server.max_attempts,
        max_concurrency=server.max_concurrency,
        max_in_flight=server.max_in_flight,
        health=health,
    )


def _tool(server_id: str, server: ServerConfig, name: str, config: ToolConfig) -> Tool:
    definition = _definition(server_id, name, config.tool_class, config.input_schema, config.description)
    return Tool(
        server_id=server_id,
        tool_name=name,
        tool_class=config.tool_class,
        definition_digest=digest_of(definition),
        on_unknown_outcome=config.on_unknown_outcome,
        reconcile_tool=config.reconcile_tool,
        tags=frozenset(config.tags),
        timeout_ms=server.timeout_ms,
        max_attempts=server.max_attempts,
        tenant=server.tenant,
        description=config.description,
        approval_timeout_ms=config.approval_timeout_ms,
        secret_arguments=tuple(config.secret_arguments),
        input_schema=config.input_schema,
    )


def _definition(
    server_id: str, name: str, tool_class: str, input_schema: dict[str, Any], description: str | None
) -> dict[str, Any]:
    # What the tool is, not how it is called: a new timeout or address does not make another tool of it.
    return {
        "server_id": server_id,
        "tool_name": name,
        "tool_class": tool_class,
        "input_schema": input_schema,
        "description": description,
    }


def _misfit(tool: Tool, error: ValidationError) -> tuple[str, str, str]:
    """Where, what was expected, what was found; of a secret argument only that it does not fit."""
    path = tuple(error.absolute_path)
    expected, found = mismatch(error)
    for pointer in tool.secret_arguments:
        steps = split_pointer(pointer)
        if tuple(map(str, path[: len(steps)])) == steps:
            return pointer, expected, "something else; it is a secret argument, so it is not shown"
        is_value_shown = error.validator not in ("required", "additionalProperties")
        if steps[: len(path)] == tuple(map(str, path)) and is_value_shown:
            found = "something else; a secret argument is in it, so it is not shown"
    return pointer_to(path) or "the top", expected, found
