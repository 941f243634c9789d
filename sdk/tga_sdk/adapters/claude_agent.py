"""The gateway's tools as an in-process MCP server of the Claude Agent SDK.

`ClaudeAgentOptions(mcp_servers={"tga": await gateway_server()}, allowed_tools=["mcp__tga"])`. The gateway is an MCP
server itself, at `/mcp`: what this adds is a key for each tool call, so that one which is repeated is executed once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from tga_sdk.adapters.offering import Terms, explained, framework, offer, told
from tga_sdk.client import AsyncClient
from tga_sdk.client.calls import Wait
from tga_sdk.errors import TgaError

_EXTRA: Final = "claude-agent"
_config: Any = framework("claude_agent_sdk", extra=_EXTRA).McpSdkServerConfig
_Server: Any = framework("mcp.server", extra=_EXTRA).Server
_types: Any = framework("mcp.types", extra=_EXTRA)
TOOL_USE_ID: Final = "claudecode/toolUseId"  # in `_meta` of a call: the id of the model's tool call


async def gateway_server(
    client: AsyncClient | None = None,
    *,
    name: str = "tga",
    only: Collection[str] | None = None,
    wait: Wait = 0.0,
    timeout: float | None = 60.0,
    scope: str | None = None,
) -> Any:
    """An MCP server for `ClaudeAgentOptions.mcp_servers`, with the gateway's tools.

    Guaranteed: a tool call of the model is executed once for its id, where Claude Code tells it (it does, in the call's
    `_meta`); without an id each call is a call of its own. Denials, failures, wrong arguments and calls that wait for a
    person are error results that the model reads. So is what it cannot act on (no gateway, no right to call), because
    this SDK has no other way to tell: its text begins with "The gateway".

    `only`: servers, or `server/tool`. `wait`: as for `Client.call`; 0 tells the model that a person has to decide.
    """
    used = client or AsyncClient()
    terms = Terms(wait, timeout, scope)
    offered = {one.name: one for one in offer(await used.tools(), only=only)}

    async def list_tools(*_: Any) -> Any:
        tools = [
            _types.Tool.model_validate(
                {
                    "name": one.name,
                    "description": one.description,
                    "inputSchema": one.schema,
                    "annotations": {"readOnlyHint": one.is_read},
                }
            )
            for one in offered.values()
        ]
        return _types.ListToolsResult(tools=tools)

    async def call_tool(context: Any, params: Any) -> Any:
        one = offered.get(params.name)
        if one is None:
            return _result(f"There is no tool {params.name}.", is_error=True)
        try:
            options = terms.options(one, _tool_use_id(params))
            return _result(told(await used.call(one.server, one.tool, params.arguments or {}, **options)))
        except TgaError as error:
            words = explained(error) or f"The gateway could not be used: {error}. Nobody but its operator can help."
            return _result(words, is_error=True)

    server = _Server(name, on_list_tools=list_tools, on_call_tool=call_tool)
    return _config(type="sdk", name=name, instance=server)


def _tool_use_id(params: Any) -> str | None:
    raw = params.model_dump(by_alias=True, mode="json", exclude_none=True)
    meta = raw.get("_meta")
    found = meta.get(TOOL_USE_ID) if isinstance(meta, dict) else None
    return found if isinstance(found, str) and found else None


def _result(text: str, *, is_error: bool = False) -> Any:
    return _types.CallToolResult.model_validate({"content": [{"type": "text", "text": text}], "isError": is_error})
