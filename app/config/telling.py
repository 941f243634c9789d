"""What the gateway tells of itself: `[telemetry]`, and which events webhooks are told of, in which format."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.core.limits import URL_CHARS_MAX

WebhookEvent = Literal[
    "approval_requested", "call_held", "tool_quarantined", "log_forked", "run_parked", "run_diverged"
]
WebhookFormat = Literal["json", "slack", "teams"]
_Endpoint = Annotated[str, StringConstraints(max_length=URL_CHARS_MAX, pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")]


class TelemetryConfig(BaseModel):
    """`[telemetry]`. `metrics`: who may read /metrics: whoever has a key of an operator or auditor of the default
    tenant (`key`), `anyone`, or nobody (`off`). `log_format`: how stderr is written; `log_calls`: a line for each call.
    `traces`: spans over OTLP, to `otlp_endpoint`, else where OTEL_EXPORTER_OTLP_ENDPOINT says. `trace_ratio`: the part
    of calls and runs that is traced, of those without a caller's trace; else as OTEL_TRACES_SAMPLER says."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    metrics: Literal["key", "anyone", "off"] = "key"
    log_format: Literal["text", "json"] = "text"
    log_calls: bool = True
    traces: bool = False
    trace_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    otlp_endpoint: _Endpoint | None = Field(default=None, repr=False)
