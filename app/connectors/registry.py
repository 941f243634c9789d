"""The servers and tools of a configuration, each tenant's its own, and the way to each server.

Tools of HTTP servers stand in the configuration. Those of MCP servers are discovered, and may change while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from jsonschema.exceptions import ValidationError

from app.clock import SystemClock
from app.config import DEFAULT_TENANT, Config, ServerConfig, ToolConfig, qualify
from app.config.bounded_schema import TooManySteps, bounded_validator_of, first_misfit
from app.config.fields import split_pointer
from app.config.input_schema import mismatch, validator_of
from app.config.loading import HTTP_CLIENT
from app.config.schema_acceptance import Accepts, acceptance_of
from app.config.tables import ADDRESS_FIELDS, Transport
from app.config.wording import one_of, pointer_to, shown
from app.connectors.credentials import Credentials
from app.connectors.http import HttpConnector
from app.connectors.http_client import HttpPool
from app.connectors.mcp.child_guard import ends_all_descendants
from app.connectors.mcp.discovery import Discovery, McpTool
from app.connectors.mcp.server import Connection, McpServer, Watchers
from app.connectors.mcp.transport import transport_of
from app.connectors.mcp.wire import ProgressWatcher
from app.connectors.reach_check import ReachCheck
from app.connectors.server_slots import Health, ServerSlots
from app.connectors.server_status import ServerStatus
from app.connectors.web_reading import WebConnector, web_servers
from app.core.digest import digest_of
from app.core.errors import ArgumentsInvalid, TgaError, ToolNotFound
from app.core.limits import MCP_START_WAIT_MS
from app.domain.tga.ports import Connector
from app.domain.tools import Tool

logger = logging.getLogger("tga")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server as it may be shown to its tenant: `name` is what its tenant calls it, `server_id` what the log does."""

    server_id: str
    name: str
    tenant: str
    transport: Transport
    base_url: str | None
    timeout_ms: int
    max_attempts: int
    unreachable_for_ms: int
    max_concurrency: int
    max_in_flight: int
    health: Health
    status: ServerStatus
    connection: Connection | None = None  # of MCP servers


class Registry:
    """Tools and connectors of one configuration (the ports Tools and Connectors).

    Ids are qualified (`app.config.qualify`), except where a tenant stands beside them. `on_discovery` is called with
    the tools of an MCP server whenever they were listed anew; the registry already has them then. It says which of
    them cannot be pinned, and why.
    """

    on_discovery: Callable[[Sequence[Tool]], Awaitable[Sequence[str]]] | None = None

    def __init__(
        self,
        servers: Mapping[str, tuple[str, ServerConfig]],
        tools: Iterable[Tool],
        slots: Mapping[str, ServerSlots],
        *,
        pool: HttpPool,
        mcp: Mapping[str, McpServer] | None = None,
        watchers: Watchers | None = None,
    ) -> None:
        self._servers = dict(servers)  # qualified id to own name and table
        self._tools = {(tool.server_id, tool.tool_name): tool for tool in tools}
        self._checks = {key: _check(tool) for key, tool in self._tools.items()}
        self._slots = dict(slots)
        self._pool = pool
        self._mcp: dict[str, McpServer] = dict(mcp or {})
        self._reach: dict[str, ReachCheck] = {}  # of servers that are not MCP
        self._watchers = watchers or Watchers()
        self._web: WebConnector | None = None

    @classmethod
    def from_config(cls, config: Config, *, environment: Mapping[str, str] | None = None) -> Self:
        """Raises SettingInvalid when a credential is not where the configuration says."""
        # No server waits for another's connections: its slots bound its own.
        pool = HttpPool(connections_per_server=sum(server.max_concurrency for server in config.servers.values()) or 1)
        now = SystemClock().now
        registry = cls({}, [], {}, pool=pool)
        for name, server in config.servers.items():
            server_id = qualify(server.tenant, name)
            registry._servers[server_id] = (name, server)
            connector: Connector
            if server.is_mcp:
                connector = registry._mcp[server_id] = registry._mcp_server(config, name, server_id, environment)
            else:
                credentials = Credentials.open(_at(config, name, "credentials"), server.credentials, environment)
                connector = HttpConnector(server.base_url or "", pool=pool, credentials=credentials)
                field = ADDRESS_FIELDS[server.transport]
                registry._reach[server_id] = ReachCheck(server_id, connector, now, address_field=field)
                registry._replace(server_id, [_tool(server_id, server, *named) for named in server.tools.items()])
            registry._slots[server_id] = ServerSlots(connector, concurrency=server.max_concurrency, now=now)
        web = WebConnector(config.lua.http)
        registry._web = web
        for server_id, server in web_servers(config):
            registry._servers[server_id] = (HTTP_CLIENT, server)
            registry._reach[server_id] = ReachCheck(server_id, web, now, address_field="allowed_hosts")
            registry._replace(server_id, [_tool(server_id, server, *named) for named in server.tools.items()])
            registry._slots[server_id] = ServerSlots(web, concurrency=server.max_concurrency, now=now)
        return registry

    async def start(self, *, wait_ms: int = MCP_START_WAIT_MS) -> None:
        """Prepare to check arguments fast, and start the MCP servers. Waits for each first attempt, but not for ever,
        and for none that fails: what is not there now is tried on, and its tools come when it does."""
        if any(server.transport == "mcp-stdio" for _, server in self._servers.values()) and not ends_all_descendants():
            logger.warning(
                "this system has no subreapers (prctl of Linux): what an MCP server starts in a session of its own may "
                "outlive the gateway"
            )
        for key, tool in self._tools.items():
            if not isinstance(tool, McpTool):
                self._checks[key] = self._checks[key]._replace(accepts=acceptance_of(tool.input_schema))
        for server in self._mcp.values():
            server.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                await asyncio.gather(*(server.tried() for server in self._mcp.values()))

    def watch_progress(self, trace_id: str, watcher: ProgressWatcher) -> AbstractContextManager[None]:
        """While it is open, `watcher` is called with the params of every progress notification of the trace's call.

        Only if it is opened before the call is sent, and by the process that sends it.
        """
        return self._watchers.watch(trace_id, watcher)

    def cancel(self, trace_id: str) -> bool:
        """Tell the MCP server that the caller does not want the trace's call any more; False if none is under way.

        The outcome is what the server still answers, or unknown; the call is not sent again.
        """
        return sum(server.cancel(trace_id) for server in self._mcp.values()) > 0

    def tools(self, tenant: str | None = None) -> list[Tool]:
        """Of one tenant, or all."""
        return [tool for tool in self._tools.values() if tenant is None or tool.tenant == tenant]

    def servers(self, tenant: str | None = None) -> list[ServerInfo]:
        """Of one tenant, or all."""
        return [
            self._info(server_id, name, server)
            for server_id, (name, server) in self._servers.items()
            if tenant is None or server.tenant == tenant
        ]

    async def check_reach(self) -> None:
        """Look whether the servers that are not MCP can be reached, where that is due."""
        due = [check for server_id, check in self._reach.items() if check.is_due(self._slots[server_id].health())]
        await asyncio.gather(*(check.look() for check in due))

    def resolve(self, server_id: str, tool_name: str) -> Tool:
        """The tool of the qualified server id, or ToolNotFound naming what its tenant has instead."""
        tool = self._tools.get((server_id, tool_name))
        if tool is None:
            tenant, _, _ = server_id.rpartition("/")
            raise self._not_found(tenant or DEFAULT_TENANT, server_id, server_id, tool_name)
        return tool

    def resolve_for(self, tenant: str, server_id: str, tool_name: str) -> Tool:
        """The tool of the tenant's own server, or ToolNotFound naming what the tenant has instead.

        A tool of another tenant is answered exactly as one that does not exist.
        """
        qualified = qualify(tenant, server_id)
        tool = self._tools.get((qualified, tool_name))
        if tool is None or tool.tenant != tenant:
            raise self._not_found(tenant, qualified, server_id, tool_name)
        return tool

    def definition(self, tool: Tool) -> dict[str, Any]:
        """What the tool is, whose digest is its `definition_digest`."""
        if isinstance(tool, McpTool):
            return tool.definition
        return _definition(tool.server_id, tool.tool_name, tool.tool_class, tool.input_schema, tool.description)

    def verify_arguments(self, tool: Tool, arguments: dict[str, Any]) -> None:
        """Raise ArgumentsInvalid at the first path that does not fit the tool's schema. No secret is shown."""
        check = self._checks.get((tool.server_id, tool.tool_name))
        if check is None or check.judge.schema is not tool.input_schema:
            check = _check(tool)
        if check.accepts is not None and check.accepts(arguments):
            return
        what = f"arguments of {tool.server_id}/{tool.tool_name}"
        try:
            error = first_misfit(check.judge, arguments)
        except RecursionError:
            raise ArgumentsInvalid(f"{what} nest deeper than the schema can follow") from None
        except TooManySteps:
            raise ArgumentsInvalid(f"{what} take too long to check against the server's schema") from None
        if error is not None:
            at, expected, found = _misfit(tool, error)
            raise ArgumentsInvalid(f"{what} at {at}", expected=expected, found=found)

    def of(self, server_id: str) -> ServerSlots:
        """The slots of the server of the qualified id."""
        slots = self._slots.get(server_id)
        if slots is None:
            tenant, _, _ = server_id.rpartition("/")
            raise self._not_found(tenant or DEFAULT_TENANT, server_id, server_id, "")
        return slots

    def place(self, server_id: str) -> AbstractAsyncContextManager[Connector]:
        return self.of(server_id).place()

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._mcp.values()))
        await self._pool.close()
        if self._web is not None:
            await self._web.close()

    def _replace(self, server_id: str, tools: Sequence[Tool]) -> None:
        """All tools of the server, at once: no caller sees half of them."""
        kept = {key: tool for key, tool in self._tools.items() if key[0] != server_id}
        self._tools = kept | {(tool.server_id, tool.tool_name): tool for tool in tools}
        made = {(tool.server_id, tool.tool_name): _check(tool) for tool in tools}
        self._checks = {key: self._checks[key] for key in kept} | made

    def _mcp_server(
        self, config: Config, name: str, server_id: str, environment: Mapping[str, str] | None
    ) -> McpServer:
        async def publish(discovery: Discovery) -> Sequence[str]:
            self._replace(server_id, discovery.tools)
            if self.on_discovery is not None:
                # Without the store nothing is called either; a new tool is pinned before its first call.
                with contextlib.suppress(TgaError):
                    return await self.on_discovery(discovery.tools)
            return ()

        server = config.servers[name]
        transport = transport_of(config, name, server, pool=self._pool, environment=environment)
        now = SystemClock().now
        return McpServer(server_id, server, transport, publish=publish, watchers=self._watchers, now=now)

    def _info(self, server_id: str, name: str, server: ServerConfig) -> ServerInfo:
        mcp = self._mcp.get(server_id)
        return ServerInfo(
            server_id=server_id,
            name=name,
            tenant=server.tenant,
            transport=server.transport,
            base_url=server.base_url if server.url is None else server.url,
            timeout_ms=server.timeout_ms,
            max_attempts=server.max_attempts,
            unreachable_for_ms=server.unreachable_for_ms,
            max_concurrency=server.max_concurrency,
            max_in_flight=server.max_in_flight,
            health=self._slots[server_id].health(),
            status=self._reach[server_id].status if mcp is None else mcp.status(),
            connection=None if mcp is None else mcp.connection(),
        )

    def _not_found(self, tenant: str, qualified: str, server_id: str, tool_name: str) -> ToolNotFound:
        own = {name for name, server in self._servers.values() if server.tenant == tenant}
        _, server = self._servers.get(qualified, ("", None))
        if server is None or server.tenant != tenant:
            _, _, name = server_id.rpartition("/")
            return ToolNotFound(f"no server {shown(server_id)}", expected=one_of("a configured server", name, own))
        if (mcp := self._mcp.get(qualified)) is not None and mcp.status().state != "up":
            is_starting = mcp.status().state == "starting"
            standing = "is still starting" if is_starting else "is down"
            return ToolNotFound(
                f"server {server_id} {standing}, and has no tool {shown(tool_name)} so far",
                remedy="Call again when it is ready: `tga servers` shows how it stands. Nothing was recorded or sent.",
            )
        known = [tool.tool_name for tool in self._tools.values() if tool.server_id == qualified]
        return ToolNotFound(
            f"server {server_id} has no tool {shown(tool_name)}",
            expected=one_of("a tool of the server" if server.is_mcp else "a configured tool", tool_name, known),
        )


def _at(config: Config, name: str, field: str) -> str:
    return f"{config.path}: servers.{name}.{field}"


class _Check(NamedTuple):
    """How a tool's arguments are checked. `judge` has the last word on whatever is not accepted at once."""

    judge: Any
    accepts: Accepts | None = None  # set by `Registry.start`: commands that only look at tools need none


def _check(tool: Tool) -> _Check:
    if isinstance(tool, McpTool):
        return _Check(bounded_validator_of(tool.input_schema))
    return _Check(validator_of(tool.input_schema))


def _tool(server_id: str, server: ServerConfig, name: str, config: ToolConfig) -> Tool:
    tool_class = config.tool_class or "write"
    definition = _definition(server_id, name, tool_class, config.input_schema, config.description)
    return Tool(
        server_id=server_id,
        tool_name=name,
        tool_class=tool_class,
        definition_digest=digest_of(definition),
        on_unknown_outcome=config.on_unknown_outcome,
        is_outcome_chosen="on_unknown_outcome" in config.model_fields_set,
        reconcile_tool=config.reconcile_tool,
        tags=frozenset(config.tags),
        timeout_ms=server.timeout_ms,
        max_attempts=server.max_attempts,
        unreachable_for_ms=server.unreachable_for_ms,
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
