"""The gateway's tools as function tools of the OpenAI Agents SDK: `Agent(name="...", tools=await gateway_tools())`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from tga_sdk.adapters.offering import Offered, Terms, explained, framework, offer, told
from tga_sdk.client import AsyncClient
from tga_sdk.client.calls import Wait
from tga_sdk.errors import TgaError

_FunctionTool: Any = framework("agents", extra="openai-agents").FunctionTool


async def gateway_tools(
    client: AsyncClient | None = None,
    *,
    only: Collection[str] | None = None,
    wait: Wait = 0.0,
    timeout: float | None = 60.0,
    scope: str | None = None,
) -> list[Any]:
    """The gateway's tools.

    Guaranteed: a tool call of the model is executed once, also when a run is resumed from its state in another process:
    its key is made of the tool call's id (within `scope`, where one is given). Denials, failures, wrong arguments and
    calls that wait for a person are told to the model as the tool's output. What a model cannot act on (no gateway, no
    right to call) is raised, and fails the run.

    `only`: servers, or `server/tool`. `wait`: as for `Client.call`; 0 tells the model that a person has to decide.
    """
    used = client or AsyncClient()
    terms = Terms(wait, timeout, scope)
    return [
        _FunctionTool(
            name=one.name,
            description=one.description,
            params_json_schema=one.schema,
            on_invoke_tool=_invoker(used, one, terms),
            strict_json_schema=False,  # the gateway validates, against the schema that it has pinned
        )
        for one in offer(await used.tools(), only=only)
    ]


def _invoker(client: AsyncClient, offered: Offered, terms: Terms) -> Callable[[Any, str], Awaitable[str]]:
    async def invoke(context: Any, arguments: str) -> str:
        try:
            args = json.loads(arguments or "{}")
        except ValueError:
            args = None
        if not isinstance(args, dict):
            return "The arguments are no JSON object. Nothing was done. Correct them."
        options = terms.options(offered, getattr(context, "tool_call_id", None))
        try:
            return told(await client.call(offered.server, offered.tool, args, **options))
        except TgaError as error:
            words = explained(error)
            if words is None:
                raise
            return words

    return invoke
