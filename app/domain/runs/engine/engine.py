"""The engine: every way in which a run is started, worked on, answered, looked at and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from app.core.errors import (
    ArgumentsInvalid,
    ProcedureNotFound,
    RunErased,
    RunIdTaken,
    RunNotFound,
    RunTooDeep,
    RunTooManyChildren,
    RunValueTooLarge,
    SchemaViolation,
    StartDenied,
    TgaError,
)
from app.core.limits import RUN_ANNOUNCE_TICK_MS, RUN_SWEEP_MS
from app.domain.identity import Principal
from app.domain.runs.documents import Parent, RunAnswer
from app.domain.runs.engine.answering import Answering
from app.domain.runs.engine.artifacts import answer_of, child_intent
from app.domain.runs.engine.calling import Calling, is_begun_as
from app.domain.runs.engine.counting import count_change
from app.domain.runs.engine.descent import Descent
from app.domain.runs.engine.leasing import Leasing
from app.domain.runs.engine.messages import (
    CheckpointPut,
    Put,
    PutAnswer,
    PutRequest,
    SecretSaid,
    ThenChild,
    ThenTool,
)
from app.domain.runs.engine.ports import LoadedRun, RunObserver, RunPorts
from app.domain.runs.engine.putting import Putter, Putting, Stored
from app.domain.runs.engine.starting import JudgedStart, Starting, StartRequest
from app.domain.runs.engine.sweeping import EndedTraces, Sweeping
from app.domain.runs.engine.table import RunTable, Watchers
from app.domain.runs.engine.work import Work
from app.domain.runs.ids import child_id_of, elapsed_ms
from app.domain.runs.replay import Run

# A start of a child that is refused: the program is told, and it stands in the journal.
_REFUSED_STARTS: Final = (
    *(ProcedureNotFound, StartDenied, ArgumentsInvalid, SchemaViolation, RunValueTooLarge, RunIdTaken),
    *(RunTooDeep, RunTooManyChildren),
)


class RunEngine:
    """Its parts are for callers to use: `starting`, `leasing`, `answering`, `sweeping`; puts of all kinds are here."""

    def __init__(
        self, ports: RunPorts, traces: EndedTraces, *, erase: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        # Set here for good.
        self.ports = ports
        self.observer: RunObserver | None = None  # set by who serves, while it does
        self.watchers = Watchers()
        self.table = RunTable(ports, self._changed)
        self.leasing = Leasing(ports, self.table)
        self.starting = Starting(ports, self.table, self.leasing)
        self._descent = Descent(ports, self.table)
        self.putting = Putting(ports, self.table, self.watchers)
        self.calling = Calling(ports, self.table, self.putting)
        self.answering = Answering(ports, self.table)
        self.sweeping = Sweeping(ports, self.table, traces, cancel=self._cancel_child, erase=erase)
        # Runs that have changed here and were not announced yet: `_changed` adds, `_announce` takes all.
        self._to_announce: set[str] = set()
        self._sender = f"@{ports.clock.new_id()}"  # stands under what is announced here; no run has such an id
        self._tasks: set[asyncio.Task[Any]] = set()
        self._swept = asyncio.Event()  # set when something may be due sooner than the sweep thinks

    async def put(
        self, run_id: str, request: PutRequest, principal: Principal, *, traceparent: str | None = None
    ) -> PutAnswer:
        """What a worker has done, and what it does then. `traceparent`: of the worker's span, for a tool call."""
        request = await self._with_secrets_sealed(run_id, request, principal.tenant)
        then = request.then
        if isinstance(then, ThenTool):
            return await self.calling.call(run_id, request, then, principal, traceparent)
        if isinstance(then, ThenChild):
            return await self._start_child(run_id, request, then, principal)
        return await self.putting.put(run_id, request, principal)

    async def _with_secrets_sealed(self, run_id: str, request: PutRequest, tenant: str) -> PutRequest:
        if not any(isinstance(put, CheckpointPut) and isinstance(put.value, SecretSaid) for put in request.puts):
            return request
        puts: list[Put] = []
        for put in request.puts:
            if isinstance(put, CheckpointPut) and isinstance(put.value, SecretSaid):
                sealed = await self.ports.secrets.seal(tenant, run_id, put.path, put.value.value)
                puts.append(put.model_copy(update={"value": sealed}))
            else:
                puts.append(put)
        return request.model_copy(update={"puts": puts})

    async def until_due(self, milliseconds: float) -> None:
        """Return after this long, or sooner when something else may be due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(milliseconds / 1000):
                await self._swept.wait()
        self._swept.clear()

    def heard(self, payload: str) -> None:
        """A gateway has changed these runs: what this one has changed is known here."""
        run_ids = None if payload == "*" else payload.split("\n")
        if run_ids is not None and run_ids[-1] == self._sender:
            return
        self.watchers.tell(run_ids)
        self.leasing.kick()

    def missed(self) -> None:
        """Announcements may have been missed."""
        self.heard("*")

    async def close(self) -> None:
        await self.leasing.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start_child(self, run_id: str, request: PutRequest, then: ThenChild, principal: Principal) -> PutAnswer:
        """Puts, the intent and the child's start in one commit; intent and start stand or fall together."""
        putter = Putter.of(request, principal, self.ports)
        parent = await self.table.peek(run_id)
        prefix = "" if "/" not in run_id else run_id.partition("/")[0] + "/"
        child_id = then.run_id or child_id_of(run_id, then.path, then.try_number, tenant_prefix=prefix)
        asked = StartRequest(
            principal=parent.start.principal,
            procedure=then.procedure,
            version=then.version,
            input=then.input,
            run_id=child_id,
            trigger="child",
            trigger_id=run_id,
            policy=then.policy,
            tags=then.tags,
        )
        judged: JudgedStart | TgaError  # or why it is refused
        version = then.version or "none"
        found: LoadedRun | None = None
        try:
            judged = await self.starting.judged(asked)
            version = judged.program.version
            await self._descent.verify_child(parent)
        except _REFUSED_STARTS as error:
            judged = error
        salt = self.ports.salts.new()

        async def decide(work: Work) -> Stored:
            nonlocal found
            missing, is_begun = await self.putting.not_yet_there(work, request)
            stop = putter.reason_to_stop(work.require())
            if stop is not None:
                return Stored("STOP", work.run.head.sequence_number, stop)
            # Looked for each time: a run may have taken the id since the last look. A child that has been started is
            # waited for, also when it would be refused now: the policy, or the newest program, is another one.
            with contextlib.suppress(*([RunIdTaken] if isinstance(judged, TgaError) else [])):
                found = await self._find_child(asked, run_id, then.path)
            if is_begun:
                return Stored("CONTINUE", work.run.head.sequence_number)
            for document in missing:
                await self.putting.add_put(work, document)
            if found is not None and await self._has_answered(found, work, request, then.path):
                return Stored("CONTINUE", work.run.head.sequence_number)
            is_refused = found is None and isinstance(judged, TgaError)
            named = None if is_refused else child_id
            intended = version if found is None else found.start.version
            intent = child_intent(then, run_id, request.attempt, child_run_id=named, version=intended)
            if not is_begun_as(work.run, intent):
                work.add(intent)
                work.require_blob(then.input)
            if found is not None:
                return Stored("CONTINUE", work.run.head.sequence_number)
            if isinstance(judged, TgaError):
                told = {"type": judged.code, "message": str(judged)[:1024], "retryable": False}
                now = self.ports.clock.now()
                work.add(answer_of(work.run, then.path, by="child", by_id=child_id, at=now, error=told))
                return Stored("CONTINUE", work.run.head.sequence_number)
            born = Work(None, child_id, executor_id=self.ports.executor_id(), clock=self.ports.clock)
            born_of = Parent(run_id=run_id, path=then.path, intent_digest=intent.digest())
            self.starting.add_start(born, self.starting.document(replace(asked, parent=born_of), judged), salt)
            work.needed_by, work.needs_first = [born.plan()], True
            return Stored("CONTINUE", work.run.head.sequence_number)

        try:
            stored = await self.table.change(run_id, decide)
        except RunIdTaken as error:
            judged, found = error, None
            stored = await self.table.change(run_id, decide)
        if found is not None and stored.directive == "CONTINUE":
            # It may have ended while nobody waited for it, also since it was found; from now on its end finds one.
            await self.sweeping.tell_parent(await self.ports.runs.load(child_id))
        self.leasing.kick()
        answer = await self.putting.answered(run_id, request, putter, stored)
        result = None if answer.directive == "STOP" else {"status": "pending", "run_id": child_id}
        return PutAnswer(answer.directive, answer.sequence_number, answer.reason, answer.news, result)

    async def _has_answered(self, child: LoadedRun, work: Work, request: PutRequest, path: str) -> bool:
        """Whether the child has ended since the worker last looked: a worker that goes on with a run has read a journal
        in which the child is at work, and says the start again. The answer is among the news."""
        if path in work.run.frontier.begun:
            return False
        news = [record.artifact for record in await self.putting.load_news(work.run_id, request)]
        answers = [one for one in news if isinstance(one, RunAnswer) and one.path == path]
        return any(one.answered_by.id == child.run_id for one in answers)

    async def _find_child(self, asked: StartRequest, run_id: str, path: str) -> LoadedRun | None:
        """The child that was started at this address before, and is taken up again: the answer of its start was lost,
        or the operation around it is tried again. None: it is to be started.

        RunIdTaken where another run has the child's id: then nothing of the start is stored but that it was refused.
        """
        child_id = asked.run_id or ""
        try:
            found = await self.ports.runs.load(child_id)
        except RunNotFound:
            return None
        except RunErased:
            found = None
        parent = None if found is None else found.start.parent
        if found is None or parent is None or (parent.run_id, parent.path) != (run_id, path):
            raise RunIdTaken("another run has the child's id", expected="an id that is free", found=child_id)
        if (found.start.procedure, found.start.input) != (asked.procedure, asked.input):
            raise RunIdTaken(
                "the child was started otherwise when the operation around it was tried before",
                expected="the same procedure and input",
                found=child_id,
            )
        return found

    async def _cancel_child(self, run_id: str, parent_id: str) -> None:
        with contextlib.suppress(RunNotFound):
            why = f"run {parent_id} has ended"
            await self.answering.cancel(run_id, parent_id, by_type="parent", rationale=why)

    def _changed(self, work: Work) -> None:
        """Something was stored here: wake who waits for it, and tell the others, once a tick."""
        run = work.run
        count_change(self.ports.instruments, work)
        if self.observer is not None:
            self.observer.changed(work.require(), work.state_before, work.added)
        self.watchers.tell([work.run_id])
        state, before = run.head.state, work.state_before
        if state == "SCHEDULED" and before != "SCHEDULED":
            self.leasing.kick()  # also when its pause is not over yet: the look says when to look again
        elif state in ("WAITING", "RUNNING"):
            self._look_soon(run)
        has_relatives = work.start.parent is not None or run.has_left_children
        if has_relatives and state in ("COMPLETED", "CANCELLED", "FAILED") and before != state:
            self._spawn(self._tell_relatives(work))
        # Of a run that is born to a worker who waits for it here no other gateway knows, and none is to look for it.
        is_born_leased = before is None and state == "RUNNING"
        if (state != before and not is_born_leased) or work.has_news_for_others:
            if not self._to_announce:
                self._spawn(self._announce())
            self._to_announce.add(work.run_id)

    def _look_soon(self, run: Run) -> None:
        """What is due before the next sweep is looked for when it is due."""
        begun = run.frontier.begun
        if run.head.state == "WAITING":
            due = [begun[path].next_at for path in run.awaits if path in begun]
        else:  # what its worker does not wait for at the moment
            due = [one.due_at for one in begun.values() if one.kind == "tool"]
        times, now = [at for at in due if at is not None], self.ports.clock.now()
        if times and (left_ms := elapsed_ms(now, min(times))) < RUN_SWEEP_MS:
            asyncio.get_running_loop().call_later(max(0, left_ms + 1) / 1000, self._swept.set)

    async def _tell_relatives(self, work: Work) -> None:
        with contextlib.suppress(TgaError):  # the sweep does it later
            await self.sweeping.tell_relatives(work.require())

    async def _announce(self) -> None:
        await asyncio.sleep(RUN_ANNOUNCE_TICK_MS / 1000)
        told, self._to_announce = self._to_announce, set()
        with contextlib.suppress(TgaError):  # they look by themselves, only later
            await self.ports.runs.announce([*sorted(told), self._sender])

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
