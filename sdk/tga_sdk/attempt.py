"""One attempt of one run: what is read of its journal, what is put, what it waits for, and how it ends.

A program runs from its top in every attempt. The journal is read in pages, as far as the program asks for it; what it
has passed is dropped, so a run of any length takes little memory. From the journal's end on the program is live.

1. The program is done: complete, or fail, or diverge, in one request with what it put last.
2. Everything it could go on with is with others: suspend, and leave.
3. The gateway says STOP, or the worker drains: leave; what is not recorded did not happen.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import hashlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from tga_sdk import guard, telemetry
from tga_sdk.defaults import makes_defaults
from tga_sdk.endings import Over as Over
from tga_sdk.endings import error_document, failure, program_line
from tga_sdk.errors import GatewayError, NotDeterministic, OperationError, TgaError, ValueInvalid
from tga_sdk.frames import Frame, current_frame, enter, log_line, remember_caller
from tga_sdk.journal import Begun, Diverged, Ended, Operation, OperationsAtOnce, Scope
from tga_sdk.journal_reader import JournalReader
from tga_sdk.pipe import Pipe, Put, Sent
from tga_sdk.pipe import encode as encode_json
from tga_sdk.procedures import Procedure, Task
from tga_sdk.state import State
from tga_sdk.threads import Threads
from tga_sdk.values import Blob, blob_of, decode, encode
from tga_sdk.waiting import Waiting
from tga_sdk.wire import Wire, json_of

T = TypeVar("T")
JSON: Final = {"Content-Type": "application/json"}
logger = logging.getLogger("tga_sdk")


@dataclass
class Host:
    """What an attempt needs of its worker. `heard_at`: when the last heartbeat that was acknowledged was sent."""

    wire: Wire
    threads: concurrent.futures.Executor
    is_strict: bool = False
    is_draining: bool = False
    lease_ms: int = 30_000
    heard_at: float = 0.0
    now: Callable[[], float] = time.time  # seconds since 1970, as the gateway reckons them
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep

    @property
    def is_heard(self) -> bool:
        """Whether no other worker can have the runs of this one. Only then may a body run."""
        return (time.monotonic() - self.heard_at) * 1000 <= self.lease_ms


class Attempt:
    """`leased` is the run as the gateway gave it."""

    def __init__(self, host: Host, leased: dict[str, Any], procedure: Procedure[Any, Any]) -> None:
        self.host = host
        self.procedure = procedure
        self.run_id: str = leased["run_id"]
        self.number: int = leased["attempt"]
        self.lease: str = leased["lease"]
        self.salt = bytes.fromhex(leased["salt"])
        self.reader = JournalReader(self, leased)
        self.journal = self.reader.journal
        self.pipe = Pipe(self._send)
        self.over: Over | None = None
        self.log = logging.LoggerAdapter(logger, {"run_id": self.run_id, "attempt": self.number})
        self._leased = leased
        # Said by the run's start, or by this worker; a gateway that is older than the field does not say it.
        self.is_strict: bool = host.is_strict or leased.get("strict_determinism", False)
        self.waiting = Waiting(self)
        self.threads = Threads(host.threads, lambda: self.over)
        self._after_seq: int = leased["sequence_number"]
        self._main: asyncio.Task[Over] | None = None
        self.traceparents: dict[str, str] = {}  # by path: the contexts of the spans of tool calls under way
        self._told: set[str] = set()  # of which values it was said that their defaults differ

    # ------------------------------------------------------------------------------------------ the attempt as a whole

    async def run(self) -> str:
        """How the attempt ended: COMPLETED, FAILED, DIVERGED, RELEASED, SUSPENDED, or why it was stopped."""
        self._main = asyncio.create_task(self._perform())
        try:
            over = await self._main
        except Over as found:
            over = found
        except asyncio.CancelledError:
            if self.over is None:
                raise
            over = self.over
        finally:
            self.waiting.close()
        over = self.over or over  # a program that caught what ended it is over all the same
        self._end(over)
        if over.then is not None:
            if over.how == "DIVERGED":
                self.pipe.forget_deferred()  # the journal is left as it was
            return await self._tell_end(over)
        return over.how

    async def _tell_end(self, over: Over) -> str:
        """How the attempt ended. Where the gateway refuses that end, or what was to be recorded with it, the run fails
        with what the gateway said: else it would be attempted again, and refused again."""
        while over.then is not None:
            try:
                await self._put_last(over.then)
            except Over as refused:
                is_last = over.how.startswith("REFUSED")
                over = Over(refused.how) if is_last else refused
            else:
                break
        return over.how

    def stop(self, reason: str) -> None:
        """From outside: the run is not this worker's any more."""
        self.give_up(Over(reason))

    async def _perform(self) -> Over:
        """Run the program; what the gateway is told of its end."""
        if telemetry.active is not None:
            telemetry.active.enter_run(self._leased.get("traceparent"))
        try:
            await self.reader.read_drawers()
            root = Frame(self, Scope(), None, State(self.procedure.state_type, {}), self.reader.draws(""))
            output = await self._program(root)
            await self.reader.read_all()
            await self._put_what_is_left(root)
            self.verify_end("", root.scope.performed)
            value = await self.encoded(output, type_=self.procedure.output_type, where="output")
        except (Over, asyncio.CancelledError):
            raise
        except Diverged as diverged:
            return self.diverged(diverged)
        except Exception as error:
            return self.failed(error)
        return Over("COMPLETED", {"type": "complete", "output": value, "positions": root.scope.performed})

    async def _program(self, root: Frame) -> Any:
        from tga_sdk.context import Context
        from tga_sdk.sync_context import SyncContext

        ctx: Context[Any] = Context(self)
        procedure = self.procedure
        given: tuple[Any, ...] = ()
        if procedure.takes_input:
            given = (await self.decoded(self._leased["input"], procedure.input_type, where="input"),)
        enter(root)
        if makes_defaults(procedure.state_type):
            await ctx.checkpoint(name="state", defer=True)  # before anything can depend on what was made
        watched = frozenset({getattr(procedure.fn, "__module__", "")})
        with guard.watch(watched, strict=self.is_strict, warn=self._warn):
            if procedure.is_async:
                return await procedure.fn(ctx, *given)
            return await self.threads.run(functools.partial(procedure.fn, SyncContext(ctx), *given))

    async def _put_what_is_left(self, root: Frame) -> None:
        """State changes and log lines after the last operation ride with the end, as a checkpoint of their own. A run
        that failed at its very end, and is retried, has it already: then it is performed again, whatever is left."""
        found = self.journal.look(root.next_path)
        is_there = found is not None and (found.operation.kind, found.operation.name) == ("checkpoint", "end")
        if is_there or (found is None and (root.state.pending() or root.logs)):
            from tga_sdk.context import Context

            enter(root)
            await Context[Any](self).checkpoint(name="end", defer=True)

    async def _put_last(self, then: Put) -> None:
        await self.pipe.settle()
        await self.pipe.put((), then)

    def failed(self, error: BaseException) -> Over:
        """The program raised. What an operation has recorded as failed would fail again; anything else may not."""
        document = error_document(error)
        if isinstance(error, OperationError | ValueInvalid | OperationsAtOnce):
            line = program_line(error)
            self.log.error("run %s failed%s: %s", self.run_id, f" at {line}" if line else "", document["message"])
        else:
            document["retryable"] = not isinstance(error, TgaError) or error.retryable
            self.log.error("run %s failed: %s", self.run_id, document["message"], exc_info=error)
        return Over("FAILED", {"type": "fail", "error": document})

    def diverged(self, error: Diverged) -> Over:
        """The program is not the one that wrote the journal. It stops before it does anything."""
        path = error.path if error.path != "the end" else "1"
        said = {"path": path, "recorded": error.recorded, "performed": error.performed, "source": error.source}
        self.log.error("run %s diverged: %s", self.run_id, error)
        return Over("DIVERGED", {"type": "diverge", "divergence": said})

    def _end(self, over: Over) -> None:
        if self.over is None:
            self.over = over

    def give_up(self, over: Over) -> Over:
        """End the attempt, also of branches that wait: whatever the program catches, it performs nothing more."""
        self._end(over)
        if self._main is not None:
            self._main.cancel()
        return self.over or over

    def verify_going(self) -> None:
        """Every operation asks first."""
        if self.over is not None:
            raise self.over

    async def verify_live(self) -> None:
        """Before a body runs: nothing waits to be recorded, and the run is still this worker's."""
        await self.pipe.flush()
        self.verify_own()

    def verify_own(self) -> None:
        """Before something new is asked of others: the run is still this worker's, and is to go on here."""
        self.verify_going()
        if self.host.is_draining:
            raise self.give_up(Over("RELEASED", {"type": "release", "reason": "the worker is shutting down"}))
        if not self.host.is_heard:
            raise self.give_up(Over("LEASE_UNKNOWN"))

    def _warn(self, finding: guard.Finding) -> None:
        frame = current_frame()
        place = "" if frame is None else f" at {frame.next_path}"
        self.log.warning("run %s%s: %s", self.run_id, place, finding)
        if frame is not None:
            frame.logs.append(log_line("warning", str(finding)))

    # ----------------------------------------------------------------------------------------------------- the journal

    async def match(self, frame: Frame, path: str, operation: Operation, source: str | None) -> Ended | Begun | None:
        """What stands at this address, reading on as far as it takes. Divergence ends the attempt."""
        await self.reader.look(path)
        try:
            found = self.journal.match(path, operation, source=source)
        except Diverged as error:
            raise self.give_up(self.diverged(error)) from error
        if self.reader.fork_changes and not self._is_of_source(path, operation, found):
            self._apply_fork_changes(frame)
        return found

    def _is_of_source(self, path: str, operation: Operation, found: Ended | Begun | None) -> bool:
        """Of a fork: whether this operation, or something inside it, stands in what it has of its source. Branches of a
        gather begin with the state as it was changed."""
        if isinstance(found, Ended):
            return found.sequence_number <= 0
        return operation.kind != "gather" and self.journal.performed_inside(path) > 0

    def verify_end(self, path: str, performed: int) -> None:
        """Divergence when the journal has more operations inside this one than were performed."""
        try:
            self.journal.verify_end(path, performed)
        except Diverged as error:
            raise self.give_up(self.diverged(error)) from error

    def _apply_fork_changes(self, frame: Frame) -> None:
        """From here on the fork is on its own, with the state as the caller who forked it has changed it."""
        changes, self.reader.fork_changes = self.reader.fork_changes, []
        frame.state.put_before_pending(changes)

    # ------------------------------------------------------------------------------------------------------------ puts

    async def put(self, sent: Sequence[Sent] = (), then: Put | None = None) -> dict[str, Any]:
        self.verify_going()
        return await self.pipe.put(sent, then)

    async def _send(self, sent: Sequence[Sent], then: Put | None) -> dict[str, Any]:
        """One put request. What is stored, and what others have recorded meanwhile, is in the journal afterwards."""
        head = {"lease": self.lease, "attempt": self.number, "after_seq": self._after_seq}
        if then is not None:
            head["then"] = then
        puts = b",".join(one.encoded for one in sent)
        content = encode_json(head)[:-1] + b',"puts":[' + puts + b"]}"
        path = f"/v1/runs/{self.run_id}/checkpoints"
        wait = 0.0 if then is None else then.get("wait_ms", 0) / 1000
        headers = JSON
        if self.traceparents and then is not None and then["type"] == "tool":
            headers = {**JSON, "traceparent": self.traceparents.get(then["path"], "")}
        answer: dict[str, Any] = await self.ask("POST", path, content, headers=headers, wait=wait)
        directive = answer["directive"]
        if directive == "STOP":
            raise self.give_up(Over(f"STOP {answer['reason']}"))
        number = answer["sequence_number"]
        for one in sent:
            self.journal.add(_record_of(one.put, number))
            if not one.is_kept and one.put["type"] == "checkpoint" and one.put["outcome"] != "RETRY":
                self.journal.leave_behind(one.put["path"])
        if then is not None and then["type"] in ("tool", "child"):
            self.journal.add(_record_of(then, number))
        if directive == "SUSPENDED":
            raise self.give_up(Over("SUSPENDED"))
        for record in answer["news"]:
            self.reader.feed(record)
        self._after_seq = max(
            number, *(record["sequence_number"] for record in answer["news"] or [{"sequence_number": 0}])
        )
        self.waiting.wake()
        return answer

    async def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait: float = 0.0,
    ) -> Any:
        """An answer of the gateway; a refusal ends the attempt, and the run fails with what was said."""
        try:
            return json_of(await self.host.wire.send(method, path, content=content, headers=headers, wait=wait))
        except GatewayError as error:
            then = None if error.code == "RUN_NOT_FOUND" else failure(error.code, str(error))
            self.log.error("run %s: the gateway refused %s %s: %s", self.run_id, method, path, error)
            if self.over is not None and self.over.then is not None:  # its end was refused
                self.pipe.forget_deferred()
                raise Over(f"REFUSED {error.code}", then) from error
            raise self.give_up(Over(f"REFUSED {error.code}", then)) from error

    # ---------------------------------------------------------------------------------------------------------- values

    async def encoded(self, value: Any, *, tier: str = "auto", type_: Any = None, where: str) -> dict[str, Any]:
        """A value as the journal has it; what is large is stored first."""
        made = encode(value, tier=tier, type_=type_, where=where)
        if made.blob is not None:
            await self.upload(made.blob)
        return made.value

    async def upload(self, blob: Blob) -> None:
        path = f"/v1/blobs/{blob.sha256}"
        try:
            await self.host.wire.send("PUT", path, content=blob.data, headers={"Content-Type": blob.media_type})
        except GatewayError as error:
            raise self.give_up(Over(f"REFUSED {error.code}", failure(error.code, str(error)))) from error

    async def decoded(self, value: dict[str, Any] | None, type_: Any = None, *, where: str) -> Any:
        """A recorded value as the program gets it; what is large is fetched, and verified."""
        blob, sha256 = None, blob_of(value)
        if sha256 is not None:
            try:
                blob = (await self.host.wire.send("GET", f"/v1/blobs/{sha256}")).content
            except GatewayError as error:
                raise self.give_up(Over(f"REFUSED {error.code}", failure(error.code, str(error)))) from error
            if hashlib.sha256(blob).hexdigest() != sha256:
                raise self.give_up(
                    Over("FAILED", failure("BLOB_DAMAGED", f"the bytes of blob {sha256} are other ones"))
                )
        made = decode(value, type_, blob, where=where)
        if makes_defaults(type_) and decode(value, type_, blob, where=where) != made:
            self._tell_of_defaults(where)
        return made

    def _tell_of_defaults(self, where: str) -> None:
        """A default that is made anew each time was filled in: the program sees another one in each attempt."""
        fix = "give the field a value where it comes from; or make it in the program: ctx.uuid(), await ctx.now()"
        finding = guard.Finding(self.procedure.source, f"a default of {where}, made anew each time,", fix)
        if self.is_strict:
            raise NotDeterministic(str(finding))
        if where not in self._told:
            self._told.add(where)
            self._warn(finding)

    # ---------------------------------------------------------------------------------------------------------- bodies

    async def run_body(self, frame: Frame, fn: Callable[..., Any], args: Sequence[Any], timeout: float | None) -> Any:
        """Run a body in its frame: a coroutine here, anything else in a thread. TimeoutError when it takes too long."""
        before = current_frame()
        enter(frame)
        remember_caller(None)
        try:
            async with asyncio.timeout(timeout):
                with self.waiting.timed(timeout), guard.off():
                    if inspect.iscoroutinefunction(fn):
                        return await fn(*args)
                    return await self.threads.called(functools.partial(fn, *args))
        finally:
            frame.is_over = True
            enter(before)

    def perform_task(self, task: Task[Any, Any], given: dict[str, Any], body: Callable[[], Any]) -> Any:
        """A task that the program calls like any function is a step of the run."""
        from tga_sdk.annotations import result_type
        from tga_sdk.context import Context

        ctx: Context[Any] = Context(self)
        options = {"type": result_type(task.fn), **task.options}
        if inspect.iscoroutinefunction(task.fn):

            async def awaited() -> Any:
                return await body()

            return ctx.perform("step", task.name, awaited, given=given, **options)
        return self.threads.wait_for(ctx.perform("step", task.name, body, given=given, **options))


def _record_of(put: Put, number: int) -> dict[str, Any]:
    """What the journal has of this worker's own put, as far as a replay needs it."""
    if put["type"] == "checkpoint":
        return {**put, "artifact_type": "run_checkpoint", "sequence_number": number}
    name = f"{put['server_id']}.{put['tool_name']}" if put["type"] == "tool" else put["name"]
    return {**put, "artifact_type": "run_intent", "kind": put["type"], "name": name, "sequence_number": number}
