"""`http_client`: programs read what the operator allows, and nothing else, whatever the server or its name say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from app.config import Config
from app.config.tables import LuaHttpConfig
from app.connectors.registry import Registry
from app.connectors.web_reading import WebConnector
from app.core.errors import ArgumentsInvalid, ToolNotFound
from app.domain.tga.documents import ToolCall
from app.domain.tga.ports import Answered, Dispatched, NotSent, Unknown, Withheld


class Site:
    """A server that answers by path; `asked` is what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self.over = asyncio.Event()
        self.answering: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(reader, writer))
        self.answering.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await task
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        self.asked.append((method, path))
        status, headers, body = "200 OK", {"Content-Type": "text/plain", "Set-Cookie": "a=b"}, b"fine"
        if path.startswith("/to/"):
            status, headers["Location"] = "302 Found", path.removeprefix("/to/").replace("PORT", str(self.port))
        elif path == "/404":
            status, body = "404 Not Found", b"no"
        elif path == "/bytes":
            body = b"\xff\x00"
        elif path == "/large":
            body = b"x" * 5_000
        elif path == "/loop":
            status, headers["Location"] = "301 Moved", "/loop"
        elif path == "/silent":
            await self.over.wait()
        lines = [f"HTTP/1.1 {status}", *(f"{k}: {v}" for k, v in headers.items()), f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body))
        await writer.drain()


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    yield made
    made.over.set()
    server.close()
    await asyncio.gather(*made.answering, return_exceptions=True)
    await asyncio.sleep(0.05)  # the loop closes their sockets


def call_of(url: str, tool: str = "get", **more: Any) -> ToolCall:
    return ToolCall.model_construct(tool_name=tool, arguments={"url": url, **more})


async def read(site: Site, path: str, *, private: bool = True, timeout_ms: int = 30_000, **more: Any) -> Dispatched:
    hosts = [f"localhost:{site.port}", "10.0.0.1", "example.com"]
    table = LuaHttpConfig(allowed_hosts=hosts, private_hosts=["localhost"] if private else [], max_bytes=1_000)
    connector = WebConnector(table)
    url = path if not path.startswith("/") else f"http://localhost:{site.port}{path}"
    try:
        return await connector.dispatch(call_of(url, **more), timeout_ms=timeout_ms)
    finally:
        await connector.close()


def value_of(found: Dispatched) -> dict[str, Any]:
    assert isinstance(found, Answered)
    assert found.output is not None, found
    said: dict[str, Any] = json.loads(json.dumps(found.output.to_json()))["value"]
    return said


async def test_an_allowed_host_is_read_with_status_headers_and_body(site: Site) -> None:
    said = value_of(await read(site, "/a?b=c"))
    assert (said["status"], said["body"], said["headers"]["content-type"]) == (200, "fine", "text/plain")
    assert "set-cookie" not in said["headers"]
    assert value_of(await read(site, "/404"))["status"] == 404
    assert value_of(await read(site, "/bytes"))["is_base64"]
    assert value_of(await read(site, "/x", tool="head"))["body"] == ""
    assert site.asked == [("GET", "/a?b=c"), ("GET", "/404"), ("GET", "/bytes"), ("HEAD", "/x")]


@pytest.mark.parametrize(
    "url",
    [
        "http://elsewhere.test/",
        "http://localhost/",  # another port
        "http://example.com:8080/",
        "http://user:pass@example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http://10.0.0.1/",  # allowed, and still of a private network
        "http://EXAMPLE.COM.evil.test/",
    ],
)
async def test_what_is_not_allowed_is_refused_and_nothing_is_sent(site: Site, url: str) -> None:
    found = await read(site, url)
    assert isinstance(found, Answered)
    assert (found.outcome, found.error_code) == ("FAILURE", "HTTP_NOT_ALLOWED"), found
    assert site.asked == []


async def test_a_name_with_a_private_address_is_refused_unless_the_operator_named_it(site: Site) -> None:
    found = await read(site, "/", private=False)
    assert isinstance(found, Answered)
    assert found.error_code == "HTTP_NOT_ALLOWED"
    assert "private_hosts" in (found.error_message or "")
    assert site.asked == []


async def test_redirects_are_followed_to_the_same_place_only(site: Site) -> None:
    said = value_of(await read(site, "/to//there"))
    assert (said["status"], said["url"]) == (200, f"http://localhost:{site.port}/there")
    for elsewhere in ("http://127.0.0.1:PORT/x", "http://example.com/x", "https://localhost:PORT/", "file:///x"):
        site.asked.clear()
        said = value_of(await read(site, f"/to/{elsewhere}"))
        assert said["status"] == 302
        assert len(site.asked) == 1
    found = await read(site, "/loop")
    assert isinstance(found, Answered)
    assert found.error_code == "HTTP_REDIRECTED"


async def test_answers_and_time_are_bounded(site: Site) -> None:
    found = await read(site, "/large")
    assert isinstance(found, Answered)
    assert found.error_code == "HTTP_TOO_LARGE"
    silent = await read(site, "/silent", timeout_ms=300)
    assert isinstance(silent, Unknown | NotSent)
    refused = await read(site, "/", headers={"Authorization": "Bearer x"})
    assert isinstance(refused, Answered)
    assert refused.error_code == "HTTP_NOT_ALLOWED"


async def test_the_executor_has_the_last_word(site: Site) -> None:
    async def no() -> bool:
        return False

    table = LuaHttpConfig(allowed_hosts=[f"localhost:{site.port}"], private_hosts=["localhost"])
    connector = WebConnector(table)
    call = call_of(f"http://localhost:{site.port}/")
    assert isinstance(await connector.dispatch(call, timeout_ms=30_000, may_send=no), Withheld)
    assert site.asked == []
    await connector.close()


async def test_the_tool_is_there_for_the_tenants_that_are_named_and_of_class_read() -> None:
    http = {"allowed_hosts": ["example.com"], "tenants": ["default", "other"]}
    registry = Registry.from_config(Config.model_validate({"lua": {"http": http}}))
    tool = registry.resolve_for("other", "http_client", "get")
    assert (tool.tool_class, tool.tenant) == ("read", "other")
    assert registry.resolve_for("default", "http_client", "head").tenant == "default"
    with pytest.raises(ToolNotFound):
        registry.resolve_for("third", "http_client", "get")
    with pytest.raises(ArgumentsInvalid):
        registry.verify_arguments(tool, {"url": "https://example.com/", "method": "POST"})
    assert [server.name for server in registry.servers("default")] == ["http_client"]
    await registry.close()
    for lua in ({}, {"enabled": False, "http": http}):
        registry = Registry.from_config(Config.model_validate({"lua": lua}))
        assert registry.servers() == []
        await registry.close()
