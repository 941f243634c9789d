"""What a program sees of its run: `ctx`, whose methods are the operations that are recorded.

Each operation has an address that follows from its place in the program. At every one the journal is asked first: what
is recorded is returned or raised, and nothing is executed; what is not is performed, recorded, and then returned. So
the program sees in a replay exactly what it saw when it was live.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar, Unpack, overload
from uuid import UUID

from pydantic import BaseModel, TypeAdapter

from tga_sdk.attempt import Attempt, log_line, time_text
from tga_sdk.bodies import LOG_LINES_MAX, Body, Resume, Tier, checkpoint_put, gathered, named, recorded_error
from tga_sdk.defaults import makes_defaults
from tga_sdk.durations import YEAR_S, verify_order, verify_recordable, verify_seconds
from tga_sdk.errors import (
    ProcedureInvalid,
    Stop,
)
from tga_sdk.frames import Frame, caller, current_frame
from tga_sdk.journal import Begun, Ended, Operation
from tga_sdk.pipe import Sent
from tga_sdk.procedures import Procedure, Task, procedure_of
from tga_sdk.retry import Retry
from tga_sdk.telemetry import traced
from tga_sdk.values import Artifact, Secret, decode, encode, input_digest, result_type, to_json, verify_tier

S = TypeVar("S")
T = TypeVar("T")
Level = Literal["debug", "info", "warning", "error"]
CARRIES_NOTHING: Final = frozenset({"tool", "ask", "sleep", "signal", "child"})  # no state change, no log lines
WAIT_FOR_TOOL_MS: Final = 30_000


class Review(BaseModel):
    """What somebody who was asked for a review has said. `edited` is what is to be used instead, where it was given."""

    decision: Literal["approve", "revise", "reject"]
    feedback: str | None = None
    edited: Any = None


@dataclass(frozen=True, slots=True)
class Escalation:
    """Nobody has answered after so many seconds: these webhooks are told, all if none is named. The question stays
    open, and whoever looks at the approvals sees that it has been raised."""

    after: float
    webhooks: Sequence[str] = ()


class StepOptions(TypedDict, total=False):
    """The options of `Context.step`, which says what each of them does."""

    retry: Retry | int | None
    timeout: float | None
    tier: Tier
    resume: Resume
    at_most_once: bool
    defer: bool
    type: Any


class Context(Generic[S]):
    """The run, as its program sees it. One object for the whole run, also in nested bodies and branches.

    Guaranteed of every operation: once it is recorded it is not executed again, whatever crashes, and the program gets
    the same result in every attempt. Tools are called at most once for each try, under a key that is theirs alone. Not
    guaranteed: that the body of a step that was under way in a crash is not executed again (`at_most_once=True`
    guarantees that, and then nobody knows whether it happened: `Interrupted`).

    Operations of one body come one after the other; what should happen at the same time goes into `gather`.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    # ------------------------------------------------------------------------------------------------ what a run knows

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._attempt.run_id

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1. It differs between a run and its replay: for logs, not for decisions."""
        return self._attempt.number

    @property
    def key(self) -> str:
        """A key for whatever this body does outside: the same in every attempt of this operation of this run."""
        address = self._frame().scope.address
        return f"run:{self.run_id}/{address}" if address else f"run:{self.run_id}"

    @property
    def state(self) -> S:
        """The run's state. Changes are recorded with the next operation that ends, all of them or none.

        What is assigned is copied: changing the assigned object afterwards changes nothing here.
        """
        view: S = self._frame().state.view
        return view

    # ------------------------------------------------------------------------------------------------------ operations

    async def tool(
        self,
        server: str,
        tool: str,
        args: Mapping[str, Any] | BaseModel | None = None,
        *,
        retry: Retry | int | None = None,
        timeout: float | None = None,
        intent: str | None = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Call a tool through the gateway, as whoever started the run; its output, read as `type` where that is given.

        The call is made once: a repeat, by this worker or the next, has the same key. `retry` is for calls that failed
        for certain; each of them is a new call with a key of its own (`/r2`), because one key has one effect. An
        unknown outcome keeps its key, and the gateway settles it. ToolError when the call failed, was denied or could
        not be made. A call that needs an approval waits for it, for days if it takes days.

        `timeout`: how many seconds the run waits, for people too; then TimedOut, which the journal has, so every replay
        raises it. The call itself is not taken back: it goes on, and may have its effect later, which its trace shows.
        So a TimedOut call is not tried again by `retry`; where the operation around, or the run, is tried again, it
        waits for the same call, under the same key, for as long again.
        """
        frame, attempt = self._begin()
        retry = Retry.of(retry)
        given = to_json(args if args is not None else {}, where=f"the arguments of {server}.{tool}")
        operation = self._operation(frame, "tool", f"{server}.{tool}", given)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        if timeout is not None and not isinstance(found, Ended):
            with frame.scope.refusing():
                verify_seconds(timeout, f"the timeout of {server}.{tool}", longest=YEAR_S)
        with traced(attempt, found, "tool", f"{server}.{tool}", path):
            while not isinstance(found, Ended):
                attempt.verify_own()
                tried = attempt.journal.try_of(path)
                if found is None and tried > 1:
                    await attempt.host.pause(retry.pause(tried - 1))
                then: dict[str, Any] = {
                    "type": "tool",
                    "path": path,
                    "input_digest": operation.input_digest,
                    "try_number": tried,
                    "server_id": server,
                    "tool_name": tool,
                    "arguments": given,
                    "retries": retry.retries,
                    "wait_ms": WAIT_FOR_TOOL_MS if attempt.is_alone else 0,
                }
                if source is not None:
                    then["source"] = source
                if intent is not None:
                    then["intent"] = intent
                if timeout is not None:
                    then["timeout_ms"] = max(1, round(timeout * 1000))
                going = attempt.journal.going_try(path)
                if going is not None:
                    then["continues_try"] = going
                answer = await attempt.put((), then)
                if (answer.get("result") or {}).get("status") == "pending":
                    await attempt.blocked(path, "tool")
                found = await attempt.match(frame, path, operation, source)
            return await self._recorded(frame, path, found, type)

    @overload
    async def step(
        self, name: str, fn: Callable[..., Awaitable[Artifact[T]]], *args: Any, **options: Unpack[StepOptions]
    ) -> T: ...

    @overload
    async def step(
        self, name: str, fn: Callable[..., Artifact[T]], *args: Any, **options: Unpack[StepOptions]
    ) -> T: ...

    @overload
    async def step(
        self, name: str, fn: Callable[..., Awaitable[T]], *args: Any, **options: Unpack[StepOptions]
    ) -> T: ...

    @overload
    async def step(self, name: str, fn: Callable[..., T], *args: Any, **options: Unpack[StepOptions]) -> T: ...

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        retry: Retry | int | None = None,
        timeout: float | None = None,
        tier: Tier = "auto",
        resume: Resume = "snapshot",
        at_most_once: bool = False,
        defer: bool = False,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """Run `fn(*args)`, record what it returns, and return it; in a replay, return what is recorded.

        A coroutine runs here, a plain function in a thread. The result is what a replay would give: it is read back
        from its recorded form, by the function's return annotation or `type`. If the body raises, `StepError` with the
        exception's class in `type`, now and in every replay; `retry` tries again first. `timeout` is in seconds and for
        one try: TimedOut (a thread cannot be ended; its result is ignored). Up to a minute it also holds while the body
        waits for others; with a longer one the run leaves its worker meanwhile, and the next attempt begins the time
        anew.

        `tier`: where the value goes (`auto`: into the journal up to 32 KiB, else a blob). `resume="recompute"`: run
        again in every attempt. `at_most_once`: recorded before the body begins; a crash in it raises `Interrupted`.
        `defer`: recorded with the next operation instead of at once; nothing else happens before that.
        """
        if not callable(fn):
            verify_callable(name, fn)
        given = [
            to_json(value, where=f"argument {number} of step {name}", for_digest=True)
            for number, value in enumerate(args, 1)
        ]
        return await self.perform(
            "step",
            name,
            fn,
            *args,
            given=given,
            retry=retry,
            timeout=timeout,
            tier=tier,
            resume=resume,
            at_most_once=at_most_once,
            defer=defer,
            type=type,
        )

    async def perform(
        self,
        kind: str,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        given: Any = None,
        retry: Retry | int | None = None,
        timeout: float | None = None,
        tier: Tier = "auto",
        resume: Resume = "snapshot",
        at_most_once: bool = False,
        defer: bool = False,
        shown: bool = False,
        then_shows: str | None = None,
        tool_call: tuple[str, Any] | None = None,
        type: Any = None,  # noqa: A002
    ) -> Any:
        """What steps, sub-procedures, an agent's turns and predictions are made of: a body, and a record of its end.

        `given` is what the operation is given, for its identity. `shown`: that it has begun is recorded, too, so that
        whoever looks sees it in progress. `then_shows`: the name of the step, given nothing, that certainly comes next
        and is shown: that it begins is recorded together with the end of this one. `tool_call`: of an agent's Python
        tool, the id and arguments of the model's call, for its span.
        """
        frame, attempt = self._begin()
        verify_tier(tier, resume, where=f"{kind} {name}")
        operation = self._operation(frame, kind, name, given)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        type = type if type is not None else result_type(fn)  # noqa: A001
        if isinstance(found, Ended) and (found.resume == "snapshot" or found.failed):
            return await self._recorded(frame, path, found, type)
        body = Body(attempt, frame, path, operation, source, fn, args, timeout, tier, resume, type)
        if isinstance(found, Ended):
            return await body.recompute()
        if isinstance(found, Begun) and at_most_once:
            return await body.interrupt()
        if timeout is not None:
            with frame.scope.refusing():
                verify_seconds(timeout, f"the timeout of {kind} {name}")
        following = None if then_shows is None else self._operation(frame, "step", then_shows, None)
        with traced(attempt, found, kind, name, path, tool_call=tool_call):
            return await body.perform(
                Retry.of(retry),
                at_most_once=at_most_once,
                defer=defer,
                shown=shown and found is None,
                following=following,
            )

    async def checkpoint(self, *, name: str = "checkpoint", defer: bool = False) -> None:
        """Record the state and the log lines so far, and go on. It computes nothing and spares no computation in a
        replay: what is expensive belongs into a step."""
        frame, attempt = self._begin()
        operation = self._operation(frame, "checkpoint", name, None)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        if isinstance(found, Ended):
            await self._recorded(frame, path, found)
            return
        await self._mark(frame, path, operation, {"tier": "inline", "value": None}, source, defer=defer)

    async def now(self) -> datetime:
        """The time, as it was when the program first asked here; in UTC."""
        frame, attempt = self._begin()
        operation = self._operation(frame, "now", "now", None)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        if isinstance(found, Ended):
            return _time_of(await self._recorded(frame, path, found))
        said = time_text(attempt.host.now())
        await self._mark(frame, path, operation, {"tier": "inline", "value": said}, source, defer=True)
        return _time_of(said)

    async def emit(self, value: Any, *, name: str = "emit") -> None:
        """Show a value to whoever follows the run. It is recorded as an event; the program has nothing of it."""
        shown = encode(value, tier="event", where=f"event {name}").value
        frame, attempt = self._begin()
        operation = self._operation(frame, "emit", name, None)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        if isinstance(found, Ended):
            await self._recorded(frame, path, found)
            return
        await self._mark(frame, path, operation, shown, source, defer=True)

    async def patched(self, name: str) -> bool:
        """Whether the program is to behave as changed by this patch: true, unless this run had passed here before the
        patch was there. Lets a changed program go on with runs of the one before (`accepts`)."""
        frame, attempt = self._begin()
        operation = self._operation(frame, "patched", name, None)
        path = frame.scope.enter(operation)
        found = await attempt.look(path)
        if found is not None and found.operation != operation:
            frame.scope.busy_with = None  # another operation stands here: no address is used
            return False
        if isinstance(found, Ended):
            await self._recorded(frame, path, found)
            return True
        await self._mark(frame, path, operation, {"tier": "inline", "value": True}, caller(), defer=True)
        return True

    async def approve(
        self,
        message: str,
        *,
        context: Any = None,
        timeout: float | None = None,
        default: bool | None = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "approve",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> bool:
        """Ask a person to approve. Waits for days if it takes days, and holds nothing meanwhile.

        After `timeout` seconds the answer is `default`; without one TimedOut is raised. `escalate`: whom to tell before
        that. The first answer counts. `webhooks`: of the gateway's, by name, all if none is named; `callback`: a URL
        that is told of this question too, at least once, at a host that the gateway's operator allows; elsewhere the
        run fails with RUN_CALLBACK_REFUSED. It stands in the journal: put no secret into it.
        """
        said = await self._ask(
            "approve", name, message, {"type": "boolean"}, context, timeout, default, escalate, webhooks, callback
        )
        return bool(said)

    async def input(
        self,
        message: str,
        *,
        type: Any = str,  # noqa: A002
        context: Any = None,
        timeout: float | None = None,
        default: Any = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "input",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> Any:
        """Ask a person for a value of this type; an answer of another type is refused, and the question stays open."""
        schema = TypeAdapter(type).json_schema()
        said = await self._ask("input", name, message, schema, context, timeout, default, escalate, webhooks, callback)
        return decode({"tier": "inline", "value": said}, type, where=f"the answer to {name}")

    async def select(
        self,
        message: str,
        options: Sequence[str],
        *,
        context: Any = None,
        timeout: float | None = None,
        default: str | None = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "select",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> str:
        """Ask a person to choose one of the options."""
        schema = {"type": "string", "enum": list(options)}
        said = await self._ask("select", name, message, schema, context, timeout, default, escalate, webhooks, callback)
        return str(said)

    async def review(
        self,
        message: str,
        artifact: Any,
        *,
        timeout: float | None = None,
        default: Review | None = None,
        escalate: Escalation | Sequence[Escalation] | None = None,
        name: str = "review",
        webhooks: Sequence[str] = (),
        callback: str | None = None,
    ) -> Review:
        """Ask a person to look at something and approve it, have it revised, or reject it."""
        schema = Review.model_json_schema()
        plain = None if default is None else default.model_dump(mode="json")
        said = await self._ask("review", name, message, schema, artifact, timeout, plain, escalate, webhooks, callback)
        return Review.model_validate(said)

    async def sleep(self, seconds: float, *, name: str = "sleep") -> None:
        """Wait. The run holds nothing meanwhile, and wakes on any worker."""
        if not isinstance(seconds, int | float):
            raise ProcedureInvalid(f"sleep {name}: expected a number of seconds, found {seconds!r}{_line()}")
        verify_recordable(seconds, f"sleep {name}")
        milliseconds = round(seconds * 1000)

        def put() -> dict[str, Any]:
            verify_seconds(seconds, f"sleep {name}")
            return {"wakes_at": time_text(self._attempt.host.now() + milliseconds / 1000)}

        await self._wait("sleep", name, milliseconds, put)

    async def signal(self, name: str, *, type: Any = None, timeout: float | None = None) -> Any:  # noqa: A002
        """The value of the next signal of this name, which may have come already. TimedOut after `timeout` seconds."""

        def put() -> dict[str, Any]:
            if timeout is None:
                return {}
            verify_seconds(timeout, f"the timeout of signal {name}")
            return {"expires_at": time_text(self._attempt.host.now() + timeout)}

        return await self._wait("signal", name, None, put, type)

    async def call(
        self,
        procedure: Procedure[Any, Any] | Task[Any, Any] | str | Any,
        input: Any = None,  # noqa: A002
        *,
        child: bool = False,
        run_id: str | None = None,
        version: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Call another procedure: inline, as one recorded operation of this run with its own inside; or as a child, a
        run of its own that any worker may execute (`child=True`, or a procedure given by its name).

        An inline one that declares a state has its own for the time of the call: `ctx.state` in it is that, beginning
        with its defaults, and its caller's is as it was when it is over. Whoever looks at the run meanwhile sees it as
        the member `@call:{path}` of the run's state. One that declares none shares its caller's. ChildError when a
        child failed or was cancelled; StepError when an inline one raised.
        """
        if child or isinstance(procedure, str):
            return await self._child(procedure, input, run_id, version, name)
        called = procedure_of(procedure)
        given = to_json(input, where=f"the input of {called.name}")

        async def body() -> Any:
            return await _run_inline(self, called, given)

        return await self.perform("call", name or called.name, body, given=given, type=called.output_type)

    async def gather(self, *branches: Callable[[], Any] | Coroutine[Any, Any, Any], name: str = "gather") -> list[Any]:
        """Run branches at the same time; their results, in their order.

        Each branch is a scope of its own with a copy of the state; their changes are merged in the order of the
        branches, and of what several have set the last one's counts. Changes that would hit another place than a branch
        meant, as when one removes items of a list and another changes items of it, are refused: StepError of type
        RUN_MERGE_CONFLICT, which names both. All branches are waited for; then, if some failed, the error of the first
        of them is raised.
        """
        frame, attempt = self._begin()
        types = [result_type(branch) if callable(branch) else None for branch in branches]
        operation = self._operation(frame, "gather", name, len(branches))
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        if isinstance(found, Ended):
            for branch in branches:
                if inspect.iscoroutine(branch):
                    branch.close()
            return gathered(await self._recorded(frame, path, found), types, name)
        from tga_sdk.branches import gather

        with traced(attempt, found, "gather", name, path):
            return await gather(frame, path, operation, source, branches, types)

    # --------------------------------------------------------------------------------- what needs no record of its own

    def random(self) -> float:
        """A random number from 0 to 1, the same in every attempt."""
        frame, _ = self._begin()
        return frame.draws.random(frame.scope.performed + 1)

    def uuid(self) -> UUID:
        """A random id, the same in every attempt."""
        frame, _ = self._begin()
        return frame.draws.uuid(frame.scope.performed + 1)

    def log(self, text: str, *, level: Level = "info") -> None:
        """A line for whoever looks at the run; it stands with the next operation that is recorded."""
        frame, attempt = self._begin()
        if len(frame.logs) < LOG_LINES_MAX:
            frame.logs.append(log_line(level, text))
        else:
            frame.logs[-1] = log_line(
                "warning", f"more than {LOG_LINES_MAX} lines before one checkpoint; the rest is left out"
            )
        if attempt.is_live:
            attempt.log.log(getattr(logging, level.upper()), "run %s at %s: %s", self.run_id, frame.scope.address, text)

    def agent(self, *args: Any, **kwargs: Any) -> Any:
        """A durable agent; see `tga_sdk.agents`."""
        return import_module("tga_sdk.agents").agent_of(self, *args, **kwargs)

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """A model that predicts; see `tga_sdk.models`."""
        return import_module("tga_sdk.models").model_of(self, *args, **kwargs)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _frame(self) -> Frame:
        frame = current_frame()
        if frame is None or frame.attempt is not self._attempt:
            raise ProcedureInvalid(
                "this ctx was used outside of its run: in a thread or task that its body did not start"
            )
        if frame.is_over:
            raise Stop("this body has ended, or took too long and was given up: what goes on of it performs nothing")
        return frame

    def _begin(self) -> tuple[Frame, Attempt]:
        self._attempt.verify_going()
        return self._frame(), self._attempt

    def _operation(self, frame: Frame, kind: str, name: str, given: Any) -> Operation:
        return Operation(kind, name, input_digest(self._attempt.salt, given, frame.around))

    async def _recorded(self, frame: Frame, path: str, found: Ended, type_: Any = None) -> Any:
        """What the journal has of this operation: the program gets it, and nothing is executed."""
        if found.changes:
            frame.state.recorded(found.changes)
        if found.operation.kind not in CARRIES_NOTHING:
            frame.logs.clear()
        frame.scope.leave()
        if not frame.is_kept:
            self._attempt.journal.leave_behind(path)
        if found.failed:
            raise recorded_error(found, path)
        value = found.value
        if value is None or value["tier"] in ("event", "transient"):
            return None
        return await self._attempt.decoded(value, type_, where=f"operation {path} ({found.operation})")

    async def _mark(
        self,
        frame: Frame,
        path: str,
        operation: Operation,
        value: dict[str, Any],
        source: str | None,
        *,
        defer: bool,
    ) -> None:
        """Record an operation that has no body."""
        sent = checkpoint_put(frame, path, operation, "OK", value=value, changes=frame.state.take(), source=source)
        if defer:
            self._attempt.pipe.defer(sent)
        else:
            await self._attempt.put([sent])
        frame.scope.leave()

    async def _ask(
        self,
        form: str,
        name: str,
        message: str,
        schema: dict[str, Any],
        context: Any,
        timeout: float | None,
        default: Any,
        escalate: Escalation | Sequence[Escalation] | None,
        webhooks: Sequence[str],
        callback: str | None,
    ) -> Any:
        attempt = self._attempt
        where = f"the context of {name}"  # people read it, and no program: its type need not be known
        if not isinstance(context, bytes | Artifact | Secret):
            context = to_json(context, where=where)
        shown = None if context is None else await attempt.encoded(context, where=where)
        fallback = (
            None if default is None else await attempt.encoded(default, tier="inline", where=f"the default of {name}")
        )

        levels = [escalate] if isinstance(escalate, Escalation) else escalate or ()

        def put() -> dict[str, Any]:
            if timeout is not None:
                verify_seconds(timeout, f"the timeout of {name}")
            afters = [verify_seconds(level.after, f"an escalation of {name}") for level in levels]
            verify_order(afters, timeout, f"the escalations of {name}")
            request: dict[str, Any] = {
                "form": form,
                "message": message,
                "context": shown,
                "answer_schema": schema,
                "expires_at": None if timeout is None else time_text(attempt.host.now() + timeout),
                "default": fallback,
                "webhooks": list(webhooks),
            }
            if levels:
                now = attempt.host.now()
                request["escalations"] = [
                    {"at": time_text(now + level.after), "webhooks": list(level.webhooks)} for level in levels
                ]
            if callback is not None:
                request["callback"] = callback
            return {"request": request}

        given = {"form": form, "message": message, "context": shown}
        return await self._wait("ask", name, given, put)

    async def _wait(
        self, kind: str, name: str, given: Any, more: Callable[[], dict[str, Any]], type_: Any = None
    ) -> Any:
        """An operation that others end."""
        frame, attempt = self._begin()
        operation = self._operation(frame, kind, name, given)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        with traced(attempt, found, kind, name, path):
            if found is None:
                attempt.verify_own()
                with frame.scope.refusing():
                    said = more()
                put = {"type": kind, **named(operation, path, attempt.journal.try_of(path), source), **said}
                await attempt.put([Sent(put, frame.is_kept)])
            return await self._awaited(frame, path, operation, kind, source, type_)

    async def _awaited(
        self, frame: Frame, path: str, operation: Operation, kind: str, source: str | None, type_: Any
    ) -> Any:
        found = await self._attempt.match(frame, path, operation, source)
        while not isinstance(found, Ended):
            await self._attempt.blocked(path, kind)
            found = await self._attempt.match(frame, path, operation, source)
        return await self._recorded(frame, path, found, type_)

    async def _child(
        self, procedure: Any, given: Any, run_id: str | None, version: str | None, name: str | None
    ) -> Any:
        called = None if isinstance(procedure, str) else procedure_of(procedure)
        frame, attempt = self._begin()
        procedure_name = procedure if called is None else called.name
        plain = to_json(given, where=f"the input of {procedure_name}")
        operation = self._operation(frame, "child", name or procedure_name, plain)
        path = frame.scope.enter(operation)
        source = caller()
        found = await attempt.match(frame, path, operation, source)
        with traced(attempt, found, "child", name or procedure_name, path):
            if not isinstance(found, Ended):
                attempt.verify_own()
                then: dict[str, Any] = {
                    "type": "child",
                    **named(operation, path, attempt.journal.try_of(path), source),
                    "procedure": procedure_name,
                    "input": await attempt.encoded(plain, where=f"the input of {procedure_name}"),
                }
                version = version if version is not None else (called.version if called else None)
                for field, value in (("run_id", run_id), ("version", version)):
                    if value is not None:
                        then[field] = value
                await attempt.put((), then)
            output_type = None if called is None else called.output_type
            return await self._awaited(frame, path, operation, "child", source, output_type)


async def _run_inline(ctx: Context[Any], called: Procedure[Any, Any], given: Any) -> Any:
    """The body of a procedure that another one calls: in the frame of the call."""
    from tga_sdk import guard
    from tga_sdk.sync_context import SyncContext

    arguments: tuple[Any, ...] = ()
    if called.takes_input:
        where = f"the input of {called.name}"
        arguments = (decode({"tier": "inline", "value": given}, called.input_type, where=where),)
    attempt, frame = ctx._attempt, ctx._frame()
    callers = frame.state
    if called.state_type is not None:
        frame.state = callers.called(called.state_type, frame.scope.address)
        if makes_defaults(called.state_type):
            await ctx.checkpoint(name="state", defer=True)
    watched = frozenset({getattr(called.fn, "__module__", "")})
    try:
        with guard.watch(watched, strict=attempt.is_strict, warn=attempt._warn):
            if called.is_async:
                return await called.fn(ctx, *arguments)
            return await attempt.in_thread(lambda: called.fn(SyncContext(ctx), *arguments))
    finally:
        if frame.state is not callers:
            callers.leave(frame.state)


def verify_callable(name: str, fn: Any) -> None:
    """ProcedureInvalid for what is no function, and most often is what a function has returned."""
    if inspect.iscoroutine(fn):
        fn.close()
    raise ProcedureInvalid(
        f"step {name}: expected a function, found {type(fn).__name__}{_line()}: the step calls it itself, so give the "
        f"function and its arguments, ctx.step({name!r}, fn, argument), and not fn(argument)"
    )


def _line() -> str:
    source = caller()
    return "" if source is None else f" ({source})"


def _time_of(said: str) -> datetime:
    return datetime.fromisoformat(said.replace("Z", "+00:00")).astimezone(UTC)
