"""What HTTP and MCP share for calls: admission at the tool server, the answer at shutdown, the traceparent."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Final

from app.core.errors import CallInFlight, ConcurrentExecution, ShuttingDown, TgaError, TraceNotFound
from app.core.limits import FOLLOW_POLL_MAX_MS, FOLLOW_POLL_MS
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import Answer, answer_of, request_of
from app.domain.tga.runtime import CheckedCall
from app.domain.tga.transitions import TRACE
from app.edge.services import Services
from app.postgres.listing import load_head

_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Calls:
    """Passes calls of every transport to the runtime."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._in_flight_max = {info.server_id: info.max_in_flight for info in services.registry.servers()}

    async def in_line(self, call: CheckedCall, *, wait_ms: int) -> Answer:
        """As `_in_line`. Told to the observer are repeats and refusals: of what is executed the executor tells."""
        observer = self._services.observer
        if observer is None:
            return await self._in_line(call, wait_ms=wait_ms)
        try:
            answer = await self._in_line(call, wait_ms=wait_ms)
        except TgaError as error:
            observer.refused(call, error)
            raise
        if answer.replayed:
            observer.repeated(call, answer)
        return answer

    async def _in_line(self, call: CheckedCall, *, wait_ms: int) -> Answer:
        """The runtime's answer; until then the call counts towards its server's load. GatewayBusy when that is full."""
        runtime, admission, server_id = self._services.runtime, self._services.admission, call.server_id
        in_flight_max = self._in_flight_max.get(server_id)
        if in_flight_max is None:
            # Not a server of this configuration; the call may still be a repeat of a finished one.
            return self._counted(call, await runtime.call(call, wait_ms=wait_ms))
        # Callers who no longer wait are not counted at the middleware, but their calls are still being executed.
        admission.enter_server(server_id, in_flight_max, at_work=runtime.at_work(server_id))
        try:
            return self._counted(call, await runtime.call(call, wait_ms=wait_ms))
        finally:
            admission.leave_server(server_id)

    def _counted(self, call: CheckedCall, answer: Answer) -> Answer:
        if answer.replayed:
            self._services.replays.add(call.principal.tenant, call.server_id, call.tool_name)
        return answer

    async def until_handed_over(self, call: CheckedCall, *, wait_ms: int) -> Answer:
        """As `in_line`, or HandedOver when the gateway has to go before there is an answer."""
        return await self._services.handover.wait(self.in_line(call, wait_ms=wait_ms))

    async def handed_over(self, call: CheckedCall) -> Answer:
        """What is durable of a call that is no longer waited for; ShuttingDown if nothing is, or it is another's.

        How far the call came before it was broken off is not known: perhaps nothing of it was looked at yet.
        """
        trace_id = call.trace_id
        if call.idempotency_key is not None:
            try:
                return await self._services.runtime.call(call, wait_ms=0)
            except CallInFlight as error:
                trace_id = trace_of(error)
            except ConcurrentExecution:
                if call.is_trace_id_chosen:
                    raise
                # It is being executed here, and its claim is not durable yet.
        if trace_id is not None:
            with contextlib.suppress(TraceNotFound):
                stored = await self._services.traces.load_trace(trace_id)
                if call.principal.is_same_as(request_of(stored).principal):
                    return answer_of(stored)
        raise ShuttingDown("the gateway is stopping")

    async def as_it_stands(self, trace_id: TraceId) -> Answer:
        """What is recorded of a trace that this caller has asked for; every error names the trace."""
        with naming(trace_id):
            return answer_of(await self._services.traces.load_trace(trace_id))

    async def followed(self, answer: Answer, deadline: float) -> Answer:
        """Until the trace is over, or the deadline. Another gateway may decide or recover it."""
        loop, pause_ms = asyncio.get_running_loop(), FOLLOW_POLL_MS
        while loop.time() < deadline:
            await asyncio.sleep(min(pause_ms / 1000, max(0.0, deadline - loop.time())))
            pause_ms = min(pause_ms * 2, FOLLOW_POLL_MAX_MS)
            with naming(answer.trace_id):
                head = await load_head(self._services.sessions, answer.trace_id)
            if head is not None and head.state in TRACE.terminal_states:
                break
        return (await self.as_it_stands(answer.trace_id))._replace(replayed=answer.replayed)


@contextlib.contextmanager
def naming(trace_id: TraceId) -> Iterator[None]:
    """Put the trace into every error raised inside: the call is on the record, and its caller must find it there."""
    try:
        yield
    except TgaError as error:
        raise error.at(stream=TRACE.stream(trace_id)) from None


def traceparent_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The caller's trace context among the headers of a request."""
    for name, value in headers:
        if name == b"traceparent":
            return checked_traceparent(value.decode("latin-1"))
    return None


def checked_traceparent(given: object) -> str | None:
    """A well-formed W3C Trace Context header; None for anything else."""
    return given if isinstance(given, str) and _TRACEPARENT.fullmatch(given) else None


def trace_of(error: TgaError) -> TraceId | None:
    return TraceId(TRACE.identity_of(error.stream)) if error.stream and TRACE.has(error.stream) else None
