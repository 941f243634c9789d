"""Agents whose turns and tool calls are recorded: `durable(agent)`, and `ctx.agent(...)` in a program.

Guaranteed: a turn that is recorded is not asked for, and not paid for, again; a tool call that is recorded is not made
again; every attempt sees the same answers in the same order, so the agent goes on exactly where it was.

Not guaranteed: that a request to the provider is sent once. One that was under way when the worker died is sent again
and paid twice, and the body of a Python tool runs again (calls through the gateway are made once). What an agent does
between its turns, in output validators, history processors and prompt functions, is part of the program: it runs again
in every attempt and has to come to the same result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai import Agent, StructuredDict, Tool
from pydantic_ai.agent import AbstractAgent, AgentRun, AgentRunResult, WrapperAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.capabilities.abstract import CapabilityOrdering
from pydantic_ai.durable_exec import conversation_id_from_run_id
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse
from pydantic_ai.models import Model
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, RunContext
from pydantic_ai.toolsets import AbstractToolset
from pydantic_ai.usage import RunUsage, UsageLimits

from tga_sdk.agents.specs import AgentSpecification, agent_specification
from tga_sdk.agents.tools import DurableToolset, GatewayTools, ToolCalls, definitions_of
from tga_sdk.agents.turns import TurnModel, Turns, cost_of
from tga_sdk.errors import ProcedureInvalid
from tga_sdk.frames import current_frame
from tga_sdk.retry import Retry
from tga_sdk.telemetry import agent_run

if TYPE_CHECKING:
    from tga_sdk.context import Context

USUAL_RETRY: Final = Retry(4, first=1.0, longest=30.0)
USUAL_TIMEOUT: Final = 120.0
_provided: dict[str, Model | Callable[[], Model]] = {}


def provide_model(name: str, model: Model | Callable[[], Model]) -> None:
    """Let specifications of agents in this process name a model that is made here: a scripted one, or a private one."""
    _provided[name] = model


def is_provided(name: str) -> bool:
    """Whether a model of this name was made in this process."""
    return name in _provided


@dataclass
class Durability(AbstractCapability[Any]):
    """What makes one run of an agent durable: its model's requests are turns, its tool calls are operations."""

    turns: Turns
    calls: ToolCalls
    run_id: str

    def get_ordering(self) -> CapabilityOrdering:
        return CapabilityOrdering(position="innermost")

    def get_default_run_id(self) -> str | None:
        return self.run_id

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id)

    def get_wrapper_model(self, model: Model) -> Model:
        return TurnModel(model, self.turns)

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any]:
        return DurableToolset(toolset, self.calls)

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[Any], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        return await self.calls.handle(requests)


class DurableAgent(WrapperAgent[Any, Any]):
    """An agent of pydantic-ai that may be used where that one was. In a run its turns and tool calls are recorded;
    outside of one it is the agent itself.

    `run`, `iter` and `run_stream` take what they always took. `run_sync` belongs into programs that are plain
    functions only, through `ctx.agent`.
    """

    def __init__(
        self,
        wrapped: AbstractAgent[Any, Any],
        *,
        name: str,
        tools: Sequence[str] = (),
        approve: Sequence[str] = (),
        retry: Retry = USUAL_RETRY,
        timeout: float | None = USUAL_TIMEOUT,
        stream: bool = False,
    ) -> None:
        super().__init__(wrapped)
        self._called = name
        self._gateway_tools = tuple(tools)
        self._approve = frozenset(approve) | {one.replace(".", "__", 1) for one in approve}
        self._retry = retry
        self._timeout = timeout
        self._stream = stream

    @asynccontextmanager
    async def iter(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, **options: Any
    ) -> AsyncIterator[AgentRun[Any, Any]]:
        """As `Agent.iter`: every node of the run, one after the other."""
        frame = current_frame()
        if frame is None:
            if self._gateway_tools:
                raise ProcedureInvalid(
                    f"agent {self._called} has tools of the gateway, which it can call in a run only: "
                    "call it from a procedure (outside of runs tga_sdk.adapters has the gateway's tools)"
                )
            async with super().iter(*args, **options) as run:
                yield run
            return
        from tga_sdk.context import Context

        ctx: Context[Any] = Context(frame.attempt)
        definitions = await definitions_of(ctx, self._called, self._gateway_tools)
        durability = Durability(
            turns=Turns(ctx, self._called, self._retry, self._timeout, self._stream),
            calls=ToolCalls(ctx, self._approve),
            run_id=str(ctx.uuid()),
        )
        options["capabilities"] = [*(options.get("capabilities") or ()), durability]
        if definitions:
            options["toolsets"] = [*(options.get("toolsets") or ()), GatewayTools(definitions)]
        with agent_run(self._called, ctx.run_id):
            async with super().iter(*args, **options) as run:
                yield run
        frame.attempt.verify_going()


def durable(
    agent: AbstractAgent[Any, Any],
    *,
    name: str | None = None,
    tools: Sequence[str] = (),
    approve: Sequence[str] = (),
    retry: Retry | int | None = None,
    timeout: float | None = USUAL_TIMEOUT,
    stream: bool = False,
) -> DurableAgent:
    """The same agent, durable inside of runs: `await durable(agent).run("...")` in a procedure.

    `tools` are tools of the gateway (`server.tool`, or `server.*`) that the agent gets besides its own; each of its own
    is a step. `approve` names tools, of either sort, that a person approves first. `retry` and `timeout` (seconds) are
    of one request to the provider. `stream`: show text as it comes to followers of the run.
    """
    called = name or agent.name
    if not called:
        raise ProcedureInvalid(
            "an agent's turns are recorded under its name: Agent(name=...) or durable(agent, name=...)"
        )
    said = USUAL_RETRY if retry is None else Retry.of(retry)
    return DurableAgent(agent, name=called, tools=tools, approve=approve, retry=said, timeout=timeout, stream=stream)


class AgentSession:
    """An agent with a conversation that goes on from one `run` to the next.

    The conversation is nowhere written as a whole: each turn records its answer and each tool call its result, and a
    replay puts it together again. `history()` is for handing it on.
    """

    def __init__(
        self,
        ctx: Context[Any],
        agent: DurableAgent,
        *,
        name: str,
        prompt: str | Callable[..., Any] | None,
        limits: UsageLimits,
        deps: Any,
        history: Sequence[ModelMessage] | Sequence[dict[str, Any]] | None,
    ) -> None:
        self.name = name
        self.output: Any = None
        self.usage = RunUsage()
        self._ctx = ctx
        self._agent = agent
        self._prompt = prompt
        self._limits = limits
        self._deps = deps
        self._messages: list[ModelMessage] = ModelMessagesTypeAdapter.validate_python(list(history or ()))

    @property
    def messages(self) -> list[ModelMessage]:
        """The conversation so far."""
        return list(self._messages)

    @property
    def cost(self) -> Decimal | None:
        """What the answers so far cost, in US dollars; None when the price of one of them is not known."""
        return cost(self._messages)

    def history(self) -> list[dict[str, Any]]:
        """The conversation as plain data: for `ctx.agent(..., history=...)` here, in a child, or in the next run.

        As a result or in a step it is a blob as soon as it is larger than 32 KiB.
        """
        found: list[dict[str, Any]] = ModelMessagesTypeAdapter.dump_python(self._messages, mode="json")
        return found

    async def run(self, message: Any = None, *, deps: Any = None, **options: Any) -> Any:
        """The agent's output to this message. `options` are those of pydantic-ai's `Agent.run`."""
        instructions = await self._instructions()
        if instructions is not None:
            options["instructions"] = instructions
        options.setdefault("usage_limits", self._limits)
        result: AgentRunResult[Any] = await self._agent.run(
            message, message_history=self._messages, deps=self._deps if deps is None else deps, **options
        )
        self._messages = result.all_messages()
        self.usage = self.usage + result.usage
        self.output = result.output
        return result.output

    __call__ = run

    async def _instructions(self) -> str | None:
        """A prompt that is a function is evaluated in a step, so it may use chance and time: it is recorded."""
        if not callable(self._prompt):
            return self._prompt
        found: str = await self._ctx.perform("step", f"{self.name}.prompt", self._prompt, type=str)
        return found


class BlockingSession:
    """An `AgentSession` for procedures that are plain functions: `run` returns when the agent has answered."""

    def __init__(self, session: AgentSession, do: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.session = session
        self._do = do

    def run(self, message: Any = None, **options: Any) -> Any:
        """See `AgentSession.run`."""
        return self._do(self.session.run(message, **options))

    __call__ = run

    def __getattr__(self, name: str) -> Any:
        """`output`, `messages`, `usage`, `cost`, `history`: those of the session."""
        return getattr(self.session, name)


def agent_of(
    ctx: Context[Any],
    said: str | dict[str, Any] | AgentSpecification | AbstractAgent[Any, Any],
    *,
    model: Model | str | None = None,
    system_prompt: str | Callable[..., Any] | None = None,
    tools: Sequence[str | Callable[..., Any] | Tool[Any]] = (),
    output_type: Any = None,
    deps: Any = None,
    history: Sequence[ModelMessage] | Sequence[dict[str, Any]] | None = None,
    limits: UsageLimits | None = None,
    **more: Any,
) -> AgentSession:
    """`ctx.agent(...)`: an agent for this run, given by a name and what follows, by a specification, or ready-made.

    `tools` are tools of the gateway (`"server.tool"`) and Python functions, which become steps. A `system_prompt` that
    is a function is a step. `more` are the other fields of `AgentSpecification`.
    """
    if isinstance(said, AbstractAgent):
        spec = agent_specification({"name": more.pop("name", None) or said.name or "agent", **more})
        ready = said
        spec = spec.model_copy(update={"tools": tuple(one for one in tools if isinstance(one, str))})
        if len(spec.tools) != len(tools):
            raise ProcedureInvalid(f"agent {spec.name} is ready-made: give Python tools to its own Agent(tools=...)")
    else:
        fields: dict[str, Any] = {"name": said} if isinstance(said, str) else dict(_fields(said))
        fields.update(more)
        fields["tools"] = [*fields.get("tools", ()), *(one for one in tools if isinstance(one, str))]
        spec = agent_specification(fields)
        functions = tuple(one for one in tools if not isinstance(one, str))
        ready = Agent(
            _model_named(model if model is not None else spec.model, spec.name),
            name=spec.name,
            output_type=_output_type(spec, output_type),
            tools=functions,
            model_settings=spec.settings or None,  # type: ignore[arg-type]
        )
    agent = durable(
        ready,
        name=spec.name,
        tools=spec.tools,
        approve=spec.approve,
        retry=Retry(spec.retries, first=1.0, longest=30.0),
        timeout=spec.timeout,
        stream=spec.stream,
    )
    usual = UsageLimits(
        request_limit=spec.max_turns, tool_calls_limit=spec.max_tool_calls, total_tokens_limit=spec.max_tokens
    )
    prompt = system_prompt if system_prompt is not None else spec.system_prompt
    return AgentSession(ctx, agent, name=spec.name, prompt=prompt, limits=limits or usual, deps=deps, history=history)


def cost(messages: Sequence[ModelMessage]) -> Decimal | None:
    """What the answers among these messages cost, in US dollars; None when the price of one of them is not known."""
    whole = Decimal(0)
    for message in messages:
        if isinstance(message, ModelResponse):
            found = cost_of(message)
            if found is None:
                return None
            whole += Decimal(found["amount"])
    return whole


def _fields(said: dict[str, Any] | AgentSpecification) -> dict[str, Any]:
    return said if isinstance(said, dict) else said.model_dump(exclude_unset=True)


def _model_named(said: Model | str | None, agent: str) -> Any:
    if said is None:
        raise ProcedureInvalid(f"agent {agent} has no model: model='provider:name', as pydantic-ai names models")
    if isinstance(said, str) and said in _provided:
        found = _provided[said]
        return found if isinstance(found, Model) else found()
    return said


def _output_type(spec: AgentSpecification, said: Any) -> Any:
    if said is not None:
        return said
    return str if spec.output_schema is None else StructuredDict(spec.output_schema, name="result")
