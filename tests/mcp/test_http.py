"""Calls to an MCP server over streamable HTTP: one POST each, whatever the server does."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from app.core.limits import MCP_MESSAGE_BYTES_MAX
from app.domain.tga.ports import Answered, Dispatched, NotSent, Unknown, Withheld
from tests.connectors.servers import output_of, tool_call, until
from tests.mcp.http_server import Handler, HttpMcp, answer, echo, error, event, http_mcp, stream
from tests.mcp.standing import Standing, standing, structured
from tests.patience import HANG_S
from tests.traces import uuid7

ERAS = ["modern", "legacy"]


def config(url: str, more: str = "") -> str:
    return f'[servers.it]\ntransport = "mcp-http"\nurl = "{url}"\n{more}\n'


def result_of(body: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": body["id"], "result": {"content": [], "structuredContent": {"ok": True}}}


async def dispatched(tmp_path: Path, era: str, call: Handler, *, timeout_ms: int = 5000, **how: Any) -> Dispatched:
    """What one dispatch gives. However it ends, the server saw one tools/call."""
    async with http_mcp(era, call, **how) as server, standing(tmp_path, config(server.url)) as world:
        result = await world.call("x", timeout_ms=timeout_ms)
        assert len(server.calls()) == 1
    return result


@pytest.mark.parametrize("era", ERAS)
async def test_the_request_says_what_the_protocol_wants_and_shows_the_servers_own_credentials(
    tmp_path: Path, era: str
) -> None:
    async with http_mcp(era) as server:
        credentials = '[servers.it.credentials]\nAuthorization = { env = "T", prefix = "Bearer " }\n'
        async with standing(tmp_path, config(server.url, credentials), environment={"T": "s3cret"}) as world:
            assert structured(await world.call("x")) == {"steps": ["x"]}
        sent = server.calls()[0]
        assert sent.headers["authorization"] == "Bearer s3cret"
        assert sent.headers["accept"] == "application/json, text/event-stream"
        assert sent.body["params"]["_meta"]["tga/idempotency-key"] == "key-1"
        if era == "modern":
            assert sent.headers["mcp-protocol-version"] == "2026-07-28"
            assert (sent.headers["mcp-method"], sent.headers["mcp-name"]) == ("tools/call", "does")
            assert "mcp-session-id" not in sent.headers
        else:
            assert sent.headers["mcp-protocol-version"] == "2025-11-25"
            assert sent.headers["mcp-session-id"] == "s-1"
            assert len(server.calls("notifications/initialized")) == 1


async def test_arguments_that_a_tool_wants_in_headers_are_mirrored_there(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    async with http_mcp("modern", schema=schema) as server, standing(tmp_path, config(server.url)) as world:
        await world.dispatch("it", "does", {"region": "eu"})
        assert server.calls()[0].headers["mcp-param-region"] == "eu"


@pytest.mark.parametrize("era", ERAS)
async def test_an_answer_in_a_stream_is_found_among_other_messages(tmp_path: Path, era: str) -> None:
    told: list[dict[str, Any]] = []

    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        token = body["params"]["_meta"]["progressToken"]
        progress = {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}}
        ask = {"jsonrpc": "2.0", "id": 7, "method": "sampling/createMessage", "params": {}}
        return await stream(request, b": hello\n\n", event(progress), event(ask), event(result_of(body)))

    async with http_mcp(era, call) as server, standing(tmp_path, config(server.url)) as world:
        with world.registry.watch_progress(uuid7(1), told.append):
            assert structured(await world.call("x")) == {"ok": True}
        await until(lambda: any(heard.body.get("id") == 7 for heard in server.requests))
        assert len(server.calls()) == 1
    assert [params["progress"] for params in told] == [1]


# What is known, for every way in which a server can answer.


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("status", "known"),
    [
        (400, "HTTP_400"),
        (401, "HTTP_401"),
        (403, "HTTP_403"),
        (307, "HTTP_307"),
        (301, "HTTP_301"),
        (202, "retryable_answer"),
        (204, "retryable_answer"),
        (408, "retryable_answer"),
        (409, "retryable_answer"),
        (429, "retryable_answer"),
        (500, "retryable_answer"),
        (503, "retryable_answer"),
    ],
)
async def test_a_status_without_json_rpc_is_read_as_http(tmp_path: Path, era: str, status: int, known: str) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": "/mcp", "Retry-After": "2"})

    result = await dispatched(tmp_path, era, call)
    if isinstance(result, Answered):
        assert (result.outcome, result.error_code) == ("FAILURE", known)
    else:
        assert isinstance(result, Unknown)
        assert result.result == known
        assert result.retry_after_ms == 2000


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize(
    ("status", "code", "known"),
    [
        (200, -32602, "MCP_-32602"),
        (400, -32602, "MCP_-32602"),
        (404, -32601, "MCP_-32601"),
        (200, -32603, "MCP_-32603"),
        (500, -32603, None),
        (400, -32000, None),
        (200, -32001, None),
    ],
)
async def test_an_error_of_json_rpc_is_definite_unless_it_leaves_it_open(
    tmp_path: Path, era: str, status: int, code: int, known: str | None
) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(error(None if status == 400 else body["id"], code, "no"), status=status)

    if era == "legacy" and status == 404:
        known = None  # the session may be what was not found
    result = await dispatched(tmp_path, era, call)
    if known is None:
        assert isinstance(result, Unknown)
        assert result.result == "retryable_answer"
    else:
        assert isinstance(result, Answered)
        assert (result.outcome, result.error_code) == ("FAILURE", known)


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b'{"jsonrpc":"2.0","id":1,"result":{}}', b'{"result":{}}'])
async def test_what_is_not_the_answer_leaves_the_outcome_unknown(tmp_path: Path, body: bytes) -> None:
    async def call(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    result = await dispatched(tmp_path, "modern", call)
    assert isinstance(result, Unknown)
    assert result.result == "retryable_answer"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_too_large_to_be_read_is_a_success_of_which_the_digest_is_kept(
    tmp_path: Path, is_stream: bool
) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        huge = {"jsonrpc": "2.0", "id": body["id"], "result": {"content": ["x" * MCP_MESSAGE_BYTES_MAX]}}
        return await stream(request, event(huge)) if is_stream else web.json_response(huge)

    output = output_of(await dispatched(tmp_path, "modern", call))
    assert output is not None
    assert (output["encoding"], output["truncated"]) == ("digest", True)


# Once, and no more.


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(tmp_path: Path, era: str, status: int) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, headers={"Location": str(request.url)})

    assert isinstance(await dispatched(tmp_path, era, call), Answered)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("begins", [False, True])
async def test_a_call_that_is_not_answered_in_time_is_unknown(tmp_path: Path, era: str, begins: bool) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, event({"method": "notifications/x"})) if begins else web.Response()
        await asyncio.sleep(0.6)
        return response

    async with http_mcp(era, call) as server, standing(tmp_path, config(server.url)) as world:
        result = await world.call("x", timeout_ms=200)
        assert isinstance(result, Unknown)
        assert result.result == "timed_out"
        if era == "legacy":
            await until(lambda: server.calls("notifications/cancelled"))
        assert len(server.calls()) == 1
        assert len(server.calls("notifications/cancelled")) == (1 if era == "legacy" else 0)


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("begins", [False, True])
async def test_a_connection_that_breaks_is_unknown(tmp_path: Path, era: str, begins: bool) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, event({"method": "notifications/x"})) if begins else web.Response()
        assert request.transport is not None
        request.transport.abort()
        return response

    result = await dispatched(tmp_path, era, call)
    assert isinstance(result, Unknown)
    assert result.result == "disconnected"


async def test_a_stream_that_breaks_off_is_read_on_and_the_call_is_not_sent_again(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.append(body)
        return await stream(request, event(None, event_id="e-1", retry=10))  # and ends

    async def get(request: web.Request) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID")
        if last is None:
            return web.Response(status=405)
        if last == "e-1":
            return await stream(request, event({"method": "notifications/x"}, event_id="e-2"))
        return await stream(request, event(result_of(asked[0]), event_id="e-3"))

    async with http_mcp("legacy", call, get=get) as server, standing(tmp_path, config(server.url)) as world:
        assert structured(await world.call("x")) == {"ok": True}
        assert len(server.calls()) == 1
        assert [sent["last-event-id"] for sent in server.gets if "last-event-id" in sent] == ["e-1", "e-2"]


async def test_a_stream_that_cannot_be_read_on_is_unknown_and_the_call_is_not_sent_again(tmp_path: Path) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, event(None, event_id="e-1", retry=10))

    result = await dispatched(tmp_path, "legacy", call)
    assert isinstance(result, Unknown)
    assert result.result == "disconnected"


async def test_without_a_session_a_stream_that_breaks_off_is_not_asked_for_again(tmp_path: Path) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, event(None, event_id="e-1", retry=10))

    async with http_mcp("modern", call) as server, standing(tmp_path, config(server.url)) as world:
        assert isinstance(await world.call("x"), Unknown)
        assert server.gets == []


async def test_a_server_that_is_not_there_is_not_sent_to_and_found_when_it_comes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with standing(tmp_path, config(f"http://127.0.0.1:{port}/mcp")) as world:
        assert world.connection().state != "connected"
        assert isinstance(await world.call("x", timeout_ms=100), NotSent)
        runner = await _serve_at(port)
        try:
            await until(lambda: world.connection().state == "connected")
            assert structured(await world.call("x")) == {"steps": ["x"]}
        finally:
            await runner.cleanup()
        assert isinstance(await world.call("x", timeout_ms=100), NotSent)


async def _serve_at(port: int) -> web.AppRunner:
    server = HttpMcp("modern", echo)
    application = web.Application()
    application.router.add_post("/mcp", server.post)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


async def test_a_forgotten_session_is_made_anew_and_the_call_stays_with_the_runtime(tmp_path: Path) -> None:
    async with http_mcp("legacy") as server, standing(tmp_path, config(server.url)) as world:
        await world.call("x")
        server.session = "s-2"
        result = await world.call("x")
        assert isinstance(result, Unknown)
        assert result.result == "retryable_answer"
        assert structured(await world.call("x")) == {"steps": ["x"]}
        assert [heard.headers["mcp-session-id"] for heard in server.calls()] == ["s-1", "s-1", "s-2"]


@pytest.mark.parametrize("era", ERAS)
async def test_a_cancelled_call_is_unknown_and_the_server_is_told(tmp_path: Path, era: str) -> None:
    is_gone = asyncio.Event()

    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, event({"method": "notifications/x"}))
        try:
            for _ in range(100):
                await asyncio.sleep(0.1)
                await response.write(b": beat\n\n")
        except (ConnectionError, asyncio.CancelledError):
            is_gone.set()
        return response

    async with http_mcp(era, call) as server, standing(tmp_path, config(server.url)) as world:
        calling = asyncio.create_task(world.call("x", timeout_ms=30_000))
        await until(lambda: server.calls())
        assert world.registry.cancel(uuid7(1))
        result = await calling
        assert isinstance(result, Unknown)
        assert result.is_cancelled
        if era == "legacy":
            await until(lambda: server.calls("notifications/cancelled"))
        async with asyncio.timeout(HANG_S):
            await is_gone.wait()
        assert len(server.calls()) == 1


def _known(world: Standing) -> str | None:
    return world.registry.resolve("it", "does").description


async def test_tools_that_change_are_noticed_when_the_server_says_so_in_its_stream(tmp_path: Path) -> None:
    changed = asyncio.Event()

    async def get(request: web.Request) -> web.StreamResponse:
        response = await stream(request, b": open\n\n")
        await changed.wait()
        await response.write(event({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}))
        await asyncio.sleep(5)
        return response

    async with http_mcp("legacy", get=get) as server, standing(tmp_path, config(server.url)) as world:
        server.description = "Other."
        changed.set()
        await until(lambda: _known(world) == "Other.")


async def test_an_answer_to_another_request_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return answer(body["id"] + 1, {"content": []})

    assert isinstance(await dispatched(tmp_path, "modern", call), Unknown)


# The last word before the first byte.


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_that_may_not_be_sent_is_not_posted(tmp_path: Path, era: str) -> None:
    said = [True, False]

    async def may_send() -> bool:
        return said.pop()

    async with http_mcp(era) as server, standing(tmp_path, config(server.url)) as world:
        call = tool_call(server_id="it", tool_name="does", arguments={"steps": ["x"]})
        async with world.registry.place("it") as connector:
            assert await connector.dispatch(call, timeout_ms=5000, may_send=may_send) == Withheld()
            assert server.calls() == []
            assert isinstance(await connector.dispatch(call, timeout_ms=5000, may_send=may_send), Answered)
        assert len(server.calls()) == 1
    assert said == []


async def test_a_session_that_is_closed_is_given_back_to_the_server(tmp_path: Path) -> None:
    async with http_mcp("legacy") as server:
        async with standing(tmp_path, config(server.url)) as world:
            await world.call("x")
        assert server.deleted == ["s-1"]
