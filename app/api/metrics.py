"""What Prometheus reads."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.core.errors import Forbidden, RouteNotFound
from app.domain.identity import DEFAULT_TENANT
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.services import Services, header_of

_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_EXAMPLE = (
    "# HELP tga_calls_refused_total Calls that were answered with an error, by its code.\n"
    "# TYPE tga_calls_refused_total counter\n"
    'tga_calls_refused_total{code="TOOL_NOT_FOUND"} 3\n'
)


def router(services: Services) -> APIRouter:
    made = APIRouter()

    @made.get(
        "/metrics",
        summary="Counters and gauges of this gateway, for Prometheus",
        tags=["health"],
        response_model=None,
        response_class=Response,
        responses={
            200: {
                "description": "Prometheus's text format, version 0.0.4; docs/metrics.md lists the metrics. Where "
                "several processes serve the port all of them are shown, each series with the label `process`. They "
                "are of the whole installation, and name the servers and tools of every tenant: so they are shown to "
                "operators, auditors and admins of the default tenant, or, where `[telemetry]` says so, to anyone.",
                "content": {"text/plain": {"example": _EXAMPLE}},
            },
            **documented(),
        },
    )
    async def metrics(request: Request) -> Response:
        shown = services.metrics
        if shown is None:
            raise RouteNotFound("no metrics are shown here", remedy='Set metrics = "key" in [telemetry] of tga.toml.')
        if shown.needs_key:
            # Not counted among requests: who watches must see a gateway that is full.
            principal = await services.authenticator.authenticate(header_of(request.scope, b"authorization"))
            require(principal, "read_metrics")
            if principal.tenant != DEFAULT_TENANT:
                raise Forbidden(
                    "metrics are of the whole installation",
                    expected=f"a key of the tenant {DEFAULT_TENANT}",
                    found="another tenant's",
                )
        return Response(await services.processes.with_others(await shown.render()), media_type=_TYPE)

    return made
