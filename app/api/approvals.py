"""What waits for a person."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.approval_documents import ApprovalPage
from app.api.traces import json_answer
from app.edge.approvals import load_approvals, load_approvals_count
from app.edge.parameters import documented_parameters, limit_in, parameters
from app.edge.permissions import require, scope_of
from app.edge.problems import documented
from app.edge.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["approvals"])

    @routes.get(
        "/v1/approvals",
        operation_id="list_approvals",
        summary="List what waits for a person: calls and questions of runs, soonest expiry first",
        response_model=None,
        responses={200: {"model": ApprovalPage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def list_of_approvals(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read")
            given = parameters(request, "cursor", "limit")
            items, cursor = await load_approvals(services, principal, cursor=given.get("cursor"), limit=limit_in(given))
            count = asdict(await load_approvals_count(services, principal))
            return json_answer({"items": items, "next": cursor, "scope": scope_of(principal).name, "count": count})

    return routes
