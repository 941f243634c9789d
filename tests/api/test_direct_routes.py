"""The short way to endpoints is the framework's way, shortened: the same endpoint, with the same parameters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from fastapi import APIRouter, Depends
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match

from app.edge.direct_routes import DirectRoutes, is_direct
from app.edge.protocol import ANSWER_WHOLE
from app.edge.services import Services
from app.gateway.http_server import routers_of

# A tool's name may contain `/`, and probes take no request.
LEFT_TO_THE_FRAMEWORK = {"/v1/tools/{server_id}/{tool_name:path}/pin", "/healthz", "/readyz"}
WORDS = [
    "v1",
    "runs",
    "worker",
    "lease",
    "traces",
    "tools",
    "pin",
    "checkpoints",
    "events",
    "blobs",
    "order-7",
    "a b",
    "",
    "ü",
    "\n",
]


class _Anything:
    """Stands for services that routes only keep."""

    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __call__(self, *_: object, **__: object) -> Any:
        return _Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _routes() -> Iterator[Any]:
    for router in routers_of(cast("Services", _Anything())):
        yield from router.routes


ROUTES = list(_routes())
DIRECT = DirectRoutes(ROUTES)


def _by_the_framework(method: str, path: str) -> tuple[Any, dict[str, Any]] | None:
    for route in ROUTES:
        match, found = route.matches({"type": "http", "method": method, "path": path, "root_path": ""})
        if match is Match.FULL:
            return route, found["path_params"]
    return None


def _directly(method: str, path: str) -> tuple[Any, dict[str, Any]] | None:
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path}
    return (scope["endpoint"], scope["path_params"]) if DIRECT.finds(scope) else None


def test_every_route_is_direct_but_those_that_are_named() -> None:
    assert {route.path for route in ROUTES if not is_direct(route)} == LEFT_TO_THE_FRAMEWORK


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{'|'.join(route.methods)} {route.path}")
def test_a_declared_route_is_found_by_either_way(route: Any) -> None:
    path = re.sub(r"\{[^}]+\}", "order-7.1:2 ü", route.path)
    for method in route.methods:
        framework = _by_the_framework(method, path)
        assert framework is not None
        found = _directly(method, path)
        if route.path in LEFT_TO_THE_FRAMEWORK:
            assert found is None
        else:
            assert found == (framework[0].endpoint, framework[1])


@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "get"]),
    parts=st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=6),
)
@example(method="GET", parts=["v1", "runs", "order-7\n"])
@example(method="GET", parts=["v1", "tools", "crm", "a", "pin"])
def test_no_other_path_leads_anywhere_else(method: str, parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    framework, found = _by_the_framework(method, path), _directly(method, path)
    if found is None:
        assert framework is None or framework[0].path in LEFT_TO_THE_FRAMEWORK
    else:
        assert framework is not None
        assert found == (framework[0].endpoint, framework[1])


def test_an_endpoint_that_wants_more_than_the_request_is_left_to_the_framework() -> None:
    router = APIRouter()

    @router.get("/request")
    async def request_alone(request: Request) -> Response:
        return Response()

    @router.get("/more")
    async def more(request: Request, limit: int = 1) -> Response:
        return Response()

    @router.get("/value", response_model=None)
    async def value(request: Request) -> dict[str, int]:
        return {}

    @router.get("/blocking")
    def blocking(request: Request) -> Response:
        return Response()

    @router.get("/guarded", dependencies=[Depends(blocking)])
    async def guarded(request: Request) -> Response:
        return Response()

    assert [is_direct(cast("Any", route)) for route in router.routes] == [True, False, False, False, False]


def test_the_first_of_two_routes_answers() -> None:
    router = APIRouter()

    @router.get("/v1/{anything}")
    async def first(request: Request) -> Response:
        return Response()

    @router.get("/v1/known")
    async def second(request: Request) -> Response:
        return Response()

    scope: dict[str, Any] = {"method": "GET", "path": "/v1/known"}
    assert DirectRoutes(router.routes).finds(scope)
    assert scope["endpoint"] is first


async def _answered(method: str, response: Response, *, is_taken: bool = True) -> tuple[list[Any], list[Any]]:
    """What was written whole, and what the framework was told."""
    whole: list[Any] = []
    told: list[Any] = []

    async def endpoint(_: Request) -> Response:
        return response

    async def send(message: Any) -> None:
        told.append(message["type"])

    async def receive() -> Any:
        await asyncio.get_running_loop().create_future()  # the client stays

    def answer_whole(by: Any, *answer: Any) -> bool:
        assert by is send
        if is_taken:
            whole.append(answer)
        return is_taken

    scope = {"type": "http", "method": method, "path": "/", "endpoint": endpoint, ANSWER_WHOLE: answer_whole}
    await DIRECT(scope, receive, send)
    return whole, told


async def test_a_posted_request_whose_answer_is_a_body_is_answered_whole() -> None:
    whole, told = await _answered("POST", Response(b"{}", media_type="application/json"))
    assert whole == [(200, [(b"content-length", b"2"), (b"content-type", b"application/json")], b"{}")]
    assert told == []


async def test_the_answer_to_a_start_is_answered_whole_with_its_trace() -> None:
    response = Response(b"{}", media_type="application/json", headers={"traceresponse": "00-1-2-01"})
    whole, told = await _answered("POST", response)
    assert [(name, value) for _, headers, _ in whole for name, value in headers] == response.raw_headers
    assert (b"traceresponse", b"00-1-2-01") in response.raw_headers
    assert told == []


@pytest.mark.parametrize(
    ("method", "response"),
    [
        ("GET", Response(b"{}", media_type="application/json")),
        ("POST", Response(b"{}", media_type="application/json", headers={"Location": "/v1/runs/a\r\nX: b"})),
        ("POST", Response(b"{}", media_type="application/json", background=BackgroundTask(list))),
        ("POST", StreamingResponse(iter(["a"]), media_type="text/plain")),
        ("POST", Response(status_code=204)),
        ("POST", Response(b"")),
    ],
    ids=["get", "header", "background", "stream", "no-content", "no-type"],
)
async def test_every_other_answer_is_the_frameworks(method: str, response: Response) -> None:
    """HEAD comes as GET; headers with more than length and type are looked at, so that no line can be smuggled in."""
    whole, told = await _answered(method, response)
    assert whole == []
    assert told[0] == "http.response.start"


async def test_an_answer_that_the_connection_does_not_take_whole_is_the_frameworks() -> None:
    whole, told = await _answered("POST", Response(b"{}", media_type="application/json"), is_taken=False)
    assert whole == []
    assert told == ["http.response.start", "http.response.body"]
