"""Verification over HTTP: one trace or run recomputed, check by check; and the signed heads of the log."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.traces import json_answer
from app.api.verification_documents import HeadPage, VerificationDocument
from app.core.errors import RunNotFound, TraceNotFound
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import documented_parameters, limit_in, parameters, trace_seen_by
from app.edge.problems import documented
from app.edge.runs import run_seen_by
from app.edge.services import Services
from app.edge.verification import verify_one
from app.postgres.tree_heads import list_heads


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["log"])

    @routes.get(
        "/v1/traces/{trace_id}/verification",
        operation_id="verify_trace",
        summary="Recompute a trace: each check by itself, and what was not checked",
        response_model=None,
        responses={200: {"model": VerificationDocument}, **documented(TraceNotFound)},
        openapi_extra=documented_parameters("trace_id"),
    )
    async def trace_verification(request: Request) -> Response:
        async with services.admitted(request) as principal:
            trace_id = await trace_seen_by(services, principal, request)
            parameters(request)
            return json_answer(asdict(await verify_one(services, TRACE.stream(trace_id))))

    @routes.get(
        "/v1/runs/{run_id}/verification",
        operation_id="verify_run",
        summary="Recompute a run: each check by itself, and what was not checked",
        response_model=None,
        responses={200: {"model": VerificationDocument}, **documented(RunNotFound)},
        openapi_extra=documented_parameters("run_id"),
    )
    async def run_verification(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"])
            parameters(request)
            return json_answer(asdict(await verify_one(services, RUN.stream(run_id))))

    @routes.get(
        "/v1/log/heads",
        operation_id="list_heads",
        summary="The signed tree heads, newest first",
        response_model=None,
        responses={200: {"model": HeadPage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def heads(request: Request) -> Response:
        async with services.admitted(request):
            given = parameters(request, "cursor", "limit")
            position = list_position("heads", given.get("cursor"))
            before = None if position is None else int(position)
            page = await list_heads(services.sessions, before=before, limit=limit_in(given))
            items = [asdict(one) for one in page.items]
            return json_answer({"items": items, "next": list_cursor("heads", page.next)})

    return routes
