"""What people did: decisions, resolutions, answers, and what else the record has of them, the newest first."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.reading_documents import ActPage
from app.api.traces import json_answer
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import documented_parameters, limit_in, own_name, parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.runs import own_run_id
from app.edge.services import Services
from app.postgres.acts import ListedAct, list_acts


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["log"])

    @routes.get(
        "/v1/acts",
        operation_id="list_acts",
        summary="What people did, newest first: decisions, resolutions, answers, and what they did to runs and tools",
        response_model=None,
        responses={200: {"model": ActPage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def list_of_acts(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_tenant")
            given = parameters(request, "cursor", "limit")
            before = list_position("acts", given.get("cursor"))
            page = await list_acts(services.sessions, principal.tenant, before=before, limit=limit_in(given))
            items = [_told(one, principal.tenant) for one in page.items]
            return json_answer({"items": items, "next": list_cursor("acts", page.next)})

    return routes


def _told(one: ListedAct, tenant: str) -> dict[str, Any]:
    """Servers, tools and runs as the tenant calls them."""
    kind, _, name = one.stream.partition(":")
    server_id = tool_name = procedure = None
    identity, about = None, one.about
    if kind == TRACE.name:
        identity, server_id, tool_name = name, own_name(tenant, one.subject), one.name
    elif kind == RUN.name:
        identity, procedure = own_run_id(tenant, name), one.subject
        about = own_run_id(tenant, about) if one.act == "forked" and about is not None else about
    elif one.act == "accepted_tool" and about is not None:
        server, _, tool_name = about.partition(" ")
        server_id, about = own_name(tenant, server), None
    elif one.act == "erased" and about is not None:
        erased, _, of = about.partition(":")
        about = f"{erased}:{own_run_id(tenant, of)}"
    return {
        "act": one.act,
        "by": one.actor,
        "at": one.recorded_at,
        "kind": kind,
        "id": identity,
        "sequence_number": one.sequence_number,
        "leaf_index": one.leaf_index,
        "server_id": server_id,
        "tool_name": tool_name,
        "procedure": procedure,
        "about": about,
        "reason": one.reason,
    }
