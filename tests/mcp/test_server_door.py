"""Who is let in at /mcp, and what happens to those who are not."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cli.world import World
from tests.mcp.served import LEGACY, MODERN, mcp_world, raw_of
from tests.patience import HANG_S


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    limits = "[limits]\nrequests_per_second = 1000000\nburst = 1000000\n"
    pages = '[mcp]\nallowed_hosts = ["tools.example.org"]\nallowed_origins = ["https://chat.example.org"]\n'
    with mcp_world(limits + pages) as made:
        made.start()
        yield made


PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@pytest.mark.parametrize("authorization", ["", "Bearer nonsense", "Basic YTpi"])
async def test_without_a_good_key_nobody_gets_in(world: World, authorization: str) -> None:
    async with raw_of(world) as raw:
        headers = {**raw.headers, "Authorization": authorization}
        async with raw.session.post(f"{world.url}/mcp", json=PING, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["data"]["code"] == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example.com"}, 403),
        ({"Host": "evil.example.com:8420"}, 403),
        ({"Host": "127.0.0.1.evil.example.com"}, 403),
        ({"Host": "localhost@evil.example.com"}, 403),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost.evil.example.com"}, 403),
        ({"Origin": "http://chat.example.org"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:8420"}, 200),
        ({"Host": "tools.example.org"}, 200),
        ({"Host": "TOOLS.example.org:443"}, 200),
        ({"Origin": "http://localhost:6274"}, 200),
        ({"Origin": "http://127.0.0.1:3000"}, 200),
        ({"Origin": "https://chat.example.org"}, 200),
    ],
)
async def test_a_web_page_of_another_site_cannot_ask(world: World, headers: dict[str, str], status: int) -> None:
    async with raw_of(world, LEGACY) as raw:
        found, answer = await raw.post(PING, headers=headers)
        assert found == status, answer
        if status == 403:
            assert answer["error"]["data"]["code"] == "FORBIDDEN"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_there_is_no_stream_and_no_session_to_end(world: World, method: str) -> None:
    async with raw_of(world) as raw, raw.session.request(method, f"{world.url}/mcp", headers=raw.headers) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"


async def test_no_session_is_given_and_none_is_needed(world: World) -> None:
    async with raw_of(world, LEGACY) as raw:
        hello = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        async with raw.session.post(f"{world.url}/mcp", json=body, headers=raw.headers) as response:
            assert "mcp-session-id" not in response.headers
            assert (await response.json())["result"]["protocolVersion"] == LEGACY
        status, answer = await raw.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (status, answer) == (202, None)
    async with raw_of(world, LEGACY) as another:  # which has made no handshake
        assert (await another.ask("tools/list"))["tools"]


async def test_headers_that_say_something_else_than_the_body_are_refused(world: World) -> None:
    async with raw_of(world) as raw:
        message, headers = raw.request("tools/call", {"name": "bank__balance", "arguments": {}})
        changes: list[dict[str, str]] = [
            {"Mcp-Method": "tools/list"},
            {"Mcp-Name": "bank__charge"},
            {"MCP-Protocol-Version": "2027-01-01"},
            {"Mcp-Name": "=?base64?YmFua19f?="},
        ]
        for changed in changes:
            status, answer = await raw.post(message, headers={**headers, **changed})
            assert (status, answer["error"]["code"], answer["id"]) == (400, -32020, 7), changed
        for dropped in ("Mcp-Method", "Mcp-Name"):
            fewer = {name: value for name, value in headers.items() if name != dropped}
            assert (await raw.post(message, headers=fewer))[1]["error"]["code"] == -32020
        message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] = "2027-01-01"
        status, answer = await raw.post(message, headers={**headers, "MCP-Protocol-Version": "2027-01-01"})
        assert (status, answer["error"]["code"]) == (400, -32022)
        assert answer["error"]["data"] == {"supported": [MODERN], "requested": "2027-01-01"}


async def test_arguments_that_belong_into_headers_must_stand_there(world: World) -> None:
    async with raw_of(world) as raw:
        message, headers = raw.request("tools/call", {"name": "fixture__test_headers", "arguments": {"region": "eu"}})
        assert (await raw.post(message, headers=headers))[1]["error"]["code"] == -32020
        assert (await raw.post(message, headers={**headers, "Mcp-Param-Region": "us"}))[1]["error"]["code"] == -32020
        status, answer = await raw.post(message, headers={**headers, "Mcp-Param-Region": "eu"})
        assert status == 200
        assert "result" in answer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
METHODS = st.sampled_from(
    [
        "initialize",
        "ping",
        "tools/list",
        "tools/call",
        "tasks/get",
        "tasks/list",
        "tasks/result",
        "tasks/cancel",
        "tasks/update",
        "server/discover",
        "subscriptions/listen",
        "notifications/cancelled",
        "x",
    ]
)
KNOWN: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["bank__balance", "tga__approvals", "tga__approve", "fixture__greet"]) | JSON,
        "arguments": JSON,
        "taskId": st.just("01a1e2d0-aa8c-74eb-9da5-1c5bf71f8280") | JSON,
        "cursor": JSON,
        "task": JSON,
        "notifications": st.just([]) | st.text(max_size=3),
        "_meta": st.fixed_dictionaries(
            {},
            optional={
                "io.modelcontextprotocol/protocolVersion": st.just(MODERN) | JSON,
                "io.modelcontextprotocol/clientCapabilities": st.just({"extensions": {}}) | JSON,
                "progressToken": JSON,
                "tga/idempotency-key": JSON,
                "tga/proposed-key": JSON,
                "tga/intent": JSON,
                "traceparent": JSON,
            },
        )
        | JSON,
    },
)
BROKEN = st.fixed_dictionaries(
    {}, optional={"jsonrpc": st.just("2.0") | JSON, "id": JSON, "method": METHODS | JSON, "params": KNOWN | JSON}
)
ACCEPTED = st.sampled_from(["application/json", "*/*", "text/event-stream", "application/json, text/event-stream"])
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "MCP-Protocol-Version": st.sampled_from([MODERN, LEGACY, "2020-01-01", "x"]),
        "Mcp-Method": METHODS,
        "Mcp-Name": st.sampled_from(["bank__balance", "=?base64?x?=", "=?base64?YmFua19fYmFsYW5jZQ==?="]),
        "Accept": ACCEPTED,
    },
)


@st.composite
def well_formed(draw: st.DrawFn) -> tuple[Any, dict[str, str]]:
    """A request whose envelope is right: what is wrong with it is in its params."""
    method, params = draw(METHODS), dict(draw(KNOWN))
    message = {
        "jsonrpc": "2.0",
        "id": draw(st.integers(0, 9) | st.text(max_size=3)),
        "method": method,
        "params": params,
    }
    headers = {"Accept": draw(ACCEPTED)}
    if draw(st.booleans()):
        meta = params.get("_meta")
        tasks: dict[str, Any] = {"extensions": {"io.modelcontextprotocol/tasks": {}}}
        params["_meta"] = {
            **(meta if isinstance(meta, dict) else {}),
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": draw(st.sampled_from([{}, tasks])),
        }
        headers |= {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
        named = params.get("name" if method == "tools/call" else "taskId")
        if isinstance(named, str):
            headers["Mcp-Name"] = f"=?base64?{base64.b64encode(named.encode('utf-8', 'replace')).decode()}?="
    return message, headers


SENT: st.SearchStrategy[Any] = well_formed() | st.tuples(BROKEN | JSON | st.binary(max_size=40), HEADERS)


def test_whatever_is_sent_is_answered_as_json_rpc_and_never_with_a_server_error(world: World) -> None:
    """One connection for all examples: a new one each would be most of the work."""
    loop = asyncio.new_event_loop()
    opened = raw_of(world)
    raw = loop.run_until_complete(opened.__aenter__())

    @settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SENT)
    def send(given_: tuple[Any, dict[str, str]]) -> None:
        message, headers = given_

        async def sent() -> None:
            async with asyncio.timeout(HANG_S):
                status, answer = await raw.post(message, headers=headers)
            assert status in (200, 202, 400, 403, 404), (status, answer)
            if status != 202:
                assert answer["jsonrpc"] == "2.0"
                assert ("result" in answer) != ("error" in answer)
                assert "INTERNAL" not in str(answer.get("error")), answer

        loop.run_until_complete(sent())

    try:
        send()
    finally:
        loop.run_until_complete(opened.__aexit__(None, None, None))
        loop.close()
    assert "incident" not in world.told.read_text()
