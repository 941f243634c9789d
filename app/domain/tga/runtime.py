"""TgaRuntime: what agents, supervisors and operators ask of traces. Each of it ends in the same loop (executor.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any, Literal

from app.core.canonical import canonical_enclosed
from app.core.errors import (
    ApprovalExpired,
    ArgumentsInvalid,
    CallDenied,
    CallInFlight,
    ConcurrentExecution,
    KeyClaimed,
    KeyMissing,
    KeyReused,
    OutcomeUnknown,
    RecoveryFailed,
    TgaError,
    ToolNotFound,
    ToolQuarantined,
    TraceNotHeld,
)
from app.core.limits import (
    ATTEMPTS_MAX,
    CLOSE_WAIT_MS,
    FOLLOW_POLL_MAX_MS,
    FOLLOW_POLL_MS,
    RECOVERIES_AT_ONCE_MAX,
    RECOVERY_PAGE_TRACES,
)
from app.domain.identity import Principal
from app.domain.ledger.plans import Sealed
from app.domain.tga.attempts import effect_of_resolution
from app.domain.tga.documents import ActionRequest, Resolution, TraceId, payload_digest
from app.domain.tga.executor import NO_ANSWER, Answer, TraceExecution, TraceExecutor, known, request_of
from app.domain.tga.ports import Output, Ports, StoredClaim, StoredTrace
from app.domain.tga.secrets import find_secrets, redact, verify_redactions
from app.domain.tga.supervision import Ruling, Supervision
from app.domain.tga.transitions import TRACE, State
from app.domain.tga.waiting import Patience
from app.domain.tools import Tool


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """What a principal asks for, parsed strictly and authenticated; nothing else is known about it yet."""

    server_id: str
    tool_name: str
    arguments: dict[str, Any]
    idempotency_key: str | None
    principal: Principal
    intent: str | None = None
    trace_id: TraceId | None = None
    traceparent: str | None = None
    is_trace_id_chosen: bool = False  # by the caller, who may have chosen somebody else's


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery found, did and why; `error` when it could not."""

    trace_id: TraceId
    found: State | None
    answer: Answer | None
    error: TgaError | None = None


class TgaRuntime:
    """Executes traces: fresh calls, repeats, decisions, resolutions and recoveries are one loop.

    One process executes a trace at a time (I6); a repeat is answered from what is recorded. A tool server that ignores
    keys may execute twice after a crash: `hold` and `reconcile` are for those.
    """

    def __init__(self, ports: Ports) -> None:
        self._loop = asyncio.get_running_loop()  # kept: asking each time costs a system call
        self._traces = ports.traces
        self._tools = ports.tools
        self._clock = ports.clock
        self._pins = ports.pins
        self._vault = ports.vault
        self._executor = TraceExecutor(ports)
        self._supervision = Supervision(ports, self._executor)
        # I6: the process-local table; the store takes two tasks of one executor for the same owner.
        self._running: dict[TraceId, tuple[TraceExecution, asyncio.Task[Answer]]] = {}
        self._being_taken: set[TraceId] = set()
        self._being_given_back: dict[TraceId, asyncio.Task[None]] = {}
        self._at_work: Counter[str] = Counter()

    async def call(self, call: CheckedCall, *, wait_ms: int | None = None) -> Answer:
        """Answer a tool call: executed once for its key, or from what is recorded of it.

        Waits up to `wait_ms` (None: until it is over). A call that goes on answers with its state; CallInFlight when
        it is a repeat of one that goes on. Nothing is stored when it raises before the first commit.
        """
        canonical_enclosed(call.arguments)  # a person may approve it long after: then its documents must fit
        async with self._patience(wait_ms) as patience:
            return await self._call(call, patience)

    async def _call(self, call: CheckedCall, patience: Patience) -> Answer:
        try:
            if call.is_trace_id_chosen and call.trace_id and await self._traces.is_known(call.trace_id):
                # Looked at before anything is begun under it: whoever executes that trace is not disturbed.
                raise ConcurrentExecution("a trace with this id exists")
            tool = self._tools.resolve(call.server_id, call.tool_name)
            self._tools.verify_arguments(tool, call.arguments)
            if tool.tool_class == "write" and call.idempotency_key is None:  # I2
                raise KeyMissing(
                    "a write-class tool needs an idempotency key", found=f"{call.server_id} {call.tool_name}"
                )
            await self._pins.verify(tool)
            execution = self._fresh(call, tool)
            if await self._executor.judge(execution, tool) == "deny" and call.idempotency_key is not None:
                # A repeat of a recorded call is no new call, and makes no new trace: it is answered, or refused.
                repeat = await self._answer_repeat(call, patience)
                if repeat is not None:
                    return repeat
            return await patience.wait(execution, self._start(execution))
        except (KeyClaimed, ToolNotFound, ArgumentsInvalid, ToolQuarantined, ConcurrentExecution):
            # A finished call's repeat is answered even if its tool has changed since, or is gone; a claim that was
            # lost, and a trace that another executor took over, are answered from what is recorded.
            repeat = await self._answer_repeat(call, patience)
            if repeat is None:
                raise
            return repeat

    async def decide(self, trace_id: TraceId, ruling: Ruling, *, wait_ms: int | None = None) -> Answer:
        """A person's decision on exactly this request, used once; then the loop goes on from there.

        A decision that comes too late is refused by the store's clock (ApprovalExpired), and the expiry recorded.
        """
        try:
            async with self._patience(wait_ms) as patience:
                async with self._taken(trace_id) as execution:
                    self._executor.advance(execution, await self._supervision.decide(execution, ruling))
                    execution.begin_anew()
                    task = self._start(execution)
                return await patience.wait(execution, task)
        except ApprovalExpired:
            with contextlib.suppress(TgaError):  # the sweep comes by, too
                await self.expire(trace_id)
            raise

    async def withdraw(
        self, trace_id: TraceId, principal: Principal, *, rationale: str | None = None, wait_ms: int | None = None
    ) -> Answer:
        """The caller takes back its own request, which is DENIED then."""
        async with self._patience(wait_ms) as patience:
            async with self._taken(trace_id) as execution:
                self._executor.advance(execution, self._supervision.withdraw(execution, principal, rationale))
                execution.begin_anew()
                task = self._start(execution)
            return await patience.wait(execution, task)

    async def expire(self, trace_id: TraceId) -> Answer:
        """Record that nobody decided in time; ApprovalNotExpired when, by the store's clock, there is still time."""
        async with self._taken(trace_id) as execution:
            self._executor.advance(execution, self._supervision.expire(execution))
            execution.begin_anew()
            task = self._start(execution)
        return await self._patience(None).wait(execution, task)

    async def expire_all(self) -> int:
        """Every request whose time is over becomes DENIED; how many. One that cannot be does not stop the others."""
        expired, failed = 0, set[TraceId]()
        while page := await self._traces.list_expired(limit=RECOVERY_PAGE_TRACES):
            if failed.issuperset(page):
                break
            for trace_id in page:
                if trace_id not in failed:
                    try:
                        await self.expire(trace_id)
                        expired += 1
                    except TgaError:
                        failed.add(
                            trace_id
                        )  # decided meanwhile, executed elsewhere, or broken: the next sweep looks again
        return expired

    async def resolve(
        self,
        trace_id: TraceId,
        *,
        action: Literal["redispatch", "succeeded", "failed"],
        tool_call_digest: str,
        resolved_by: str,
        rationale: str,
        output: Output | None = None,
        wait_ms: int | None = None,
    ) -> Answer:
        """An operator's word on a trace that is held, or that cannot be sent any more, about exactly this tool call."""
        async with self._patience(wait_ms) as patience:
            async with self._taken(trace_id) as execution:
                await self._verify_resolvable(execution, action, tool_call_digest)
                now = self._clock.now()
                resolution = Resolution.made(
                    action=action, resolved_by=resolved_by, rationale=rationale, resolved_at=now
                )
                execution.begin_anew()
                if action == "redispatch":
                    execution.redispatch = resolution
                else:
                    effect = effect_of_resolution(known(execution.call), resolution, output, execution.attempts, now)
                    self._executor.advance(execution, effect)
                task = self._start(execution)
            return await patience.wait(execution, task)

    async def _verify_resolvable(self, execution: TraceExecution, action: str, tool_call_digest: str) -> None:
        state = known(execution.state)
        is_open = execution.waiting == "operator" or (
            action != "redispatch" and await self._executor.is_unsendable(execution)
        )
        if not is_open or state.tool_call_digest != tool_call_digest:
            raise TraceNotHeld(
                "nothing to resolve",
                expected="a trace that waits for an operator or cannot be sent any more, and its tool_call_digest",
                found=f"{state.state}, waiting for {execution.waiting or 'nobody'}, tool call {state.tool_call_digest}",
            )
        if action == "redispatch" and execution.attempts.count >= ATTEMPTS_MAX:
            raise TraceNotHeld(
                "the call was sent too often", expected="succeeded or failed", found=f"{ATTEMPTS_MAX} attempts"
            )

    async def recover(self, trace_id: TraceId, *, wait_ms: int | None = None) -> Answer:
        """The six steps: own the trace, validate its checkpoint, replay and verify its log, go on from its state.

        A broken chain is never dispatched; a living executor's trace is left alone (ConcurrentExecution).
        """
        async with self._patience(wait_ms) as patience:
            async with self._taken(trace_id) as execution:
                task = self._start(execution)
            return await patience.wait(execution, task)

    async def recover_all(self, *, at_once: int = RECOVERIES_AT_ONCE_MAX) -> AsyncGenerator[Recovered, None]:
        """Every trace that nobody executes and that waits for nobody, oldest first, a bounded number at a time.

        One that cannot be recovered is reported, and does not stop the others.
        """
        after: TraceId | None = None
        running: set[asyncio.Task[Recovered]] = set()
        while page := await self._traces.list_recoverable(after=after, limit=RECOVERY_PAGE_TRACES):
            after = page[-1]
            for trace_id in page:
                # The list holds what this process owns and has lost sight of, and what it is executing.
                if self._is_busy_with(trace_id):
                    continue
                if len(running) >= at_once:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        yield task.result()
                running.add(asyncio.create_task(self._recovered(trace_id)))
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()

    async def close(self) -> None:
        """Wait a while for what is being executed. What takes longer, or waits for the store, is left to recovery."""
        waited_ms, step_ms = 0, 1_000
        while tasks := [task for execution, task in self._running.values() if not execution.is_unsettled]:
            if waited_ms >= CLOSE_WAIT_MS:
                break
            await asyncio.wait(tasks, timeout=step_ms / 1000)
            waited_ms += step_ms
        for task in [*(task for _, task in self._running.values()), *self._being_given_back.values()]:
            task.cancel()

    def _fresh(self, call: CheckedCall, tool: Tool) -> TraceExecution:
        trace_id = call.trace_id or TraceId(self._clock.new_id())
        arguments, sealed, secret_places = self._without_secrets(trace_id, call.arguments, tool)
        asked = {
            "trace_id": trace_id,
            "requested_at": self._clock.now(),
            "expires_at": self._clock.after(tool.approval_timeout_ms),
            "principal": call.principal,
            "server_id": call.server_id,
            "tool_name": call.tool_name,
            "tool_class": tool.tool_class,
            "tool_definition_digest": tool.definition_digest,
            "arguments": arguments,
            "idempotency_key": call.idempotency_key,
            "intent": call.intent,
        }
        if call.traceparent is not None:
            asked["traceparent"] = call.traceparent
        request = ActionRequest.asked(asked)
        verify_redactions(arguments, request.written()[0], secret_places)
        execution = TraceExecution(trace_id, self._traces.executor_id(), request)
        if sealed is not None:
            execution.sealed, execution.true_arguments = sealed, call.arguments
        self._executor.advance(execution, request)
        return execution

    def _without_secrets(
        self, trace_id: TraceId, arguments: dict[str, Any], tool: Tool
    ) -> tuple[dict[str, Any], Sealed | None, Collection[str]]:
        """The arguments as they are recorded, what is sealed beside the record, and the places of the secrets."""
        secrets = find_secrets(arguments, tool.secret_arguments) if tool.secret_arguments else {}
        if not secrets:
            return arguments, None, ()
        salt = self._vault.new_salt(list(secrets))
        return redact(arguments, secrets, salt=salt.salt), self._vault.seal(trace_id, salt, secrets), secrets

    @contextlib.asynccontextmanager
    async def _taken(self, trace_id: TraceId) -> AsyncIterator[TraceExecution]:
        """Own the trace and load it, one task at a time; given back if it is not started."""
        if self._is_busy_with(trace_id):
            raise ConcurrentExecution("this process already executes the trace", stream=TRACE.stream(trace_id))
        self._being_taken.add(trace_id)
        try:
            executor_id = await self._acquired(trace_id)
            try:
                yield TraceExecution.of(await self._traces.load_trace(trace_id), executor_id)
            except BaseException as error:
                await self._give_back(trace_id, executor_id, after=error)
                if isinstance(error, TgaError):
                    error.at(stream=TRACE.stream(trace_id))
                raise
        finally:
            self._being_taken.discard(trace_id)

    async def _acquired(self, trace_id: TraceId) -> str:
        executor_id = self._traces.executor_id()
        try:
            return await self._traces.acquire(trace_id)
        except (OutcomeUnknown, asyncio.CancelledError) as error:
            # It may be ours now, and nobody would execute it. If this does not get through either, the sweep finds it.
            await self._give_back(trace_id, executor_id, after=error)
            raise

    async def _give_back(self, trace_id: TraceId, executor_id: str, *, after: BaseException) -> None:
        """A caller that is cancelled does not wait for it. Until it is done nobody here takes the trace: it would be
        given away while it is executed."""
        giving = self._loop.create_task(self._executor.give_back(trace_id, executor_id))
        self._being_given_back[trace_id] = giving
        giving.add_done_callback(lambda _: self._being_given_back.pop(trace_id, None))
        if not isinstance(after, asyncio.CancelledError):
            await asyncio.shield(giving)

    def _is_busy_with(self, trace_id: TraceId) -> bool:
        return trace_id in self._running or trace_id in self._being_taken or trace_id in self._being_given_back

    def _start(self, execution: TraceExecution) -> asyncio.Task[Answer]:
        if execution.trace_id in self._running:
            raise ConcurrentExecution(
                "this process already executes the trace", stream=TRACE.stream(execution.trace_id)
            )
        # A task of its own: a caller who gives up does not interrupt a call that is under way.
        task = self._loop.create_task(self._executed_to_the_end(execution))
        task.add_done_callback(_seen)
        self._running[execution.trace_id] = (execution, task)
        self._at_work[execution.request.server_id] += 1
        return task

    def at_work(self, server_id: str) -> int:
        """How many calls of this server are being executed here, whoever waits for them, if anyone."""
        return self._at_work[server_id]

    async def _executed_to_the_end(self, execution: TraceExecution) -> Answer:
        try:
            return await self._executor.run(execution)
        except ConcurrentExecution:
            raise  # nothing of ours is there to give back
        except Exception as error:
            if execution.stored is not None or execution.committed is not None or execution.is_unsettled:
                await self._executor.give_back(execution.trace_id, execution.executor_id)
            if isinstance(error, TgaError) and not isinstance(error, KeyClaimed):
                error.at(stream=TRACE.stream(execution.trace_id))
            raise
        finally:
            del self._running[execution.trace_id]
            server_id = execution.request.server_id
            self._at_work[server_id] -= 1
            if not self._at_work[server_id]:
                del self._at_work[server_id]

    def _patience(self, wait_ms: int | None) -> Patience:
        return Patience(self._clock, wait_ms, self._loop)

    async def _answer_repeat(self, call: CheckedCall, patience: Patience) -> Answer | None:
        """What is recorded of the trace that has this key; None when no trace has it."""
        if call.idempotency_key is None:
            return None
        claim = await self._traces.find_claim(call.server_id, call.tool_name, call.idempotency_key)
        if claim is None:
            return None
        stored = await self._traces.load_trace(claim.trace_id)
        request = request_of(stored)
        if not call.principal.is_same_as(request.principal) or not await self._is_same_payload(call, claim):
            raise KeyReused("the key belongs to another call")
        if (await self._supervision.verify_reader(request, call.principal)).answer == "deny":
            raise CallDenied("the policy does not allow this call any more")
        return await self._follow(claim.trace_id, patience)

    async def _is_same_payload(self, call: CheckedCall, claim: StoredClaim) -> bool:
        """Whether these are the arguments that the claim was made with; secret ones by their commitments."""
        arguments = call.arguments
        salt = await self._vault.load_salt(claim.trace_id)
        if salt is not None:
            secrets = find_secrets(arguments, salt.pointers)
            arguments = redact(arguments, secrets, salt=salt.salt)
        return claim.payload_digest == payload_digest(call.server_id, call.tool_name, arguments)

    async def _follow(self, trace_id: TraceId, patience: Patience) -> Answer:
        """The trace's answer, waited for; a trace whose executor is dead is executed here."""
        poll_ms = FOLLOW_POLL_MS
        while True:
            driven = self._running.get(trace_id)
            if driven is not None:
                with contextlib.suppress(ConcurrentExecution):  # it was fenced: another executor continues it
                    answer = await patience.wait(*driven)
                    if not answer.is_final and answer.waiting is None:
                        break
            stored = await self._traces.load_trace(trace_id)
            answer = _answer_of(stored)
            if answer.is_final or answer.waiting is not None:
                return answer
            # Its executor lives, or this one is just getting a new id.
            with contextlib.suppress(ConcurrentExecution, *NO_ANSWER):
                async with self._taken(trace_id) as execution:
                    self._start(execution)
                continue
            if patience.is_over:
                break
            await self._clock.sleep(poll_ms / 1000)
            poll_ms = min(poll_ms * 2, FOLLOW_POLL_MAX_MS)
        raise CallInFlight("the call is still being executed", stream=TRACE.stream(trace_id))

    async def _recovered(self, trace_id: TraceId) -> Recovered:
        found: State | None = None
        try:
            async with self._taken(trace_id) as execution:
                found = known(execution.state).state
                task = self._start(execution)
            return Recovered(trace_id, found, await self._patience(None).wait(execution, task))
        except TgaError as error:
            return Recovered(trace_id, found, None, error)
        except Exception as error:  # whatever is wrong with one trace must not stop the others
            wrong = RecoveryFailed(
                "the trace cannot be executed", found=f"{type(error).__name__}: {error}", stream=TRACE.stream(trace_id)
            )
            return Recovered(trace_id, found, None, wrong)


def _seen(task: asyncio.Task[Answer]) -> None:
    """How it failed is for who waits for it. If nobody does any more, the next sweep finds what is on the record."""
    if not task.cancelled():
        task.exception()


def _answer_of(stored: StoredTrace) -> Answer:
    return TraceExecution.of(stored, executor_id="").answer(replayed=True)
