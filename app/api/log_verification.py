"""The whole log verified on request: start it, follow it, stop it, read the last results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.events import EVENT_SCHEMA
from app.api.traces import json_answer
from app.api.verification_documents import LogVerificationDocument, LogVerificationPage
from app.core import errors
from app.domain.identity import DEFAULT_TENANT, Principal
from app.edge.log_verification import SharedVerifications
from app.edge.parameters import documented_parameters, parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.services import Services
from app.edge.streaming import MEDIA_TYPE, Events, EventStream, event

_EVENT = {
    **EVENT_SCHEMA,
    "properties": {**EVENT_SCHEMA["properties"], "event": {"enum": ["progress", "end", "problem"]}},
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "An event `progress` as it goes on and an event `end` when it is over, each with the whole "
        "verification as its data.",
        "content": {MEDIA_TYPE: {"schema": _EVENT, "example": {"event": "end", "data": "{}"}}},
    }
}


def router(services: Services) -> APIRouter:
    routes, known = APIRouter(tags=["log"]), SharedVerifications(services)
    one = documented_parameters(in_path=("verification_id",))

    @routes.post(
        "/v1/log/verifications",
        operation_id="start_verification",
        summary="Verify the whole log now, while calls go on; one at a time",
        response_model=None,
        status_code=202,
        responses={202: {"model": LogVerificationDocument}, **documented(errors.ConcurrentExecution)},
    )
    async def start(request: Request) -> Response:
        async with services.admitted(request) as principal:
            _require(principal)
            parameters(request)
            answer = json_answer(await known.start(principal))
            answer.status_code = 202
            return answer

    @routes.get(
        "/v1/log/verifications",
        operation_id="list_verifications",
        summary="The last verifications of this gateway, newest first",
        response_model=None,
        responses={200: {"model": LogVerificationPage}, **documented()},
    )
    async def listed(request: Request) -> Response:
        async with services.admitted(request) as principal:
            _require(principal)
            parameters(request)
            return json_answer({"items": await known.newest_first(), "next": None})

    @routes.get(
        "/v1/log/verifications/{verification_id}",
        operation_id="get_verification",
        summary="How far a verification has come, or what it found",
        response_model=None,
        responses={200: {"model": LogVerificationDocument}, **documented(errors.VerificationNotFound)},
        openapi_extra=one,
    )
    async def shown(request: Request) -> Response:
        async with services.admitted(request) as principal:
            told = await found(principal, request)
            parameters(request)
            return json_answer(told)

    @routes.get(
        "/v1/log/verifications/{verification_id}/events",
        operation_id="follow_verification",
        summary="Follow a verification as server-sent events",
        response_model=None,
        response_class=Response,  # else the document would promise JSON
        responses={**_EVENTS, **documented(errors.VerificationNotFound)},
        openapi_extra=one,
    )
    async def events(request: Request) -> Response:
        async def opens(principal: Principal) -> Events | None:
            told = await found(principal, request)
            parameters(request)
            return _events(known.followed(told["verification_id"]))

        return EventStream(services, request, opens)

    @routes.post(
        "/v1/log/verifications/{verification_id}/stop",
        operation_id="stop_verification",
        summary="Stop a verification; what it found so far stays",
        response_model=None,
        responses={200: {"model": LogVerificationDocument}, **documented(errors.VerificationNotFound)},
        openapi_extra=one,
    )
    async def stop(request: Request) -> Response:
        async with services.admitted(request) as principal:
            told = await found(principal, request)
            parameters(request)
            await known.stop(told["verification_id"])
            return json_answer(await found(principal, request))

    async def found(principal: Principal, request: Request) -> dict[str, Any]:
        _require(principal)
        told = await known.find(request.path_params["verification_id"])
        if told is None:
            raise errors.VerificationNotFound("no such verification")
        return told

    return routes


async def _events(steps: AsyncIterator[dict[str, Any]]) -> Events:
    async with aclosing(steps):  # type: ignore[type-var]
        async for told in steps:
            yield event("progress" if told["state"] == "running" else "end", told)


def _require(principal: Principal) -> None:
    require(principal, "verify_log")
    if principal.tenant != DEFAULT_TENANT:
        raise errors.Forbidden(
            "the log is every tenant's, and findings name their streams",
            expected=f"a principal of the tenant {DEFAULT_TENANT}",
            remedy="Verify a single trace or run: GET /v1/traces/{trace_id}/verification.",
        )
