"""Agents of a Lua program: the SDK's own `ctx.agent`, with the program's functions as tools and as prompts.

A conversation belongs to the body that it is held in. When a body ends, what it said to agents from outside of it is
forgotten: in a replay the body does not run, and the program must see the same in both.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from app.lua.options import LuaOptions
from app.lua.programs import schema_of

if TYPE_CHECKING:
    from pydantic_ai import Tool
    from pydantic_ai.messages import ModelMessage

    from tga_sdk.agents import AgentSession
    from tga_sdk.context import Context

Body = Callable[[int, int, Any], Awaitable[Any]]
PROMPT: Final = 0  # of the functions that a turn may ask the program for; its tools are 1, 2, ...
_FIELDS: Final = ("approve", "max_turns", "max_tool_calls", "max_tokens", "timeout", "retries", "stream", "settings")
_DONE: Final = {"type": "object", "properties": {"reason": {"type": "string"}}, "additionalProperties": True}


@dataclass
class _Agent:
    spec: Mapping[str, Any]
    messages: list[ModelMessage] = field(default_factory=list)
    session: AgentSession | None = None  # None: to be made, with these messages

    @property
    def has_prompt(self) -> bool:
        return bool(self.spec.get("prompt_is_function") or self.spec.get("system_prompt"))


class LuaAgents:
    """The agents of one attempt. `body(thread, which, given)` runs a function of the program that has the turn."""

    def __init__(self, ctx: Context[Any], options: LuaOptions, body: Body) -> None:
        self._ctx = ctx
        self._options = options
        self._body = body
        self._agents: dict[int, _Agent] = {}
        self._thread: ContextVar[int] = ContextVar("thread")
        self._before: ContextVar[dict[int, list[ModelMessage]] | None] = ContextVar("before", default=None)

    async def turn(self, thread: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """One message to an agent, and what it says. `done`: how its tool `done` was called meanwhile."""
        number, name = request["id"], request["name"]
        agent = self._agents.get(number)
        if agent is None:
            agent = self._agents[number] = _Agent(request["spec"])
        before = self._before.get()
        if before is not None:
            before.setdefault(number, agent.messages)
        if agent.session is None or agent.session.name != name:
            agent.session = self._session(name, agent)
        self._thread.set(thread)
        had = len(agent.messages)
        message = request.get("message")
        said = message if message is None or isinstance(message, str) else json.dumps(message, ensure_ascii=False)
        if said is None and not agent.messages and not agent.has_prompt:
            said = ""  # a turn begins with something that was said
        output = await agent.session.run(said)
        agent.messages = agent.session.messages
        return {"output": output, "done": _calls_of_done(agent.messages[had:])}

    def messages(self, number: int) -> list[dict[str, Any]]:
        """The conversation so far, as plain data."""
        from pydantic_ai.messages import ModelMessagesTypeAdapter

        agent = self._agents.get(number)
        found: list[dict[str, Any]] = ModelMessagesTypeAdapter.dump_python(agent.messages if agent else [], mode="json")
        return found

    def enter(self) -> Callable[[], None]:
        """A body begins; what is returned is called when it has ended."""
        outer = self._before.get()
        inner: dict[int, list[ModelMessage]] = {}
        self._before.set(inner)

        def leave() -> None:
            self._before.set(outer)
            for number, messages in inner.items():
                agent = self._agents[number]
                agent.messages, agent.session = messages, None

        return leave

    def _session(self, name: str, agent: _Agent) -> AgentSession:
        spec = agent.spec
        fields: dict[str, Any] = {key: spec[key] for key in _FIELDS if spec.get(key) is not None}
        if spec.get("temperature") is not None:
            fields["settings"] = {**fields.get("settings", {}), "temperature": spec["temperature"]}
        if spec.get("output_fields"):
            fields["output_schema"] = schema_of(spec["output_fields"])
        model = self._options.agent_model(name, spec.get("model"), spec.get("provider"))
        made: AgentSession = self._ctx.agent(
            {"name": name, **fields},
            model=model,
            system_prompt=self._prompt if spec.get("prompt_is_function") else spec.get("system_prompt"),
            tools=[*spec.get("tools", ()), *self._functions(spec)],
            history=agent.messages,
        )
        return made

    async def _prompt(self) -> Any:
        return await self._body(self._thread.get(), PROMPT, None)

    def _functions(self, spec: Mapping[str, Any]) -> list[Tool[Any]]:
        from pydantic_ai import Tool

        made: list[Tool[Any]] = []
        for which, one in enumerate(spec.get("functions", ()), 1):
            schema = schema_of(one.get("fields")) or {"type": "object", "additionalProperties": True}
            made.append(Tool.from_schema(self._function(which), one["name"], one.get("description"), schema))
        if spec.get("offers_done"):
            made.append(Tool.from_schema(_done, "done", "Call this when the task is complete.", _DONE))
        return made

    def _function(self, which: int) -> Callable[..., Awaitable[Any]]:
        async def function(**given: Any) -> Any:
            return await self._body(self._thread.get(), which, given)

        return function


async def _done(**given: Any) -> str:
    return "done"


def _calls_of_done(messages: list[ModelMessage]) -> list[dict[str, Any]]:
    """With which arguments `done` was called, and answered."""
    from pydantic_ai.messages import ModelRequest, ModelResponse, ToolCallPart, ToolReturnPart

    asked = {
        part.tool_call_id: part.args_as_dict()
        for message in messages
        if isinstance(message, ModelResponse)
        for part in message.parts
        if isinstance(part, ToolCallPart) and part.tool_name == "done"
    }
    return [
        asked[part.tool_call_id]
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart) and part.tool_call_id in asked
    ]
