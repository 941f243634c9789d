"""What waits for a person."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import ApprovalPage
from app.api.traces import json_answer
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import documented_parameters, limit_in, own_name, parameters
from app.edge.permissions import require, scope_of
from app.edge.problems import documented
from app.edge.services import Services
from app.postgres.listing import list_approvals


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["approvals"])

    @routes.get(
        "/v1/approvals",
        operation_id="list_approvals",
        summary="List requests that wait for a person, oldest first",
        response_model=None,
        responses={200: {"model": ApprovalPage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def list_of_approvals(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read")
            given = parameters(request, "cursor", "limit")
            page = await list_approvals(
                services.sessions,
                scope_of(principal),
                after=list_position("approvals", given.get("cursor")),
                limit=limit_in(given),
            )
            items = [replace(item, server_id=own_name(principal.tenant, item.server_id)) for item in page.items]
            cursor = list_cursor("approvals", page.next)
            return json_answer({"items": items, "next": cursor, "scope": scope_of(principal).name})

    return routes
