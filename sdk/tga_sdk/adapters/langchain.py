"""The gateway's tools as tools of LangChain and LangGraph: `create_agent(model, gateway_tools())`."""

from __future__ import annotations

import contextvars
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from tga_sdk.adapters.offering import Offered, Terms, explained, framework, offer, told
from tga_sdk.client import AsyncClient, Client
from tga_sdk.client.calls import Wait
from tga_sdk.errors import TgaError

if TYPE_CHECKING:
    BaseTool = Any
    Tools = list[Any]
else:
    BaseTool = framework("langchain_core.tools", extra="langchain").BaseTool

_ToolException: Any = framework("langchain_core.tools", extra="langchain").ToolException
# The model's tool call that is being executed: its id, and the thread of LangGraph that it belongs to.
_calling: contextvars.ContextVar[tuple[str | None, str | None]] = contextvars.ContextVar("tga_calling")


def gateway_tools(
    client: Client | None = None,
    *,
    only: Collection[str] | None = None,
    wait: Wait = 0.0,
    timeout: float | None = 60.0,
    scope: str | None = None,
) -> list[Any]:
    """The gateway's tools; they can be invoked and awaited (then they run in a thread).

    Guaranteed: a tool call of the model is executed once, also when LangGraph goes on from a checkpoint in another
    process: its key is made of the tool call's id and the thread's (`configurable.thread_id`, else `scope`). Denials,
    failures, wrong arguments and calls that wait for a person become tool messages with status `error`. What a model
    cannot act on (no gateway, no right to call) is raised.

    `only`: servers, or `server/tool`. `wait`: as for `Client.call`; 0 tells the model that a person has to decide.
    """
    used = client or Client()
    terms = Terms(wait, timeout, scope)
    return [_made(one, terms, client=used) for one in offer(used.tools(), only=only)]


async def async_gateway_tools(
    client: AsyncClient | None = None,
    *,
    only: Collection[str] | None = None,
    wait: Wait = 0.0,
    timeout: float | None = 60.0,
    scope: str | None = None,
) -> list[Any]:
    """As `gateway_tools`, for programs with an event loop; these tools can only be awaited."""
    used = client or AsyncClient()
    terms = Terms(wait, timeout, scope)
    return [_made(one, terms, async_client=used) for one in offer(await used.tools(), only=only)]


def _made(
    offered: Offered, terms: Terms, *, client: Client | None = None, async_client: AsyncClient | None = None
) -> Any:
    made = GatewayTool(
        name=offered.name,
        description=offered.description,
        args_schema=offered.schema,
        handle_tool_error=True,
        metadata={"server": offered.server, "tool": offered.tool},
    )
    made._offered, made._terms = offered, terms
    made._client, made._async_client = client, async_client
    return made


class GatewayTool(BaseTool):  # type: ignore[misc, unused-ignore]
    """One tool of the gateway."""

    _offered: Any = None
    _terms: Any = None
    _client: Any = None
    _async_client: Any = None

    def invoke(self, input: Any, config: Any = None, **more: Any) -> Any:  # noqa: A002
        """As of every tool of LangChain; remembers which tool call this is."""
        token = _calling.set(_identity(input, config))
        try:
            return super().invoke(input, config, **more)
        finally:
            _calling.reset(token)

    async def ainvoke(self, input: Any, config: Any = None, **more: Any) -> Any:  # noqa: A002
        """As `invoke`."""
        token = _calling.set(_identity(input, config))
        try:
            return await super().ainvoke(input, config, **more)
        finally:
            _calling.reset(token)

    def _run(self, *_: Any, **args: Any) -> Any:
        if self._client is None:
            raise TgaError("these tools are for `ainvoke`; `gateway_tools` makes those that can be invoked")
        try:
            return told(self._client.call(self._offered.server, self._offered.tool, args, **self._options()))
        except TgaError as error:
            raise _for_model(error) from error

    async def _arun(self, *given: Any, **args: Any) -> Any:
        if self._async_client is None:
            return await super()._arun(*given, **args)  # in a thread
        try:
            result = await self._async_client.call(self._offered.server, self._offered.tool, args, **self._options())
            return told(result)
        except TgaError as error:
            raise _for_model(error) from error

    def _options(self) -> dict[str, Any]:
        call_id, thread = _calling.get((None, None))
        return dict(self._terms.options(self._offered, call_id, thread))


def _identity(given: Any, config: Any) -> tuple[str | None, str | None]:
    call_id = given.get("id") if isinstance(given, dict) and given.get("type") == "tool_call" else None
    thread = ((config or {}).get("configurable") or {}).get("thread_id")
    return (call_id if isinstance(call_id, str) else None), (None if thread is None else str(thread))


def _for_model(error: TgaError) -> Exception:
    words = explained(error)
    if words is None:
        return error
    exception: Exception = _ToolException(words)
    return exception
