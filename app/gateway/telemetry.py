"""What a gateway that serves tells of itself: lines on stderr, spans over OTLP. Commands that open one tell nothing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from app.config.telling import TelemetryConfig
from app.core.errors import SettingInvalid
from app.edge.call_lines import Lines, LineWriter
from app.edge.services import Services
from app.gateway.logs import log_to_stderr

logger = logging.getLogger("tga")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@contextlib.contextmanager
def telling(services: Services, config: TelemetryConfig) -> Iterator[None]:
    """Until it ends, calls and runs are told of as `[telemetry]` says; what is left is written and sent at its end."""
    log_to_stderr(config.log_format)
    observer, clock = services.observer, services.clock
    with contextlib.ExitStack() as stack:
        if observer is not None and config.log_calls:
            writer = LineWriter(services.instruments)
            stack.callback(writer.close)
            observer.lines = Lines(writer, clock, config.log_format)
        if observer is not None and _wants_traces(config):
            try:
                from app.edge.spans import spans_over_otlp
            except ImportError:
                raise SettingInvalid(
                    "traces are to be exported, and OpenTelemetry is not installed",
                    expected="the extra `otel`",
                    remedy='pip install "tga-gateway[otel]", or set traces = false in [telemetry].',
                ) from None
            spans, queue = spans_over_otlp(config.otlp_endpoint, clock, services.instruments, ratio=config.trace_ratio)
            stack.callback(queue.close)
            observer.spans = spans
            services.runs.observer = spans
            logger.info("spans are exported over OTLP")
        try:
            yield
        finally:
            if observer is not None:
                observer.lines = observer.spans = None
            services.runs.observer = None


def _wants_traces(config: TelemetryConfig) -> bool:
    """By setting, or by the standard environment: an endpoint, and nothing that turns it off."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not off and (config.traces or any(os.environ.get(name) for name in _ENDPOINTS))
