"""Statistics of the tenant's calls."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.statistics_documents import StatisticsDocument
from app.api.traces import json_answer
from app.edge.parameters import documented_parameters, milliseconds_in, name_in, parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.services import Services
from app.edge.statistics import load_statistics, now_of, window_of

_ASKED = ("since", "until", "server_id", "tool_name")


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["traces"])

    @routes.get(
        "/v1/stats",
        operation_id="get_statistics",
        summary="Calls by time, server and tool: how many, what became of them, how quick",
        response_model=None,
        responses={200: {"model": StatisticsDocument}, **documented()},
        openapi_extra=documented_parameters(*_ASKED),
    )
    async def statistics(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_tenant")
            given = parameters(request, *_ASKED)
            window = window_of(
                now_of(services), since_ms=milliseconds_in(given, "since"), until_ms=milliseconds_in(given, "until")
            )
            server_id, tool_name = name_in(given, "server_id"), name_in(given, "tool_name")
            return json_answer(
                await load_statistics(services, principal, window, server_id=server_id, tool_name=tool_name)
            )

    return routes
