"""From what an MCP server lists to tools that can be called: checked, bounded, with a digest of what they say they are.

A tool that does not hold is left out, and said so; the others are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.config import ServerConfig, ToolConfig
from app.config.bounded_schema import verify_discovered_schema
from app.config.fields import ToolName, split_pointer
from app.config.input_schema import verify_reachable
from app.config.wording import shown
from app.connectors.answers import plain
from app.connectors.mcp.session import Listing
from app.core.canonical import canonical_enclosed
from app.core.digest import digest_of
from app.core.errors import InputMalformed, InputTooLarge, SettingInvalid
from app.core.limits import MCP_DEFINITION_BYTES_MAX, MCP_DESCRIPTION_CHARS_MAX, MCP_PROBLEMS_MAX
from app.domain.tools import Tool, ToolClass

_NAME: Final = TypeAdapter[str](ToolName)


class _Said(BaseModel):
    """Parts of a description by the types that MCP gives them. Clients read a list as a whole: one member of another
    type would cost them all tools of all servers."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Defining(_Said):
    title: str | None = None
    description: Annotated[str, Field(max_length=MCP_DESCRIPTION_CHARS_MAX)] | None = None
    inputSchema: dict[str, Any]  # noqa: N815 - MCP's own names
    outputSchema: dict[str, Any] | None = None  # noqa: N815
    annotations: dict[str, Any] | None = None


class _Icon(_Said):
    src: str
    mimeType: str | None = None  # noqa: N815
    sizes: list[str] | None = None
    theme: Literal["light", "dark"] | None = None


# What is no part of the definition: if it is wrong, the tool is listed without it.
_DECORATING: Final[dict[str, TypeAdapter[Any]]] = {
    "icons": TypeAdapter(list[_Icon]),
    "_meta": TypeAdapter(dict[str, Any]),
}
_HINTS: Final = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
_PARAM_HEADER: Final = "x-mcp-header"


@dataclass(frozen=True, slots=True)
class McpTool(Tool):
    """A tool that an MCP server described. `listed` is its description as it stood in the list, without what no client
    could read, for who lists it on; `definition` is what its digest is over."""

    is_discovered: ClassVar[bool] = True
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
        except Exception as error:  # libraries document no list of what they raise over a server's text
            problems.append(plain(f"tool {shown(name)} is left out: {_said(error)}", 512))
            continue
        if tool.tool_name in tools:
            problems.append(f"tool {shown(name)} is listed twice; the first counts")
            continue
        tools[tool.tool_name] = tool
    missing = [name for name in server.tools if name not in tools]
    problems += [f"tool {shown(name)} is configured, but the server has no such tool" for name in missing]
    return Discovery(tuple(tools.values()), bounded_problems(problems))


def bounded_problems(problems: Sequence[str]) -> tuple[str, ...]:
    more = len(problems) - MCP_PROBLEMS_MAX + 1
    return tuple(problems) if more <= 1 else (*problems[: MCP_PROBLEMS_MAX - 1], f"and {more} more")


class _Unfit(Exception):
    pass


def _said(error: Exception) -> str:
    if isinstance(error, SettingInvalid | InputMalformed | InputTooLarge):
        parts = [str(error.what), f"expected {error.expected}" if error.expected else "", f"found {error.found}"]
        return "; ".join(part for part in parts if part and not part.endswith("None"))
    return str(error) if isinstance(error, _Unfit) else f"it cannot be checked ({type(error).__name__})"


def _tool(server_id: str, server: ServerConfig, listed: dict[str, Any]) -> McpTool:
    try:
        name = _NAME.validate_python(listed.get("name"), strict=True)
    except ValidationError:
        raise _Unfit("its name is not one that a log can carry") from None
    try:
        # All of it, also what is in no pin: it is listed on to others.
        canonical_enclosed(listed, bytes_max=MCP_DEFINITION_BYTES_MAX)
    except (InputMalformed, InputTooLarge) as error:
        raise _Unfit(f"its description cannot be recorded: {_said(error)}") from None
    _verify_types(listed)
    schema: dict[str, Any] = listed["inputSchema"]
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
        unreachable_for_ms=server.unreachable_for_ms,
        tenant=server.tenant,
        description=listed.get("description"),
        input_schema=schema,
        listed=_readable(listed),
        definition=definition,
        has_param_headers=has_param_headers,
        **_overridden(override),
    )


def _overridden(override: ToolConfig | None) -> dict[str, Any]:
    if override is None:
        return {}
    return {
        "on_unknown_outcome": override.on_unknown_outcome,
        "is_outcome_chosen": "on_unknown_outcome" in override.model_fields_set,
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


def _verify_types(listed: dict[str, Any]) -> None:
    try:
        _Defining.model_validate(listed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise _Unfit(f"it has no {where}") from None
        raise _Unfit(f"its {where} is not what MCP says: {first['msg']}") from None


def _is_hint(name: str, said: Any) -> bool:
    if name == "title":
        return isinstance(said, str)
    return isinstance(said, bool) if name in _HINTS else said is not None


def _readable(listed: dict[str, Any]) -> dict[str, Any]:
    """Without members that are null, which some clients refuse, and without hints and decoration of another type."""
    kept = {name: member for name, member in listed.items() if member is not None}
    if "annotations" in kept:
        kept["annotations"] = {name: hint for name, hint in kept["annotations"].items() if _is_hint(name, hint)}
    for name, type_of in _DECORATING.items():
        try:
            if name in kept:
                type_of.validate_python(kept[name], strict=True)
        except ValidationError:
            del kept[name]
    return kept


def _verify_param_headers(schema: dict[str, Any]) -> None:
    from mcp.shared.inbound import find_invalid_x_mcp_header  # a second to import, and rarely needed

    reason = find_invalid_x_mcp_header(schema)
    if reason is not None:
        raise _Unfit(f"its {_PARAM_HEADER} is wrong: {reason}")
