"""The outermost layer: every request is counted here, and everything that goes wrong leaves here as a problem."""

from __future__ import annotations

import logging
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from app.config.wording import pointer_to, shown
from app.core.errors import (
    InternalError,
    MethodNotAllowed,
    RouteNotFound,
    SchemaViolation,
    ShuttingDown,
    TgaError,
)
from app.edge.body import ClientGone
from app.edge.problems import problem
from app.edge.services import IN_PROCESS, Services

logger = logging.getLogger("tga")

# Probes are answered also when the gateway is full, or about to stop.
_WATCHED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_ENDLESS: Final = "/events"
_LARGE: Final = "/v1/blobs/"  # their HEAD is a route of its own, which reads nothing


class GatewayMiddleware:
    """Pure ASGI, around the whole application. Its own cost is two comparisons and a count."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if scope["method"] == "HEAD" and not path.endswith(_ENDLESS) and not path.startswith(_LARGE):
            # The same answer as to GET; the protocol leaves its body out. The copy keeps it knowing that.
            scope = {**scope, "method": "GET"}
        try:
            if path in _WATCHED:
                await self._app(scope, receive, send)
            else:
                await self._counted(scope, receive, send)
        except ClientGone:
            pass
        except Exception as error:
            try:
                await self._answer(error, scope)(scope, receive, send)
            except RuntimeError:
                # An answer is already under way: it ends here, and the protocol closes the connection.
                if isinstance(error, TgaError):
                    logger.warning("an answer to %s was broken off: %s", path, error)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._services.stopping.is_set() and IN_PROCESS not in scope:  # its own work is brought to its end
            raise ShuttingDown("the gateway is stopping")
        self._services.admission.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            self._services.admission.end()

    def _answer(self, error: Exception, scope: Scope) -> Response:
        code = error.code if isinstance(error, TgaError) else InternalError.code
        self._services.instruments.problems.add((code,))
        if isinstance(error, ShuttingDown):
            return problem(error, headers={"Connection": "close"})
        if isinstance(error, TgaError):
            if problem_is_ours(error):
                logger.error("%s %s: %s", scope["method"], scope["path"], error)
            return problem(error)
        incident = self._services.clock.new_id()
        # Log nothing that a caller sent but the path; the traceback shows code, not values.
        logger.error("incident %s at %s %s", incident, scope["method"], scope["path"], exc_info=error)
        return problem(InternalError("the gateway failed to answer"), incident=incident)


def problem_is_ours(error: TgaError) -> bool:
    """Whether an operator should know: the store is not what it should be, or cannot be reached."""
    return error.code.startswith(("STORE_", "STATE_CHECKSUM", "BLOB_STORE_", "BLOB_DAMAGED"))


def add_exception_handlers(app: FastAPI) -> None:
    """Answers to what the framework itself refuses: as problems, like everything else."""

    async def on_http_exception(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        if status == 405:
            allow = ", ".join(_methods_at(app, request))
            if request.method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": allow})
            refused = MethodNotAllowed(f"no {shown(request.method)} here", expected=allow)
            return problem(refused, headers={"Allow": allow})
        if status == 404:
            return problem(RouteNotFound(f"nothing at {shown(request.url.path)}"))
        raise RuntimeError("the framework refused a request in a way that is not known") from error

    async def on_invalid_parameters(_: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        first = error.errors()[0]
        refused = SchemaViolation(
            f"the request at {pointer_to(first['loc'])}", expected=first["msg"], found=shown(first.get("input"))
        )
        return problem(refused)

    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_invalid_parameters)


def _methods_at(app: FastAPI, request: Request) -> list[str]:
    methods = {"OPTIONS"}
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in app.router.routes):
            methods.add(method)
    if "GET" in methods and not request.url.path.endswith(_ENDLESS):
        methods.add("HEAD")
    return sorted(methods)
