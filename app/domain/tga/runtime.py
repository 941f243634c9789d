"""TgaRuntime: what agents, supervisors and operators ask of traces. Each of it ends in the same loop (executor.py)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from app.core.canonical import canonical_enclosed
from app.core.errors import (
    ApprovalExpired,
    ArgumentsInvalid,
    CallDenied,
    CallInFlight,
    ConcurrentExecution,
    KeyClaimed,
    KeyMissing,
    KeyReserved,
    KeyReused,
    TgaError,
    ToolNotFound,
    ToolQuarantined,
    TraceNotHeld,
)
from app.core.limits import ATTEMPTS_MAX, RECOVERIES_AT_ONCE_MAX, RECOVERY_PAGE_STREAMS
from app.domain.addresses import RUN_KEY_PREFIX, RunOfCall
from app.domain.identity import Principal
from app.domain.ledger.executions import Executions
from app.domain.ledger.plans import Sealed
from app.domain.ledger.waiting import Patience
from app.domain.tga.attempts import effect_of_resolution
from app.domain.tga.documents import ActionRequest, Resolution, TraceId, payload_digest, payload_digest_of
from app.domain.tga.execution import Answer, ExecutionSecrets, TraceExecution, known
from app.domain.tga.executor import TraceExecutor
from app.domain.tga.ports import Companion, Output, Ports, RecordedCall
from app.domain.tga.repeats import Repeats
from app.domain.tga.secrets import find_secrets, redact, verify_redactions
from app.domain.tga.supervision import Ruling, Supervision
from app.domain.tga.transitions import TRACE, State
from app.domain.tools import Tool

_UNKNOWN: Final = "Look at the trace, or make the call again with its key: what was asked for may still happen."


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
    is_trace_id_chosen: bool = False  # by the caller; a trace with that id may exist
    run: RunOfCall | None = None  # the run that makes the call; None: a direct one
    companion: Companion | None = None  # what is stored together with it


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery found, did and why; `error` when it could not."""

    trace_id: TraceId
    found: State | None
    answer: Answer | None
    error: TgaError | None = None


def verify_key(call: CheckedCall) -> None:
    """Raise KeyReserved if a direct call has a key as only runs have them: it would take the place of a run's call, or
    be answered with that one's effect."""
    key = call.idempotency_key
    if call.run is None and key is not None and key.startswith(RUN_KEY_PREFIX):
        raise KeyReserved(
            "the idempotency key is one of a run", expected=f"a key that does not begin with {RUN_KEY_PREFIX}"
        )


class TgaRuntime:
    """Executes traces: fresh calls, repeats, decisions, resolutions and recoveries are one loop.

    One process executes a trace at a time (I6); a repeat is answered from what is recorded. A tool server that ignores
    keys may execute twice after a crash: `hold` and `reconcile` are for those.
    """

    def __init__(self, ports: Ports) -> None:
        self._traces = ports.traces
        self._tools = ports.tools
        self._clock = ports.clock
        self._pins = ports.pins
        self._vault = ports.vault
        self._executor = TraceExecutor(ports)
        self._executions = Executions(self._executor.stream_ports, self._executor, remedy=_UNKNOWN)
        self._supervision = Supervision(ports, self._executor)
        self._repeats = Repeats()

    async def call(self, call: CheckedCall, *, wait_ms: int | None = None) -> Answer:
        """Answer a tool call: executed once for its key, or from what is recorded of it.

        Waits up to `wait_ms` (None: until it is over). A call that goes on answers with its state; CallInFlight when
        it is a repeat of one that goes on. Nothing is stored when it raises before the first commit.
        """
        verify_key(call)
        # Refuse now what could not be recorded when a person approves it later.
        written = canonical_enclosed(call.arguments)
        async with self._executions.patience(wait_ms) as patience:
            # A run's call goes through its journal first, which says whether the worker may make it, and as which try.
            if call.companion is None and self._repeats.is_expected(
                call.server_id, call.tool_name, call.idempotency_key
            ):
                # Whatever is wrong with its tool by now: a repeat is answered from the record.
                repeat = await self._answer_repeat(call, written, patience)
                if repeat is not None:
                    return repeat
            answer = await self._call(call, written, patience)
            self._repeats.expect(call.server_id, call.tool_name, call.idempotency_key)
            return answer

    async def _call(self, call: CheckedCall, written: bytes, patience: Patience) -> Answer:
        try:
            if call.is_trace_id_chosen and call.trace_id and await self._traces.is_known(call.trace_id):
                # Look before anything is begun under this id: the executor of that trace must not be disturbed.
                raise ConcurrentExecution("a trace with this id exists")
            tool = self._tools.resolve(call.server_id, call.tool_name)
            self._tools.verify_arguments(tool, call.arguments)
            if tool.tool_class == "write" and call.idempotency_key is None:  # I2
                raise KeyMissing(
                    "a write-class tool needs an idempotency key", found=f"{call.server_id} {call.tool_name}"
                )
            await self._pins.verify(tool)
            execution = self._fresh(call, written, tool)
            if await self._executor.judge(execution, tool) == "deny" and call.idempotency_key is not None:
                # A repeat of a recorded call makes no new trace, not even a denied one: answer it from the record.
                repeat = await self._answer_repeat(call, written, patience)
                if repeat is not None:
                    return repeat
            return await patience.wait(execution, self._executions.start(execution))
        except (KeyClaimed, ToolNotFound, ArgumentsInvalid, ToolQuarantined, ConcurrentExecution) as error:
            # A finished call's repeat is answered even if its tool has changed since, or is gone; a claim that was
            # lost, and a trace that another executor took over, are answered from what is recorded.
            winner = cast("RecordedCall | None", error.winner) if isinstance(error, KeyClaimed) else None
            repeat = await self._answer_repeat(call, written, patience, winner)
            if repeat is None:
                raise
            return repeat

    async def decide(self, trace_id: TraceId, ruling: Ruling, *, wait_ms: int | None = None) -> Answer:
        """A person's decision on exactly this request, used once; then the loop goes on from there.

        A decision that comes too late is refused by the store's clock (ApprovalExpired), and the expiry recorded.
        """
        try:
            async with self._executions.patience(wait_ms) as patience:
                async with self._executions.taken(TRACE.stream(trace_id)) as execution:
                    self._executor.advance(execution, await self._supervision.decide(execution, ruling))
                    execution.begin_anew()
                    task = self._executions.start(execution)
                return await patience.wait(execution, task)
        except ApprovalExpired:
            with contextlib.suppress(TgaError):  # if this fails, the next sweep records the expiry
                await self.expire(trace_id)
            raise

    async def withdraw(
        self, trace_id: TraceId, principal: Principal, *, rationale: str | None = None, wait_ms: int | None = None
    ) -> Answer:
        """The caller takes back its own request, which is DENIED then."""
        async with self._executions.patience(wait_ms) as patience:
            async with self._executions.taken(TRACE.stream(trace_id)) as execution:
                self._executor.advance(execution, self._supervision.withdraw(execution, principal, rationale))
                execution.begin_anew()
                task = self._executions.start(execution)
            return await patience.wait(execution, task)

    async def expire(self, trace_id: TraceId) -> Answer:
        """Record that no person decided in time; ApprovalNotExpired when, by the store's clock, there is still time."""
        async with self._executions.taken(TRACE.stream(trace_id)) as execution:
            self._executor.advance(execution, self._supervision.expire(execution))
            execution.begin_anew()
            task = self._executions.start(execution)
        return await self._executions.patience(None).wait(execution, task)

    async def expire_all(self) -> int:
        """Every request whose time is over becomes DENIED; how many. One that cannot be does not stop the others."""
        expired, failed = 0, set[TraceId]()
        while page := await self._traces.list_expired(limit=RECOVERY_PAGE_STREAMS):
            if failed.issuperset(page):
                break
            for trace_id in page:
                if trace_id not in failed:
                    try:
                        await self.expire(trace_id)
                        expired += 1
                    except TgaError:
                        # Decided meanwhile, executed elsewhere, or broken: the next sweep looks again.
                        failed.add(trace_id)
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
        """Apply an operator's decision on exactly this call, which is held or cannot be sent any more."""
        async with self._executions.patience(wait_ms) as patience:
            async with self._executions.taken(TRACE.stream(trace_id)) as execution:
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
                task = self._executions.start(execution)
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
        async with self._executions.patience(wait_ms) as patience:
            async with self._executions.taken(TRACE.stream(trace_id)) as execution:
                task = self._executions.start(execution)
            return await patience.wait(execution, task)

    async def recover_all(self, *, at_once: int = RECOVERIES_AT_ONCE_MAX) -> AsyncGenerator[Recovered, None]:
        """Every trace that no executor works on and that waits for no person, oldest first, a bounded number at a time.

        One that cannot be recovered is reported, and does not stop the others.
        """
        async with contextlib.aclosing(self._executions.recover_all(at_once=at_once)) as recoveries:
            async for stream, found, answer, error in recoveries:
                yield Recovered(TraceId(TRACE.identity_of(stream)), cast("State | None", found), answer, error)

    async def close(self) -> None:
        """Wait a while for what is being executed. What takes longer, or waits for the store, is left to recovery."""
        await self._executions.close()

    def at_work(self, server_id: str) -> int:
        """How many calls of this server are being executed here, whether or not a caller waits for them."""
        return self._executions.at_work(server_id)

    def _fresh(self, call: CheckedCall, written: bytes, tool: Tool) -> TraceExecution:
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
        if call.run is not None:
            asked["run"] = call.run
        request = ActionRequest.asked(asked, written_arguments=written if sealed is None else None)
        verify_redactions(arguments, request.written()[0], secret_places)
        execution = self._executor.begin(request, executor_id=self._traces.executor_id(), companion=call.companion)
        if sealed is not None:
            execution.secrets = ExecutionSecrets(sealed=sealed, true_arguments=call.arguments)
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

    async def _answer_repeat(
        self, call: CheckedCall, written: bytes, patience: Patience, recorded: RecordedCall | None = None
    ) -> Answer | None:
        """What is recorded of the trace that has this key; None when no trace has it. `recorded`: as the store has just
        given it. `written`: the bytes of the arguments."""
        if call.idempotency_key is None:
            return None
        if recorded is None:
            recorded = await self._traces.find_call(call.server_id, call.tool_name, call.idempotency_key)
        if recorded is None:
            return None
        request, stands = self._repeats.read(recorded)
        if not call.principal.is_same_as(request.principal) or not self._is_same_payload(call, written, recorded):
            raise KeyReused("the key belongs to another call")
        if (await self._supervision.verify_reader(request, call.principal)).answer == "deny":
            raise CallDenied("the policy does not allow this call any more")
        if stands.is_final:
            return stands
        stream = TRACE.stream(recorded.trace_id)
        answer = await self._executions.follow(stream, patience)
        if answer is None:
            raise CallInFlight("the call is still being executed", stream=stream)
        return answer

    def _is_same_payload(self, call: CheckedCall, written: bytes, recorded: RecordedCall) -> bool:
        """Whether these are the arguments that the claim was made with; secret ones by their commitments."""
        server_id, tool_name, arguments = call.server_id, call.tool_name, call.arguments
        if recorded.sealed_salt is None:
            return recorded.payload_digest == payload_digest_of(server_id, tool_name, arguments, written=written)[0]
        salt = self._vault.open_salt(recorded.trace_id, recorded.sealed_salt)
        secrets = find_secrets(arguments, salt.pointers)
        arguments = redact(arguments, secrets, salt=salt.salt)
        return recorded.payload_digest == payload_digest(server_id, tool_name, arguments)
