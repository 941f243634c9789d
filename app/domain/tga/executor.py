"""The loop over the table from state to action, for one trace at a time. Recovery is this loop, entered in the middle.

What is done depends on the state alone (a Moore machine). Steps that need nothing from outside are collected into one
plan, and the plan is committed before the world is touched: an allowed call is two transactions, one before dispatch
and one after.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar

from app.core.canonical import canonical_bytes
from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import (
    ConcurrentExecution,
    LockAcquireFailed,
    OutcomeUnknown,
    RecoveryFailed,
    SecretMissing,
    SequenceGap,
    StoreBusy,
    StoreUnavailable,
    ToolNotFound,
    TraceNotFound,
)
from app.core.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS, OWNERSHIP_BELIEVED_MS
from app.domain.ledger.documents import Signature
from app.domain.ledger.plans import Plan, PlannedCheckpoint, PlannedEntry, Sealed
from app.domain.policy.question import Verdict
from app.domain.tga.attempts import (
    Attempts,
    effect_of_answer,
    effect_of_exhaustion,
    effect_of_reconciliation,
)
from app.domain.tga.checkpoints import is_checkpoint_due
from app.domain.tga.documents import (
    ActionRequest,
    ArtifactDocument,
    DecidedBy,
    ExecutionLogEntry,
    ExecutionState,
    Resolution,
    SupervisorDecision,
    ToolCall,
    ToolEffect,
    TraceId,
)
from app.domain.tga.idempotency import claim_at_birth
from app.domain.tga.ports import Answered, Dispatched, Ports, StoredTrace, Waiting, Withheld
from app.domain.tga.replay import ACTION_OF_STATE, LogRecord, decide_next, fold_next, head_of, plan_next
from app.domain.tga.secrets import find_commitments, reveal
from app.domain.tga.transitions import TRACE, State
from app.domain.tools import Tool

_T = TypeVar("_T")
BY_POLICY: Final = DecidedBy(type="policy", id="policy")
_UNBORN: Final = Head.unborn(TRACE)
NO_ANSWER: Final = (OutcomeUnknown, StoreUnavailable, LockAcquireFailed)


class Answer(NamedTuple):
    """Where a trace stands. `effect` is there when it is COMPLETED or FAILED, `decision` once it was decided on."""

    trace_id: TraceId
    state: State
    tool_call_id: str | None
    decision: SupervisorDecision | None
    effect: ToolEffect | None
    waiting: Waiting | None = None
    replayed: bool = False

    @property
    def is_final(self) -> bool:
        return self.state in TRACE.terminal_states


@dataclass(slots=True)
class TraceExecution:
    """A trace being executed by this process: where it stands, and what is collected but not yet committed."""

    trace_id: TraceId
    executor_id: str
    request: ActionRequest
    head: Head = _UNBORN  # after `pending`
    updated_at: str = ""  # when the head was recorded
    stored: ExecutionState | None = None  # as it was loaded
    decision: SupervisorDecision | None = None
    call: ToolCall | None = None
    effect: ToolEffect | None = None
    claim_effect: Digest | None = None
    waiting: Waiting | None = None
    pending: list[PlannedEntry] = field(default_factory=list)
    pending_after: Head = _UNBORN
    attempts: Attempts = field(default_factory=Attempts)
    redispatch: Resolution | None = None
    must_ask: bool = False
    is_unsettled: bool = False
    sealed: Sealed | None = None  # secrets that come with the birth
    has_secrets: bool = False
    true_arguments: dict[str, Any] | None = None  # with secret values; in memory only
    committed: Answer | None = None  # what may be told to others: `state` runs ahead of the store
    proven_at_ms: float = -math.inf  # when the store was asked for what last proved that the trace is ours

    @classmethod
    def of(cls, stored: StoredTrace, executor_id: str) -> TraceExecution:
        state = stored.state
        execution = cls(
            TraceId(state.trace_id), executor_id, request_of(stored), head_of(state), state.updated_at, state
        )
        execution.pending_after = execution.head
        for record in stored.records:
            execution.keep(record.artifact)
        execution.claim_effect = stored.claim_effect
        execution.waiting = stored.waiting
        execution.has_secrets = stored.has_secrets
        if execution.call is not None:
            # Whatever was begun before is interrupted: nobody knows how it ended.
            execution.attempts = Attempts.interrupted(
                execution.call.prepared_at, stored.attempt_times, stored.resolution
            )
        execution.committed = execution.answer()
        return execution

    @property
    def state(self) -> ExecutionState | None:
        """The log, folded, of the documents at hand; None before the first of them is appended."""
        if self.head.sequence_number == 0:
            return None
        return ExecutionState.of_documents(
            self.head, self.updated_at, self.request, self.decision, self.call, self.effect
        )

    def begin_anew(self) -> None:
        """A person, or time, has ended the wait. Until that is durable there is nothing that may be told."""
        self.waiting = self.committed = None

    def keep(self, artifact: ArtifactDocument | None) -> None:
        # isinstance would ask pydantic's metaclass, in Python, each time that it is something else.
        if type(artifact) is SupervisorDecision:
            self.decision = artifact
        elif type(artifact) is ToolCall:
            self.call = artifact
        elif type(artifact) is ToolEffect:
            self.effect = artifact

    def is_continued_by(self, artifact: ArtifactDocument) -> bool:
        """I3: whether it is about this very trace, and about the call that was asked for."""
        if artifact.trace_id != self.trace_id:
            return False
        if type(artifact) is ToolCall:
            return artifact.carries_out(self.request)
        if type(artifact) is ToolEffect:
            return self.call is not None and artifact.tool_call_id == self.call.tool_call_id
        return True

    def answer(self, *, replayed: bool = False) -> Answer:
        call = self.call
        return Answer(
            self.trace_id,
            self.head.state,  # type: ignore[arg-type]  # a trace's
            None if call is None else call.tool_call_id,
            self.decision,
            self.effect,
            self.waiting,
            replayed,
        )


class TraceExecutor:
    """Executes one trace from where it stands to where it rests: finished, or waiting for a person.

    The intent is durable before anything is sent; what is not known is sent again only with the same ids, and after a
    committed attempt row; a recorded effect is never sent again.
    """

    def __init__(self, ports: Ports) -> None:
        self._ledger = ports.ledger
        self._traces = ports.traces
        self._tools = ports.tools
        self._connectors = ports.connectors
        self._supervisor = ports.supervisor
        self._pins = ports.pins
        self._vault = ports.vault
        self._approval_webhooks = ports.approval_webhooks
        self._clock = ports.clock
        steps: dict[str, Callable[[TraceExecution], Awaitable[Answer | None]]] = {
            "ask_supervisor": self._ask_supervisor,
            "append_tool_call": self._append_tool_call,
            "dispatch": self._dispatch,
            "return_result": self._return_result,
        }
        self._step_of_state = {state: steps[action] for state, action in ACTION_OF_STATE.items()}

    async def run(self, execution: TraceExecution) -> Answer:
        if execution.stored is not None:
            decide_next(execution.stored, claim_effect=execution.claim_effect)  # raises where claim and log disagree
        while True:
            answer = await self._step_of_state[execution.head.state](execution)  # type: ignore[index]  # a trace's
            if answer is not None:
                return answer

    async def _ask_supervisor(self, execution: TraceExecution) -> Answer | None:
        if execution.waiting == "supervisor":
            await self.give_back(execution.trace_id, execution.executor_id)
            return execution.answer()
        if await self.judge(execution, self.tool_of(execution)) != "ask":
            return None
        execution.waiting = "supervisor"
        # It waits owned by nobody, holding no lock, connection or memory.
        await self._commit(execution, owner_after=None, announce_to=self._approval_webhooks)
        return execution.answer()

    async def _append_tool_call(self, execution: TraceExecution) -> Answer | None:
        tool = self.tool_of(execution)
        await self._verify_as_decided(execution, tool)
        call = ToolCall.carrying_out(
            execution.request,
            tool_call_id=self._clock.new_id(),
            supervisor_decision_digest=known(execution.decision).digest(),
            tool_definition_digest=tool.definition_digest,
            on_unknown_outcome=tool.on_unknown_outcome,
            reconcile_tool=tool.reconcile_tool,
            prepared_at=self._clock.now(),
        )
        self.advance(execution, call)
        return None

    async def _verify_as_decided(self, execution: TraceExecution, tool: Tool) -> None:
        """Before it runs: the tool is the one that was decided on, and what was decided long ago is still allowed."""
        decided_on = execution.request.tool_definition_digest
        if decided_on not in (None, tool.definition_digest):
            raise RecoveryFailed(
                "the tool has changed since the call was decided on", expected=decided_on, found=tool.definition_digest
            )
        if not execution.pending:  # it was decided in an earlier life
            await self._pins.verify(tool)
            if (await self._supervisor.judge(execution.request, tool)).answer == "deny":
                raise RecoveryFailed("the policy no longer allows the call that was decided on")

    async def _dispatch(self, execution: TraceExecution) -> Answer | None:
        """Send the call until its outcome is known or its attempts are used up; append what became of it."""
        tool, call = self.tool_of(execution), known(execution.call)
        if execution.pending:
            await self._arguments_to_send(execution, tool)  # what cannot be sent is not said to be under way
            # I7: from here the intent is durable. A crash before the effect is appended leaves the outcome unknown;
            # the loop re-dispatches with the same ids (I3).
            await self._commit(execution, owner_after=execution.executor_id)
        while True:
            effect: ToolEffect | None = None
            if execution.attempts.may_have_been_sent and execution.redispatch is None:
                if call.on_unknown_outcome == "hold":
                    execution.waiting = "operator"
                    await self._commit(execution, owner_after=None)
                    return execution.answer()
                if call.on_unknown_outcome == "reconcile":
                    effect = await self._reconcile(execution, tool)
            is_over = execution.attempts.is_cancelled or execution.attempts.count >= tool.max_attempts
            if effect is None and is_over and execution.redispatch is None:
                effect = effect_of_exhaustion(call, execution.attempts, self._clock.now())
            if effect is None:
                effect = await self._attempt(execution, tool)
            if effect is not None:
                self.advance(execution, effect)
                return None

    async def _return_result(self, execution: TraceExecution) -> Answer:
        if execution.pending:
            await self._commit(execution, owner_after=None)
        else:
            await self.give_back(execution.trace_id, execution.executor_id)
        return known(execution.committed)

    async def _attempt(self, execution: TraceExecution, tool: Tool) -> ToolEffect | None:
        """One send. Every one after the first is preceded by its own committed row: the fence, and the count."""
        call, attempts = known(execution.call), execution.attempts
        arguments = await self._arguments_to_send(execution, tool)  # first: what is not sent must not use up an attempt
        if attempts.sent_by_this_process > 0:
            await self._clock.sleep(self._backoff_s(attempts, tool))
        async with self._connectors.place(call.server_id) as connector:
            if attempts.count > 0:
                await self._commit(execution, owner_after=execution.executor_id, attempt=attempts.count + 1)
            if execution.redispatch is not None:
                attempts.resolution, execution.redispatch = execution.redispatch, None
            result: Dispatched = Withheld()
            while isinstance(result, Withheld):
                await self._verify_ownership(execution)
                attempts.begin(self._clock.now())
                # I3: the recorded call itself, with the ids that every attempt carries.
                result = await connector.dispatch(
                    call,
                    timeout_ms=tool.timeout_ms,
                    traceparent=execution.request.traceparent,
                    arguments=arguments,
                    # I6: waiting for a place, a name or a connection may have been long.
                    may_send=lambda: self._is_still_ours(execution),
                )
        attempts.end(self._clock.now(), result)
        if isinstance(result, Answered):
            return effect_of_answer(call, result, attempts, self._clock.now())
        return None

    async def _arguments_to_send(self, execution: TraceExecution, tool: Tool) -> dict[str, Any] | None:
        """The arguments with their secret values; None when the recorded ones are all there is."""
        if not execution.has_secrets and not tool.secret_arguments:
            return execution.true_arguments
        recorded = known(execution.call).arguments
        if execution.true_arguments is None and execution.has_secrets:
            salt, values = await self._vault.load_secrets(execution.trace_id)
            if set(values) != set(salt.pointers):
                raise SecretMissing("not all secret values are there", stream=TRACE.stream(execution.trace_id))
            execution.true_arguments = reveal(recorded, values, salt=salt.salt)
        if execution.true_arguments is None and find_commitments(recorded, tool.secret_arguments):
            raise SecretMissing("the call's secret values are gone", stream=TRACE.stream(execution.trace_id))
        return execution.true_arguments

    async def is_unsendable(self, execution: TraceExecution) -> bool:
        """Whether the call is under way and cannot be sent again by anyone: its tool or its secret values are gone."""
        if execution.head.state != "EXECUTING":
            return False
        try:
            await self._arguments_to_send(execution, self.tool_of(execution))
        except (SecretMissing, RecoveryFailed):
            return True
        return False

    async def _reconcile(self, execution: TraceExecution, tool: Tool) -> ToolEffect | None:
        """Ask the named read tool whether the key was executed; None when it was not. Asking changes nothing, so it
        may be repeated; when nobody can say, the outcome stays unknown."""
        call = known(execution.call)
        reader = self._known_tool(call.server_id, known(call.reconcile_tool))
        # Without the key in its own place: a server that remembers answers by key must not remember this one's.
        question = call.model_copy(
            update={
                "tool_name": reader.tool_name,
                "tool_class": "read",
                "arguments": {"idempotency_key": call.key_at_server},
                "idempotency_key": None,
            }
        )
        for asked in range(tool.max_attempts):
            if asked:
                await self._clock.sleep(self._backoff_s(execution.attempts, tool, exponent=asked))
            async with self._connectors.place(call.server_id) as connector:
                result = await connector.dispatch(question, timeout_ms=reader.timeout_ms)
            if isinstance(result, Answered) and result.outcome == "SUCCESS":
                said = getattr(result.output, "value", None)
                if isinstance(said, dict) and isinstance(said.get("executed"), bool):
                    if not said["executed"]:
                        execution.attempts.note_not_executed()
                        return None
                    return effect_of_reconciliation(call, said.get("output"), execution.attempts, self._clock.now())
        return effect_of_exhaustion(call, execution.attempts, self._clock.now())

    def advance(self, execution: TraceExecution, artifact: ArtifactDocument) -> None:
        now = self._clock.now()
        planned, head, is_admitted = plan_next(
            execution.head, artifact, identity=execution.trace_id, executor_id=execution.executor_id, recorded_at=now
        )
        if not is_admitted or not execution.is_continued_by(artifact):
            # The judge of replay names what is wrong, and raises.
            fold_next(execution.state, LogRecord(ExecutionLogEntry.from_body_bytes(planned.entry), artifact))
        execution.head, execution.updated_at = head, now
        execution.pending.append(planned)
        execution.keep(artifact)

    async def _commit(
        self,
        execution: TraceExecution,
        *,
        owner_after: str | None,
        attempt: int | None = None,
        announce_to: Sequence[str] = (),
    ) -> None:
        """Commit what is collected, in one transaction; an unknown commit is settled before anything else happens."""
        state, entries = execution.head.state, execution.pending
        is_birth = execution.pending_after.sequence_number == 0
        checkpoint = None
        if entries and is_checkpoint_due(state):
            checkpoint = PlannedCheckpoint(known(execution.state).write(), self._clock.now())
        plan = Plan(
            stream=TRACE.stream(execution.trace_id),
            executor_id=execution.executor_id,
            owner_after=owner_after,
            waiting_after=execution.waiting,
            entries=entries,
            claim=claim_at_birth(execution.request, state) if is_birth else None,
            checkpoint=checkpoint,
            dispatch_attempt=attempt,
            resolution=None if execution.redispatch is None else canonical_bytes(execution.redispatch.to_json()),
            # A call that is denied at once needs its secrets no more.
            sealed=None if state == "DENIED" else execution.sealed,
            forgets_secrets=execution.has_secrets and state in TRACE.terminal_states,
            announce_to=announce_to,
        )
        delay_ms = BACKOFF_FIRST_MS
        while True:
            execution.proven_at_ms = self._clock.monotonic_ms()
            try:
                await self._ledger.commit(plan)
                break
            except (OutcomeUnknown, SequenceGap) as error:
                if isinstance(error, SequenceGap) and is_birth and not execution.is_unsettled:
                    # Somebody else's trace has this id. It is not touched, not even to look whose.
                    raise ConcurrentExecution("a trace with this id exists") from None
                # A gap means that the head has moved: by a commit of ours that was thought lost, or by another.
                execution.is_unsettled = True
                if await self._settle(execution, attempt=attempt):
                    if owner_after is None:
                        await self.give_back(
                            execution.trace_id, execution.executor_id
                        )  # settling has made it ours again
                    break
                plan = _as_executor(plan, execution.executor_id)
            except (StoreBusy, StoreUnavailable, LockAcquireFailed):
                # Nothing was stored. A fresh call is refused; a call that was made must get its effect recorded.
                if is_birth:
                    raise
                execution.is_unsettled = True
                await self._clock.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, BACKOFF_MAX_MS)
        execution.is_unsettled = False
        execution.has_secrets |= plan.sealed is not None
        execution.sealed = None
        execution.pending, execution.pending_after = [], execution.head
        execution.committed = execution.answer()

    async def _settle(self, execution: TraceExecution, *, attempt: int | None) -> bool:
        """Whether the unknown commit happened. The stream's lock is taken first: then it is no longer happening.

        ConcurrentExecution when another executor has continued the trace in the meantime.
        """
        before = execution.pending_after.entry_digest
        delay_ms = BACKOFF_FIRST_MS
        while True:
            try:
                stored = await self._acquire_again(execution)
            except TraceNotFound:
                return False
            except NO_ANSWER:
                await self._clock.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, BACKOFF_MAX_MS)
                continue
            if execution.pending and stored.state.entry_digest == execution.head.entry_digest:
                return True
            attempts_found = len(stored.attempt_times) + 1
            if stored.state.entry_digest != before or (attempt is not None and attempts_found > attempt):
                await self._yield_to_another(execution)
            # Without entries and attempt it says only who waits for whom, which may be said again.
            return attempts_found == attempt

    async def _verify_ownership(self, execution: TraceExecution) -> None:
        """No dispatch under an executor id that is dead: first a new one, and the trace again, as it was left.

        While the id was dead another executor may have continued the trace, to its end even: then nothing is sent here.
        """
        delay_ms = BACKOFF_FIRST_MS
        while True:
            try:
                if self._traces.executor_id() == execution.executor_id:
                    return
                stored = await self._acquire_again(execution)
            except NO_ANSWER:
                await self._clock.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, BACKOFF_MAX_MS)
                continue
            found = (stored.state.entry_digest, len(stored.attempt_times), stored.waiting)
            if found != (execution.head.entry_digest, execution.attempts.count, None):
                await self._yield_to_another(execution)

    async def _is_still_ours(self, execution: TraceExecution) -> bool:
        """Whether this executor still owns the trace, asked when the next thing is the first byte to the tool server.

        Costs no question while the commit before it was asked for a moment ago. After a slow commit, a long wait for a
        connection, or when this process was stopped meanwhile, another executor may have taken over: ask the store. An
        answer that comes late is as old as its question, so ask again, but believe the next one twice as long: a store
        that is always slow must not keep the call from being sent. What remains possible: docs/operations.md.
        """
        asks = 0
        while self._is_executor(execution.executor_id):
            now_ms = self._clock.monotonic_ms()
            if now_ms - execution.proven_at_ms <= OWNERSHIP_BELIEVED_MS << max(0, asks - 1):
                return True
            if not await self._traces.is_alive(execution.executor_id):
                return False
            execution.proven_at_ms, asks = now_ms, asks + 1
        return False

    def _is_executor(self, executor_id: str) -> bool:
        try:
            return self._traces.executor_id() == executor_id
        except StoreUnavailable:
            return False

    async def _acquire_again(self, execution: TraceExecution) -> StoredTrace:
        execution.proven_at_ms = self._clock.monotonic_ms()
        execution.executor_id = await self._traces.acquire(execution.trace_id)
        return await self._traces.load_trace(execution.trace_id)

    async def _yield_to_another(self, execution: TraceExecution) -> NoReturn:
        await self.give_back(execution.trace_id, execution.executor_id)
        raise ConcurrentExecution("another executor has continued the trace", stream=TRACE.stream(execution.trace_id))

    async def judge(self, execution: TraceExecution, tool: Tool) -> Literal["allow", "deny", "ask"]:
        if execution.must_ask:
            return "ask"
        verdict = await self._supervisor.judge(execution.request, tool)
        execution.must_ask = verdict.answer == "ask"
        if verdict.answer != "ask":
            decided: Literal["APPROVE", "DENY"] = "APPROVE" if verdict.answer == "allow" else "DENY"
            self.advance(execution, self.decision(execution, decided, BY_POLICY, verdict, rationale=verdict.rationale))
        return verdict.answer

    def decision(
        self,
        execution: TraceExecution,
        decision: Literal["APPROVE", "DENY"],
        decided_by: DecidedBy,
        verdict: Verdict | None,
        *,
        rationale: str | None,
        decided_at: str | None = None,
        signature: Signature | None = None,
    ) -> SupervisorDecision:
        """The decision, with the policy that was asked about it."""
        # What a person has written is validated; all else is the gateway's own.
        make = SupervisorDecision.of_known if rationale is None and signature is None else SupervisorDecision.made_of
        return make(
            {
                "trace_id": execution.trace_id,
                "action_request_digest": execution.request.digest(),
                "decision": decision,
                "decided_by": decided_by,
                "decided_at": decided_at or self._clock.now(),
                "policy_digest": None if verdict is None else verdict.policy_digest,
                "policy_ids": [] if verdict is None else list(verdict.policy_ids),
                "rationale": rationale,
                "signature": signature,
            }
        )

    def tool_of(self, execution: TraceExecution) -> Tool:
        return self._known_tool(execution.request.server_id, execution.request.tool_name)

    def _known_tool(self, server_id: str, tool_name: str) -> Tool:
        try:
            return self._tools.resolve(server_id, tool_name)
        except ToolNotFound as error:
            raise RecoveryFailed(
                "the trace's tool is gone", expected=error.expected, found=error.found or error.what
            ) from None

    def _backoff_s(self, attempts: Attempts, tool: Tool, *, exponent: int | None = None) -> float:
        """Exponential, with jitter over half of it; a server that says when to come back is asked then.

        While the tool may still be at work, asking in haste would use up the attempts before it is done: they are
        spread over one more of its time-outs.
        """
        step = attempts.sent_by_this_process if exponent is None else exponent
        delay_ms = min(BACKOFF_FIRST_MS << min(step, 16), BACKOFF_MAX_MS) * (0.5 + self._clock.jitter() / 2)
        if attempts.may_still_run:
            delay_ms = max(delay_ms, tool.timeout_ms / max(1, tool.max_attempts - 1))
        return max(delay_ms, attempts.retry_after_ms or 0) / 1000

    async def give_back(self, trace_id: TraceId, executor_id: str) -> None:
        # If the store does not answer it stays ours until this process ends, and then it is free.
        with contextlib.suppress(*NO_ANSWER):
            await self._traces.release(trace_id, executor_id)


def known(value: _T | None) -> _T:
    """What the state promises to be there; a stored trace that breaks the promise cannot go on."""
    if value is None:
        raise RecoveryFailed("the trace lacks what its state says it has")
    return value


def request_of(stored: StoredTrace) -> ActionRequest:
    request = stored.records[0].artifact if stored.records else None
    if not isinstance(request, ActionRequest):
        raise RecoveryFailed("the trace's request is missing", stream=TRACE.stream(stored.state.trace_id))
    return request


def _as_executor(plan: Plan, executor_id: str) -> Plan:
    """The same plan under a new executor id: the old one's session was lost."""
    owner_after = executor_id if plan.owner_after is not None else None
    return plan._replace(executor_id=executor_id, owner_after=owner_after)
