"""tools/call: the same runtime, checks and bounds as over HTTP; waiting, keys and results as MCP clients need them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Field

from app.connectors.mcp.discovery import McpTool
from app.core.canonical import canonical_enclosed
from app.core.errors import (
    CallInFlight,
    InternalError,
    KeyReused,
    SchemaViolation,
    ShuttingDown,
    TgaError,
    ToolNotFound,
)
from app.domain.identity import Principal
from app.domain.ledger.documents import IdempotencyKey, Part, Text
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from app.domain.tools import Tool
from app.edge.body import checked
from app.edge.calls import Calls, checked_traceparent, naming, trace_of
from app.edge.handover import HandedOver
from app.edge.permissions import require
from app.edge.services import Services
from app.mcp_server.envelope import Client, verify_param_headers
from app.mcp_server.key_reservations import Intent, Intents, begin
from app.mcp_server.results import IDEMPOTENCY_KEY, PROPOSED_KEY, finished, not_over, refusal, result_of
from app.mcp_server.supervising import SUPERVISOR_NAMES, supervise
from app.mcp_server.tasks import created_task
from app.mcp_server.tool_catalogue import ToolCatalogue
from app.mcp_server.wire import INVALID_PARAMS, Message, RpcError, text_param

Notify = Callable[[str, dict[str, Any]], None]


class _Meta(Part):
    """What of `_meta` is for us; the rest is between others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    key: Annotated[IdempotencyKey | None, Field(alias=IDEMPOTENCY_KEY)] = None
    proposed_key: Annotated[IdempotencyKey | None, Field(alias=PROPOSED_KEY)] = None
    intent: Annotated[Text | None, Field(alias="tga/intent")] = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, authenticated and admitted."""

    message: Message
    client: Client
    principal: Principal
    catalogue: ToolCatalogue
    headers: Mapping[str, str]
    notify: Notify


@dataclass(frozen=True, slots=True)
class Called:
    """What is answered. `is_final`: the call is over with it, or its handle is; until then `intent` stays open."""

    result: dict[str, Any] | RpcError
    intent: Intent | None = None
    is_final: bool = True


class Calling:
    def __init__(self, services: Services, intents: Intents, *, hold_ms: int, task_after_ms: int) -> None:
        self._services = services
        self._task_after_ms = task_after_ms
        self._intents = intents
        self._hold_ms = hold_ms
        self._calls = Calls(services)

    async def call(self, asked: Asked) -> Called:
        """RpcError for what is no call; everything else that can go wrong with one is a result."""
        params = asked.message.params
        name = text_param(params, "name")
        arguments = params.get("arguments")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "params.arguments must be an object", data={"code": SchemaViolation.code})
        if asked.catalogue.offers_supervision and name in SUPERVISOR_NAMES:
            return Called(await self._supervised(asked, name, arguments))
        try:
            require(asked.principal, "call")
            tool = await asked.catalogue.find(name)
            meta = checked(_Meta, asked.message.meta)
        except (ToolNotFound, SchemaViolation) as error:
            raise RpcError.of(error) from None
        except TgaError as error:
            return Called(refusal(error, asked.client))
        if asked.client.is_modern and isinstance(tool, McpTool) and tool.has_param_headers:
            verify_param_headers(tool.input_schema, arguments, asked.headers)
        return await self._called(asked, tool, arguments, meta)

    async def _supervised(self, asked: Asked, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await supervise(self._services, asked.principal, name, arguments)
        except HandedOver:
            return refusal(ShuttingDown("the gateway is stopping; look at the trace"), asked.client)
        except TgaError as error:
            return refusal(error, asked.client)
        text = {"type": "text", "text": _indented(answer)}
        return finished({"content": [text], "structuredContent": answer, "isError": False}, asked.client)

    async def _called(self, asked: Asked, tool: Tool, arguments: dict[str, Any], meta: _Meta) -> Called:
        hold_ms = self._task_after_ms if asked.client.takes_tasks else self._hold_ms
        deadline = asyncio.get_running_loop().time() + hold_ms / 1000
        intent: Intent | None = None
        try:
            if meta.key is None and tool.tool_class == "write":
                # Before anything is remembered of it: a call that does not fit is none.
                canonical_enclosed(arguments)
                self._services.registry.verify_arguments(tool, arguments)
                proposed = meta.proposed_key or self._services.clock.new_id()
                intent = await self._begun(asked, tool, arguments, proposed)
            return await self._answered(asked, tool, arguments, meta, intent, deadline)
        except InternalError as error:
            return Called(RpcError.of(error), intent, is_final=False)
        except TgaError as error:
            key = intent.key if intent is not None else meta.key
            return Called(refusal(error, asked.client, key=key), intent, is_final=_is_an_end(error, intent))
        except BaseException:
            if intent is not None:
                await intent.conclude(None)
            raise

    async def _begun(self, asked: Asked, tool: Tool, arguments: dict[str, Any], proposed: str) -> Intent:
        awaited = begin(self._intents, asked.principal, tool, arguments, proposed_key=proposed, wait_ms=self._hold_ms)
        try:
            return await self._services.handover.wait(awaited)
        except HandedOver:
            raise ShuttingDown("the gateway is stopping") from None

    async def _answered(
        self,
        asked: Asked,
        tool: Tool,
        arguments: dict[str, Any],
        meta: _Meta,
        intent: Intent | None,
        deadline: float,
    ) -> Called:
        call = CheckedCall(
            server_id=tool.server_id,
            tool_name=tool.tool_name,
            arguments=arguments,
            idempotency_key=meta.key if intent is None else intent.key,
            principal=asked.principal,
            intent=meta.intent,
            trace_id=TraceId(self._services.clock.new_id()),
            traceparent=_traceparent(asked),
        )
        wants_task = "task" in asked.message.params and not asked.client.is_modern
        try:
            with self._watched(asked, call):
                answer = await self._running(asked, call, deadline, wants_task=wants_task)
        except KeyReused:
            if intent is None or not intent.is_again or not tool.secret_arguments:
                raise
            # Equal but for a secret argument, and so another call than the one that was broken off.
            await intent.forget()
            fresh = await self._begun(asked, tool, arguments, self._services.clock.new_id())
            intent.begun = fresh.begun
            return await self._answered(asked, tool, arguments, meta, intent, deadline)
        if wants_task or (asked.client.takes_tasks and not answer.is_final):
            with naming(answer.trace_id):
                return Called(await created_task(self._services, answer.trace_id, asked.client), intent)
        if not answer.is_final:
            unfinished = not_over(answer, asked.client, call.idempotency_key, waited_ms=self._hold_ms)
            return Called(unfinished, intent, is_final=False)
        try:
            return Called(result_of(answer, tool, asked.client, call.idempotency_key), intent)
        except RpcError as error:
            return Called(error, intent)

    @contextlib.contextmanager
    def _watched(self, asked: Asked, call: CheckedCall) -> Any:
        """Progress of the call goes to the client that asked for it, under the client's own token."""
        token = asked.message.meta.get("progressToken")
        if not isinstance(token, (str, int)) or isinstance(token, bool):
            yield
            return

        def tell(params: dict[str, Any]) -> None:
            asked.notify("notifications/progress", {**params, "progressToken": token})

        with self._services.registry.watch_progress(call.trace_id or "", tell):
            yield

    async def _running(self, asked: Asked, call: CheckedCall, deadline: float, *, wants_task: bool) -> Answer:
        """The call's answer by the deadline. It is the runtime that executes it; here it is only waited for."""
        loop = asyncio.get_running_loop()
        wait_ms = 0 if wants_task else max(0, int((deadline - loop.time()) * 1000))
        trace_id: TraceId | None = None
        try:
            answer = await self._services.handover.wait(self._calls.in_line(call, wait_ms=wait_ms))
            if answer.is_final or wants_task or asked.client.takes_tasks:
                return answer
            trace_id = answer.trace_id
            if answer.waiting == "supervisor":
                self._tell_waiting(asked, trace_id)
            return await self._services.handover.wait(self._calls.followed(answer, deadline))
        except CallInFlight as error:
            trace_id = trace_of(error)
            if trace_id is None:
                raise
            return await self._calls.as_it_stands(trace_id)
        except HandedOver:
            return await (self._calls.handed_over(call) if trace_id is None else self._calls.as_it_stands(trace_id))

    def _tell_waiting(self, asked: Asked, trace_id: str) -> None:
        token = asked.message.meta.get("progressToken")
        if isinstance(token, (str, int)) and not isinstance(token, bool):
            message = f"waits for a person to decide; trace {trace_id}"
            asked.notify("notifications/progress", {"progressToken": token, "progress": 0, "message": message})


def _is_an_end(error: TgaError, intent: Intent | None) -> bool:
    """Whether nothing more comes of the call. If it may have been made durable, its answer is still owed; that of a
    call that came again is owed from the first time, whatever went wrong this time."""
    return error.stream is None and not isinstance(error, CallInFlight) and (intent is None or not intent.is_again)


def _traceparent(asked: Asked) -> str | None:
    given = asked.message.meta.get("traceparent", asked.headers.get("traceparent"))
    return checked_traceparent(given)


def _indented(answer: dict[str, Any]) -> str:
    return orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode()
