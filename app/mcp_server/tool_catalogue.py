"""Which tools a principal has over MCP, under which names, and how they are described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.config import qualify
from app.config.wording import one_of, shown
from app.connectors.mcp.discovery import McpTool
from app.connectors.registry import Registry
from app.core.errors import InputMalformed, RouteNotFound, ToolNotFound
from app.core.limits import MCP_LIST_TTL_MS, MCP_PAGE_TOOLS
from app.domain.identity import Principal
from app.domain.tools import Tool
from app.edge.permissions import may
from app.mcp_server.envelope import Client
from app.mcp_server.names import by_name
from app.mcp_server.supervising import SUPERVISOR_TOOLS
from app.mcp_server.tool_visibility import ToolVisibility

_OF_BOOLEAN: dict[bool, dict[str, Any]] = {True: {}, False: {"not": {}}}
_KEPT = ("title", "description", "inputSchema", "outputSchema", "annotations", "icons", "_meta")


@dataclass(frozen=True, slots=True)
class ToolCatalogue:
    """The tools of one request: those of the principal's tenant, or of one of its servers only (`server`)."""

    registry: Registry
    visibility: ToolVisibility
    principal: Principal
    server: str | None = None

    def verify(self) -> None:
        """Raise RouteNotFound for a server that the tenant does not have."""
        if self.server is not None:
            names = {info.name for info in self.registry.servers(self.principal.tenant)}
            if self.server not in names:
                raise RouteNotFound(
                    f"no server {shown(self.server)}", expected=one_of("a configured server", self.server, names)
                )

    @property
    def offers_supervision(self) -> bool:
        return self.server is None and may(self.principal, "decide")

    async def find(self, name: str) -> Tool:
        """The tool of this name, listed or not: whether it is called is decided later. Else ToolNotFound."""
        tool = self._named().get(name)
        if tool is None:
            raise ToolNotFound(
                f"no tool {shown(name)}",
                expected=one_of("a listed tool", name, await self._listed()),
                remedy="Ask for tools/list: the tools may have changed.",
            )
        return tool

    async def page(self, client: Client, cursor: Any) -> dict[str, Any]:
        """One page of tools/list, in the order of names: a cursor is the last name of the page before."""
        if cursor is not None and not isinstance(cursor, str):
            raise InputMalformed("the cursor is not one of this list", remedy="Begin again without a cursor.")
        described = {name: _described(name, tool, client) for name, tool in (await self._listed()).items()}
        if self.offers_supervision:
            described |= {tool["name"]: tool for tool in SUPERVISOR_TOOLS}
        names = sorted(name for name in described if cursor is None or name > cursor)
        page: dict[str, Any] = {"tools": [described[name] for name in names[:MCP_PAGE_TOOLS]]}
        if len(names) > MCP_PAGE_TOOLS:
            page["nextCursor"] = names[MCP_PAGE_TOOLS - 1]
        if client.is_modern:
            page |= {"resultType": "complete", "ttlMs": MCP_LIST_TTL_MS, "cacheScope": "private"}
        return page

    async def identities(self) -> frozenset[tuple[str, str]]:
        """Enough to notice that a tool came, went or changed."""
        return frozenset((name, tool.definition_digest) for name, tool in (await self._listed()).items())

    async def _listed(self) -> Mapping[str, Tool]:
        """What models are told of. A tool's name does not depend on which others are listed."""
        named = self._named()
        visible = {id(tool) for tool in await self.visibility.visible(self.principal, list(named.values()))}
        return {name: tool for name, tool in named.items() if id(tool) in visible}

    def _named(self) -> Mapping[str, Tool]:
        if not may(self.principal, "call"):
            return {}
        tenant = self.principal.tenant
        tools: dict[tuple[str | None, str], Tool] = {}
        for info in self.registry.servers(tenant):
            if self.server in (None, info.name):
                shown_as = info.name if self.server is None else None
                server_id = qualify(tenant, info.name)
                of_server = (tool for tool in self.registry.tools(tenant) if tool.server_id == server_id)
                tools |= {(shown_as, tool.tool_name): tool for tool in of_server}
        return {name: tools[pair] for name, pair in by_name(tools).items()}


def _described(name: str, tool: Tool, client: Client) -> dict[str, Any]:
    if isinstance(tool, McpTool):
        described = {"name": name, **{field: tool.listed[field] for field in _KEPT if field in tool.listed}}
        described["inputSchema"] = _object_schema(tool.input_schema)
        if not client.is_modern and "outputSchema" in described:
            # Until 2025-11-25 an output is an object, and its schema says so.
            schema = described.pop("outputSchema")
            described |= {"outputSchema": _object_schema(schema)} if schema.get("type") == "object" else {}
    else:
        described = {"name": name, "inputSchema": _object_schema(tool.input_schema)}
        if tool.description is not None:
            described["description"] = tool.description
        is_read = tool.tool_class == "read"
        # Repeats with the same key execute once; without one, the gateway decides what is a repeat.
        described["annotations"] = {"readOnlyHint": is_read, "idempotentHint": is_read}
    if not client.is_modern:
        described["execution"] = {"taskSupport": "optional"}
    return described


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """As all clients read it: of type `object`, which arguments always are, and no property's schema `true` or
    `false`."""
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):  # of an output: the server has never been asked for anything that fits it
        return {**schema, "type": "object", "properties": {}}
    if schema.get("type") == "object" and not any(isinstance(member, bool) for member in properties.values()):
        return schema
    written = {name: _OF_BOOLEAN[member] if isinstance(member, bool) else member for name, member in properties.items()}
    return {**schema, "type": "object"} | ({"properties": written} if properties else {})
