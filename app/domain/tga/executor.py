"""The loop over the table from state to action, for one trace at a time. Recovery is this loop, entered in the middle.

What is done depends on the state alone (a Moore machine). Steps that need nothing from outside are collected into one
plan, and the plan is committed before the world is touched: an allowed call is two transactions, one before dispatch
and one after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Literal

from app.core.canonical import canonical_bytes
from app.core.chain import Head
from app.core.errors import ConcurrentExecution, RecoveryFailed, SecretMissing, ToolNotFound, TraceNotFound
from app.core.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS
from app.domain.ledger.documents import Signature
from app.domain.ledger.owned_stream import UNBORN, OwnedStream, Position, StreamPorts
from app.domain.ledger.plans import Plan
from app.domain.policy.question import Verdict
from app.domain.tga.attempts import (
    Attempts,
    Refusals,
    effect_of_answer,
    effect_of_exhaustion,
    effect_of_reconciliation,
)
from app.domain.tga.documents import (
    ActionRequest,
    ArtifactDocument,
    DecidedBy,
    ExecutionLogEntry,
    SupervisorDecision,
    ToolCall,
    ToolEffect,
    TraceId,
)
from app.domain.tga.execution import Answer, TraceExecution, answer_of, known, position_of
from app.domain.tga.idempotency import claim_at_birth
from app.domain.tga.ports import Answered, Companion, Dispatched, NotSent, Ports, Withheld
from app.domain.tga.replay import ACTION_OF_STATE, LogRecord, decide_next, fold_next, plan_next
from app.domain.tga.secrets import find_commitments, reveal
from app.domain.tga.transitions import TRACE
from app.domain.tools import Tool

BY_POLICY: Final = DecidedBy(type="policy", id="policy")
_HEAD_AT_BIRTH: Final = Head.unborn(TRACE)


class TraceExecutor:
    """Executes one trace from where it stands to where it rests: finished, or waiting for a person.

    The intent is durable before anything is sent; what is not known is sent again only with the same ids, and after a
    committed attempt row; a recorded effect is never sent again.
    """

    def __init__(self, ports: Ports) -> None:
        self._traces = ports.traces
        self._tools = ports.tools
        self._connectors = ports.connectors
        self._supervisor = ports.supervisor
        self._pins = ports.pins
        self._vault = ports.vault
        self._approval_webhooks = ports.approval_webhooks
        self._companion_of = ports.companion_of
        self._clock = ports.clock
        self._observer = ports.observer
        self.stream_ports = StreamPorts(TRACE, ports.ledger, ports.traces, ports.clock, self._load_position)
        steps: dict[str, Callable[[TraceExecution], Awaitable[Answer | None]]] = {
            "ask_supervisor": self._ask_supervisor,
            "append_tool_call": self._append_tool_call,
            "dispatch": self._dispatch,
            "return_result": self._return_result,
        }
        self._step_of_state = {state: steps[action] for state, action in ACTION_OF_STATE.items()}

    def begin(self, request: ActionRequest, *, executor_id: str, companion: Companion | None = None) -> TraceExecution:
        """A trace that begins with this request; nothing of it is stored before its first commit."""
        owned = OwnedStream(self.stream_ports, request.trace_id, executor_id=executor_id, head=_HEAD_AT_BIRTH)
        execution = TraceExecution(TraceId(request.trace_id), request, owned=owned, companion=companion)
        self._mark(execution, "begin")
        self.advance(execution, request)
        return execution

    async def load(self, stream: str, *, executor_id: str) -> TraceExecution:
        stored = await self._traces.load_trace(TraceId(TRACE.identity_of(stream)))
        execution = TraceExecution.of(stored, self.stream_ports, executor_id=executor_id)
        execution.companion = self._companion_of(execution.request)
        self._mark(execution, "begin")
        return execution

    async def load_answer(self, stream: str) -> Answer:
        return answer_of(await self._traces.load_trace(TraceId(TRACE.identity_of(stream))))

    async def _load_position(self, stream: str) -> Position:
        try:
            return position_of(await self._traces.load_trace(TraceId(TRACE.identity_of(stream))))
        except TraceNotFound:
            return UNBORN

    def group_of(self, execution: TraceExecution) -> str:
        return execution.request.server_id

    async def run(self, execution: TraceExecution) -> Answer:
        if execution.loaded is not None:
            decide_next(execution.loaded, claim_effect=execution.claim_effect)  # raises where claim and log disagree
        answer: Answer | None = None
        try:
            while answer is None:
                step = self._step_of_state[execution.owned.head.state]  # type: ignore[index]  # a trace's
                answer = await step(execution)
        except ConcurrentExecution:
            if self._observer is not None and execution.owned.durable_head.sequence_number > 0:
                self._observer.fenced(execution)
            raise
        if self._observer is not None:
            self._observer.rested(execution, answer)
        return answer

    def _mark(self, execution: TraceExecution, phase: str) -> None:
        """Note that this phase is over now."""
        if self._observer is not None:
            execution.marks.append((phase, self._clock.monotonic_ms()))

    async def _ask_supervisor(self, execution: TraceExecution) -> Answer | None:
        if execution.waiting == "supervisor":
            await execution.owned.give_back()
            return execution.answer()
        if await self.judge(execution, self.tool_of(execution)) != "ask":
            return None
        execution.waiting = "supervisor"
        # While it waits it has no owner, and holds no lock, connection or memory.
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
        if not execution.owned.pending:  # the decision is an older commit's
            await self._pins.verify(tool)
            if (await self._supervisor.judge(execution.request, tool)).answer == "deny":
                raise RecoveryFailed("the policy no longer allows the call that was decided on")

    async def _dispatch(self, execution: TraceExecution) -> Answer | None:
        """Send the call until its outcome is known, its attempts are used up, or its server was unreachable for too
        long; append what became of it."""
        tool, call = self.tool_of(execution), known(execution.call)
        if execution.owned.pending:
            await self._arguments_to_send(execution, tool)  # fail before the intent is recorded if secrets are missing
            # I7: from here the intent is durable. A crash before the effect is appended leaves the outcome unknown;
            # the loop re-dispatches with the same ids (I3).
            await self._commit(execution, owner_after=execution.owned.executor_id)
        while True:
            effect: ToolEffect | None = None
            attempts = execution.attempts
            # An attempt of which nothing was sent so far goes on: what to do about earlier ones was asked before it.
            goes_on = attempts.refusals.tries > 0
            if attempts.may_have_been_sent and execution.redispatch is None and not goes_on:
                if call.on_unknown_outcome == "hold":
                    execution.waiting = "operator"
                    await self._commit(execution, owner_after=None)
                    return execution.answer()
                if call.on_unknown_outcome == "reconcile":
                    effect = await self._reconcile(execution, tool)
            is_over = attempts.is_cancelled or attempts.is_given_up or attempts.count >= tool.max_attempts
            if effect is None and is_over and execution.redispatch is None and not goes_on:
                effect = effect_of_exhaustion(call, attempts, self._clock.now())
            if effect is None:
                effect = await self._attempt(execution, tool)
            if effect is not None:
                self.advance(execution, effect)
                return None

    async def _return_result(self, execution: TraceExecution) -> Answer:
        if execution.owned.pending:
            await self._commit(execution, owner_after=None)
        else:
            await execution.owned.give_back()
        return known(execution.committed)

    async def _attempt(self, execution: TraceExecution, tool: Tool) -> ToolEffect | None:
        """One send. Every one after the first is preceded by its own committed row: the fence, and the count. A try of
        which nothing was sent needs no other row: the next try is the same attempt."""
        call, attempts = known(execution.call), execution.attempts
        arguments = await self._arguments_to_send(execution, tool)  # before an attempt is counted, because it may fail
        if attempts.refusals.tries > 0:
            await self._pause(attempts.refusals, tool)
        elif attempts.sent_by_this_process > 0:
            await self._clock.sleep(self._backoff_s(attempts, tool))
        async with self._connectors.place(call.server_id) as connector:
            if attempts.count > 0 and not attempts.is_fenced:
                await self._commit(execution, owner_after=execution.owned.executor_id, attempt=attempts.count + 1)
                attempts.is_fenced = True
            if execution.redispatch is not None:
                attempts.resolution, execution.redispatch = execution.redispatch, None
            self._mark(execution, "wait")
            result: Dispatched = Withheld()
            began_ms = self._clock.monotonic_ms()
            while isinstance(result, Withheld):
                await execution.owned.verify_owned()
                attempts.begin(self._clock.now())
                # I3: the recorded call itself, with the ids that every attempt carries.
                result = await connector.dispatch(
                    call,
                    timeout_ms=tool.timeout_ms,
                    traceparent=execution.request.traceparent,
                    arguments=arguments,
                    # I6: waiting for a place, a name or a connection may have been long.
                    may_send=execution.owned.is_still_ours,
                )
        self._mark(execution, "dispatch")
        if isinstance(result, NotSent):
            attempts.refuse(result, took_ms=self._clock.monotonic_ms() - began_ms)
            if attempts.refusals.are_over(within_ms=tool.unreachable_for_ms):
                attempts.give_up(self._clock.now())
            return None
        attempts.end(self._clock.now(), result)
        if isinstance(result, Answered):
            return effect_of_answer(call, result, attempts, self._clock.now())
        return None

    async def _pause(self, refusals: Refusals, tool: Tool) -> None:
        pause_ms = refusals.next_pause_ms(within_ms=tool.unreachable_for_ms, jitter=self._clock.jitter())
        await self._clock.sleep(pause_ms / 1000)

    async def _arguments_to_send(self, execution: TraceExecution, tool: Tool) -> dict[str, Any] | None:
        """The arguments with their secret values; None when the recorded ones are all there is."""
        secrets = execution.secrets
        true_arguments = secrets.true_arguments
        if not secrets.are_stored and not tool.secret_arguments:
            return true_arguments
        recorded = known(execution.call).arguments
        if true_arguments is None and secrets.are_stored:
            salt, values = await self._vault.load_secrets(execution.trace_id)
            if set(values) != set(salt.pointers):
                raise SecretMissing("not all secret values are there", stream=execution.owned.stream)
            true_arguments = reveal(recorded, values, salt=salt.salt)
            execution.secrets = secrets._replace(true_arguments=true_arguments)
        if true_arguments is None and find_commitments(recorded, tool.secret_arguments):
            raise SecretMissing("the call's secret values are gone", stream=execution.owned.stream)
        return true_arguments

    async def is_unsendable(self, execution: TraceExecution) -> bool:
        """Whether the call is under way and cannot be sent again by anyone: its tool or its secret values are gone."""
        if execution.owned.head.state != "EXECUTING":
            return False
        try:
            await self._arguments_to_send(execution, self.tool_of(execution))
        except (SecretMissing, RecoveryFailed):
            return True
        return False

    async def _reconcile(self, execution: TraceExecution, tool: Tool) -> ToolEffect | None:
        """Ask the named read tool whether the key was executed; None when it was not. Asking changes nothing, so it is
        repeated; if the tool never says, the outcome stays unknown."""
        call = known(execution.call)
        reader = self._known_tool(call.server_id, known(call.reconcile_tool))
        # The question carries no idempotency key: a server that keeps answers by key must not keep this one.
        question = call.model_copy(
            update={
                "tool_name": reader.tool_name,
                "tool_class": "read",
                "arguments": {"idempotency_key": call.key_at_server},
                "idempotency_key": None,
            }
        )
        asked, refusals = 0, Refusals()
        while asked < tool.max_attempts and not refusals.are_over(within_ms=tool.unreachable_for_ms):
            if refusals.tries > 0:
                await self._pause(refusals, tool)
            elif asked:
                await self._clock.sleep(self._backoff_s(execution.attempts, tool, exponent=asked))
            async with self._connectors.place(call.server_id) as connector:
                began_ms = self._clock.monotonic_ms()
                result = await connector.dispatch(question, timeout_ms=reader.timeout_ms)
            if isinstance(result, NotSent):
                refusals.note(result, took_ms=self._clock.monotonic_ms() - began_ms)
                continue
            asked, refusals = asked + 1, Refusals()
            if isinstance(result, Answered) and result.outcome == "SUCCESS":
                said = getattr(result.output, "value", None)
                if isinstance(said, dict) and isinstance(said.get("executed"), bool):
                    if not said["executed"]:
                        execution.attempts.note_not_executed()
                        return None
                    return effect_of_reconciliation(call, said.get("output"), execution.attempts, self._clock.now())
        return effect_of_exhaustion(call, execution.attempts, self._clock.now())

    def advance(self, execution: TraceExecution, artifact: ArtifactDocument) -> None:
        """Collect the entry that appends this artifact for the next commit; raise, and change nothing, where the trace
        does not admit it."""
        now, owned = self._clock.now(), execution.owned
        planned, head, is_admitted = plan_next(
            owned.head, artifact, identity=owned.identity, executor_id=owned.executor_id, recorded_at=now
        )
        if not is_admitted or not execution.is_continued_by(artifact):
            # Let replay judge it: it raises, naming what is wrong.
            fold_next(execution.state, LogRecord(ExecutionLogEntry.from_body_bytes(planned.entry), artifact))
        owned.append(planned, head)
        execution.updated_at = now
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
        owned, secrets = execution.owned, execution.secrets
        state, entries = owned.head.state, owned.pending
        is_birth = owned.durable_head.sequence_number == 0
        plan = Plan(
            stream=owned.stream,
            executor_id=owned.executor_id,
            owner_after=owner_after,
            waiting_after=execution.waiting,
            entries=entries,
            claim=claim_at_birth(execution.request, state) if is_birth else None,
            dispatch_attempt=attempt,
            resolution=None if execution.redispatch is None else canonical_bytes(execution.redispatch.to_json()),
            # A call that is denied at once needs its secrets no more.
            sealed=None if state == "DENIED" else secrets.sealed,
            forgets_secrets=secrets.are_stored and state in TRACE.terminal_states,
            announce_to=announce_to,
        )
        companion, through = execution.companion, None
        if companion is not None and (is_birth or state in TRACE.terminal_states):
            through = partial(companion.commit, trace=execution.answer(), is_birth=is_birth)
        await owned.commit(plan, through)
        if self._observer is not None:
            is_over = state in TRACE.terminal_states
            self._mark(execution, "effect" if is_over else "intent" if execution.waiting is None else "ask")
        if secrets.sealed is not None:
            execution.secrets = secrets._replace(sealed=None, are_stored=plan.sealed is not None)
        execution.committed = execution.answer()

    async def judge(self, execution: TraceExecution, tool: Tool) -> Literal["allow", "deny", "ask"]:
        if execution.must_ask:
            return "ask"
        verdict = await self._supervisor.judge(execution.request, tool)
        self._mark(execution, "decide")
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
        # Validate what a person has written; the gateway made all else.
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
        """Exponential, with jitter over half of it, and never less than the server's Retry-After.

        While the tool may still be at work, asking in haste would use up the attempts before it is done: they are
        spread over one more of its time-outs.
        """
        step = attempts.sent_by_this_process if exponent is None else exponent
        delay_ms = min(BACKOFF_FIRST_MS << min(step, 16), BACKOFF_MAX_MS) * (0.5 + self._clock.jitter() / 2)
        if attempts.may_still_run:
            delay_ms = max(delay_ms, tool.timeout_ms / max(1, tool.max_attempts - 1))
        return max(delay_ms, attempts.retry_after_ms or 0) / 1000
