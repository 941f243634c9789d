"""The public halves of the gateways' own keys: what signs decisions for people, and what webhooks are sent."""

from __future__ import annotations

from base64 import b64encode

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import SigningKeyPage
from app.api.traces import json_answer
from app.core import errors
from app.edge.parameters import parameters
from app.edge.problems import documented_alone
from app.edge.services import Services

_ERRORS = (
    errors.InputMalformed,
    errors.RequestTimeout,
    errors.HeadersTooLarge,
    errors.GatewayBusy,
    errors.ShuttingDown,
    errors.InternalError,
)


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["keys"])

    @routes.get(
        "/v1/keys/signing",
        operation_id="list_signing_keys",
        summary="The gateways' public signing keys, for whoever checks a webhook; needs no credential",
        response_model=None,
        responses={200: {"model": SigningKeyPage}, **documented_alone(*_ERRORS)},
    )
    async def list_of_signing_keys(request: Request) -> Response:
        parameters(request)
        items = [
            {
                "key_id": key_id,
                "algorithm": "Ed25519",
                "public_key": b64encode(key.public_key).decode("ascii"),
                "is_retired": key.is_retired,
            }
            for key_id, key in services.signing_keys().items()
        ]
        return json_answer({"items": items, "next": None})

    return routes
