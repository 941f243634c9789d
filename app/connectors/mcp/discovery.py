"""From what an MCP server lists to tools that can be called: checked, bounded, with a digest of what they say they are.

A tool that does not hold is left out, and said so; the others are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from app.config import ServerConfig, ToolConfig
from app.config.bounded_schema import verify_discovered_schema
from app.config.input_schema import verify_reachable
from app.config.tables import ToolName, split_pointer
from app.config.wording import shown
from app.connectors.answers import plain
from app.connectors.mcp.session import Listing
from app.core.canonical import canonical_bytes
from app.core.digest import digest_of
from app.core.errors import InputMalformed, InputTooLarge, SettingInvalid
from app.core.limits import MCP_DEFINITION_BYTES_MAX, MCP_DESCRIPTION_CHARS_MAX, MCP_PROBLEMS_MAX
from app.domain.tools import Tool, ToolClass

_NAME: Final = TypeAdapter[str](ToolName)
_PARAM_HEADER: Final = "x-mcp-header"


@dataclass(frozen=True, slots=True)
class McpTool(Tool):
    """A tool that an MCP server described. `listed` is its description as it stood in the list, for who lists it on;
    `definition` is what its digest is over."""

    listed: dict[str, Any] = field(default_factory=dict, hash=False)
    definition: dict[str, Any] = field(default_factory=dict, hash=False)
    has_param_headers: bool = False

    def param_headers(self, arguments: dict[str, Any]) -> dict[str, str]:
        """Arguments that the tool wants in HTTP headers too (2026-07-28)."""
        if not self.has_param_headers:
            return {}
        from mcp.shared.inbound import mcp_param_headers, x_mcp_header_map  # a second to import, and rarely needed

        return mcp_param_headers(x_mcp_header_map(self.input_schema), arguments)


@dataclass(frozen=True, slots=True)
class Discovery:
    """The tools of one listing, and what was found wrong in it."""

    tools: tuple[McpTool, ...]
    problems: tuple[str, ...]


def discover(server_id: str, server: ServerConfig, listing: Listing) -> Discovery:
    tools: dict[str, McpTool] = {}
    problems = list(listing.problems)
    for listed in listing.tools:
        name = listed.get("name")
        try:
            tool = _tool(server_id, server, listed)
        except (SettingInvalid, _Unfit) as error:
            problems.append(plain(f"tool {shown(name)} is left out: {_said(error)}", 512))
            continue
        if tool.tool_name in tools:
            problems.append(f"tool {shown(name)} is listed twice; the first counts")
            continue
        tools[tool.tool_name] = tool
    missing = [name for name in server.tools if name not in tools]
    problems += [f"tool {shown(name)} is configured, but the server has no such tool" for name in missing]
    if len(problems) > MCP_PROBLEMS_MAX:
        problems[MCP_PROBLEMS_MAX - 1 :] = [f"and {len(problems) - MCP_PROBLEMS_MAX + 1} more"]
    return Discovery(tuple(tools.values()), tuple(problems))


class _Unfit(Exception):
    pass


def _said(error: Exception) -> str:
    if isinstance(error, SettingInvalid):
        parts = [str(error.what), f"expected {error.expected}" if error.expected else "", f"found {error.found}"]
        return "; ".join(part for part in parts if part and not part.endswith("None"))
    return str(error)


def _tool(server_id: str, server: ServerConfig, listed: dict[str, Any]) -> McpTool:
    try:
        name = _NAME.validate_python(listed.get("name"), strict=True)
    except ValidationError:
        raise _Unfit("its name is not one that a log can carry") from None
    try:
        canonical_bytes(listed, bytes_max=MCP_DEFINITION_BYTES_MAX)
    except (InputMalformed, InputTooLarge) as error:
        raise _Unfit(f"its description cannot be recorded: {error.what}") from None
    description, schema = listed.get("description"), listed.get("inputSchema")
    if description is not None and not isinstance(description, str):
        raise _Unfit("its description is not text")
    if len(description or "") > MCP_DESCRIPTION_CHARS_MAX:
        raise _Unfit(f"its description has more than {MCP_DESCRIPTION_CHARS_MAX} characters")
    if not isinstance(schema, dict):
        raise _Unfit("it has no inputSchema")
    verify_discovered_schema("inputSchema", schema)
    override = server.tools.get(name)
    for pointer in override.secret_arguments if override else ():
        verify_reachable("secret_arguments", schema, split_pointer(pointer))
    has_param_headers = _PARAM_HEADER in str(schema)
    if has_param_headers:
        _verify_param_headers(schema)
    tool_class = _tool_class(server, override, listed)
    definition = _definition(server_id, name, tool_class, listed)
    return McpTool(
        server_id=server_id,
        tool_name=name,
        tool_class=tool_class,
        definition_digest=digest_of(definition),
        timeout_ms=server.timeout_ms,
        max_attempts=server.max_attempts,
        tenant=server.tenant,
        description=description,
        input_schema=schema,
        listed=listed,
        definition=definition,
        has_param_headers=has_param_headers,
        **_overridden(override),
    )


def _overridden(override: ToolConfig | None) -> dict[str, Any]:
    if override is None:
        return {}
    return {
        "on_unknown_outcome": override.on_unknown_outcome,
        "reconcile_tool": override.reconcile_tool,
        "tags": frozenset(override.tags),
        "approval_timeout_ms": override.approval_timeout_ms,
        "secret_arguments": tuple(override.secret_arguments),
    }


def _tool_class(server: ServerConfig, override: ToolConfig | None, listed: dict[str, Any]) -> ToolClass:
    """`write`, unless the operator says otherwise, or believes the server when it says so."""
    if override is not None and override.tool_class is not None:
        return override.tool_class
    annotations = listed.get("annotations")
    says_read = isinstance(annotations, dict) and annotations.get("readOnlyHint") is True
    return "read" if server.trust_annotations and says_read else "write"


def _definition(server_id: str, name: str, tool_class: str, listed: dict[str, Any]) -> dict[str, Any]:
    # What callers, people and policies are told of it. Icons and _meta are not: they may change with every listing.
    return {
        "server_id": server_id,
        "tool_name": name,
        "tool_class": tool_class,
        "input_schema": listed["inputSchema"],
        "description": listed.get("description"),
        "title": listed.get("title"),
        "output_schema": listed.get("outputSchema"),
        "annotations": listed.get("annotations"),
    }


def _verify_param_headers(schema: dict[str, Any]) -> None:
    from mcp.shared.inbound import find_invalid_x_mcp_header  # a second to import, and rarely needed

    reason = find_invalid_x_mcp_header(schema)
    if reason is not None:
        raise _Unfit(f"its {_PARAM_HEADER} is wrong: {reason}")
