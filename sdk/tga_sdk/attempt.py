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
import contextvars
import functools
import hashlib
import inspect
import logging
import re
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from tga_sdk import guard, telemetry
from tga_sdk.defaults import makes_defaults
from tga_sdk.draws import Drawers, Draws, ForkDraws, fork_salt
from tga_sdk.errors import GatewayError, NotDeterministic, OperationError, Stop, TgaError, ValueInvalid
from tga_sdk.frames import Frame, caller, current_frame, enter, remember_caller
from tga_sdk.journal import Begun, Diverged, Ended, Journal, Operation, OperationsAtOnce, Scope
from tga_sdk.pipe import Pipe, Put, Sent
from tga_sdk.pipe import encode as encode_json
from tga_sdk.procedures import Procedure, Task
from tga_sdk.state import State
from tga_sdk.values import Blob, decode, encode
from tga_sdk.wire import Wire, json_of

T = TypeVar("T")
HOLDS: Final = {"tool": 20_000, "child": 20_000, "sleep": 2_000, "signal": 0, "ask": 0}  # milliseconds
FIRST_LOOK: Final = 0.02  # seconds; a look for answers while other branches go on
LONGEST_LOOK: Final = 1.0
HELD_TIMEOUT: Final = 60.0  # seconds; a body with a longer time-out does not keep the worker while it waits
MESSAGE_CHARS_MAX: Final = 1_024
TYPE_CHARS_MAX: Final = 128
_UNPRINTABLE: Final = re.compile("[^!-~]")
SDK: Final = str(Path(__file__).parent)
LIBRARIES: Final = sysconfig.get_path("stdlib")
JSON: Final = {"Content-Type": "application/json"}
logger = logging.getLogger("tga_sdk")


class Over(Stop):
    """The attempt is over, whatever the program catches. `then` is what the gateway is told; None: nothing."""

    def __init__(self, how: str, then: Put | None = None) -> None:
        super().__init__(how)
        self.how = how
        self.then = then


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
        self.journal = Journal()
        self.pipe = Pipe(self._send)
        self.over: Over | None = None
        self.log = logging.LoggerAdapter(logger, {"run_id": self.run_id, "attempt": self.number})
        self._leased = leased
        # Said by the run's start, or by this worker; a gateway that is older than the field does not say it.
        self.is_strict: bool = host.is_strict or leased.get("strict_determinism", False)
        self._draw_salt = bytes.fromhex(leased["draw_salt"])
        self._drawers: Drawers | None = None
        self._leased_to: int = leased["sequence_number"]
        self._read_to: int = leased["first_seq"]
        if self.number == 1 and self._read_to == 0:
            self._read_to = self._leased_to  # a first attempt has nothing to replay
        self._after_seq = self._leased_to
        self._reading = asyncio.Lock()
        self._resumed_at: list[int] | None = None  # entries not yet read at which failed operations were reopened
        self._fork_changes: list[dict[str, Any]] = []
        self._active = 1  # branches that are not blocked
        self._timed = 0  # bodies under way whose time-out this worker stays for
        self._blocked: dict[str, tuple[str, asyncio.Event]] = {}  # by path: kind, and what wakes it
        self._looking: asyncio.Task[None] | None = None
        self._suspending: asyncio.Task[None] | None = None
        self._main: asyncio.Task[Over] | None = None
        self._loop = asyncio.get_running_loop()
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
            if self._looking is not None:
                self._looking.cancel()
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
            await self._read_drawers()
            root = Frame(self, Scope(), None, State(self.procedure.state_type, {}), self.draws(""))
            output = await self._program(root)
            await self.read_all()
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
            return await self.in_thread(functools.partial(procedure.fn, SyncContext(ctx), *given))

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

    def draws(self, scope: str) -> Draws:
        if self._drawers is not None:
            return ForkDraws(fork_salt(self._draw_salt, self.run_id), scope, self._drawers)
        return Draws(self._draw_salt, scope)

    async def _read_drawers(self) -> None:
        """Of a fork: who was where before. Read ahead, because a draw cannot wait; of the records nothing is kept."""
        after: int = self._leased["first_seq"]
        if after >= 0:
            return
        drawers = Drawers(self._draw_salt)
        while after < 0:
            for record in await self._page(after):
                after = record["sequence_number"]
                if after > 0:
                    break
                drawers.add_run(record["run_id"])
                if "path" in record:
                    has_ended = record["artifact_type"] == "run_checkpoint" and record["outcome"] != "RETRY"
                    drawers.add(record["run_id"], record["path"], has_ended=has_ended)
        self._drawers = drawers

    # ----------------------------------------------------------------------------------------------------- the journal

    @property
    def is_live(self) -> bool:
        """Whether the program has reached the journal's end."""
        return self._read_to >= self._leased_to

    async def match(self, frame: Frame, path: str, operation: Operation, source: str | None) -> Ended | Begun | None:
        """What stands at this address, reading on as far as it takes. Divergence ends the attempt."""
        await self.look(path)
        try:
            found = self.journal.match(path, operation, source=source)
        except Diverged as error:
            raise self.give_up(self.diverged(error)) from error
        if self._fork_changes and not self._is_of_source(path, operation, found):
            self._apply_fork_changes(frame)
        return found

    def _is_of_source(self, path: str, operation: Operation, found: Ended | Begun | None) -> bool:
        """Of a fork: whether this operation, or something inside it, stands in what it has of its source. Branches of a
        gather begin with the state as it was changed."""
        if isinstance(found, Ended):
            return found.sequence_number <= 0
        return operation.kind != "gather" and self.journal.performed_inside(path) > 0

    async def look(self, path: str) -> Ended | Begun | None:
        """What stands at this address, whatever it is."""
        while True:
            found = self.journal.look(path)
            if isinstance(found, Ended) and not (found.failed and await self._is_reopened_later()):
                return found
            if not await self._read_on():
                return found

    def verify_end(self, path: str, performed: int) -> None:
        """Divergence when the journal has more operations inside this one than were performed."""
        try:
            self.journal.verify_end(path, performed)
        except Diverged as error:
            raise self.give_up(self.diverged(error)) from error

    async def read_all(self) -> None:
        while await self._read_on():
            pass

    async def _read_on(self) -> bool:
        """Read one more page; False at the journal's end."""
        read_to = self._read_to
        async with self._reading:
            if self.is_live:
                return False
            if self._read_to == read_to:  # else another branch has read on meanwhile
                for record in await self._page(self._read_to):
                    self._feed(record)
                    self._read_to = record["sequence_number"]
            return True

    async def _page(self, after: int) -> list[dict[str, Any]]:
        self.verify_going()
        path = f"/v1/runs/{self.run_id}/checkpoints?after_seq={after}&limit=1000"
        page = await self._asked("GET", path)
        items: list[dict[str, Any]] = page["items"]
        if not items:
            raise self.give_up(Over("FAILED", _fail("RUN_JOURNAL_SHORT", f"the journal ends after entry {after}")))
        return items

    async def _is_reopened_later(self) -> bool:
        """Whether an entry that is not read yet reopens what failed. Looked for once; nothing is kept of the look."""
        if self.is_live:
            return False
        if self._resumed_at is None:
            self._resumed_at = []
            after = self._read_to
            while after < self._leased_to:
                for record in await self._page(after):
                    after = record["sequence_number"]
                    if record["artifact_type"] == "run_resumption":
                        self._resumed_at.append(after)
        return any(number > self._read_to for number in self._resumed_at)

    def _feed(self, record: dict[str, Any]) -> None:
        joined = record.get("joined")
        if joined is not None:
            value = record.get("value") or {}
            if value.get("tier") == "secret":
                record = {**record, "value": {"tier": "secret", "value": joined}}
            elif isinstance(joined, dict) and "tier" in joined:
                record = {**record, "value": joined}
            else:
                record = {**record, "value": {"tier": "inline", "value": joined.get("value")}}
        if record["artifact_type"] == "run_start" and record.get("forked_from"):
            self._fork_changes = list(record["forked_from"].get("state_change") or ())
        self.journal.add(record)

    def _apply_fork_changes(self, frame: Frame) -> None:
        """From here on the fork is on its own, with the state as whoever forked it has changed it."""
        changes, self._fork_changes = self._fork_changes, []
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
        answer: dict[str, Any] = await self._asked("POST", path, content, headers=headers, wait=wait)
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
            self._feed(record)
        self._after_seq = max(
            number, *(record["sequence_number"] for record in answer["news"] or [{"sequence_number": 0}])
        )
        for place, (_, event) in self._blocked.items():
            if not isinstance(self.journal.look(place), Begun):
                event.set()
        return answer

    async def _asked(
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
            then = None if error.code == "RUN_NOT_FOUND" else _fail(error.code, str(error))
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
            raise self.give_up(Over(f"REFUSED {error.code}", _fail(error.code, str(error)))) from error

    async def decoded(self, value: dict[str, Any] | None, type_: Any = None, *, where: str) -> Any:
        """A recorded value as the program gets it; what is large is fetched, and verified."""
        blob = None
        if value is not None and value.get("tier") == "artifact":
            sha256 = value["ref"]["sha256"]
            try:
                blob = (await self.host.wire.send("GET", f"/v1/blobs/{sha256}")).content
            except GatewayError as error:
                raise self.give_up(Over(f"REFUSED {error.code}", _fail(error.code, str(error)))) from error
            if hashlib.sha256(blob).hexdigest() != sha256:
                raise self.give_up(Over("FAILED", _fail("BLOB_DAMAGED", f"the bytes of blob {sha256} are other ones")))
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

    # --------------------------------------------------------------------------------------------------------- waiting

    @property
    def is_alone(self) -> bool:
        """Whether nothing else of the program could go on while this branch waits."""
        return self._active == 1 and not self._blocked

    def count_branches(self, more: int) -> None:
        self._active += more
        if self._active == 0:
            self._suspend_soon()

    async def blocked(self, path: str, kind: str) -> None:
        """Until others have ended what has begun at this address."""
        if isinstance(self.journal.look(path), Ended):
            return
        self.verify_going()
        event = asyncio.Event()
        self._blocked[path] = (kind, event)
        self.count_branches(-1)
        if self._active > 0:
            self._look_meanwhile()
        try:
            await event.wait()
        finally:
            self._active += 1
            self._blocked.pop(path, None)
        self.verify_going()

    @property
    def _is_timed(self) -> bool:
        return self._timed > 0 and not self.host.is_draining

    def _suspend_soon(self) -> None:
        if self._blocked and self.over is None:
            if self._is_timed:  # who leaves takes the clock of the time-out along: stay, and ask for answers
                self._look_meanwhile()
                return
            with guard.off():
                self._suspending = self._loop.create_task(self._suspend())

    async def _suspend(self) -> None:
        """Nothing of the program can go on: wait at the gateway for a while, then leave."""
        try:
            while self._active == 0 and self._blocked and self.over is None:
                if any(event.is_set() for _, event in self._blocked.values()):
                    return
                awaits = sorted(self._blocked)
                held = 0 if self.host.is_draining else max(HOLDS[kind] for kind, _ in self._blocked.values())
                then = {"type": "suspend", "awaits": awaits, "wake": "ANY", "wait_ms": held}
                await self.pipe.put((), then)
        except Over as over:
            self.give_up(over)

    def _look_meanwhile(self) -> None:
        if self._looking is None or self._looking.done():
            with guard.off():
                self._looking = self._loop.create_task(self._look())

    async def _look(self) -> None:
        """Some branches wait, and others go on or have their time-out: ask from time to time whether something was
        answered."""
        pause = FIRST_LOOK
        try:
            while self._blocked and self.over is None:
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_LOOK)
                if self._active == 0 and not self._is_timed:  # the worker is to end
                    self._suspend_soon()
                    return
                if self._blocked and self.pipe.is_idle and self.over is None:
                    before = len(self._blocked)
                    await self.pipe.put()
                    if len(self._blocked) != before:
                        pause = FIRST_LOOK
        except Over as over:
            self.give_up(over)

    # ---------------------------------------------------------------------------------------------------------- bodies

    async def run_body(self, frame: Frame, fn: Callable[..., Any], args: Sequence[Any], timeout: float | None) -> Any:
        """Run a body in its frame: a coroutine here, anything else in a thread. TimeoutError when it takes too long."""
        before = current_frame()
        enter(frame)
        remember_caller(None)
        is_held = timeout is not None and timeout <= HELD_TIMEOUT
        self._timed += is_held
        try:
            async with asyncio.timeout(timeout):
                with guard.off():
                    if inspect.iscoroutinefunction(fn):
                        return await fn(*args)
                    return await self.called(functools.partial(fn, *args))
        finally:
            self._timed -= is_held
            frame.is_over = True
            enter(before)

    async def in_thread(self, fn: Callable[[], T]) -> T:
        """Run it in a thread, in this frame. A thread cannot be ended: one that hangs goes on, unheard."""
        context = contextvars.copy_context()
        return await self._loop.run_in_executor(self.host.threads, context.run, fn)

    async def called(self, fn: Callable[[], Any]) -> Any:
        """What a plain function returns, which runs in a thread; of a coroutine that it returns, what that returns."""
        made: list[Any] = []
        is_left = threading.Event()  # nobody waits for the thread any more

        def call() -> None:
            made.append(fn())
            if is_left.is_set():
                _close(made)

        try:
            await self.in_thread(call)
        except BaseException:
            is_left.set()
            _close(made)  # Python would complain of a coroutine that nobody awaits
            raise
        return await made[0] if inspect.isawaitable(made[0]) else made[0]

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
        return self.wait_for(ctx.perform("step", task.name, body, given=given, **options))

    def wait_for(self, operation: Coroutine[Any, Any, T]) -> T:
        """The result of an operation, for code in a thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            operation.close()
            raise TgaError(
                "a blocking operation was called in an async body, which it would stop: use await ctx.step(name, fn)",
                code="PROCEDURE_INVALID",
            )
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        context = contextvars.copy_context()
        context.run(remember_caller, caller())

        def begin() -> None:
            task = self._loop.create_task(operation, context=context)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.set_exception(self.over or Stop("the worker ends"))
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        return done.result()


def error_document(error: BaseException) -> dict[str, Any]:
    """What the journal says of an error."""
    if isinstance(error, OperationError):
        said = error.document()
    else:
        code = error.code if isinstance(error, TgaError) else type(error).__name__
        said = {"type": code, "message": str(error) or type(error).__name__, "retryable": False}
    # A class may be called as it likes, and a Lua program may say any type; the journal has names that can be printed.
    said["type"] = _UNPRINTABLE.sub("_", said["type"])[:TYPE_CHARS_MAX] or "Error"
    said["message"] = said["message"][:MESSAGE_CHARS_MAX]
    return said


def program_line(error: BaseException) -> str | None:
    """The line of the program at which this was raised: the innermost one outside of the SDK and the libraries."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((SDK, LIBRARIES)) and not file.startswith("<") and "site-packages" not in file:
            found = f"{file}:{line}"
    return found


def log_line(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "text": text[:1_024], "at": time_text(time.time())}


def time_text(seconds: float) -> str:
    """A time as the gateway writes it: UTC with milliseconds."""
    whole, rest = divmod(round(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{rest:03d}Z"


def _fail(code: str, message: str) -> Put:
    return {"type": "fail", "error": {"type": code, "message": message[:MESSAGE_CHARS_MAX], "retryable": False}}


def _record_of(put: Put, number: int) -> dict[str, Any]:
    """What the journal has of this worker's own put, as far as a replay needs it."""
    if put["type"] == "checkpoint":
        return {**put, "artifact_type": "run_checkpoint", "sequence_number": number}
    name = f"{put['server_id']}.{put['tool_name']}" if put["type"] == "tool" else put["name"]
    return {**put, "artifact_type": "run_intent", "kind": put["type"], "name": name, "sequence_number": number}


def _close(made: list[Any]) -> None:
    for one in made:
        if inspect.iscoroutine(one):
            one.close()
