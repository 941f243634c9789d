"""What a program sees of its run: `ctx`, whose methods are the operations that are recorded.

Each operation has an address that follows from its place in the program. At every one the journal is asked first: what
is recorded is returned or raised, and nothing is executed; what is not is performed, recorded, and then returned. So
the program sees in a replay exactly what it saw when it was live.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar, Unpack, overload
from uuid import UUID

from pydantic import BaseModel

from tga_sdk.annotations import result_type
from tga_sdk.bodies import LOG_LINES_MAX, Body, gathered
from tga_sdk.durations import YEAR_S, verify_recordable, verify_seconds
from tga_sdk.errors import ProcedureInvalid, ValueInvalid
from tga_sdk.frames import caller, log_line
from tga_sdk.given import to_json
from tga_sdk.journal import Begun, Ended
from tga_sdk.operations import line_text
from tga_sdk.procedures import Procedure, Task, procedure_of
from tga_sdk.questions import Escalation as Escalation
from tga_sdk.questions import Questions
from tga_sdk.questions import Review as Review
from tga_sdk.retry import Retry
from tga_sdk.subprocedures import run_child, run_inline
from tga_sdk.telemetry import traced
from tga_sdk.times import time_of, time_text
from tga_sdk.values import Resume, Tier, encode, verify_tier
from tga_sdk.wrappers import Artifact

S = TypeVar("S")
T = TypeVar("T")
Level = Literal["debug", "info", "warning", "error"]
WAIT_FOR_TOOL_MS: Final = 30_000
BRANCHES_MAX: Final = 1_000  # of one gather, as the gateway admits them


class StepOptions(TypedDict, total=False):
    """The options of `Context.step`, which says what each of them does."""

    retry: Retry | int | None
    timeout: float | None
    tier: Tier
    resume: Resume
    at_most_once: bool
    defer: bool
    type: Any


class Context(Questions, Generic[S]):
    """The run, as its program sees it. One object for the whole run, also in nested bodies and branches.

    Guaranteed of every operation: once it is recorded it is not executed again, whatever crashes, and the program gets
    the same result in every attempt. Tools are called at most once for each try, under a key that is theirs alone. Not
    guaranteed: that the body of a step that was under way in a crash is not executed again (`at_most_once=True`
    guarantees that, and then it is not known whether it happened: `Interrupted`).

    Operations of one body come one after the other; what should happen at the same time goes into `gather`.
    """

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
        """Call a tool through the gateway, as the caller who started the run; its output, read as `type` where that is
        given. What is no JSON comes as `bytes`, and of a tool that answers nothing None.

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
        operation, path, source, found = await self._enter(frame, "tool", f"{server}.{tool}", given)
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
                    "wait_ms": WAIT_FOR_TOOL_MS if attempt.waiting.is_alone else 0,
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
                    await attempt.waiting.blocked(path, "tool")
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
        readers of the run see it in progress. `then_shows`: the name of the step, given nothing, that certainly comes
        next and is shown: that it begins is recorded together with the end of this one. `tool_call`: of an agent's
        Python tool, the id and arguments of the model's call, for its span.
        """
        frame, attempt = self._begin()
        verify_tier(tier, resume, where=f"{kind} {name}")
        operation, path, source, found = await self._enter(frame, kind, name, given)
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
        frame, _ = self._begin()
        operation, path, source, found = await self._enter(frame, "checkpoint", name, None)
        if isinstance(found, Ended):
            await self._recorded(frame, path, found)
            return
        await self._mark(frame, path, operation, {"tier": "inline", "value": None}, source, defer=defer)

    async def now(self) -> datetime:
        """The time, as it was when the program first asked here; in UTC."""
        frame, attempt = self._begin()
        operation, path, source, found = await self._enter(frame, "now", "now", None)
        if isinstance(found, Ended):
            return time_of(await self._recorded(frame, path, found))
        said = time_text(attempt.host.now())
        await self._mark(frame, path, operation, {"tier": "inline", "value": said}, source, defer=True)
        return time_of(said)

    async def emit(self, value: Any, *, name: str = "emit") -> None:
        """Show a value to followers of the run. It is recorded as an event; the program has nothing of it."""
        shown = encode(value, tier="event", where=f"event {name}").value
        frame, _ = self._begin()
        operation, path, source, found = await self._enter(frame, "emit", name, None)
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
        found = await attempt.reader.look(path)
        if found is not None and found.operation != operation:
            frame.scope.busy_with = None  # another operation stands here: no address is used
            return False
        if isinstance(found, Ended):
            await self._recorded(frame, path, found)
            return True
        await self._mark(frame, path, operation, {"tier": "inline", "value": True}, caller(), defer=True)
        return True

    async def sleep(self, seconds: float, *, name: str = "sleep") -> None:
        """Wait. The run holds nothing meanwhile, and wakes on any worker."""
        if not isinstance(seconds, int | float):
            raise ProcedureInvalid(f"sleep {name}: expected a number of seconds, found {seconds!r}{line_text()}")
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
            return await run_child(self, procedure, input, run_id, version, name)
        called = procedure_of(procedure)
        given = to_json(input, where=f"the input of {called.name}")

        async def body() -> Any:
            return await run_inline(self, called, given)

        return await self.perform("call", name or called.name, body, given=given, type=called.output_type)

    async def gather(self, *branches: Callable[[], Any] | Coroutine[Any, Any, Any], name: str = "gather") -> list[Any]:
        """Run branches at the same time; their results, in their order.

        Each branch is a scope of its own with a copy of the state; their changes are merged in the order of the
        branches, and of what several have set the last one's counts. Changes that would hit another place than a branch
        meant, as when one removes items of a list and another changes items of it, are refused: StepError of type
        RUN_MERGE_CONFLICT, which names both. All branches are waited for; then, if some failed, the error of the first
        of them is raised. There are at most 1,000 of them.
        """
        frame, attempt = self._begin()
        if len(branches) > BRANCHES_MAX:
            for branch in branches:
                if inspect.iscoroutine(branch):
                    branch.close()
            raise ValueInvalid(f"{name}: expected at most {BRANCHES_MAX} branches, found {len(branches)}", where=name)
        types = [result_type(branch) if callable(branch) else None for branch in branches]
        operation, path, source, found = await self._enter(frame, "gather", name, len(branches))
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
        """A line for readers of the run; it stands with the next operation that is recorded."""
        frame, attempt = self._begin()
        if len(frame.logs) < LOG_LINES_MAX:
            frame.logs.append(log_line(level, text))
        else:
            frame.logs[-1] = log_line(
                "warning", f"more than {LOG_LINES_MAX} lines before one checkpoint; the rest is left out"
            )
        if attempt.reader.is_live:
            attempt.log.log(getattr(logging, level.upper()), "run %s at %s: %s", self.run_id, frame.scope.address, text)

    def agent(self, *args: Any, **kwargs: Any) -> Any:
        """A durable agent; see `tga_sdk.agents`."""
        return import_module("tga_sdk.agents").agent_of(self, *args, **kwargs)

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """A model that predicts; see `tga_sdk.models`."""
        return import_module("tga_sdk.models").model_of(self, *args, **kwargs)


def verify_callable(name: str, fn: Any) -> None:
    """ProcedureInvalid for what is no function, and most often is what a function has returned."""
    if inspect.iscoroutine(fn):
        fn.close()
    raise ProcedureInvalid(
        f"step {name}: expected a function, found {type(fn).__name__}{line_text()}: the step calls it itself, so give "
        f"the function and its arguments, ctx.step({name!r}, fn, argument), and not fn(argument)"
    )
