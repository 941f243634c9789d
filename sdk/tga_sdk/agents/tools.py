"""An agent's tools: each call is recorded, those of one turn run at the same time, and no address depends on time.

pydantic-ai starts the calls of a turn as tasks of their own. Their addresses in the journal would depend on which was
first, so the calls are only collected there: each says that it needs an approval, pydantic-ai hands all of them, in the
model's order, to `handle_deferred_tool_calls`, and they are performed from there: one call as one operation, several in
the branches of a `gather`. Then pydantic-ai executes the "approved" calls, and each finds its result waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter
from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, ModelRetry, ToolFailed
from pydantic_ai.messages import ToolReturn
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext, ToolDefinition, ToolDenied
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool, WrapperToolset
from pydantic_core import SchemaValidator, core_schema, to_jsonable_python

from tga_sdk.errors import ProcedureInvalid, ToolError
from tga_sdk.plain import text_or_base64

if TYPE_CHECKING:
    from tga_sdk.context import Context

ANY_ARGUMENTS: Final = SchemaValidator(core_schema.dict_schema())
RETURNED: Final[TypeAdapter[ToolReturn[Any]]] = TypeAdapter(ToolReturn[Any])
DENIED: Final = "A person has denied this call. Do not try it again."


@dataclass
class ToolCalls:
    """The tool calls of one agent run: collected by the toolset, performed together, handed back by their ids."""

    ctx: Context[Any]
    approve: frozenset[str]
    asked: dict[str, _Asked] = field(default_factory=dict)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def handle(self, requests: DeferredToolRequests) -> DeferredToolResults | None:
        """Perform the calls that were collected, in the model's order; a denied one is told to the model."""
        calls = [self.asked[call.tool_call_id] for call in requests.approvals if call.tool_call_id in self.asked]
        if not calls:
            return None
        for group in _groups(calls):
            if len(group) == 1:
                outcomes = [await self._perform(group[0])]
            else:
                branches = [_branch(self._perform, call) for call in group]
                outcomes = await self.ctx.gather(*branches, name="tools")
            for call, outcome in zip(group, outcomes, strict=True):
                self.done[call.id] = outcome
        for call in calls:
            del self.asked[call.id]
        return DeferredToolResults(
            approvals={
                call.id: ToolDenied(self.done.pop(call.id)["denied"]) if "denied" in self.done[call.id] else True
                for call in calls
            }
        )

    async def _perform(self, call: _Asked) -> dict[str, Any]:
        if call.name in self.approve or call.needs_approval:
            if not await self._approved(call):
                return {"denied": DENIED}
            call = replace(call, ctx=replace(call.ctx, tool_call_approved=True))
        outcome = await call.toolset.perform(call)
        if "approval" in outcome:  # the tool itself says that this call needs one
            if not await self._approved(call):
                return {"denied": DENIED}
            outcome = await call.toolset.perform(replace(call, ctx=replace(call.ctx, tool_call_approved=True)))
        return outcome

    async def _approved(self, call: _Asked) -> bool:
        context = {"tool": call.shown_name, "arguments": to_jsonable_python(call.args)}
        return await self.ctx.approve(
            f"May the agent call {call.shown_name}?", context=context, name=f"approve-{call.shown_name}"
        )


@dataclass
class _Asked:
    """One call that the model made, with valid arguments."""

    id: str
    name: str
    args: dict[str, Any]
    ctx: RunContext[Any]
    tool: ToolsetTool[Any]
    toolset: DurableToolset
    needs_approval: bool

    @property
    def shown_name(self) -> str:
        metadata = self.tool.tool_def.metadata or {}
        return str(metadata.get("tga_tool", self.name))


@dataclass
class DurableToolset(WrapperToolset[Any]):
    """All tools of an agent, around whatever sets they come from."""

    calls: ToolCalls

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        found = await self.wrapped.get_tools(ctx)
        return {name: _own_approval(tool) for name, tool in found.items()}

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        call_id = ctx.tool_call_id or ""
        if call_id in self.calls.done:
            return _result_of(self.calls.done.pop(call_id))
        needs_approval = bool((tool.tool_def.metadata or {}).get("tga_needs_approval"))
        self.calls.asked[call_id] = _Asked(call_id, name, tool_args, ctx, tool, self, needs_approval)
        raise ApprovalRequired

    async def perform(self, call: _Asked) -> dict[str, Any]:
        """One call, recorded: through the gateway, or as a step of the program."""
        gateway_tool = (call.tool.tool_def.metadata or {}).get("tga_tool")
        if gateway_tool is not None:
            return await _through_gateway(self.calls.ctx, gateway_tool, call.args)

        async def body() -> dict[str, Any]:
            return await _outcome_of(self.wrapped.call_tool(call.name, call.args, call.ctx, call.tool))

        given = [call.name, to_jsonable_python(call.args)]
        found: dict[str, Any] = await self.calls.ctx.perform(
            "step", call.name, body, given=given, tool_call=(call.id, call.args)
        )
        return found


class GatewayTools(AbstractToolset[Any]):
    """Tools of the gateway for an agent, as the gateway described them when the agent first ran in this run."""

    def __init__(self, definitions: Sequence[dict[str, Any]]) -> None:
        self._definitions = definitions

    @property
    def id(self) -> str | None:
        return "tga-gateway"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        return {one["name"]: self._tool(one) for one in self._definitions}

    def _tool(self, one: dict[str, Any]) -> ToolsetTool[Any]:
        definition = ToolDefinition(
            name=one["name"],
            description=one["description"],
            parameters_json_schema=one["input_schema"] or {"type": "object", "properties": {}},
            metadata={"tga_tool": one["tool"]},
        )
        return ToolsetTool(toolset=self, tool_def=definition, max_retries=3, args_validator=ANY_ARGUMENTS)

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        raise ProcedureInvalid(
            f"{name} is a tool of the gateway: it is called in a run, through ctx.agent or durable()"
        )


async def definitions_of(ctx: Context[Any], agent: str, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """What the gateway says of these tools, recorded once: every attempt offers the model the same."""
    if not wanted:
        return []

    async def body() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for server in sorted({one.partition(".")[0] for one in wanted}):
            page = await ctx._attempt.host.wire.ask("GET", f"/v1/tools?server_id={server}")
            found += page["items"]
        return _chosen(found, wanted)

    result: list[dict[str, Any]] = await ctx.perform("step", f"{agent}.tools", body, given=list(wanted))
    return result


def _chosen(found: Sequence[dict[str, Any]], wanted: Sequence[str]) -> list[dict[str, Any]]:
    by_name = {f"{one['server_id']}.{one['tool_name']}": one for one in found}
    chosen: dict[str, dict[str, Any]] = {}
    for name in wanted:
        server, _, tool = name.partition(".")
        matching = [one for one in by_name if tool == "*" and one.startswith(f"{server}.")] or [name]
        for one in matching:
            if one not in by_name:
                has = ", ".join(sorted(by_name)) or "none"
                raise ProcedureInvalid(f"the gateway has no tool {one}; of the named servers it has: {has}")
            said = by_name[one]
            chosen[one] = {
                "name": _name_for_models(one),
                "tool": one,
                "description": said["description"] or "",
                "input_schema": said["input_schema"],
            }
    return list(chosen.values())


def _name_for_models(name: str) -> str:
    """`server__tool`, as the gateway's MCP server says it; providers take letters, digits, `_` and `-`."""
    server, _, tool = name.partition(".")
    return "".join(one if one.isascii() and (one.isalnum() or one in "_-") else "_" for one in f"{server}__{tool}")[:64]


async def _through_gateway(ctx: Context[Any], name: str, args: dict[str, Any]) -> dict[str, Any]:
    server, _, tool = name.partition(".")
    try:
        found = await ctx.tool(server, tool, args)
        return {"returned": text_or_base64(found) if isinstance(found, bytes) else found}
    except ToolError as error:  # definite, or refused: the model is told, and goes on from there
        return {"failed": f"{error.type}: {error.message}"}


async def _outcome_of(calling: Awaitable[Any]) -> dict[str, Any]:
    """What a Python tool did, as data: what it asks of the model is no failure of the step."""
    try:
        returned = await calling
    except ModelRetry as error:
        return {"retry": error.message}
    except ToolFailed as error:
        return {"failed": error.message}
    except ApprovalRequired:
        return {"approval": True}
    except CallDeferred as error:
        raise ProcedureInvalid(
            "a tool that others execute cannot be called by a durable agent: use ctx.signal"
        ) from error
    if isinstance(returned, ToolReturn):
        return {"tool_return": RETURNED.dump_python(returned, mode="json")}
    return {"returned": to_jsonable_python(returned)}


def _result_of(outcome: dict[str, Any]) -> Any:
    if "retry" in outcome:
        raise ModelRetry(outcome["retry"])
    if "failed" in outcome:
        raise ToolFailed(outcome["failed"])
    if "tool_return" in outcome:
        return RETURNED.validate_python(outcome["tool_return"])
    return outcome["returned"]


def _own_approval(tool: ToolsetTool[Any]) -> ToolsetTool[Any]:
    """A tool that requires approval is collected like all others; the person is asked when it is performed."""
    if tool.tool_def.kind != "unapproved":
        return tool
    metadata = {**(tool.tool_def.metadata or {}), "tga_needs_approval": True}
    return replace(tool, tool_def=replace(tool.tool_def, kind="function", metadata=metadata))


def _groups(calls: Sequence[_Asked]) -> list[list[_Asked]]:
    """Calls that run at the same time; a tool that is `sequential` runs alone."""
    groups: list[list[_Asked]] = []
    is_open = False
    for call in calls:
        if call.tool.tool_def.sequential or not is_open:
            groups.append([call])
        else:
            groups[-1].append(call)
        is_open = not call.tool.tool_def.sequential
    return groups


def _branch(perform: Callable[[_Asked], Awaitable[dict[str, Any]]], call: _Asked) -> Callable[[], Awaitable[Any]]:
    async def branch() -> dict[str, Any]:
        return await perform(call)

    return branch
