"""The client of the commands, against servers that are not what they should be: real sockets, no gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from app.cli.client import GatewayClient, error_of
from app.cli.decisions import decide
from app.cli.event_stream import Event, events_in
from app.cli.traces import watch_trace
from app.core.errors import (
    ALL_ERRORS,
    ChecksumMismatch,
    GatewayUnreachable,
    InputTooLarge,
    InternalError,
    SettingInvalid,
    TgaError,
    Unauthenticated,
)
from app.settings import Settings
from tests.connectors.servers import endless, raw_server

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET = "tga_0123456789abcdef_" + "S" * 43


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def settings_of(url: str, home: Path, **more: str) -> Settings:
    return Settings.from_environment({"TGA_URL": url, "TGA_HOME": str(home), **more})


@asynccontextmanager
async def asking(handler: Handler, home: Path) -> AsyncIterator[GatewayClient]:
    async with serving(handler) as port, GatewayClient.open(settings_of(f"http://127.0.0.1:{port}", home)) as client:
        yield client


async def test_pages_are_followed_until_there_are_enough_or_no_more(tmp_path: Path) -> None:
    asked: list[dict[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(dict(request.query))
        start = int(request.query.get("cursor", 0))
        # A page may be short, or empty, and not the last.
        size = 0 if start == 3 else 3
        last = start >= 9
        items = [{"n": start + i} for i in range(min(size, int(request.query["limit"])))]
        return web.json_response({"items": items, "next": None if last else str(start + max(size, 1))})

    async with (
        serving(handler) as port,
        GatewayClient.open(settings_of(f"http://127.0.0.1:{port}", tmp_path)) as client,
    ):
        items = await client.list_items("/v1/traces", limit=1000, state="PENDING", tool_name=None)
        assert [item["n"] for item in items] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
        assert asked[0] == {"limit": "200", "state": "PENDING"}
        assert len(await client.list_items("/v1/traces", limit=5)) == 5


async def test_who_asks_too_quickly_waits_as_long_as_it_is_told(tmp_path: Path) -> None:
    times: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            problem = {"code": "RATE_LIMITED", "detail": "too fast", "status": 429}
            return web.json_response(
                problem, status=429, headers={"Retry-After": "1"}, content_type="application/problem+json"
            )
        return web.json_response({"items": [], "next": None})

    async with (
        serving(handler) as port,
        GatewayClient.open(settings_of(f"http://127.0.0.1:{port}", tmp_path)) as client,
    ):
        assert await client.list_items("/v1/traces", limit=5) == []
    assert times[1] - times[0] >= 0.95


@pytest.mark.parametrize(
    "answer",
    [
        (200, "text/html", b"<html>welcome</html>"),
        (404, "text/plain", b"no"),
        (500, "application/json", b"{}"),
        (200, "application/json", b"[1, 2]"),
        (200, "application/json", b"{"),
        (200, "application/json", b"[" * 100_000),
        (200, "application/json", b'{"a":"' + b"x" * 17_000_000 + b'"}'),
        (302, "text/plain", b""),
    ],
    ids=["html", "not-found", "bare-500", "no-object", "cut", "deep", "endless", "elsewhere"],
)
async def test_what_is_no_gateway_is_said_to_be_none(tmp_path: Path, answer: tuple[int, str, bytes]) -> None:
    status, kind, body = answer
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        headers = {"Content-Type": kind, **({"Location": "/elsewhere"} if status == 302 else {})}
        return web.Response(status=status, body=body, headers=headers)

    async with (
        serving(handler) as port,
        GatewayClient.open(settings_of(f"http://127.0.0.1:{port}", tmp_path)) as client,
    ):
        with pytest.raises(GatewayUnreachable, match=f"{client.url} is no gateway"):
            await client.get("/v1/traces")
        assert asked == ["/v1/traces"]
        with pytest.raises(GatewayUnreachable):
            async for _ in client.events("/v1/events", last_id=None):
                pass


async def test_a_connection_that_breaks_is_told_without_what_was_sent(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serving(handler) as port:
        settings = settings_of(f"http://127.0.0.1:{port}", tmp_path, TGA_API_KEY=SECRET)
        async with GatewayClient.open(settings) as client:
            with pytest.raises(GatewayUnreachable) as caught:
                await client.post("/v1/tool-calls", {"card": "4242"})
    assert "S" * 43 not in str(caught.value)
    assert "4242" not in str(caught.value)


async def test_what_answers_without_end_is_left(tmp_path: Path) -> None:
    async with raw_server(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n")) as raw:
        async with GatewayClient.open(settings_of(raw.url, tmp_path)) as client:
            with pytest.raises(GatewayUnreachable, match="informational"):
                await client.get("/v1/traces")
            with pytest.raises(GatewayUnreachable, match="informational"):
                async for _ in client.events("/v1/events", last_id=None):
                    pass
        assert len(raw.requests) == 2


async def test_the_key_of_this_machine_is_not_sent_to_another(tmp_path: Path) -> None:
    seen: list[str | None] = []
    (tmp_path / "admin.key").write_text(SECRET + "\n")

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        problem = {"code": "UNAUTHENTICATED", "detail": "no", "status": 401}
        return web.json_response(problem, status=401, content_type="application/problem+json")

    async with serving(handler) as port:
        # 0.0.0.0 leads here, and is not known to: as any name of another machine.
        for host, expected in (("127.0.0.1", f"Bearer {SECRET}"), ("localhost", f"Bearer {SECRET}"), ("0.0.0.0", None)):  # noqa: S104
            async with GatewayClient.open(settings_of(f"http://{host}:{port}", tmp_path)) as client:
                with pytest.raises(Unauthenticated) as caught:
                    await client.get("/v1/traces")
            assert seen.pop() == expected
            assert SECRET not in str(caught.value)
            assert ("TGA_API_KEY" in str(caught.value)) == (expected is None)
        async with GatewayClient.open(settings_of(f"http://0.0.0.0:{port}", tmp_path, TGA_API_KEY="other")) as client:
            with pytest.raises(Unauthenticated):
                await client.get("/v1/traces")
        assert seen == ["Bearer other"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"TGA_URL": "ftp://host"},
        {"TGA_URL": "host:8420"},
        {"TGA_URL": "http://user:s3cret@host"},
        {"TGA_URL": "http://host:99999"},
        {"TGA_URL": "http://host?key=s3cret"},
        {"TGA_API_KEY": "s3cret\r\nX-Injected: 1"},
        {"TGA_API_KEY": "s3crét"},
        {"TGA_API_KEY": "s3cret" * 10_000},
    ],
    ids=["scheme", "none", "password", "port", "query", "lines", "letters", "long"],
)
async def test_a_setting_that_cannot_be_used_is_named_and_not_shown(tmp_path: Path, wrong: dict[str, str]) -> None:
    settings = Settings.from_environment({"TGA_HOME": str(tmp_path), **wrong})
    with pytest.raises(SettingInvalid, match=next(iter(wrong))) as caught:
        async with GatewayClient.open(settings):
            pass
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_code_becomes_the_error_that_it_was(kind: type[TgaError]) -> None:
    document = {"code": kind.code, "detail": "what", "expected": "e", "found": "f", "remedy": "Do so.", "trace_id": "t"}
    error = error_of(document)
    assert type(error) is kind
    assert str(error) == f"{kind.code}: trace:t: what; expected e; found f. Do so."


def test_a_code_of_a_newer_gateway_is_shown() -> None:
    error = error_of({"code": "FROM_THE_FUTURE", "detail": "?"})
    assert (type(error), "FROM_THE_FUTURE" in str(error)) == (InternalError, True)


async def pieces(text: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_events_are_read_whole_however_they_arrive(size: int) -> None:
    text = (
        b"retry: 1000\n\n:\n\nid: 1\nevent: entry\ndata: {\"a\":\n"
        b'data: "\xc3\xa9"}\n\nid: 2\n\nevent: end\r\ndata:x\r\n\r\nevent: entry\ndata: half'
    )  # fmt: skip
    found = [event async for event in events_in(pieces(text, size), bytes_max=1000)]
    assert found == [Event("entry", '{"a":\n"é"}', "1"), Event("end", "x", "2")]


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: x\n", b"data:\n"])
async def test_an_event_without_end_is_not_kept(piece: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield piece

    with pytest.raises(InputTooLarge):
        async for _ in events_in(chunks(), bytes_max=1000):
            pass


async def test_a_watcher_comes_back_after_its_last_event_and_takes_none_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last_ids: list[str | None] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        last_ids.append(request.headers.get("Last-Event-ID"))
        if len(last_ids) == 3:
            return web.Response(status=503)  # the gateway is being restarted
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        after = int(last_ids[-1] or 0)
        await response.write(f'id: {after + 1}\nevent: entry\ndata: {{"n": {after + 1}}}\n\n'.encode())
        if after == 2:
            await response.write(b'event: end\ndata: {"state": "COMPLETED"}\n\n')
        elif request.transport is not None:
            request.transport.close()
        return response

    async with (
        serving(handler) as port,
        GatewayClient.open(settings_of(f"http://127.0.0.1:{port}", tmp_path)) as client,
    ):
        assert await watch_trace(client, "some-trace", as_json=True)
    assert last_ids == [None, "1", "2", "2"]
    assert capsys.readouterr().out == '{"n": 1}\n{"n": 2}\n{"n": 3}\n'


async def test_a_stream_that_breaks_off_with_a_problem_says_which(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        body = b'event: problem\ndata: {"code": "STATE_CHECKSUM_MISMATCH", "detail": "changed"}\n\n'
        return web.Response(body=body, content_type="text/event-stream")

    async with (
        serving(handler) as port,
        GatewayClient.open(settings_of(f"http://127.0.0.1:{port}", tmp_path)) as client,
    ):
        with pytest.raises(ChecksumMismatch, match="changed"):
            await watch_trace(client, "some-trace", as_json=True)


async def test_a_gateway_that_does_not_answer_is_not_waited_for_longer_than_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.client._CONNECT_S", 0.1)
    monkeypatch.setattr("app.cli.client._MARGIN_S", 0.1)

    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response({})

    async with asking(handler, tmp_path) as client:
        with pytest.raises(GatewayUnreachable, match="no answer in time"):
            await client.get("/v1/traces")
        assert (await client.post("/v1/tool-calls", {}, wait_ms=1000)).status == 200


async def test_nobody_approves_what_is_not_what_was_asked(tmp_path: Path) -> None:
    """The gateway, or whoever sits between, shows another request than the one whose digest waits."""
    posted = []

    async def handler(request: web.Request) -> web.Response:
        if request.method == "POST":
            posted.append(await request.json())
        trace = {
            "waiting": "supervisor",
            "state": "PENDING",
            "action_request_digest": "0" * 64,
            "artifacts": {"action_request": {"arguments": {"amount": 1}}},
        }
        return web.json_response(trace)

    async with asking(handler, tmp_path) as client:
        with pytest.raises(ChecksumMismatch):
            await decide(client, "t", "APPROVE", rationale=None, sign_with=None, principal=None, yes=True)
    assert posted == []
