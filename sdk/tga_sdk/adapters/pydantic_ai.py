"""The gateway's tools as a toolset of pydantic-ai: `Agent(model, toolsets=[GatewayToolset()])`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic_core import SchemaValidator, core_schema

from tga_sdk.adapters.offering import Offered, Terms, explained, framework, is_correctable, offer
from tga_sdk.client import AsyncClient
from tga_sdk.client.calls import Wait
from tga_sdk.errors import TgaError

framework("pydantic_ai", extra="pydantic-ai")

from pydantic_ai import ModelRetry, RunContext, ToolDefinition  # noqa: E402
from pydantic_ai.exceptions import ToolFailed  # noqa: E402
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool  # noqa: E402

_ANY_ARGUMENTS = SchemaValidator(schema=core_schema.dict_schema(keys_schema=core_schema.str_schema()))


class GatewayToolset(AbstractToolset[Any]):
    """The tools of a gateway, for an agent of pydantic-ai.

    Guaranteed: a tool call of the model is executed once, also when the agent is run again with the same history and
    conversation (`conversation_id`): its key is made of these ids. Wrong arguments go back to the model as a retry;
    denials, failures and calls that wait for a person as a failed result. What a model cannot act on (no gateway, no
    right to call) is raised to the caller of the agent.

    `only`: servers, or `server/tool`. `wait`: as for `Client.call`; 0 tells the model that a person has to decide.
    The list of tools is asked for once; `refresh()` asks again.
    """

    def __init__(
        self,
        client: AsyncClient | None = None,
        *,
        only: Collection[str] | None = None,
        wait: Wait = 0.0,
        timeout: float | None = 60.0,
        scope: str | None = None,
        max_retries: int = 2,
        id: str | None = "tga",  # noqa: A002
    ) -> None:
        self._client = client or AsyncClient()
        self._only = only
        self._terms = Terms(wait, timeout, scope)
        self._max_retries = max_retries
        self._id = id
        self._offered: dict[str, Offered] | None = None

    @property
    def id(self) -> str | None:
        """Names the toolset among those of its agent."""
        return self._id

    def refresh(self) -> None:
        """Ask the gateway for its tools again before the next step."""
        self._offered = None

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        """The tools as the model sees them."""
        if self._offered is None:
            self._offered = {one.name: one for one in offer(await self._client.tools(), only=self._only)}
        return {
            name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=name,
                    description=one.description,
                    parameters_json_schema=one.schema,
                    metadata={"server": one.server, "tool": one.tool},
                ),
                max_retries=self._max_retries,
                args_validator=_ANY_ARGUMENTS,  # the gateway validates, against the schema that it has pinned
            )
            for name, one in self._offered.items()
        }

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        """Call the tool through the gateway, and return what it answered."""
        offered = (self._offered or {})[name]
        options = self._terms.options(offered, ctx.tool_call_id, ctx.conversation_id or ctx.run_id)
        try:
            return (await self._client.call(offered.server, offered.tool, tool_args, **options)).output
        except TgaError as error:
            words = explained(error)
            if words is None:
                raise
            raise (ModelRetry(words) if is_correctable(error) else ToolFailed(words)) from error
