"""Flows: a list of named steps that carry typed data, with a stage that says where a run is.

    flow = Flow("onboard-user", data=Onboarding, retry=2, trigger=Event("user.created"), steps=[
        Step("plan", plan),
        Step("workspace", call_tool("crm", "create", lambda data: {"email": data.email}, into="workspace_id")),
        Step("charge", charge, retry=0),
    ])

A flow is a procedure like any other: start runs of it by its name, serve it with a `Worker`. What is special about it:

1. Its state is `{"stage": ..., "data": ...}`: the name of the step that the run is at (None when it has finished), and
   the data as the last finished step left it. `GET /v1/runs/{id}/state` shows both, at every entry of the past too.
2. Each step is one recorded operation. `GET /v1/runs/{id}` lists all of them: pending, in_progress, completed, failed
   or retrying; how often each was tried; what it changed in the data (its `value`); its error.
3. The first operation records the names of the steps. A run goes on only under the same names in the same order: a step
   that was renamed, inserted or removed is told by name, and the run rests as DIVERGED. It never starts from the top.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, cast

from pydantic import BaseModel

from tga_sdk.codecs import codec_of
from tga_sdk.errors import GatewayError, ProcedureInvalid, TgaError
from tga_sdk.given import to_json
from tga_sdk.journal import Diverged
from tga_sdk.plain import detached
from tga_sdk.procedures import NAME, Policy, Procedure, digest_of
from tga_sdk.retry import Retry

if TYPE_CHECKING:
    from tga_sdk.wire import Wire

D = TypeVar("D")
StepRun = Callable[[Any, D], "D | Awaitable[D | None] | None"]
_STEPS: Final = "flow.steps"  # the gateway's view of runs knows this name
_MISSED: Final = ("skip", "one", "all")


@dataclass(frozen=True)
class Event:
    """A run is started by each event of this name (`POST /v1/triggers/{name}`), once for each id of an event; the
    payload is the first data of the flow. An event whose payload does not fit the data is refused to its sender."""

    name: str


@dataclass(frozen=True)
class Schedule:
    """Runs are started at these times: `cron` (five fields, as Debian's cron reads them, in `timezone`), or `every` so
    many seconds. `input` is the first data of each run. `missed`: of times at which no gateway ran, `skip` starts
    nothing, `one` a run for the last of them, `all` a run for each.

    Guaranteed: one run for each time (its id is `{name}:{time}`), however many workers and gateways there are. The
    worker registers the schedule when it starts, under `name` (default: the flow's); it stays when the worker is
    gone, and when the flow loses its trigger: then remove it. Its runs are started as the principal of the worker's
    key, which needs the role `agent` or `operator` beside `worker`.
    """

    cron: str | None = None
    every: float | None = None
    timezone: str = "UTC"
    missed: Literal["skip", "one", "all"] = "one"
    input: Any = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every is None):
            raise ProcedureInvalid("a Schedule has either cron= or every=, and not both")
        if self.missed not in _MISSED:
            raise ProcedureInvalid(f"missed: expected one of {', '.join(_MISSED)}, found {self.missed!r}")
        if self.every is not None and not self.every >= 1:
            raise ProcedureInvalid(f"every: expected at least 1 second, found {self.every}")

    def described(self) -> str:
        """For people."""
        return f"at {self.cron} ({self.timezone})" if self.cron is not None else f"every {self.every:g} s"

    def spec(self) -> dict[str, Any]:
        """As the gateway is told."""
        if self.cron is not None:
            return {"type": "cron", "expression": self.cron, "time_zone": self.timezone}
        return {"type": "interval", "every_ms": round(cast("float", self.every) * 1000)}


@dataclass(frozen=True)
class Keep:
    """Runs are kept, whether they succeed or fail: the default."""

    retention: Literal["keep", "delete_on_success"] = "keep"


@dataclass(frozen=True)
class DeleteOnSuccess:
    """The payloads of a run are erased when it has succeeded; of one that failed they are kept.

    What stays of an erased run are its entries, digests and place in the log: that it ran can still be proved, what it
    carried cannot be read any more. The traces of its tool calls are records of their own, and stay.
    """

    retention: Literal["keep", "delete_on_success"] = "delete_on_success"


@dataclass(frozen=True)
class Step(Generic[D]):
    """One step of a flow: `run(ctx, data)` returns the data for the next step; None means the data it was given, as
    `run` has left it. An `async def` gets a `Context`, a plain function a `SyncContext` and a thread.

    `retry` is how often it is tried again after an error: None is what the flow says, 0 is never.

    Guaranteed: once the step has ended, its result is recorded and it is not executed again. A step that was under way
    when its worker died is executed again, under the same `ctx.key`; what it had finished inside (`ctx.tool`,
    `ctx.step`) is not. So effects belong into `ctx.tool`, or honour `ctx.key`.

    The key of a tool call is that of the run and of its place, the same in every attempt: while its outcome is unknown,
    it is asked again under the same key, and happens once. After a definite failure a retry is a new intent, with a key
    of its own (`/r1`, `/r2`): one key has one effect, and a server that has said no under a key says no again.
    """

    name: str
    run: StepRun[D]
    retry: Retry | int | None = None


class Flow(Generic[D]):
    """Named steps in a fixed order, over data of one type; see the module's text for what is recorded of it.

    `data`: the type that is carried, a pydantic model or anything that pydantic knows; None: any JSON. What a run is
    started with, and what each step returns, is checked against it; a wrong one is refused, and the message says where.
    `retry`: how often each step is tried again after an error, unless the step says otherwise. `trigger`: what starts
    runs beside `start`: an Event, a Schedule, or several of them. `retention`: Keep() or DeleteOnSuccess().

    `version`: runs go on with workers of the same version, also when the code of a step has changed meanwhile; with
    other names of steps they do not. So change the version together with the names, and keep a worker of the old one
    until its runs have ended. `accepts` are other versions whose runs this one may go on with.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Step[D]],
        *,
        data: type[D] | None = None,
        retry: Retry | int = 0,
        trigger: Event | Schedule | Sequence[Event | Schedule] | None = None,
        retention: Keep | DeleteOnSuccess | None = None,
        version: str = "1",
        accepts: Sequence[str] = (),
        timeout_ms: int | None = None,
        checkpoint_timeout_ms: int | None = None,
        tags: Sequence[str] = (),
        description: str | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.steps = tuple(steps)
        self.data: type[D] | None = data
        self.retry = Retry.of(retry)
        triggers = [] if trigger is None else [trigger] if isinstance(trigger, Event | Schedule) else list(trigger)
        self.events = tuple(one for one in triggers if isinstance(one, Event))
        self.schedules = tuple(one for one in triggers if isinstance(one, Schedule))
        self._verify()
        self.procedure: Procedure[Any, Any] = Procedure(
            name=name,
            version=version,
            fn=self._perform,
            digest=self._digest(),
            accepts=tuple(dict.fromkeys([version, *accepts])),
            input_type=data,
            output_type=data,
            policy=Policy(
                timeout_ms=timeout_ms,
                checkpoint_timeout_ms=checkpoint_timeout_ms,
                retention=(retention or Keep()).retention,
            ),
            description=description or f"A flow: {', '.join(self.names)}.",
            tags=tuple(tags),
            triggers=tuple({"event": event.name} for event in self.events),
        )

    def __repr__(self) -> str:
        return f"Flow({self.name!r}, steps={list(self.names)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps, in their order."""
        return tuple(step.name for step in self.steps)

    async def register(self, wire: Wire) -> None:
        """Tell the gateway of the flow's schedules; the same again changes nothing. A worker does it when it starts."""
        for number, schedule in enumerate(self.schedules, 1):
            name = schedule.name or (self.name if number == 1 else f"{self.name}-{number}")
            said = {
                "procedure": self.name,
                "version": None,
                "input": codec_of(self.data).dump(schedule.input, f"the input of schedule {name}"),
                "spec": schedule.spec(),
                "missed": schedule.missed,
            }
            try:
                await wire.ask("PUT", f"/v1/schedules/{name}", said)
            except GatewayError as error:
                if error.status != 403:
                    raise
                raise TgaError(
                    f"schedule {name} of flow {self.name} could not be registered ({error.message}): its runs are "
                    "started as whoever made it, so the worker's key needs the role agent or operator too; or leave "
                    f"the Schedule out and have an operator PUT /v1/schedules/{name}",
                    code=error.code,
                ) from error

    def _verify(self) -> None:
        if not self.steps:
            raise ProcedureInvalid(f"flow {self.name}: expected at least one step, found none")
        for step in self.steps:
            if not NAME.fullmatch(step.name):
                raise ProcedureInvalid(f"flow {self.name}: a step's name is {NAME.pattern}, found {step.name!r}")
            if not callable(step.run):
                raise ProcedureInvalid(f"flow {self.name}: `run` of step {step.name} cannot be called")
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ProcedureInvalid(f"flow {self.name}: steps are told apart by name, and these come twice: {twice}")
        for schedule in self.schedules:
            codec_of(self.data).dump(schedule.input, f"flow {self.name}: the input of its schedule")

    def _digest(self) -> str:
        said = [self.name, [[step.name, _digest_of(step.run)] for step in self.steps]]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    async def _perform(self, ctx: Any, input: Any) -> Any:  # noqa: A002
        """The program of the flow."""
        first = codec_of(self.data).dump(input, "input")

        def begin() -> dict[str, Any]:
            ctx.state["stage"] = self.names[0]
            ctx.state["data"] = first
            return {"flow": self.name, "steps": list(self.names)}

        recorded = await ctx.perform("step", _STEPS, begin, given=None, then_shows=self.names[0])
        self._verify_names(recorded["steps"])
        for number, step in enumerate(self.steps):
            after = self.names[number + 1] if number + 1 < len(self.steps) else None
            retry = self.retry if step.retry is None else Retry.of(step.retry)
            body = self._body(ctx, step, after)
            # The last one's end rides with the run's; all others' with the beginning of the next.
            more: dict[str, Any] = {"defer": True} if after is None else {"then_shows": after}
            await ctx.perform("step", step.name, body, given=None, retry=retry, shown=True, **more)
        return self._typed(detached(ctx.state["data"]), where="data")

    def _verify_names(self, recorded: list[str]) -> None:
        """Diverged unless the run was begun with these very steps: it says which one has changed, and what to do."""
        if recorded != list(self.names):
            raise Diverged(
                "1",
                recorded=f"the steps {', '.join(recorded)}",
                performed=(
                    f"the steps {', '.join(self.names)} ({changes_between(recorded, self.names)}): put the names back "
                    "and retry the run, or give the changed flow a new version and keep a worker of the old one"
                ),
                source=f"flow {self.name}",
            )

    def _body(self, ctx: Any, step: Step[D], after: str | None) -> Callable[[], Any]:
        """What is performed and recorded as the step: its `run`, and what that changes in the state."""

        def given() -> Any:
            return self._typed(detached(ctx.state["data"]), where=f"the data of step {step.name}")

        def carry(data: Any, returned: Any) -> Any:
            """The data for the next step into the state; what has changed of it is the step's result."""
            out = codec_of(self.data).dump(data if returned is None else returned, f"what step {step.name} returned")
            before = detached(ctx.state["data"])
            ctx.state["stage"] = after
            if not isinstance(out, dict) or not isinstance(before, dict) or before.keys() - out.keys():
                ctx.state["data"] = out
                return out
            changed = {name: value for name, value in out.items() if name not in before or before[name] != value}
            for name, value in changed.items():
                ctx.state["data"][name] = value
            return changed

        if inspect.iscoroutinefunction(_called(step.run)):

            async def performed() -> Any:
                data = given()
                return carry(data, await cast("Awaitable[Any]", step.run(ctx, data)))

            return performed

        def performed_in_thread() -> Any:
            from tga_sdk.sync_context import SyncContext

            data = given()
            return carry(data, step.run(SyncContext(ctx), data))

        return performed_in_thread

    def _typed(self, document: Any, *, where: str) -> Any:
        """The data as the steps see it: a copy of its own. ValueInvalid says what does not fit."""
        return codec_of(self.data).load(document, where)


def changes_between(recorded: Sequence[str], now: Sequence[str]) -> str:
    """What has become of the steps that a run was begun with, by name."""
    gone, new = [name for name in recorded if name not in now], [name for name in now if name not in recorded]
    if not gone and not new:
        return "their order has changed"
    if len(recorded) == len(now) and len(gone) == len(new):
        at_once = [(old, name) for old, name in zip(recorded, now, strict=True) if old != name]
        if [old for old, _ in at_once] == gone and [name for _, name in at_once] == new:
            return "; ".join(f"{old} was renamed to {name}" for old, name in at_once)
    return "; ".join([*(f"{name} was removed" for name in gone), *(f"{name} was inserted" for name in new)])


def call_tool(
    server: str,
    tool: str,
    args: Mapping[str, Any] | Callable[[D], Mapping[str, Any]] | None = None,
    *,
    into: str | Callable[[D, Any], D | None] | None = None,
    retry: Retry | int | None = None,
    timeout: float | None = None,
) -> StepRun[D]:
    """A step's `run` that is one call of a tool through the gateway.

    `args`: the arguments, or a function of the data; None: the data itself, as an object. `into`: the member of the
    data that the result is put into, or a function of data and result; None: the data stays as it is. What the tool
    returned stands in the journal in any case. The call happens once, however often the step is executed (see `Step`).
    `timeout`: how many seconds the step waits for it; the call goes on then, and when the step is tried again it waits
    for the same call (see `Context.tool`).
    """

    async def run(ctx: Any, data: D) -> D | None:
        given = to_json(data, where="data") if args is None else args(data) if callable(args) else args
        result = await ctx.tool(server, tool, dict(given), retry=retry, timeout=timeout)
        return placed(data, result, into)

    return cast("StepRun[D]", _made(run, "call_tool", server, tool, args, into))


def llm(
    model: Any,
    prompt: str | Callable[[D], str],
    *,
    into: str | Callable[[D, Any], D | None],
    instructions: str | None = None,
    tools: Sequence[str | Callable[..., Any]] = (),
    output_type: Any = None,
    name: str = "llm",
) -> StepRun[D]:
    """A step's `run` that asks a model (of pydantic-ai: its name, or a `Model`), with tools where they are given.

    `prompt`: a text in which `{member}` stands for a member of the data, or a function of the data. `into`: where the
    answer goes, as in `call_tool`. `tools`: tools of the gateway (`"server.tool"`), and Python functions. Every turn
    and tool call is recorded: after a crash recorded turns are not paid for again. Needs the extra `pydantic-ai`.
    """

    async def run(ctx: Any, data: D) -> D | None:
        session = ctx.agent(name, model=model, system_prompt=instructions, tools=tools, output_type=output_type)
        return placed(data, await session.run(_text(prompt, data)), into)

    return cast("StepRun[D]", _made(run, "llm", str(model), prompt, into, instructions, *tools))


def agent(
    agent: Any,
    prompt: str | Callable[[D], str],
    *,
    into: str | Callable[[D, Any], D | None],
    tools: Sequence[str] = (),
    deps: Any = None,
    **options: Any,
) -> StepRun[D]:
    """A step's `run` that hands the data to an agent of pydantic-ai, or to one that a specification describes.

    `prompt` and `into` as in `llm`; `tools` are tools of the gateway beside the agent's own; `options` are those of
    `ctx.agent`. Every turn and tool call is recorded, as there. Needs the extra `pydantic-ai`.
    """

    async def run(ctx: Any, data: D) -> D | None:
        session = ctx.agent(agent, tools=tools, deps=deps, **options)
        return placed(data, await session.run(_text(prompt, data)), into)

    return cast("StepRun[D]", _made(run, "agent", getattr(agent, "name", None) or str(agent), prompt, into, *tools))


def _text(prompt: str | Callable[[D], str], data: D) -> str:
    if callable(prompt):
        return prompt(data)
    found = to_json(data, where="data")
    return prompt.format(**found) if isinstance(found, dict) else prompt.format(found)


def placed(data: D, result: Any, into: str | Callable[[D, Any], D | None] | None) -> D | None:
    """The data with a result in it."""
    if into is None:
        return data
    if callable(into):
        return into(data, result)
    if isinstance(data, BaseModel):
        return data.model_copy(update={into: result})
    if isinstance(data, dict):
        return cast("D", {**cast("dict[str, Any]", data), into: result})
    raise ProcedureInvalid(f"into={into!r}: expected data with members, found {type(data).__name__}; give a function")


def _made(run: Callable[..., Any], *what: Any) -> Callable[..., Any]:
    """A `run` that a helper has made: what it does is decided by what the helper was given."""
    run.__dict__["tga_made_of"] = what
    return run


def _digest_of(run: Any) -> Any:
    made_of = getattr(run, "tga_made_of", None)
    if made_of is None:
        found = _called(run)
        return digest_of(found) if inspect.isroutine(found) else repr(type(run))
    return [_digest_of(part) if callable(part) else repr(part) for part in made_of]


def _called(run: Any) -> Any:
    """The function behind an object that can be called."""
    while hasattr(run, "func") and hasattr(run, "keywords"):  # functools.partial
        run = run.func
    return run if inspect.isroutine(run) else getattr(run, "__call__", run)  # noqa: B004
