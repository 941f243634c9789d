"""Spans of calls and runs, over OTLP. Only loaded where `[telemetry] traces` asks for it: the extra `otel` is needed.

A call is one trace: the caller's, if it sent a `traceparent`, else one whose id is the call's own. Its spans are made
when it has come to rest, from the marks that its execution left, with ids that follow from those on the record: the one
of the send is the parent that the tool server was told. A run is a trace of its own, with a span for each attempt.
Workers are told that context with the lease: a call for which the worker sends a `traceparent` is in the run's trace;
any other call of a run has a trace of its own, and the two are linked. Names are those of the semantic conventions for
MCP and generative AI, where they have one. No arguments, outputs or keys are in them.

They go through a bounded queue to a thread that exports them. While the collector is away spans are dropped and
counted; no call waits.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Protocol

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.span import NonRecordingSpan

from app import __version__
from app.core.instruments import Instruments
from app.core.limits import SPANS_AT_ONCE_MAX, SPANS_EVERY_MS, SPANS_EXPORT_MS, SPANS_QUEUED_MAX
from app.domain.clock import Clock
from app.domain.runs.documents import RunAttempt, RunDocument, RunIntent
from app.domain.runs.engine.ports import LoadedRun
from app.domain.runs.requests import ToolRequest
from app.domain.runs.trace_context import attempt_span, run_span
from app.domain.tga.execution import Answer, TraceExecution
from app.domain.tga.runtime import CheckedCall
from app.edge.otlp import CLIENT, CONSUMER, INTERNAL, SERVER, OtlpSender, OtlpSettings, Place, Span, Value, encoded

_SCOPE: Final = "tga_gateway"
_CLOSE_WAIT_S: Final = 3.0
_ATTEMPTS_NOTED_MAX: Final = 10_000
_LINKS_MAX: Final = 128
_PHASES: Final = {"decide": "decide", "intent": "append intent", "effect": "append effect", "ask": "append request"}
_OF_SENDS: Final[tuple[str, ...]] = (
    *(
        "mcp.method.name",
        "gen_ai.operation.name",
        "gen_ai.tool.name",
        "gen_ai.tool.call.id",
        "tga.server",
        "error.type",
    ),
)
_NOTHING: Final[Mapping[str, Value]] = {}
_ENDED: Final = ("COMPLETED", "FAILED", "CANCELLED", "PARKED", "DIVERGED")
logger = logging.getLogger("tga")


class Sends(Protocol):
    """Where batches go: True when they were taken. Called by one thread, and may take its time."""

    def send(self, body: bytes) -> bool: ...

    def close(self) -> None: ...


class SpanQueue:
    """Exports spans in a thread of its own. `put` is called by one thread, never waits, and drops what has no room."""

    def __init__(self, sender: Sends, instruments: Instruments, resource: Mapping[str, object]) -> None:
        self._sender = sender
        self._instruments = instruments
        self._resource = resource
        self._spans: deque[Span] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        # Counted by the exporting thread, and added to the instruments by `put` and `close`, which alone write those.
        self._exported = 0
        self._failed = 0

    def put(self, spans: Sequence[Span]) -> None:
        if len(self._spans) + len(spans) > SPANS_QUEUED_MAX:
            self._instruments.spans.add(("dropped",), len(spans))
            return
        self._spans.extend(spans)
        if len(self._spans) >= SPANS_AT_ONCE_MAX:
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()

    def count(self) -> None:
        """Bring the counters up to date."""
        exported, failed = self._exported, self._failed
        values = self._instruments.spans.values
        values["exported",], values["failed",] = exported, failed

    def close(self) -> None:
        """Export what is left, if the collector takes it quickly."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)
        self.count()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(SPANS_EVERY_MS / 1000)
            self._wake.clear()
            while self._spans:
                self._export()
        self._sender.close()

    def _export(self) -> None:
        batch = [self._spans.popleft() for _ in range(min(len(self._spans), SPANS_AT_ONCE_MAX))]
        try:
            is_taken = self._sender.send(encoded(batch, self._resource, _SCOPE))
        except Exception:  # whatever the collector made of it, the next batch is tried
            is_taken = False
        if is_taken:
            self._exported += len(batch)
        else:
            self._failed += len(batch)


@dataclass(slots=True)
class _Attempt:
    """Of a run, under way."""

    leased_ns: int
    calls: list[str] = field(default_factory=list)


class Spans:
    """CallSpans, and the RunObserver that makes a run's trace of what was stored of it here."""

    def __init__(self, queue: SpanQueue, clock: Clock, sampler: Sampler) -> None:
        self._sampler = sampler
        self._queue = queue
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}  # by run, the oldest first; `_note` and `_changed` write it

    def executed(self, execution: TraceExecution, answer: Answer, decision: str, now_ms: float) -> None:
        request, marks = execution.request, execution.marks
        trace_id, parent, flags = _place_of(request.trace_id, request.traceparent)
        if not self._is_sampled(trace_id, parent, request.tool_name):
            return
        call_id = answer.tool_call_id
        # A call that waited for a person is executed twice: up to there, and from there on.
        context = _call_context(request.trace_id, trace_id, flags, answer.waiting)
        # Marks are of a steady clock; the wall's is looked at once, now.
        offset_ns = time.time_ns() - int(self._clock.monotonic_ms() * 1e6)
        began_ns = offset_ns + int(marks[0][1] * 1e6)
        attributes: dict[str, Value] = {
            "mcp.method.name": "tools/call",
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": request.tool_name,
            "tga.server": request.server_id,
            "tga.trace_id": request.trace_id,
            "tga.state": answer.state,
            "tga.decision": decision,
            "tga.attempts": execution.attempts.count,
        }
        if call_id is not None:
            attributes["gen_ai.tool.call.id"] = call_id
        if answer.waiting is not None:
            attributes["tga.waiting"] = answer.waiting
        links: list[Place] = []
        if request.run is not None:
            attributes["tga.run_id"] = request.run.run_id
            run_context = _run_context(request.run.run_id)
            if run_context.trace_id == trace_id:
                self._forget_call(request.run.run_id, request.trace_id)
            else:
                links.append(run_context)
        effect = answer.effect
        if effect is not None and effect.error is not None:
            attributes["error.type"] = effect.error.code
        elif answer.state == "DENIED":
            attributes["error.type"] = "CALL_DENIED"
        is_error = "error.type" in attributes
        end_ns = offset_ns + int(now_ms * 1e6)
        sends = f"tools/call {request.tool_name}"
        spans = [Span(sends, context, parent, SERVER, began_ns, end_ns, attributes, links, is_error)]
        before_ns = began_ns
        last_send = max((place for place, (phase, _) in enumerate(marks) if phase == "dispatch"), default=None)
        for place, (phase, at_ms) in enumerate(marks[1:], 1):
            at_ns = offset_ns + int(at_ms * 1e6)
            if phase == "dispatch":
                about = {name: attributes[name] for name in _OF_SENDS if name in attributes}
                # What the tool server was told is its parent is the last send.
                is_last = place == last_send and call_id is not None
                own_id = int(call_id.replace("-", "")[-16:], 16) if is_last and call_id else _within(context, place)
                own = Place(trace_id, own_id, flags)
                spans.append(Span(sends, own, context, CLIENT, before_ns, at_ns, about))
            else:
                own = Place(trace_id, _within(context, place), flags)
                spans.append(Span(_PHASES.get(phase, phase), own, context, INTERNAL, before_ns, at_ns, _NOTHING))
            before_ns = at_ns
        self._queue.put(spans)

    def count(self) -> None:
        self._queue.count()

    def repeated(self, call: CheckedCall, answer: Answer) -> None:
        """A repeat is a moment in its own caller's trace, linked to the call that was executed."""
        if call.traceparent is None:
            return
        trace_id, parent, flags = _place_of(answer.trace_id, call.traceparent)
        if not self._is_sampled(trace_id, parent, call.tool_name):
            return
        now_ns = time.time_ns()
        own = Place(trace_id, _hashed(f"repeat {now_ns} {answer.trace_id}"), flags)
        attributes: dict[str, Value] = {
            "mcp.method.name": "tools/call",
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.tool_name,
            "tga.server": call.server_id,
            "tga.trace_id": answer.trace_id,
            "tga.state": answer.state,
            "tga.replayed": True,
        }
        self._queue.put([Span(f"tools/call {call.tool_name}", own, parent, SERVER, now_ns, now_ns, attributes)])

    def started(self, run_id: str, procedure: str, traceparent: str) -> None:
        """RunObserver: the caller's trace and the run's are linked, from here; the SDK links them from the caller's."""
        _, caller, _ = _place_of(run_id, traceparent)
        context = _run_context(run_id)
        if not self.is_sampled_run(run_id, procedure):
            return
        now_ns = time.time_ns()
        own = Place(context.trace_id, _hashed(f"start {run_id} {traceparent}"))
        about: dict[str, Value] = {"gen_ai.workflow.name": procedure, "tga.run_id": run_id}
        links = [] if caller is None else [caller]
        self._queue.put([Span(f"start {procedure}", own, context, INTERNAL, now_ns, now_ns, about, links)])

    def is_sampled_run(self, run_id: str, procedure: str) -> bool:
        """RunObserver: whether spans of this run are recorded, which its workers are told."""
        return self._is_sampled(_run_context(run_id).trace_id, None, procedure)

    def changed(self, loaded: LoadedRun, state_before: str | None, added: Sequence[RunDocument]) -> None:
        """RunObserver: a span for each attempt that has ended, and the run's own when it has."""
        try:
            self._changed(loaded, state_before, added)
        except Exception:
            logger.exception("a defect in the gateway's telemetry; runs go on without it")

    def _changed(self, loaded: LoadedRun, state_before: str | None, added: Sequence[RunDocument]) -> None:
        run, start = loaded.run, loaded.start
        state = run.head.state
        self._note(run.run_id, added)
        if state == state_before or (state_before != "RUNNING" and state not in _ENDED):
            return
        context = _run_context(run.run_id)
        noted = self._attempts.pop(run.run_id, None)
        if not self._is_sampled(context.trace_id, None, start.procedure):
            return
        about: dict[str, Value] = {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": start.procedure,
            "tga.run_id": run.run_id,
            "tga.version": run.version,
            "tga.state": state,
            "tga.attempt": run.attempt,
        }
        spans, ended_ns = [], time.time_ns()
        if state_before == "RUNNING" and noted is not None:  # else another gateway gave it to its worker
            own = Place(context.trace_id, attempt_span(run.run_id, run.attempt))
            name, links = f"attempt {start.procedure}", [_called(trace_id) for trace_id in noted.calls]
            spans.append(Span(name, own, context, CONSUMER, noted.leased_ns, ended_ns, about, links))
        if state in _ENDED:
            is_error = state not in ("COMPLETED", "CANCELLED")
            if is_error:
                about = {**about, "error.type": f"RUN_{state}"}
            began_ns = _ns(run.started_at)
            links = [] if start.parent is None else [_run_context(start.parent.run_id)]
            name = f"invoke_workflow {start.procedure}"
            spans.append(Span(name, context, None, SERVER, began_ns, ended_ns, about, links, is_error))
        self._queue.put(spans)

    def _note(self, run_id: str, added: Sequence[RunDocument]) -> None:
        """When a worker got the run, and which calls it made: of attempts that are under way."""
        for artifact in added:
            if isinstance(artifact, RunAttempt) and artifact.change == "LEASED":
                self._attempts[run_id] = _Attempt(_ns(artifact.at))
                if len(self._attempts) > _ATTEMPTS_NOTED_MAX:
                    del self._attempts[next(iter(self._attempts))]
            elif isinstance(artifact, RunIntent) and isinstance(artifact.request, ToolRequest):
                noted = self._attempts.get(run_id)
                if noted is not None and len(noted.calls) < _LINKS_MAX:
                    noted.calls.append(artifact.request.trace_id)

    def _forget_call(self, run_id: str, trace_id: str) -> None:
        """A call in the run's own trace is linked by its parent."""
        noted = self._attempts.get(run_id)
        if noted is not None and trace_id in noted.calls:
            noted.calls.remove(trace_id)

    def _is_sampled(self, trace_id: int, parent: Place | None, name: str) -> bool:
        """As the sampler decides; by default as the caller did, and everything that has no caller's trace."""
        if parent is None:
            # Samplers go by the last 64 bits; in a UUID not all are chance, and a ratio would keep all or nothing.
            asked, trace_id = None, int.from_bytes(hashlib.blake2b(trace_id.to_bytes(16), digest_size=16).digest())
        else:
            told = SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags))
            asked = set_span_in_context(NonRecordingSpan(told))
        return self._sampler.should_sample(asked, trace_id, name).decision is Decision.RECORD_AND_SAMPLE


def spans_over_otlp(
    endpoint: str | None, clock: Clock, instruments: Instruments, *, ratio: float | None = None
) -> tuple[Spans, SpanQueue]:
    """To this endpoint, else where OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) says; headers, certificates,
    resource and, without a ratio, the sampler are the environment's."""
    # The provider is asked for what the environment says, and for nothing else.
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: "tga-gateway", SERVICE_VERSION: __version__}), shutdown_on_exit=False
    )
    sampler = provider.sampler if ratio is None else ParentBasedTraceIdRatio(ratio)
    sender = OtlpSender(OtlpSettings.of(endpoint), timeout_s=SPANS_EXPORT_MS / 1000)
    queue = SpanQueue(sender, instruments, provider.resource.attributes)
    return Spans(queue, clock, sampler), queue


def _place_of(trace_id: str, traceparent: str | None) -> tuple[int, Place | None, int]:
    """The trace that a call belongs to, its parent there, and whether that is sampled: as app/connectors/answers.py
    tells the tool server."""
    if traceparent is None:
        return int(trace_id.replace("-", ""), 16), None, 1
    _, trace, parent, written = traceparent.split("-")
    flags = int(written, 16)
    return int(trace, 16), Place(int(trace, 16), int(parent, 16), flags, is_remote=True), flags


def _call_context(call_trace_id: str, trace_id: int, flags: int, waiting: str | None = None) -> Place:
    return Place(trace_id, _hashed(f"call {call_trace_id} {waiting or ''}"), flags)


def _called(call_trace_id: str) -> Place:
    """The span of a run's call: those have no caller's trace."""
    return _call_context(call_trace_id, int(call_trace_id.replace("-", ""), 16), 1)


def _run_context(run_id: str) -> Place:
    """Every gateway comes to the same."""
    return Place(*run_span(run_id))


def _within(context: Place, place: int) -> int:
    """The id of a call's phase: steps of an odd number never meet, and other calls begin elsewhere."""
    return (context.span_id + place * 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF or 1


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) or 1


def _ns(written: str) -> int:
    return int(datetime.fromisoformat(written).timestamp() * 1e9)
