"""The official client through the gateway, in both protocol versions, over HTTP and over stdio."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters

from tests.cli.world import NOWHERE, World
from tests.mcp.served import FIXTURE, LEGACY, MODERN, MODES, client_of, executions, mcp_world, raw_of

VERSIONS = [MODERN, LEGACY]
# Through the gateway these say more: which trace it was.
OURS = ("tga/trace-id", "tga/idempotency-key", "tga/replayed")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with mcp_world(NOWHERE) as made:
        made.start()
        yield made


@asynccontextmanager
async def over(world: World, transport: str, version: str, *, server: str | None = None) -> AsyncIterator[Client]:
    if transport == "http":
        async with client_of(world, version, path="/mcp" if server is None else f"/mcp/{server}") as client:
            yield client
        return
    command = ["-m", "app.main", "mcp", *(["--server", server] if server else [])]
    parameters = StdioServerParameters(command=sys.executable, args=command, env=world.environment())
    async with Client(parameters, mode=MODES[version]) as client:
        yield client


@asynccontextmanager
async def direct(world: World) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=sys.executable, args=[str(FIXTURE), str(world.home / "direct.book")])
    async with Client(parameters, mode="legacy") as client:
        yield client


def told(result: Any) -> Any:
    """A result without what differs by design: our ids, and the field that only the newer protocol has."""
    value = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    value.pop("resultType", None)
    meta = {name: value for name, value in value.pop("_meta", {}).items() if name not in OURS}
    meta.pop("io.modelcontextprotocol/serverInfo", None)
    return {**value, "isError": value.get("isError", False), **({"_meta": meta} if meta else {})}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_every_tool_answers_through_the_gateway_as_it_does_directly(
    world: World, transport: str, version: str
) -> None:
    calls: dict[str, dict[str, Any]] = {
        "greet": {"name": "Ada"},
        "slow_compute": {"seconds": 0, "label": "x"},
        "json_schema_2020_12_tool": {"name": "a", "contactMethod": "phone", "phone": "1", "email": "a@b"},
        "test_headers": {"region": "nördlich"},
    }
    async with direct(world) as plain, over(world, transport, version, server="fixture") as governed:
        listed = {tool.name: tool for tool in (await plain.list_tools()).tools}
        ours = {tool.name: tool for tool in (await governed.list_tools()).tools}
        assert set(ours) == set(listed)
        for name, tool in listed.items():
            described = ours[name].model_dump(exclude={"execution", "name"})
            assert described == tool.model_dump(exclude={"execution", "name"})
            if name == "protocol_error_job":
                with pytest.raises(MCPError) as expected:
                    await plain.call_tool(name, {})
                with pytest.raises(MCPError) as found:
                    await governed.call_tool(name, {})
                assert (found.value.code, found.value.message) == (expected.value.code, expected.value.message)
                continue
            arguments = calls.get(name, {})
            assert told(await governed.call_tool(name, arguments)) == told(await plain.call_tool(name, arguments)), name


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_tools_of_all_servers_stand_under_one_roof(world: World, transport: str, version: str) -> None:
    async with over(world, transport, version) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"bank__charge", "bank__balance", "fixture__greet", "nowhere__charge", "tga__approvals"} <= set(tools)
        charge, balance = tools["bank__charge"], tools["bank__balance"]
        assert charge.description == "Charge an amount."
        assert charge.input_schema["required"] == ["amount"]
        assert charge.annotations is not None
        assert balance.annotations is not None
        assert (charge.annotations.read_only_hint, balance.annotations.read_only_hint) == (False, True)
        before = len(executions(world))
        made = await client.call_tool("bank__charge", {"amount": 7})
        assert made.structured_content is not None
        assert made.structured_content["amount"] == 7
        assert json.loads(made.content[0].text) == made.structured_content  # type: ignore[union-attr]
        assert len(executions(world)) == before + 1
    assert made.meta is not None
    async with raw_of(world) as raw:
        assert (await raw.get(f"/v1/traces/{made.meta['tga/trace-id']}"))["state"] == "COMPLETED"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_progress_of_the_tool_reaches_the_client(world: World, transport: str, version: str) -> None:
    heard: list[tuple[float, float | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total))

    async with over(world, transport, version) as client:
        await client.call_tool("fixture__test_tool_with_progress", {}, progress_callback=note)
    assert heard == [(0, 100), (50, 100), (100, 100)]


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_a_model_did_wrong_is_a_result_that_says_what_to_do(world: World, version: str) -> None:
    async with raw_of(world, version) as raw:
        cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
            ("bank__charge", {"amount": 13}, {}, "CALL_DENIED"),
            ("bank__charge", {"amount": "x"}, {}, "ARGUMENTS_INVALID"),
            ("bank__charge", {"amount": 1}, {"tga/idempotency-key": f"reused-{version}"}, ""),
            ("bank__charge", {"amount": 2}, {"tga/idempotency-key": f"reused-{version}"}, "IDEMPOTENCY_KEY_REUSED"),
            ("bank__fail", {}, {}, "HTTP_422"),
            ("nowhere__charge", {}, {}, "NOT_SENT"),
        ]
        for tool, arguments, meta, code in cases:
            result = await raw.call(tool, arguments, meta=meta)
            text = result["content"][0]["text"]
            assert result["isError"] is bool(code), (tool, result)
            if code:
                assert text.startswith(f"{code}: "), text
            if code == "CALL_DENIED":
                assert "no-thirteen" in text
                assert result["_meta"]["tga/trace-id"] in text


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_a_client_did_wrong_is_an_error_with_our_code(world: World, version: str) -> None:
    async with raw_of(world, version) as raw:
        unknown = await raw.refused("tools/call", {"name": "bank__chrage", "arguments": {}})
        assert (unknown["code"], unknown["data"]["code"]) == (-32602, "TOOL_NOT_FOUND")
        assert "bank__charge" in unknown["data"]["expected"]
        for params in ({}, {"name": None}, {"name": "bank__charge", "arguments": []}):
            assert (await raw.refused("tools/call", params))["code"] == -32602
        bad_key = {"tga/idempotency-key": "\n"}
        refused = await raw.refused("tools/call", {"name": "bank__charge", "arguments": {"amount": 1}}, meta=bad_key)
        assert (refused["code"], refused["data"]["code"]) == (-32602, "SCHEMA_VIOLATION")
        assert (await raw.refused("prompts/list"))["code"] == -32601
        assert (await raw.post([{"jsonrpc": "2.0"}]))[1]["error"]["code"] == -32600
        assert (await raw.post(b'{"jsonrpc":"2.0","id":1,"id":2}'))[1]["error"]["data"]["code"] == "INPUT_MALFORMED"
        assert (await raw.post(b"x" * 300_000))[1]["error"]["data"]["code"] == "INPUT_TOO_LARGE"


@pytest.mark.parametrize("version", VERSIONS)
async def test_who_may_not_call_sees_no_tools_and_who_may_not_decide_sees_no_approvals(
    world: World, version: str
) -> None:
    auditor = await asyncio.to_thread(world.new_key, f"auditor-{version}", "auditor")
    agent = await asyncio.to_thread(world.new_key, f"agent-{version}", "agent")
    async with raw_of(world, version, key=auditor) as raw:
        assert (await raw.ask("tools/list"))["tools"] == []
        result = await raw.call("bank__charge", {"amount": 1})
        assert result["isError"]
        assert result["content"][0]["text"].startswith("FORBIDDEN")
    async with raw_of(world, version, key=agent) as raw:
        names = {tool["name"] for tool in (await raw.ask("tools/list"))["tools"]}
        assert "bank__charge" in names
        assert not [name for name in names if name.startswith("tga__")]
        for name in ("tga__approvals", "tga__approve"):
            assert (await raw.refused("tools/call", {"name": name, "arguments": {}}))["data"][
                "code"
            ] == "TOOL_NOT_FOUND"


async def test_a_tenant_has_its_own_tools_and_no_others(world: World) -> None:
    await asyncio.to_thread(world.tga, "tenants", "create", "acme")
    stranger = await asyncio.to_thread(world.new_key, "stranger", "agent", tenant="acme")
    async with raw_of(world, key=stranger) as raw:
        assert (await raw.ask("tools/list"))["tools"] == []
        assert (await raw.refused("tools/call", {"name": "bank__charge", "arguments": {}}))["code"] == -32602
        status, answer = await raw.post(b"{}", path="/mcp/bank")
        assert (status, answer["error"]["data"]["code"]) == (404, "ROUTE_NOT_FOUND")
