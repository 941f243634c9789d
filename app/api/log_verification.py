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
from app.api.verification_documents import LogStanding, LogVerificationDocument, LogVerificationPage
from app.core import errors
from app.domain.identity import Principal
from app.edge.parameters import documented_parameters, parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.services import Services
from app.edge.streaming import MEDIA_TYPE, Events, EventStream, event
from app.postgres.log_verifications import KeptVerification

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
    routes, known = APIRouter(tags=["log"]), services.log_verifications
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
            answer = json_answer(await known.start(services, principal))
            answer.status_code = 202
            return answer

    @routes.get(
        "/v1/log/verifications",
        operation_id="list_verifications",
        summary="The last verifications of the tenant, newest first",
        response_model=None,
        responses={200: {"model": LogVerificationPage}, **documented()},
    )
    async def listed(request: Request) -> Response:
        async with services.admitted(request) as principal:
            _require(principal)
            parameters(request)
            return json_answer({"items": await known.newest_first(services, principal.tenant), "next": None})

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
            _require(principal)
            parameters(request)
            verification_id = request.path_params["verification_id"]
            return json_answer(await known.load(services, verification_id, principal.tenant))

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
            _require(principal)
            parameters(request)
            verification_id = request.path_params["verification_id"]
            await known.load(services, verification_id, principal.tenant)
            return _events(known.follow(services, verification_id, principal.tenant))

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
            _require(principal)
            parameters(request)
            verification_id = request.path_params["verification_id"]
            return json_answer(await known.stop(services, verification_id, principal.tenant))

    @routes.get(
        "/v1/log/standing",
        operation_id="get_log_standing",
        summary="What the last verification of the whole log said, for everyone",
        response_model=None,
        responses={200: {"model": LogStanding}, **documented()},
    )
    async def standing(request: Request) -> Response:
        async with services.admitted(request) as principal:
            parameters(request)
            last = await known.last_conclusive(services)
            return json_answer({"verified": None if last is None else _standing(last, principal)})

    return routes


def _standing(last: KeptVerification, principal: Principal) -> dict[str, Any]:
    """Figures only: who verified, and what was found where, is for those who may verify."""
    told, tree = last.told, last.told["tree"] or {}
    return {
        "state": told["state"],
        "ended_at": told["ended_at"],
        "started_by": told["started_by"] if last.tenant == principal.tenant else None,
        "findings_total": told["findings_total"],
        "tree_size": tree.get("tree_size"),
        "trusted_size": tree.get("trusted_size"),
        "broken_size": tree.get("broken_size"),
    }


async def _events(steps: AsyncIterator[dict[str, Any]]) -> Events:
    async with aclosing(steps):  # type: ignore[type-var]
        async for told in steps:
            yield event("progress" if told["state"] == "running" else "end", told)


def _require(principal: Principal) -> None:
    require(principal, "verify_log")
