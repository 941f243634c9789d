"""One box for everything: which traces and runs an id, an idempotency key or a digest belongs to."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.reading_documents import FoundPage
from app.api.traces import json_answer
from app.edge.finding import find, sought_in
from app.edge.parameters import documented_parameters, parameters
from app.edge.permissions import require, scope_of
from app.edge.problems import documented
from app.edge.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["traces"])

    @routes.get(
        "/v1/find",
        operation_id="find",
        summary="Find traces and runs by an id, an idempotency key or a digest, exactly",
        response_model=None,
        responses={200: {"model": FoundPage}, **documented()},
        openapi_extra=documented_parameters("q"),
    )
    async def find_by(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read")
            found = await find(services, principal, sought_in(parameters(request, "q")))
            items = [asdict(one) for one in found]
            return json_answer({"items": items, "next": None, "scope": scope_of(principal).name})

    return routes
