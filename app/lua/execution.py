"""One attempt of a Lua program: its Lua state runs in a child process, and this performs what it asks for with `ctx`.

1. A thread of the program runs until it asks for an operation, ends, or fails.
2. The operation is performed by the SDK: recorded, replayed, retried, waited for, as for a program in Python.
3. The thread goes on with the result, and with what the run has changed in its state by itself.

An operation that has a body (a step, a sub-procedure, a branch, a tool that is a Lua function) asks the waiting thread
for a new one when the body is to run. In a replay it is not, and then no Lua runs either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from app.lua.agents import LuaAgents
from app.lua.branches import OpenBranches
from app.lua.given import input_type, unfit, verify_names
from app.lua.options import LuaOptions
from app.lua.pool import ChildLost, Failed, LuaFailure, LuaState, Returned, Yielded
from app.lua.programs import Declaration, Source, file_reply, retry_of
from app.lua.state import StateCopy
from tga_sdk.attempt import Over
from tga_sdk.context import Context, Escalation, Review
from tga_sdk.errors import OperationError, TgaError, ValueInvalid
from tga_sdk.frames import current_frame, remember_caller
from tga_sdk.plain import text_or_base64

JSON = Any
Answer = Yielded | Returned | Failed
MESSAGE_CHARS_MAX: Final = 1_024
RAISED_KEPT_MAX: Final = 256


class LuaError(TgaError):
    """A Lua program raised. `code` is what it said as `type`, or LUA_ERROR."""

    code = "LUA_ERROR"
    retryable = True


class Execution:
    """One attempt. `_copies`: the states that Lua has a copy of, by identity: that of the run, and of open branches."""

    def __init__(
        self, ctx: Context[Any], state: LuaState, source: Source, declaration: Declaration, options: LuaOptions
    ) -> None:
        self._ctx = ctx
        self._state = state
        self._source = source
        self._declaration = declaration
        self._options = options
        self._agents = LuaAgents(ctx, options, self._body)
        self._copies: dict[int, StateCopy] = {}
        self._asking: dict[int, asyncio.Lock] = {}  # by thread: a new thread is asked of it, one at a time
        self._left: dict[int, asyncio.Future[Answer]] = {}  # by thread: what a body that ran out of time still does
        # What the program was told last, so that it is raised as it was; what it raises again later is made anew.
        self._raised: dict[int, Exception] = {}
        self._told_number = 0
        self._branches = OpenBranches(state.limits)
        self._operations: Mapping[str, Callable[[int, Any], Awaitable[Any]]] = {
            "agent": self._agents.turn,
            "ask": self._ask,
            "call": self._call,
            "checkpoint": self._checkpoint,
            "child": self._child,
            "emit": self._emit,
            "file": self._file,
            "gather": self._gather,
            "messages": self._messages,
            "model": self._model,
            "now": self._now,
            "random": self._random,
            "run_id": self._run_id,
            "signal": self._signal,
            "sleep": self._sleep,
            "step": self._step,
            "tool": self._tool,
            "uuid": self._uuid,
        }

    @staticmethod
    def start(source: Source, declaration: Declaration, given: Any) -> dict[str, Any]:
        """What the program's first thread is resumed with."""
        return {
            "mode": "run",
            "chunk": source.name,
            "is_script": declaration.is_script,
            "input": given,
            "state": declaration.state_fields,
        }

    async def run(self, first: Answer) -> Any:
        """The program's output; `first` is what it said after its first slice."""
        self._warn(first)
        return await self._go_on(0, first)

    # ------------------------------------------------------------------------------------------------------ the program

    async def _drive(self, thread: int, value: JSON) -> Any:
        """Run one thread to its end: what it returns, or raise what it raised."""
        return await self._go_on(thread, await self._resume(thread, value))

    async def _go_on(self, thread: int, answer: Answer) -> Any:
        while True:
            if isinstance(answer, Failed):
                raise self._failed(answer.error)
            if isinstance(answer, Returned):
                self._take(answer.value.get("changes"), answer.value.get("logs"))
                return answer.value.get("value")
            request = answer.request
            self._take(request.get("changes"), request.get("logs"))
            remember_caller(request.get("source") or self._source.name)
            answer = await self._resume(thread, await self._reply(thread, request))

    async def _resume(self, thread: int, value: JSON) -> Answer:
        try:
            if thread == 0:
                answer = await self._state.resume(thread, value)
            else:  # of a body, which may run out of time
                answer = await self._unless_left(thread, asyncio.ensure_future(self._state.resume(thread, value)))
        except ChildLost as lost:
            raise lost_child(self._ctx, lost) from None
        self._warn(answer)
        return answer

    def _warn(self, answer: Answer) -> None:
        for warning in answer.warnings:
            self._ctx.log(
                f"DETERMINISM WARNING: {warning.chunk or self._source.name}:{warning.line or '?'}: {warning.what}",
                level="warning",
            )

    async def _unless_left(self, thread: int, running: asyncio.Future[Answer]) -> Answer:
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._left[thread] = running
            raise

    async def _reply(self, thread: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Perform the operation; the program gets its result, or the error that it can catch."""
        reply: dict[str, Any]
        copy = self._copy()  # it follows the state from before the operation on
        try:
            verify_names(request)
            reply = {"value": await self._operations[request["op"]](thread, request)}
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # What a body raises comes as an error of the SDK. This is about what the program gave the operation.
            reply = {"error": self._told(unfit(request, error))}
        except Exception as error:
            reply = {"error": self._told(error)}
        news = copy.news()
        if news:
            reply["state"] = news
        return reply

    def _take(self, changes: list[dict[str, Any]] | None, logs: list[dict[str, Any]] | None) -> None:
        """What the program has changed and logged since it was last heard."""
        if changes:
            self._copy().change(changes)
        for line in logs or ():
            self._ctx.log(line["text"], level=line["level"])

    def _copy(self) -> StateCopy:
        frame = current_frame()
        if frame is None:
            raise TgaError("a Lua program runs outside of a run", code="PROCEDURE_INVALID")
        found = self._copies.get(id(frame.state))
        if found is None:
            found = self._copies[id(frame.state)] = StateCopy(frame.state)
        return found

    # ----------------------------------------------------------------------------------------------------------- bodies

    async def _body(self, thread: int, which: int, given: Any = None) -> Any:
        """Run a body of the operation that this thread waits for, in a thread of its own."""
        leave = self._agents.enter()
        spawned = await self._asked(thread, {"spawn": which, "given": given})
        body = spawned["thread"]
        try:
            return await self._drive(body, None)
        except (Exception, asyncio.CancelledError):
            # What it did to the state is about to be undone, so all of it must be known.
            left = self._left.pop(body, None)
            if left is not None:
                answer = await left
                said = answer.request if isinstance(answer, Yielded) else getattr(answer, "value", {})
                self._take(said.get("changes"), said.get("logs"))
            flushed = await self._asked(thread, {"spawn": "flush", "thread": body})
            self._take(flushed.get("of_body"), flushed.get("body_logs"))
            raise
        finally:
            leave()

    async def _asked(self, thread: int, question: dict[str, Any]) -> Mapping[str, Any]:
        """Ask a thread that waits, and let it wait on. Never left half-way: it would hear what is meant for later."""
        async with self._asking.setdefault(thread, asyncio.Lock()):
            asking = asyncio.ensure_future(self._resume(thread, question))
            try:
                answer = await asyncio.shield(asking)
            except asyncio.CancelledError:
                await asyncio.wait({asking})
                raise
        if isinstance(answer, Failed):
            raise self._failed(answer.error)
        if isinstance(answer, Returned):
            raise TypeError("expected a thread that waits, found one that has ended")
        request: Mapping[str, Any] = answer.request
        return request

    async def _step(self, thread: int, request: Mapping[str, Any]) -> Any:
        async def body() -> Any:
            return await self._body(thread, 1)

        return await self._ctx.perform(
            "step",
            request["name"],
            body,
            given=[],
            retry=retry_of(request.get("retry")),
            timeout=request.get("timeout"),
            at_most_once=bool(request.get("at_most_once")),
        )

    async def _call(self, thread: int, request: Mapping[str, Any]) -> Any:
        async def body() -> Any:
            return await self._body(thread, 1)

        return await self._ctx.perform("call", request["name"], body, given=request.get("given"))

    async def _gather(self, thread: int, request: Mapping[str, Any]) -> Any:
        def branch(which: int) -> Callable[[], Awaitable[Any]]:
            async def run() -> Any:
                copy = self._copy()
                try:
                    return await self._body(thread, which)
                finally:
                    del self._copies[id(copy.state)]

            return run

        count = request["branches"]
        with self._branches.opened(count, self._copy().state.document) as exceeded:
            if exceeded is not None:
                limit, message = exceeded
                where = f"{request['source']}: " if request.get("source") else ""
                raise failed_for_good(self._ctx, f"LUA_LIMIT_{limit}", where + message)
            branches = [branch(which) for which in range(1, count + 1)]
            return await self._ctx.gather(*branches, name=request["name"])

    # ------------------------------------------------------------------------------------------------------- operations

    async def _tool(self, thread: int, request: Mapping[str, Any]) -> Any:
        found = await self._ctx.tool(
            request["server"],
            request["tool"],
            request.get("args"),
            retry=retry_of(request.get("retry")),
            timeout=request.get("timeout"),
            intent=request.get("intent"),
        )
        return text_or_base64(found) if isinstance(found, bytes) else found

    async def _checkpoint(self, thread: int, request: Mapping[str, Any]) -> None:
        await self._ctx.checkpoint(name=request["name"])

    async def _model(self, thread: int, request: Mapping[str, Any]) -> Any:
        name = request["name"]
        model = self._ctx.model(name, self._options.predictor(name, request["spec"]))
        return await model.predict(request.get("given"))

    async def _ask(self, thread: int, request: Mapping[str, Any]) -> Any:
        ctx, form, message = self._ctx, request["form"], request["message"]
        more: dict[str, Any] = {
            "timeout": request.get("timeout"),
            "name": request["name"],
            "webhooks": request.get("webhooks") or (),
            "callback": request.get("callback"),
            "escalate": [Escalation(one["after"], one["webhooks"]) for one in request.get("escalate") or ()] or None,
        }
        default = request.get("default") if request.get("has_default") else None
        context = request.get("context")
        if form == "approve":
            return await ctx.approve(message, context=context, default=default, **more)
        if form == "select":
            options = request.get("options") or ()
            return await ctx.select(message, options, context=context, default=default, **more)
        if form == "review":
            fallback = (
                None
                if default is None
                else Review.model_validate({"decision": default} if isinstance(default, str) else default)
            )
            found = await ctx.review(message, context, default=fallback, **more)
            return found.model_dump(mode="json", exclude_none=True)
        if form == "escalate" and more["escalate"] is None:
            more["escalate"] = [Escalation(0.0, more["webhooks"])]  # whoever is to be told is told at once
        return await ctx.input(message, type=input_type(request), context=context, default=default, **more)

    async def _sleep(self, thread: int, request: Mapping[str, Any]) -> None:
        await self._ctx.sleep(request["seconds"], name=request["name"])

    async def _signal(self, thread: int, request: Mapping[str, Any]) -> Any:
        return await self._ctx.signal(request["name"], timeout=request.get("timeout"))

    async def _child(self, thread: int, request: Mapping[str, Any]) -> Any:
        return await self._ctx.call(request["name"], request.get("given"), version=request.get("version"))

    async def _emit(self, thread: int, request: Mapping[str, Any]) -> None:
        await self._ctx.emit(request.get("value"), name=request["name"])

    async def _now(self, thread: int, request: Mapping[str, Any]) -> str:
        return (await self._ctx.now()).isoformat().replace("+00:00", "Z")

    # ----------------------------------------------------------------------------------- what is answered, not recorded

    async def _uuid(self, thread: int, request: Mapping[str, Any]) -> str:
        return str(self._ctx.uuid())

    async def _random(self, thread: int, request: Mapping[str, Any]) -> float:
        return self._ctx.random()

    async def _run_id(self, thread: int, request: Mapping[str, Any]) -> str:
        return self._ctx.run_id

    async def _messages(self, thread: int, request: Mapping[str, Any]) -> Any:
        return self._agents.messages(request["id"])

    async def _file(self, thread: int, request: Mapping[str, Any]) -> Any:
        reply = file_reply(self._source, request)
        if "error" in reply:
            raise LuaError(reply["error"]["message"], code=reply["error"]["type"], retryable=False)
        return reply["value"]

    # ----------------------------------------------------------------------------------------------------------- errors

    def _told(self, error: Exception) -> dict[str, Any]:
        """An error as the program sees it; raised again, it is this very one."""
        self._told_number = number = self._told_number + 1
        self._raised[number] = error
        self._raised.pop(number - RAISED_KEPT_MAX, None)
        said: dict[str, Any] = {"ref": number, "message": str(error) or type(error).__name__, "retryable": False}
        if isinstance(error, OperationError):
            said |= {"type": error.type, "message": error.message, "retryable": error.retryable, "path": error.path}
        elif isinstance(error, TgaError):
            said |= {"type": error.code, "message": error.message, "retryable": error.retryable}
        else:
            said["type"] = type(error).__name__
        return said

    def _failed(self, failure: LuaFailure) -> BaseException:
        """What to raise: an error that bodies around may handle; or, where a limit was met, the end of the attempt."""
        if failure.code is not None:
            where = "" if failure.chunk is None or failure.line is None else f"{failure.chunk}:{failure.line}: "
            return failed_for_good(self._ctx, failure.code, where + failure.message)
        return self._error_of(failure)

    def _error_of(self, failure: LuaFailure) -> Exception:
        value = failure.value if isinstance(failure.value, dict) else {}
        ref = value.get("ref")
        told = self._raised.get(ref) if isinstance(ref, int) else None
        if told is not None:
            return told
        kind, message = value.get("type"), value.get("message")
        text = message if isinstance(message, str) else failure.message
        if kind == "RUN_VALUE_INVALID":
            return ValueInvalid(text, where=str(value.get("where", "")))
        retryable = value.get("retryable")
        return LuaError(
            text[:MESSAGE_CHARS_MAX],
            code=kind if isinstance(kind, str) and kind else None,
            retryable=retryable if isinstance(retryable, bool) else None,
        )


def lost_child(ctx: Context[Any], lost: ChildLost) -> BaseException:
    """The child process is gone. The run that it broke at fails; one that only shared it is attempted again at once."""
    if lost.is_guilty:
        return failed_for_good(ctx, f"LUA_LIMIT_{lost.reason}", str(lost))
    release = {"type": "release", "reason": f"a Lua process was lost: {lost}"[:256]}
    return ctx._attempt.give_up(Over("RELEASED", release))


def failed_for_good(ctx: Context[Any], code: str, message: str) -> BaseException:
    """The run fails here, whatever is around: the program met a limit, and would meet it again."""
    said = {"type": code, "message": message[:MESSAGE_CHARS_MAX], "retryable": False}
    return ctx._attempt.give_up(Over("FAILED", {"type": "fail", "error": said}))
