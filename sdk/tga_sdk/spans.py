"""Spans, by the semantic conventions for generative AI where these have a name. Loaded by `telemetry.enable()` alone.

**A run is one trace**, across attempts and workers: the gateway says its context with every lease, and the parent of
what a worker does is the attempt's span, which the gateway makes when the attempt is over, also when it was lost. So
spans of a worker that was killed are where they belong.

A tool call takes its span's context along: to the gateway, which makes its own spans below it, and to the tool server.
Nothing is attached where an operation is replayed; an agent's span is made with the first operation in it that is not.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tga_sdk.errors import ExtraMissing, OperationError, Stop, TgaError

try:
    from opentelemetry import context as otel
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Span,
        SpanKind,
        Status,
        StatusCode,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ExtraMissing(module="opentelemetry", extra="otel") from error

if TYPE_CHECKING:
    from tga_sdk.attempt import Attempt

CONTENT_CHARS_MAX: Final = 32_768
_W3C: Final = TraceContextTextMapPropagator()
_SETTINGS: Final = ("max_tokens", "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
# Providers as pydantic-ai names them, where the conventions have another name.
_PROVIDERS: Final = {
    "google-gla": "gcp.gemini",
    "google": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "bedrock": "aws.bedrock",
    "mistral": "mistral_ai",
    "azure": "azure.ai.openai",
    "grok": "x_ai",
    "xai": "x_ai",
}
_agent: ContextVar[_AgentRun | None] = ContextVar("tga_sdk_agent_run", default=None)


@dataclass(slots=True)
class _AgentRun:
    """An agent under way. `span`: made with its first operation that is not replayed."""

    name: str
    attributes: dict[str, Any]
    around: _AgentRun | None
    begun_ns: int = field(default_factory=time.time_ns)
    span: Span | None = None


@dataclass(slots=True)
class CallSpan:
    """A span of a client's request, which is begun and not ended."""

    span: Span

    def headers(self) -> dict[str, str]:
        """What the gateway is sent, so that its spans are below this one."""
        return {"traceparent": said} if (said := _traceparent(self.span)) else {}

    def ended(self, **attributes: Any) -> None:
        self.span.set_attributes({f"tga.{name}": value for name, value in attributes.items() if value is not None})
        self.span.end()

    def linked(self, traceparent: str | None) -> None:
        """What was started is a trace of its own."""
        context = get_current_span(_context_of(traceparent)).get_span_context()
        if context.is_valid:
            self.span.add_link(context)

    def failed(self, error: BaseException) -> None:
        _fail(self.span, error)
        self.span.end()


class Tracing:
    """Makes the spans of this process's workers and clients."""

    def __init__(self, provider: TracerProvider | None, *, is_content_recorded: bool) -> None:
        self._tracer = get_tracer("tga_sdk", tracer_provider=provider)
        self._is_content_recorded = is_content_recorded

    def enter_run(self, traceparent: str | None) -> None:
        """From here on, in this task and what it starts, spans are of the run's trace."""
        otel.attach(_context_of(traceparent))
        _agent.set(None)

    @contextmanager
    def operation(
        self, attempt: Attempt, kind: str, name: str, path: str, tool_call: tuple[str, Any] | None
    ) -> Generator[None]:
        attributes: dict[str, Any] = {
            "tga.run_id": attempt.run_id,
            "tga.attempt": attempt.number,
            "tga.path": path,
            "tga.kind": kind,
        }
        of_kind, named = SpanKind.INTERNAL, f"{kind} {name}"
        if kind == "tool":
            server, _, tool = name.partition(".")
            named, of_kind = f"execute_tool {tool}", SpanKind.CLIENT
            attributes |= {**_tool(tool, "extension"), "tga.server": server}
        elif tool_call is not None:
            named = f"execute_tool {name}"
            attributes |= {**_tool(name, "function"), "gen_ai.tool.call.id": tool_call[0]}
            self._content(attributes, "gen_ai.tool.call.arguments", tool_call[1])
        span = self._tracer.start_span(named, context=self._parent(), kind=of_kind, attributes=attributes)
        if kind == "tool":
            attempt.traceparents[path] = _traceparent(span)
        with self._inside(span):
            try:
                yield
            except (asyncio.CancelledError, Stop):
                over = attempt.over
                span.set_attribute("tga.left", "CANCELLED" if over is None else over.how)
                raise
            except BaseException as error:
                _fail(span, error)
                raise
            finally:
                attempt.traceparents.pop(path, None)
                span.end()

    @contextmanager
    def agent(self, name: str, run_id: str) -> Generator[None]:
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": name,
            "gen_ai.conversation.id": run_id,
            "tga.run_id": run_id,
        }
        before = _agent.get()
        run = _AgentRun(name, attributes, before)
        _agent.set(run)
        try:
            yield
        except Exception as error:
            if run.span is not None:
                _fail(run.span, error)
            raise
        finally:
            _agent.set(before)
            if run.span is not None:
                run.span.end()

    @contextmanager
    def chat(self, model: Any, settings: Any, messages: Any, run_id: str, stream: bool) -> Generator[ChatSpan]:
        name = str(model.model_name)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": _PROVIDERS.get(model.system, model.system),
            "gen_ai.request.model": name,
            "gen_ai.conversation.id": run_id,
            "tga.run_id": run_id,
        }
        if stream:
            attributes["gen_ai.request.stream"] = True
        for setting in _SETTINGS:
            value = (settings or {}).get(setting)
            if isinstance(value, int | float):
                attributes[f"gen_ai.request.{setting}"] = value
        if self._is_content_recorded:
            self._content(attributes, "gen_ai.input.messages", [_message(one) for one in messages])
        span = self._tracer.start_span(
            f"chat {name}", context=self._parent(), kind=SpanKind.CLIENT, attributes=attributes
        )
        with self._inside(span):
            try:
                yield ChatSpan(self, span)
            except BaseException as error:
                _fail(span, error)
                raise
            finally:
                span.end()

    def call(self, server: str, tool: str) -> CallSpan:
        """Of a client: the caller's own context is around it."""
        attributes = {**_tool(tool, "extension"), "tga.server": server}
        return CallSpan(self._tracer.start_span(f"execute_tool {tool}", kind=SpanKind.CLIENT, attributes=attributes))

    def start(self, procedure: str, run_id: str) -> CallSpan:
        """Of a client. The run that it starts is a trace of its own: it may outlive the caller's by days."""
        attributes = {"gen_ai.workflow.name": procedure, "tga.run_id": run_id}
        return CallSpan(self._tracer.start_span(f"start {procedure}", kind=SpanKind.PRODUCER, attributes=attributes))

    def _parent(self) -> Context | None:
        """Where a span of now belongs: below the agent that is under way, else to the context as it is."""
        run = _agent.get()
        return None if run is None else set_span_in_context(self._span_of(run))

    def _span_of(self, run: _AgentRun) -> Span:
        if run.span is None:
            around = None if run.around is None else set_span_in_context(self._span_of(run.around))
            run.span = self._tracer.start_span(
                f"invoke_agent {run.name}", context=around, attributes=run.attributes, start_time=run.begun_ns
            )
        return run.span

    @contextmanager
    def _inside(self, span: Span) -> Generator[None]:
        """What is performed inside, and spans that libraries make there, are below this one."""
        token, around = otel.attach(set_span_in_context(span)), _agent.get()
        _agent.set(None)
        try:
            yield
        finally:
            _agent.set(around)
            otel.detach(token)

    def _content(self, attributes: dict[str, Any], name: str, value: Any) -> None:
        if self._is_content_recorded:
            attributes[name] = json.dumps(value, ensure_ascii=False, default=lambda _: "...")[:CONTENT_CHARS_MAX]


@dataclass(slots=True)
class ChatSpan:
    """The span of one request to a provider."""

    _tracing: Tracing
    _span: Span

    def answered(self, response: Any) -> None:
        """A ModelResponse of pydantic-ai."""
        usage = response.usage
        attributes: dict[str, Any] = {
            "gen_ai.response.model": response.model_name,
            "gen_ai.response.id": response.provider_response_id,
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens or None,
            "gen_ai.response.finish_reasons": [response.finish_reason] if response.finish_reason else None,
        }
        self._tracing._content(attributes, "gen_ai.output.messages", [_message(response)])
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def _tool(name: str, kind: str) -> dict[str, str]:
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": kind}


def _message(message: Any) -> dict[str, Any]:
    """A message of pydantic-ai's as the conventions write it. Texts alone: of tool calls the name and id, because the
    gateway, and not this process, knows which of their arguments are secret."""
    parts: list[dict[str, Any]] = []
    role = "assistant" if message.kind == "response" else "user"
    for part in message.parts:
        kind, content = part.part_kind, getattr(part, "content", None)
        if kind in ("tool-call", "tool-return"):
            written = "tool_call" if kind == "tool-call" else "tool_call_response"
            parts.append({"type": written, "id": part.tool_call_id, "name": part.tool_name})
            role = "tool" if kind == "tool-return" else role
        elif kind in ("text", "user-prompt", "system-prompt") and isinstance(content, str):
            parts.append({"type": "text", "content": content})
            role = "system" if kind == "system-prompt" else role
        else:
            parts.append({"type": kind})
    return {"role": role, "parts": parts}


def _context_of(traceparent: str | None) -> Context:
    carrier: Mapping[str, str] = {} if traceparent is None else {"traceparent": traceparent}
    return _W3C.extract(carrier, context=Context())


def _traceparent(span: Span) -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context=set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def _fail(span: Span, error: BaseException) -> None:
    """The class of the error alone: its message may hold what is not to be recorded."""
    if isinstance(error, OperationError):
        found = error.type
    else:
        found = error.code if isinstance(error, TgaError) else type(error).__name__
    span.set_attribute("error.type", found)
    span.set_status(Status(StatusCode.ERROR))
