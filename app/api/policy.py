"""The policy: what is in force, what was, and why a call would be decided as it would be."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.openapi import request_body
from app.api.policy_documents import ExplainBody, ExplanationDocument, PolicyDocument, PolicySetPage
from app.api.traces import json_answer
from app.core import errors
from app.core.limits import POLICY_SETS_PAGE_MAX
from app.domain.identity import DEFAULT_TENANT, Principal
from app.edge.body import read_body
from app.edge.cursors import list_cursor, list_position
from app.edge.explaining import SupposedCall, explain_supposed, policy_in_force
from app.edge.parameters import documented_parameters, limit_in, parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.services import Services
from app.postgres.policy_sets import list_policy_sets

_EXAMPLE = {
    "server_id": "pay",
    "tool_name": "charge",
    "arguments": {"amount": 240},
    "principal_id": "billing-agent",
    "roles": ["agent"],
}


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["policy"])

    @routes.get(
        "/v1/policy",
        operation_id="get_policy",
        summary="The policy in force: its rules in the order of the file",
        response_model=None,
        responses={200: {"model": PolicyDocument}, **documented()},
    )
    async def get_policy(request: Request) -> Response:
        async with services.admitted(request) as principal:
            _require_of_house(principal)
            parameters(request)
            policy = policy_in_force(services)
            newest = await list_policy_sets(services.sessions, before=None, limit=1)
            same = [one for one in newest.items if one.policy_digest == policy.digest]
            error = None if services.policy is None else services.policy.last_error
            return json_answer(
                {
                    "policy_digest": policy.digest,
                    "recorded_at": same[0].recorded_at if same else None,
                    "rules": [
                        {"id": rule.name, "effect": rule.effect, "line": rule.line, "text": rule.statement.text}
                        for rule in policy.rules
                    ],
                    "warnings": list(policy.warnings),
                    "last_error": None if error is None else str(error),
                }
            )

    @routes.get(
        "/v1/policy/sets",
        operation_id="list_policy_sets",
        summary="The policies on the record, newest first",
        response_model=None,
        responses={200: {"model": PolicySetPage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def policy_sets(request: Request) -> Response:
        async with services.admitted(request) as principal:
            _require_of_house(principal)
            given = parameters(request, "cursor", "limit")
            position = list_position("policy sets", given.get("cursor"))
            page = await list_policy_sets(
                services.sessions,
                before=None if position is None else int(position),
                limit=min(limit_in(given), POLICY_SETS_PAGE_MAX),
            )
            items = [asdict(one) for one in page.items]
            return json_answer({"items": items, "next": list_cursor("policy sets", page.next)})

    @routes.post(
        "/v1/policy/explain",
        operation_id="explain_policy",
        summary="Why a call would be decided as it would be; nothing is stored or sent",
        response_model=None,
        responses={
            200: {"model": ExplanationDocument},
            **documented(errors.SchemaViolation, errors.ToolNotFound, errors.ArgumentsInvalid),
        },
        openapi_extra=request_body(ExplainBody, _EXAMPLE),
    )
    async def explain_call(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_policy")
            parameters(request)
            body = await read_body(request.scope, request.receive, ExplainBody)
            call = SupposedCall(
                body.server_id, body.tool_name, body.arguments, body.intent, body.procedure, body.version
            )
            told = explain_supposed(
                services, principal, call, principal_id=body.principal_id, roles=body.roles or ["agent"]
            )
            return json_answer(told)

    return routes


def _require_of_house(principal: Principal) -> None:
    require(principal, "read_policy")
    if principal.tenant != DEFAULT_TENANT:
        raise errors.Forbidden(
            "the policy is the gateway's, and may name other tenants",
            expected=f"a principal of the tenant {DEFAULT_TENANT}",
            remedy="Ask about a single call: POST /v1/policy/explain.",
        )
