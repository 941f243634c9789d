"""OpenTelemetry traces of workers and clients: off until `enable()`, or TGA_TRACES=true in the environment.

`pip install 'tga-sdk[otel]'` brings the API alone; the application chooses the SDK, the exporter and the sampler.
docs/telemetry.md says which spans there are.

While it is off nothing of OpenTelemetry is imported, and an operation costs one look at `active`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from tga_sdk.errors import SettingInvalid
from tga_sdk.journal import Begun, Ended

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from tga_sdk.attempt import Attempt
    from tga_sdk.spans import CallSpan, Tracing

_TRACES: Final = "TGA_TRACES"
_CONTENT: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_NOTHING: Final[nullcontext[None]] = nullcontext()

active: Tracing | None = None
"""What makes spans; None while telemetry is off."""


def enable(*, content: bool | None = None, tracer_provider: TracerProvider | None = None) -> None:
    """Make spans of what workers and clients of this process do from now on.

    They go to `tracer_provider`, else to the process's own (`opentelemetry.trace.set_tracer_provider`), which may be
    set later. `content`: also the texts that are said to models and by them, and the arguments of an agent's Python
    tools; without it as OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says, and not by default.

    Guaranteed: no arguments or results of the gateway's tools, no keys and no `Secret` are in a span, whatever
    `content` is; an operation that is replayed makes none. Not guaranteed: that every span arrives. One that is under
    way when the process is killed is lost, and so is what the exporter has not sent. ExtraMissing without the extra.
    """
    global active
    from tga_sdk.spans import Tracing

    wanted = os.environ.get(_CONTENT, "").lower() == "true" if content is None else content
    active = Tracing(tracer_provider, is_content_recorded=wanted)


def disable() -> None:
    """Make no more spans."""
    global active
    active = None


def enable_by_environment() -> None:
    """`enable()`, if TGA_TRACES says so and nothing was enabled before: asked when a worker or client is made."""
    said = os.environ.get(_TRACES, "").lower()
    if said not in ("", "false", "true"):
        raise SettingInvalid(f"{_TRACES}: expected true or false, found {said!r}")
    if said == "true" and active is None:
        enable()


def traced(
    attempt: Attempt,
    found: Ended | Begun | None,
    kind: str,
    name: str,
    path: str,
    *,
    tool_call: tuple[str, Any] | None = None,
) -> AbstractContextManager[Any]:
    """A span around an operation that is performed now. An operation that has ended is replayed: nothing.

    `tool_call`: of an agent's Python tool, the id and arguments that the model gave the call.
    """
    if active is None or isinstance(found, Ended) or kind == "turn":  # a turn's requests have spans of their own
        return _NOTHING
    return active.operation(attempt, kind, name, path, tool_call)


def agent_run(name: str, run_id: str) -> AbstractContextManager[Any]:
    """A span around one run of an agent in a run, made as soon as something in it is performed and not replayed."""
    return _NOTHING if active is None else active.agent(name, run_id)


def model_request(
    model: Any, settings: Any, messages: Any, *, run_id: str, stream: bool
) -> AbstractContextManager[Any]:
    """A span around one request to a model's provider; its value, where there is one, takes the answer."""
    return _NOTHING if active is None else active.chat(model, settings, messages, run_id, stream)


def client_call(server: str, tool: str) -> CallSpan | None:
    """A span of a tool call without a run, begun."""
    return None if active is None else active.call(server, tool)


def run_start(procedure: str, run_id: str) -> CallSpan | None:
    """A span of the start of a run, begun."""
    return None if active is None else active.start(procedure, run_id)
