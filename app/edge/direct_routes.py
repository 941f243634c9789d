"""The short way to endpoints: by method and path straight to the function, without the framework's layers.

FastAPI solves dependencies, validates parameters and opens exit stacks at every request; endpoints here use none of
that: they take the request and return a response, and routes are declared there for the sake of the OpenAPI document.
What is not found here (another method, an unknown path, a parameter that may contain `/`, an endpoint that takes
more than the request) is the framework's to answer, as before.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeAlias

from fastapi.routing import APIRoute
from starlette.convertors import StringConvertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from app.edge.protocol import ANSWER_WHOLE

_OF_A_BODY: Final = frozenset({b"content-length", b"content-type"})
# What is ours to the letter: any other header is looked at by the framework before it is written.
_PLAIN: Final = _OF_A_BODY | {b"traceresponse"}
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """An application for requests that `finds` has found; the others are the framework's."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        # By method and number of slashes, each in the order of declaration: the first that matches answers.
        self._declared: dict[tuple[str, int], list[tuple[re.Pattern[str], Endpoint]]] = defaultdict(list)
        for route in routes:
            if isinstance(route, APIRoute) and is_direct(route):
                for method in route.methods or ():
                    self._declared[method, route.path.count("/")].append((route.path_regex, route.endpoint))

    def finds(self, scope: Scope) -> bool:
        """Whether a route of here answers this request; what it needs for that is then in the scope."""
        path = scope["path"]
        for pattern, endpoint in self._declared.get((scope["method"], path.count("/")), ()):
            matched = pattern.match(path)
            if matched is not None:
                scope["path_params"], scope["endpoint"] = matched.groupdict(), endpoint
                return True
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await scope["endpoint"](Request(scope, receive, send))
        answer_whole = scope.get(ANSWER_WHOLE)
        if (
            answer_whole is None
            or not _is_whole(scope, response)
            or not answer_whole(send, response.status_code, response.raw_headers, response.body)
        ):
            await response(scope, receive, send)


def _is_whole(scope: Scope, response: Response) -> bool:
    """Whether it is a body with its length and type, and has no header that must be looked at. Only what is posted:
    HEAD is answered like GET, and this scope does not tell which it was."""
    return (
        scope["method"] == "POST"
        and type(response) is Response
        and response.background is None
        and _OF_A_BODY <= {name for name, _ in response.raw_headers} <= _PLAIN
    )


def is_direct(route: APIRoute) -> bool:
    """Whether its endpoint is `async def name(request: Request) -> Response` that depends on nothing, and each
    parameter a part of the path."""
    told = inspect.signature(route.endpoint)
    kinds = [*(one.annotation for one in told.parameters.values()), told.return_annotation]
    return (
        inspect.iscoroutinefunction(route.endpoint)
        and kinds in (["Request", "Response"], [Request, Response])
        and not route.dependant.dependencies
        and all(isinstance(one, StringConvertor) for one in route.param_convertors.values())
    )
