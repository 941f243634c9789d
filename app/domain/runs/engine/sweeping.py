"""What is due: timers, lost workers, deadlines, children and parents that were not told. Level-triggered: whatever a
crash has left undone is found again by looking at where the run stands.

| run | done |
|---|---|
| RUNNING: its worker is lost, or silent | LOST, and PARKED after too many in a row |
| SCHEDULED, RUNNING, WAITING: its time is over | FAILED, RUN_TIMED_OUT |
| WAITING, RUNNING: a sleep is over, a question, a wait for a signal or a tool call has expired | its answer |
| SCHEDULED, RUNNING, WAITING: nobody has answered a question by its time | others are told (an escalation) |
| WAITING for a tool or a child that has ended | its answer |
| ended: its parent was not told, its children were not | they are told |
| COMPLETED, to be deleted | its payloads are erased |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from app.core.errors import (
    ChecksumMismatch,
    InvalidTransition,
    RecoveryFailed,
    RunErased,
    RunNotFound,
    SchemaViolation,
    SequenceGap,
    TgaError,
    TraceNotFound,
)
from app.core.limits import RUN_SWEEP_RUNS_MAX
from app.domain.runs.documents import RunEnd, RunError, RunIntent
from app.domain.runs.engine.artifacts import answer_of
from app.domain.runs.engine.calling import add_answer
from app.domain.runs.engine.losing import lose
from app.domain.runs.engine.ports import DueRun, LoadedRun, RunPorts
from app.domain.runs.engine.putting import answer_due, load_artifact
from app.domain.runs.engine.table import RunTable
from app.domain.runs.engine.work import Work
from app.domain.runs.ids import elapsed_ms, later
from app.domain.runs.requests import ChildRequest, ToolRequest
from app.domain.runs.schedule import AT_WORK, running_due_at, schedule_of
from app.domain.runs.transitions import RUN
from app.domain.tga.execution import Answer

logger = logging.getLogger("tga")


# Looking again soon would not help.
UNSOUND: Final = (ChecksumMismatch, SequenceGap, InvalidTransition, RecoveryFailed, SchemaViolation)
AGAIN_MS: Final = 3_600_000


class EndedTraces(Protocol):
    async def load_answer(self, trace_id: str) -> Answer:
        """What is recorded of the trace; TraceNotFound."""
        ...


class Sweeping:
    def __init__(
        self,
        ports: RunPorts,
        table: RunTable,
        traces: EndedTraces,
        *,
        cancel: Callable[[str, str], Awaitable[Any]],
        erase: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        self._ports = ports
        self._clock = ports.clock
        self._table = table
        self._traces = traces
        self._cancel = cancel
        self._erase = erase

    async def sweep(self, *, judges_workers: bool) -> int | None:
        """Do what is due; milliseconds until the next is, None when nothing will be by itself."""
        silent_ms = self._ports.lease_ms if judges_workers else None
        due = await self._ports.runs.hold_due(limit=RUN_SWEEP_RUNS_MAX, worker_silent_ms=silent_ms)
        results = await asyncio.gather(*(self._do(one) for one in due.runs), return_exceptions=True)
        for one, result in zip(due.runs, results, strict=True):
            if isinstance(result, TgaError):
                logger.info("run %s is due, and waits: %s", one.run_id, result)
            elif isinstance(result, BaseException):
                raise result
        return 0 if len(due.runs) >= RUN_SWEEP_RUNS_MAX else due.next_ms

    async def _do(self, due: DueRun) -> None:
        self._table.forget(due.run_id)
        try:
            loaded = await self._table.peek(due.run_id)
        except RunErased:
            await self._ports.runs.move_due(due.run_id, held_until=due.held_until, due_at=None)
            return
        except UNSOUND as error:
            logger.warning("run %s cannot be read, and waits for somebody to look at it: %s", due.run_id, error)
            later_on = later(due.now, AGAIN_MS)
            await self._ports.runs.move_due(due.run_id, held_until=due.held_until, due_at=later_on)
            return
        state = loaded.run.head.state
        if state == "WAITING":
            await self.answer_ended(due.run_id)
        if state in AT_WORK:
            await self._table.change(due.run_id, lambda work: self._decide(work, due))
        else:
            await self.tell_relatives(loaded)
        # Whatever was appended has written the row anew, with what is due next; this one moves only a row that stands.
        due_at = self._due_again(await self._table.peek(due.run_id), due.now)
        if state == "COMPLETED" and loaded.start.policy.retention == "delete_on_success" and self._erase:
            try:
                await self._erase(due.run_id)
            except TgaError as error:  # an open run refers to it, or the store is away
                logger.info("run %s is kept for now: %s", due.run_id, error)
                due_at = later(due.now, AGAIN_MS)
            self._table.forget(due.run_id)
        await self._ports.runs.move_due(due.run_id, held_until=due.held_until, due_at=due_at)

    def _due_again(self, loaded: LoadedRun, now: str) -> str | None:
        state = loaded.run.head.state
        if state not in AT_WORK:
            return None
        if state == "RUNNING":
            return running_due_at(loaded.run, loaded.start, heard_at=loaded.run.updated_at)
        return schedule_of(loaded.run, loaded.start, worker=loaded.worker, now=now).due_at

    async def _decide(self, work: Work, due: DueRun) -> None:
        """What its state calls for now. By the store's clock it is due: a gateway whose own clock is behind must not
        leave it, or it would be held and left again and again, and take the place of others."""
        run, policy, now = work.run, work.start.policy, max(self._clock.now(), due.now)
        if policy.timeout_ms is not None and later(run.started_at, policy.timeout_ms) <= now:
            error = RunError(
                type="RUN_TIMED_OUT", message=f"it took longer than {policy.timeout_ms} ms", retryable=False
            )
            work.end("FAILED", by="time", by_id="deadline", at=now, error=error)
            return
        if run.head.state == "RUNNING":
            silence = policy.checkpoint_timeout_ms
            calls_a_tool = any(begun.kind == "tool" for begun in run.frontier.begun.values())
            if due.lost_attempt == run.attempt or work.require().worker is None:
                lose(work, "its worker was not heard of", now=now, clock=self._clock)
            elif silence is not None and elapsed_ms(run.updated_at, now) >= silence and not calls_a_tool:
                lose(work, f"no checkpoint came for {silence} ms", now=now, clock=self._clock)
        await answer_due(self._ports, work, now)

    async def answer_ended(self, run_id: str) -> None:
        """Tools and children that a waiting run awaits, and that have ended without its being told."""
        loaded = await self._table.peek(run_id)
        for path in list(loaded.run.awaits):
            begun = loaded.run.frontier.begun.get(path)
            if begun is None or begun.kind not in ("tool", "child"):
                continue
            intent = await load_artifact(self._ports, run_id, begun.sequence_number, RunIntent)
            if isinstance(intent.request, ToolRequest):
                try:
                    answer = await self._traces.load_answer(intent.request.trace_id)
                except TraceNotFound:
                    continue
                if answer.is_final:
                    await self._table.change(run_id, _answering(path, answer, self._ports))
            elif isinstance(intent.request, ChildRequest) and intent.request.child_run_id is not None:
                try:
                    child = await self._ports.runs.load(intent.request.child_run_id)
                except RunNotFound:
                    continue
                await self.tell_parent(child)

    async def tell_relatives(self, ended: LoadedRun) -> None:
        """A run has ended: its parent has its answer, its children have nobody who waits for them."""
        await self.tell_parent(ended)
        if ended.run.head.state in RUN.terminal_states:
            for child_id in await self._ports.runs.list_children(ended.run_id):
                child = await self._ports.runs.load(child_id)
                if child.start.policy.on_parent_end == "cancel":
                    await self._cancel(child_id, ended.run_id)

    async def tell_parent(self, child: LoadedRun) -> None:
        parent = child.start.parent
        state = child.run.head.state
        if parent is None or state not in ("COMPLETED", "FAILED", "CANCELLED"):
            return
        records = await self._ports.runs.load_records(child.run_id, after=child.run.head.sequence_number - 1, limit=1)
        end = records[0].artifact if records else None
        error = None
        if state != "COMPLETED":
            told = end.error if isinstance(end, RunEnd) and end.error is not None else None
            error = {
                "type": told.type if told else f"RUN_{state}",
                "message": told.message if told else f"the child is {state}",
                "retryable": False,
            }
        # A child that failed may be retried, and goes on after this entry: the parent keeps what it was told.
        value = None
        if state in RUN.terminal_states:
            value = {"tier": "run", "run_id": child.run_id, "entry_digest": child.run.head.entry_digest}

        async def decide(work: Work) -> None:
            begun = work.run.frontier.begun.get(parent.path)
            if begun is None or begun.kind != "child":
                return
            if begun.intent_digest != parent.intent_digest:
                # The operation around was tried again, and may have taken it up under another intent.
                intent = await load_artifact(self._ports, work.run_id, begun.sequence_number, RunIntent)
                if not isinstance(intent.request, ChildRequest) or intent.request.child_run_id != child.run_id:
                    return
            if work.run.head.state not in RUN.terminal_states:
                now = self._clock.now()
                work.add(
                    answer_of(work.run, parent.path, by="child", by_id=child.run_id, at=now, value=value, error=error)
                )

        try:
            await self._table.change(parent.run_id, decide)
        except RunNotFound:
            return


def _answering(path: str, answer: Answer, ports: RunPorts) -> Callable[[Work], Awaitable[None]]:
    async def decide(work: Work) -> None:
        await add_answer(work, path, answer, ports)

    return decide
