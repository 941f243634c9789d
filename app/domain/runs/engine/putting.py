"""Puts: what a worker has done, or is about to do, recorded under its lease.

1. A repeat is recognised by content among the entries after `after_seq`, and answered again; nothing is stored twice.
2. A worker whose lease is over is told to stop, and nothing of its request is stored (that it came is, once).
3. Puts and what comes `then` are one commit. The store compares the owner: what was decided on an old state is decided
   again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from app.core.errors import RecoveryFailed, TgaError
from app.core.limits import RUN_PAGE_RECORDS_MAX, TEXT_CHARS_MAX
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.runs.documents import (
    RunAttempt,
    RunDocument,
    RunEnd,
    RunError,
    RunEscalation,
    RunIntent,
    RunSignal,
    RunSuspension,
    WorkerName,
)
from app.domain.runs.engine.artifacts import answer_of, document_of, is_of_worker, is_same, verify_given
from app.domain.runs.engine.messages import (
    PutAnswer,
    PutRequest,
    Then,
    ThenChild,
    ThenComplete,
    ThenDiverge,
    ThenFail,
    ThenRelease,
    ThenSuspend,
    ThenTool,
)
from app.domain.runs.engine.ports import LoadedRun, RunPorts
from app.domain.runs.engine.table import RunTable, Watchers, first_of
from app.domain.runs.engine.work import Work
from app.domain.runs.ids import elapsed_ms, later, owner_of
from app.domain.runs.replay import Run, RunRecord, waits_for_nobody
from app.domain.runs.requests import CALLBACK, AskRequest
from app.domain.runs.schedule import AT_WORK
from app.domain.runs.transitions import RUN

Directive = Literal["CONTINUE", "STOP", "SUSPENDED", "DONE", "HOLD"]
DIVERGED_ERROR: Final = "RUN_DIVERGED"
D = TypeVar("D", bound=RunDocument)


@dataclass(frozen=True, slots=True)
class Putter:
    """Who puts: the lease, and the attempt that it is for."""

    owner: str
    attempt: int
    principal: Principal
    after_seq: int

    @classmethod
    def of(cls, request: PutRequest, principal: Principal, ports: RunPorts) -> Putter:
        owner = owner_of(request.lease, ports.incarnation())
        return cls(owner, request.attempt, principal, request.after_seq)

    def reason_to_stop(self, loaded: LoadedRun) -> str | None:
        """Why this worker may put nothing more; None while the run is its own."""
        run = loaded.run
        # A worker that has seen more than the store has goes by a history that was lost.
        is_known = self.after_seq <= run.head.sequence_number
        if run.head.state == "RUNNING" and loaded.owner == self.owner and run.attempt == self.attempt and is_known:
            return None
        if run.head.state == "CANCELLED":
            return "CANCELLED"
        return "LEASE_LOST" if run.head.state in AT_WORK else "ENDED"


@dataclass(frozen=True, slots=True)
class Stored:
    """What a change has come to: the directive, and where the run stands."""

    directive: Directive
    sequence_number: int
    reason: str | None = None
    state: str | None = None
    due_ms: int | None = None  # until the first of what it waits for is over by itself


class Putting:
    def __init__(self, ports: RunPorts, table: RunTable, watchers: Watchers) -> None:
        self._ports = ports
        self._clock = ports.clock
        self._table = table
        self._watchers = watchers

    async def put(self, run_id: str, request: PutRequest, principal: Principal) -> PutAnswer:
        """Everything but tools and children, which bring streams of their own."""
        putter, then = Putter.of(request, principal, self._ports), request.then
        if isinstance(then, ThenSuspend) and then.wait_ms:
            stored = await self._held(run_id, request, putter, then)
        else:
            stored = await self._store(run_id, request, putter, holds=False)
        return await self.answered(run_id, request, putter, stored)

    async def answered(self, run_id: str, request: PutRequest, putter: Putter, stored: Stored) -> PutAnswer:
        """The answer, with what others have recorded since the worker last looked."""
        if stored.directive == "STOP" and stored.reason == "LEASE_LOST":
            await self.record_fenced(run_id, putter)
        news: Sequence[RunRecord] = ()
        if stored.directive == "CONTINUE" and stored.sequence_number > request.after_seq + len(request.puts):
            news = await self.load_news(run_id, request)
        result = None if stored.state is None else {"state": stored.state}
        directive = "CONTINUE" if stored.directive == "HOLD" else stored.directive
        return PutAnswer(directive, stored.sequence_number, stored.reason, list(news), result)

    async def load_news(self, run_id: str, request: PutRequest) -> list[RunRecord]:
        """What is recorded after what the worker has seen, and is not of its own making."""
        records = await self._ports.runs.load_records(run_id, after=request.after_seq, limit=RUN_PAGE_RECORDS_MAX)
        return [record for record in records if not is_of_worker(record.artifact, request.attempt)]

    async def _store(self, run_id: str, request: PutRequest, putter: Putter, *, holds: bool) -> Stored:
        async def decide(work: Work) -> Stored:
            missing, is_then_there = await self.not_yet_there(work, request)
            if is_then_there:
                return _as_it_stands(work.run, request)
            stop = putter.reason_to_stop(work.require())
            if stop is not None:
                return Stored("STOP", work.run.head.sequence_number, stop)
            if holds:  # what is stored; what this request puts is looked at when it is, in the next round
                await answer_due(self._ports, work, self._clock.now())
            for document in missing:
                await self.add_put(work, document)
            directive = self._add_then(work, request, holds=holds)
            state = work.run.head.state if directive in ("DONE", "SUSPENDED") else None
            due_ms = self._due_in_ms(work.run) if directive == "HOLD" else None
            return Stored(directive, work.run.head.sequence_number, None, state, due_ms)

        return await self._table.change(run_id, decide)

    async def not_yet_there(self, work: Work, request: PutRequest) -> tuple[list[RunDocument], bool]:
        """The documents of the puts that are not recorded, all or none; and whether what comes `then` is recorded."""
        made: list[RunDocument] = [document_of(put, work.run_id, request.attempt) for put in request.puts]
        if work.run.head.sequence_number <= request.after_seq:
            return made, False
        records = await self._ports.runs.load_records(work.run_id, after=request.after_seq, limit=RUN_PAGE_RECORDS_MAX)
        mine = [record.artifact for record in records if is_of_worker(record.artifact, request.attempt)]
        if len(mine) < len(made) or not all(is_same(*pair) for pair in zip(mine, made, strict=False)):
            return made, False
        return [], len(mine) > len(made) and _records(mine[len(made)], request.then)

    async def add_put(self, work: Work, document: RunDocument) -> None:
        if isinstance(document, RunIntent) and isinstance(document.request, AskRequest):
            self._ports.schemas.verify(document.request.answer_schema)
            told = document.request.told_to(self._ports.ask_webhooks)
            if document.request.callback is not None:
                self._ports.verify_callback(document.request.callback)
                told.append(CALLBACK)
            work.announce_to = list(dict.fromkeys([*work.announce_to, *told]))
        work.add(document)
        if isinstance(document, RunIntent) and document.kind == "signal":
            await self._receive(work, document)

    async def _receive(self, work: Work, intent: RunIntent) -> None:
        """A signal that is there already is received in the same commit."""
        signal = next((signal for signal in work.run.signals if signal.name == intent.name), None)
        if signal is not None:
            sent = await load_artifact(self._ports, work.run_id, signal.sequence_number, RunSignal)
            now = self._clock.now()
            work.add(answer_of(work.run, intent.path, by="signal", by_id=signal.signal_id, at=now, value=sent.value))

    def _add_then(self, work: Work, request: PutRequest, *, holds: bool) -> Directive:
        then, run, now = request.then, work.run, self._clock.now()
        if isinstance(then, ThenSuspend):
            for path in then.awaits:
                if run.frontier.has_never_begun(path):  # else it would be answered at once, again and again
                    at = run.head.sequence_number + 1
                    raise waits_for_nobody(path, None).at(stream=work.stream, sequence_number=at)
            open_paths = [path for path in then.awaits if path in run.frontier.begun]
            is_woken = len(open_paths) < len(then.awaits) if then.wake == "ANY" else not open_paths
            if is_woken:
                return "CONTINUE"
            if holds:
                return "HOLD"
            named = {"run_id": run.run_id, "attempt": request.attempt}
            work.add(RunSuspension.made_of({**named, "awaits": open_paths, "wake": then.wake}))
            return "SUSPENDED"
        by = f"attempt-{request.attempt}"
        if isinstance(then, ThenComplete):
            verify_given(then.output, "the output")
            work.end("COMPLETED", by="worker", by_id=by, at=now, output=then.output, positions=then.positions)
        elif isinstance(then, ThenDiverge):
            work.end("DIVERGED", by="worker", by_id=by, at=now, error=_said_of(then), divergence=then.divergence)
        elif isinstance(then, ThenFail):
            fail(work, then.error, by_id=by, clock=self._clock)
        elif isinstance(then, ThenRelease):
            not_before = None if then.not_before_ms is None else later(now, then.not_before_ms)
            work.end_attempt("RELEASED", at=now, reason=then.reason, not_before=not_before)
        else:
            return "CONTINUE"
        return "DONE"

    def _due_in_ms(self, run: Run) -> int | None:
        due = [begun.next_at for begun in run.frontier.begun.values() if begun.next_at is not None]
        return max(0, elapsed_ms(self._clock.now(), min(due))) if due else None

    async def _held(self, run_id: str, request: PutRequest, putter: Putter, then: ThenSuspend) -> Stored:
        """Wait a while for what the run would be suspended for: cheaper than a suspension and a lease if it comes."""
        ends_ms = self._clock.monotonic_ms() + then.wait_ms
        async with self._watchers.watching(run_id) as changed:
            while True:
                changed.clear()
                left_ms = ends_ms - self._clock.monotonic_ms()
                holds = left_ms > 0 and not self._ports.stopping.is_set()
                stored = await self._store(run_id, request, putter, holds=holds)
                if stored.directive != "HOLD":
                    return stored
                if stored.due_ms is not None:
                    left_ms = min(left_ms, stored.due_ms + 1)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(left_ms, 0) / 1000):
                        await first_of(changed, self._ports.stopping)

    async def record_fenced(self, run_id: str, putter: Putter) -> None:
        """A worker whose attempt is over has come back; told once for each attempt. Nothing rests on it."""
        self._ports.instruments.fences.add(("run",))

        async def decide(work: Work) -> None:
            run = work.run
            is_over = putter.attempt < run.attempt or (putter.attempt == run.attempt and run.head.state != "RUNNING")
            if run.head.state not in AT_WORK or not is_over or putter.attempt <= run.fenced:
                return
            work.end_attempt(
                "FENCED",
                at=self._clock.now(),
                attempt=putter.attempt,
                worker=WorkerName(principal_id=putter.principal.principal_id, name=putter.principal.principal_id),
                reason=f"the lease of attempt {putter.attempt} is over",
            )

        try:
            await self._table.change(run_id, decide)
        except TgaError:
            return  # the worker is told to stop in any case


def fail(work: Work, error: RunError, *, by_id: str, clock: Clock) -> None:
    """The program has failed: it is tried again later if its policy says so, else the run has FAILED."""
    retry, now = work.start.policy.retry, clock.now()
    if error.retryable and work.run.failures < retry.retries:
        pause_ms = min(retry.first_ms << min(work.run.failures, 30), retry.max_ms)
        not_before = later(now, int(pause_ms * (0.5 + clock.jitter() / 2)))
        work.end_attempt("FAILED", at=now, error=error, not_before=not_before)
    else:
        work.end("FAILED", by="worker", by_id=by_id, at=now, error=error)


async def answer_due(ports: RunPorts, work: Work, now: str) -> None:
    """Sleeps that are over, questions, waits and tool calls that have expired, and questions that others are to be told
    of."""
    for path, begun in list(work.run.frontier.begun.items()):
        if begun.next_at is None or begun.next_at > now or work.run.head.state not in AT_WORK:
            continue
        if begun.due_at is None or begun.due_at > now:
            await _escalate(ports, work, path, now)
            continue
        if begun.kind == "sleep":
            value = {"tier": "inline", "value": None}
            work.add(answer_of(work.run, path, by="timer", by_id="sleep", at=now, value=value))
            continue
        default = None
        if begun.kind == "ask":
            intent = await load_artifact(ports, work.run_id, begun.sequence_number, RunIntent)
            default = intent.request.default if isinstance(intent.request, AskRequest) else None
            # An execution checkpoint of an earlier version does not say it.
            work.run.frontier.begun[path] = begun._replace(has_default=default is not None)
        if default is not None:
            work.add(answer_of(work.run, path, by="timer", by_id="default", at=now, value=default))
        else:
            what = "the call was not over at" if begun.kind == "tool" else "nobody answered until"
            error = {"type": "TIMEOUT", "message": f"{what} {begun.due_at}", "retryable": False}
            work.add(answer_of(work.run, path, by="timer", by_id="expiry", at=now, error=error, outcome="TIMEOUT"))


async def _escalate(ports: RunPorts, work: Work, path: str, now: str) -> None:
    """Tell others of the question at this address, at each level whose time has come. One that is over by now is not
    escalated: nobody could answer it any more."""
    begun = work.run.frontier.begun[path]
    intent = await load_artifact(ports, work.run_id, begun.sequence_number, RunIntent)
    if not isinstance(intent.request, AskRequest):
        return
    for level in range(begun.level + 1, len(begun.escalates_at) + 1):
        if begun.escalates_at[level - 1] > now:
            return
        told = intent.request.told_to(ports.ask_webhooks, level=level)
        work.announce_to = list(dict.fromkeys([*work.announce_to, *told]))
        work.add(
            RunEscalation.made_of(
                {
                    "run_id": work.run_id,
                    "path": path,
                    "intent_digest": begun.intent_digest,
                    "level": level,
                    "announced_to": told,
                    "escalated_at": now,
                }
            )
        )


async def load_artifact(ports: RunPorts, run_id: str, sequence_number: int, kind: type[D]) -> D:
    """The document at this entry, which the frontier says is of this kind."""
    records = await ports.runs.load_records(run_id, after=sequence_number - 1, limit=1)
    found = records[0].artifact if records else None
    if not isinstance(found, kind):
        raise RecoveryFailed(
            f"entry {sequence_number} is not what the journal says",
            expected=kind.artifact_type,
            stream=RUN.stream(run_id),
        )
    return found


def _said_of(then: ThenDiverge) -> RunError:
    told = then.divergence
    message = f"at {told.path} the journal has {told.recorded}, the program performs {told.performed}"
    # The end of the run has both sides whole beside it: they may be as long as this message may be in all.
    return RunError(type=DIVERGED_ERROR, message=message[:TEXT_CHARS_MAX], retryable=False)


def _records(recorded: RunDocument | None, then: Then | None) -> bool:
    """Whether this document, the worker's next, is what came of `then`."""
    match then:
        case ThenSuspend():
            return isinstance(recorded, RunSuspension) and set(recorded.awaits) <= set(then.awaits)
        case ThenComplete():
            return isinstance(recorded, RunEnd) and recorded.outcome == "COMPLETED" and recorded.output == then.output
        case ThenDiverge():
            return isinstance(recorded, RunEnd) and recorded.divergence == then.divergence
        case ThenFail():
            return isinstance(recorded, RunEnd | RunAttempt) and recorded.error == then.error
        case ThenRelease():
            return isinstance(recorded, RunAttempt) and recorded.change == "RELEASED"
        case ThenTool() | ThenChild():
            performed = (then.type, then.path, then.try_number, then.input_digest)
            return isinstance(recorded, RunIntent) and performed == (
                *(recorded.kind, recorded.path, recorded.try_number, recorded.input_digest),
            )
        case _:
            return False


def _as_it_stands(run: Run, request: PutRequest) -> Stored:
    """The answer to a request whose last part is recorded already."""
    state = run.head.state
    if isinstance(request.then, ThenSuspend):
        return Stored("SUSPENDED", run.head.sequence_number, None, state)
    return Stored("DONE", run.head.sequence_number, None, state)
