"""Tool calls inside a run.

The journal has its own intent and answer; the call is a trace like every other.

1. Birth. The intent, the puts before it and the trace's first entries are one commit, in which the trace needs the
   intent: a worker whose lease is over leaves neither, and nothing is sent. Where the intent stands already (a repeat,
   a new attempt), the commit compares the owner instead.
2. End. The effect is stored in any case; the answer goes with it, if the run still waits for it.
3. A repeat of the operation has the same key and the same trace, whoever asks and on whichever gateway.
4. A call may have a time of its own. When it is over the run is answered TIMEOUT and goes on; so does the trace, and
   its effect is recorded there. A later try of the operation may wait for the same trace again (`continues_try`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from app.core.errors import (
    ArgumentsInvalid,
    CallDenied,
    CallInFlight,
    InputMalformed,
    InputTooLarge,
    KeyMissing,
    KeyReused,
    RunLeaseLost,
    RunPositionTaken,
    SchemaViolation,
    TgaError,
    ToolNotFound,
    ToolQuarantined,
)
from app.domain.addresses import RunOfCall
from app.domain.identity import Principal
from app.domain.ledger.plans import Plan
from app.domain.runs.documents import RunAnswer, RunIntent
from app.domain.runs.engine.artifacts import answer_of, tool_intent
from app.domain.runs.engine.messages import PutAnswer, PutRequest, ThenTool
from app.domain.runs.engine.ports import RunPorts
from app.domain.runs.engine.putting import Putter, Putting, Stored, answer_due, load_artifact
from app.domain.runs.engine.table import Decide, RunTable
from app.domain.runs.engine.work import Work
from app.domain.runs.frontier import Begun
from app.domain.runs.ids import elapsed_ms
from app.domain.runs.replay import Run, RunRecord
from app.domain.runs.requests import ToolRequest
from app.domain.tga.documents import ActionRequest, ToolEffect, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.ports import FAILED_FOR_GOOD
from app.domain.tga.runtime import CheckedCall

# The call is refused, now and whenever it is repeated: the program is told, and it stands in the journal. Everything
# else may be different in a moment, and is not recorded.
_REFUSED: Final = (
    ToolNotFound,
    ArgumentsInvalid,
    KeyMissing,
    KeyReused,
    CallDenied,
    ToolQuarantined,
    SchemaViolation,
    InputMalformed,
    InputTooLarge,
)


class Calling:
    def __init__(self, ports: RunPorts, table: RunTable, putting: Putting) -> None:
        self._ports = ports
        self._table = table
        self._putting = putting

    async def call(
        self, run_id: str, request: PutRequest, then: ThenTool, principal: Principal, traceparent: str | None = None
    ) -> PutAnswer:
        """Put, then call the tool; the answer when it is there, `pending` when it takes longer than `wait_ms`."""
        putter = Putter.of(request, principal, self._ports)
        loaded = await self._table.peek(run_id)
        start, worker = loaded.start, loaded.run.worker
        now = self._ports.clock.now()
        intent = tool_intent(then, start, request.attempt, now=now)
        begun = loaded.run.frontier.begun.get(then.path)
        due_at = intent.due_at if begun is None else begun.due_at
        wait_ms = then.wait_ms if due_at is None else max(0, min(then.wait_ms, elapsed_ms(now, due_at)))

        async def begin(work: Work) -> None:
            missing, is_begun = await self._putting.not_yet_there(work, request)
            stop = putter.reason_to_stop(work.require())
            if stop is not None:
                raise RunLeaseLost("the run is not this worker's any more", found=stop)
            for document in missing:
                await self._putting.add_put(work, document)
            if not is_begun and not is_begun_as(work.run, intent):
                work.add(intent)

        companion = RunCompanion(self._ports, self._table, run_id, then.path, begin=begin, putter=putter)
        call = CheckedCall(
            server_id=then.server_id,
            tool_name=then.tool_name,
            arguments=then.arguments,
            idempotency_key=intent.request.idempotency_key,  # type: ignore[union-attr]  # a tool's
            principal=start.principal,
            intent=then.intent,
            trace_id=TraceId(intent.request.trace_id),  # type: ignore[union-attr]  # a tool's
            traceparent=traceparent,
            run=RunOfCall(
                run_id=run_id,
                procedure=start.procedure,
                version=loaded.run.version,
                path=then.path,
                attempt=request.attempt,
                worker=principal.principal_id if worker is None else worker[1],
            ),
            companion=companion,
        )
        try:
            if then.continues_try is not None:
                await self._table.change(run_id, begin)  # the trace was born by the intent of the earlier try
            answer = await self._ports.tools.call(call, wait_ms=wait_ms)
        except RunLeaseLost as error:
            stored = Stored("STOP", request.after_seq, str(error.found or "LEASE_LOST"))
            return await self._putting.answered(run_id, request, putter, stored)
        except RunPositionTaken:
            return await self._from_the_journal(run_id, request, then, putter)
        except CallInFlight:
            return await self._pending(run_id, request, then, putter, call, "EXECUTING", None)
        except _REFUSED as error:
            await self._record_refusal(run_id, then, begin, intent, error)
            return await self._from_the_journal(run_id, request, then, putter)
        if not answer.is_final:
            return await self._pending(run_id, request, then, putter, call, answer.state, answer.waiting)
        told = companion.told
        if told is not None and told.follows(request):
            effects: dict[str, ToolEffect | None] = {answer.trace_id: answer.effect}
            return PutAnswer("CONTINUE", told.number, None, [told.record], {"status": "answered"}, effects)
        await self.ensure_answered(run_id, then.path, answer)
        return await self._from_the_journal(run_id, request, then, putter)

    async def _pending(
        self,
        run_id: str,
        request: PutRequest,
        then: ThenTool,
        putter: Putter,
        call: CheckedCall,
        state: str,
        waiting: str | None,
    ) -> PutAnswer:
        begun = (await self._table.peek(run_id)).run.frontier.begun.get(then.path)
        if begun is not None and begun.due_at is not None and begun.due_at <= self._ports.clock.now():
            await self._table.change(run_id, lambda work: answer_due(self._ports, work, self._ports.clock.now()))
            begun = None
        if begun is None:  # its time is over, or it has ended meanwhile
            return await self._from_the_journal(run_id, request, then, putter)
        head = (await self._table.peek(run_id)).run.head
        result = {"status": "pending", "trace_id": call.trace_id, "state": state, "waiting": waiting}
        news = await self._putting.load_news(run_id, request)
        return PutAnswer("CONTINUE", head.sequence_number, None, news, result)

    async def _from_the_journal(self, run_id: str, request: PutRequest, then: ThenTool, putter: Putter) -> PutAnswer:
        """What is recorded of the operation: its answer is among the news."""
        loaded = await self._ports.runs.load(run_id)
        stop = putter.reason_to_stop(loaded)
        number = loaded.run.head.sequence_number
        if stop is not None:
            return await self._putting.answered(run_id, request, putter, Stored("STOP", number, stop))
        news = await self._putting.load_news(run_id, request)
        is_there = any(
            isinstance(news_of.artifact, RunAnswer) and news_of.artifact.path == then.path for news_of in news
        )
        if not is_there and then.path not in loaded.run.frontier.begun:
            # Ended before what the worker says it has seen, or another operation stands there.
            loaded.run.frontier.verify_next(then.path)
        return PutAnswer("CONTINUE", number, None, news, {"status": "answered" if is_there else "pending"})

    async def _record_refusal(
        self,
        run_id: str,
        then: ThenTool,
        begin: Decide[None],
        intent: RunIntent,
        error: TgaError,
    ) -> None:
        """The call was refused before its trace began: intent and answer in one commit."""
        told = {"type": error.code, "message": _told(error), "retryable": False}

        async def decide(work: Work) -> None:
            try:
                await begin(work)
            except RunLeaseLost:
                return
            if then.path in work.run.frontier.begun:
                now = self._ports.clock.now()
                work.add(answer_of(work.run, then.path, by="tool", by_id=intent.name, at=now, error=told))

        await self._table.change(run_id, decide)

    async def ensure_answered(self, run_id: str, path: str, answer: Answer) -> None:
        """The trace is over; if its end and the run's answer did not go together, the answer follows now."""

        async def decide(work: Work) -> None:
            await add_answer(work, path, answer, self._ports)

        loaded = await self._table.peek(run_id)
        if path in loaded.run.frontier.begun:
            await self._table.change(run_id, decide)

    def companion_of(self, request: ActionRequest) -> RunCompanion | None:
        """For a trace that is continued from the record: its end goes to the run it was made in."""
        if request.run is None:
            return None
        return RunCompanion(self._ports, self._table, request.run.run_id, request.run.path)


class AnswerTold(NamedTuple):
    """An answer that was stored here while the run was still the worker's, which needs not be read to tell it."""

    record: RunRecord
    intent_number: int

    @property
    def number(self) -> int:
        return self.record.entry.sequence_number

    def follows(self, request: PutRequest) -> bool:
        """Whether the journal has nothing after what the worker has seen but its puts, its intent, and this."""
        return self.intent_number == request.after_seq + len(request.puts) + 1 == self.number - 1


class RunCompanion:
    """What is committed with a call that is made inside a run: with its birth the intent, with its end the answer.

    `begin` adds the intent, where a worker makes the call now; a trace that is continued from the record has its intent
    there already. `putter`: that worker. `told`: the answer, once it is stored, if the run was the worker's then.
    """

    __slots__ = ("_begin", "_path", "_ports", "_putter", "_run_id", "_table", "told")

    def __init__(
        self,
        ports: RunPorts,
        table: RunTable,
        run_id: str,
        path: str,
        *,
        begin: Decide[None] | None = None,
        putter: Putter | None = None,
    ) -> None:
        self._ports = ports
        self._table = table
        self._run_id = run_id
        self._path = path
        self._begin = begin
        self._putter = putter
        self.told: AnswerTold | None = None

    async def commit(self, plan: Plan, trace: Answer, *, is_birth: bool) -> None:
        """Store the plan, which leaves the trace so, together with what the journal says of it."""

        async def decide(work: Work) -> AnswerTold | None:
            if is_birth and self._begin is not None:
                await self._begin(work)
                work.must_fence = True
                work.needed_by = [plan]
            if not trace.is_final:
                return None
            begun = work.run.frontier.begun.get(self._path)
            await add_answer(work, self._path, trace, self._ports, is_born_now=is_birth)
            is_putters = self._putter is not None and self._putter.reason_to_stop(work.require()) is None
            if begun is None or not is_putters or not (work.added and isinstance(work.added[-1], RunAnswer)):
                return None
            return AnswerTold(work.last_record(), begun.sequence_number)

        if is_birth and self._begin is not None:
            self.told = await self._table.change(self._run_id, decide)
        else:
            self.told = await self._table.change_after(self._run_id, plan, decide)


async def add_answer(work: Work, path: str, trace: Answer, ports: RunPorts, *, is_born_now: bool = False) -> None:
    """What became of the call, if the run has asked for it and not been answered. `is_born_now`: the trace and the
    intent that names it are stored together."""
    effect, decision, trace_id = trace.effect, trace.decision, trace.trace_id
    run = work.run
    begun = run.frontier.begun.get(path)
    if begun is None or begun.kind != "tool" or run.head.state in ("COMPLETED", "CANCELLED"):
        return
    if run.frontier.try_of(path) > 1 and not is_born_now:  # the trace of a try that timed out may end later than that
        intent = await load_artifact(ports, work.run_id, begun.sequence_number, RunIntent)
        if isinstance(intent.request, ToolRequest) and intent.request.trace_id != trace_id:
            return
    now = ports.clock.now()
    if effect is None:
        why = (decision.rationale if decision is not None else None) or "the call was denied"
        error: dict[str, Any] | None = {"type": CallDenied.code, "message": why[:1024], "retryable": False}
        work.add(answer_of(run, path, by="tool", by_id=trace_id, at=now, error=error))
        return
    value = {"tier": "effect", "trace_id": trace_id, "tool_effect_digest": effect.digest()}
    if effect.error is None:
        work.add(answer_of(run, path, by="tool", by_id=trace_id, at=now, value=value))
        return
    # What is not known to have failed is never tried again under another key.
    may_retry = effect.basis != "unknown" and effect.error.code not in FAILED_FOR_GOOD
    error = {"type": effect.error.code, "message": (effect.error.message or "")[:1024], "retryable": may_retry}
    outcome = "RETRY" if may_retry and _has_tries(run, path, begun) else "ERROR"
    work.add(answer_of(run, path, by="tool", by_id=trace_id, at=now, value=value, error=error, outcome=outcome))


def is_begun_as(run: Run, intent: RunIntent) -> bool:
    """Whether this very operation has begun; RunPositionTaken, when it is added, where another one has."""
    begun = run.frontier.begun.get(intent.path)
    return begun is not None and (begun.kind, begun.name, begun.input_digest) == (
        intent.kind,
        intent.name,
        intent.input_digest,
    )


def _has_tries(run: Run, path: str, begun: Begun) -> bool:
    return run.frontier.try_of(path) <= begun.retries


def _told(error: TgaError) -> str:
    if not error.expected:
        return error.what[:1024]
    found = "" if error.found is None else f", found {error.found}"
    return f"{error.what} (expected {error.expected}{found})"[:1024]
