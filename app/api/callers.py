"""Who is calling, and who may: the caller itself, and the API keys of its tenant."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.reading_documents import KeyPage, MeDocument
from app.api.traces import json_answer
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import documented_parameters, limit_in, parameters
from app.edge.permissions import actions_of, require, scope_of
from app.edge.problems import documented
from app.edge.services import Services
from app.postgres.api_keys import list_keys_of


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["keys"])

    @routes.get(
        "/v1/me",
        operation_id="get_me",
        summary="Who the caller is, how far it sees, and what its roles admit it to",
        response_model=None,
        responses={200: {"model": MeDocument}, **documented()},
    )
    async def me(request: Request) -> Response:
        async with services.admitted(request) as principal:
            parameters(request)
            return json_answer(
                {
                    "principal_id": principal.principal_id,
                    "tenant": principal.tenant,
                    "roles": list(principal.roles or ()),
                    "scope": scope_of(principal).name,
                    "may": actions_of(principal),
                }
            )

    @routes.get(
        "/v1/keys",
        operation_id="list_keys",
        summary="List the tenant's API keys, oldest first, never with a secret",
        response_model=None,
        responses={200: {"model": KeyPage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def list_of_keys(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_keys")
            given = parameters(request, "cursor", "limit")
            after = list_position("keys", given.get("cursor"))
            page = await list_keys_of(services.sessions, principal.tenant, after=after, limit=limit_in(given))
            return json_answer({"items": [asdict(key) for key in page.items], "next": list_cursor("keys", page.next)})

    return routes
