"""Calls that wait for a person: as tasks, or held and then told to come back; across restarts; decided over MCP."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from mcp import Client
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import CallToolResult, Result
from pydantic import ConfigDict, Field

from tests.cli.world import World
from tests.mcp.served import LEGACY, MODERN, TASKS, Raw, executions, mcp_world, raw_of
from tests.patience import HANG_S

VERSIONS = [MODERN, LEGACY]
_amounts = itertools.count(1_000)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with mcp_world("[mcp]\nhold_ms = 1500\n") as made:
        made.start()
        yield made


@pytest.fixture
def amount() -> int:
    return next(_amounts)


def refunded(world: World, amount: int) -> int:
    return len([line for line in executions(world, "refund") if line["arguments"]["amount"] == amount])


async def waiting_trace(raw: Raw, amount: int) -> dict[str, Any]:
    """The request for this amount, as a supervisor sees it over MCP."""
    for _ in range(200):
        listed = (await raw.call("tga__approvals", {}))["structuredContent"]["items"]
        found = [item for item in listed if (item["arguments"] or {}).get("amount") == amount]
        if found:
            return dict(found[0])
        await asyncio.sleep(0.05)
    raise AssertionError("nothing waits")


async def decide(raw: Raw, amount: int, tool: str = "tga__approve", **more: str) -> Any:
    item = await waiting_trace(raw, amount)
    ids = {"trace_id": item["trace_id"], "action_request_digest": item["action_request_digest"]}
    return await raw.call(tool, {**ids, **more})


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_call_is_held_until_somebody_decides(world: World, amount: int, version: str) -> None:
    async with raw_of(world, version) as raw:
        calling = asyncio.create_task(raw.call("bank__refund", {"amount": amount}))
        decided = await decide(raw, amount)
        assert decided["structuredContent"]["state"] in ("EXECUTING", "COMPLETED")
        result = await calling
        assert (result["isError"], refunded(world, amount)) == (False, 1)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_denial_reaches_the_model_with_its_reason(world: World, amount: int, version: str) -> None:
    async with raw_of(world, version) as raw:
        calling = asyncio.create_task(raw.call("bank__refund", {"amount": amount}))
        await decide(raw, amount, "tga__deny", rationale="the customer is not ours")
        result = await calling
        text = result["content"][0]["text"]
        assert result["isError"]
        assert "CALL_DENIED" in text
        assert "the customer is not ours" in text
        assert result["_meta"]["tga/trace-id"] in text
        assert refunded(world, amount) == 0


@pytest.mark.parametrize("version", VERSIONS)
async def test_after_the_deadline_the_same_call_made_again_is_the_one_that_waits(
    world: World, amount: int, version: str
) -> None:
    async with raw_of(world, version) as raw:
        first = await raw.call("bank__refund", {"amount": amount})
        text, trace_id = first["content"][0]["text"], first["_meta"]["tga/trace-id"]
        assert first["isError"]
        assert "waits for a person" in text
        assert trace_id in text
        assert first["_meta"]["tga/idempotency-key"] in text
        second = await raw.call("bank__refund", {"amount": amount})
        assert second["_meta"]["tga/trace-id"] == trace_id
        await decide(raw, amount)
        third = await raw.call("bank__refund", {"amount": amount})
        assert (third["isError"], third["_meta"]["tga/trace-id"]) == (False, trace_id)
        # Answered at last: from here on it would be another request.
        fourth = await raw.call("bank__refund", {"amount": amount})
        assert fourth["_meta"]["tga/trace-id"] != trace_id
        assert refunded(world, amount) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_request_that_waits_survives_a_restart(world: World, amount: int, number: signal.Signals) -> None:
    async with raw_of(world) as raw:
        task = await raw.call("bank__refund", {"amount": amount}, tasks=True)
        held = await raw.call("bank__refund", {"amount": amount + 100_000})
    assert (task["resultType"], task["status"]) == ("task", "working")
    await asyncio.to_thread(world.stop, number)
    await asyncio.to_thread(world.start)
    async with raw_of(world) as raw:
        found = await raw.ask("tasks/get", {"taskId": task["taskId"]}, tasks=True)
        assert (found["status"], found["createdAt"]) == ("working", task["createdAt"])
        for one in (amount, amount + 100_000):
            await decide(raw, one)
        done = await raw.ask("tasks/get", {"taskId": task["taskId"]}, tasks=True)
        assert done["status"] == "completed"
        assert done["result"]["structuredContent"]["amount"] == amount
        again = await raw.call("bank__refund", {"amount": amount + 100_000})
        assert again["_meta"]["tga/trace-id"] == held["_meta"]["tga/trace-id"]
        assert (refunded(world, amount), refunded(world, amount + 100_000)) == (1, 1)


async def test_a_task_is_on_the_record_before_its_handle_is_told(world: World, amount: int) -> None:
    async with raw_of(world) as raw:
        task = await raw.call("bank__refund", {"amount": amount}, tasks=True)
        trace = await raw.get(f"/v1/traces/{task['taskId']}")
        assert trace["state"] == "PENDING"
        assert task["statusMessage"] == "waits for a person to decide"
        assert (task["ttlMs"], isinstance(task["pollIntervalMs"], int)) == (None, True)


@pytest.mark.parametrize("version", VERSIONS)
async def test_cancelling_a_task_that_waits_withdraws_it(world: World, amount: int, version: str) -> None:
    is_modern = version == MODERN
    async with raw_of(world, version) as raw:
        how: dict[str, Any] = {"tasks": True} if is_modern else {"task": {}}
        made = await raw.call("bank__refund", {"amount": amount}, **how)
        task_id = made["taskId"] if is_modern else made["task"]["taskId"]
        await raw.ask("tasks/cancel", {"taskId": task_id}, tasks=is_modern)
        found = await raw.ask("tasks/get", {"taskId": task_id}, tasks=is_modern)
        assert found["status"] == "cancelled"
        trace = await raw.get(f"/v1/traces/{task_id}")
        assert trace["state"] == "DENIED"
        assert refunded(world, amount) == 0


async def test_cancelling_a_task_that_was_sent_says_that_it_goes_on(world: World, amount: int) -> None:
    async with raw_of(world, LEGACY) as raw:
        made = await raw.call("bank__slow_charge", {"amount": amount, "ms": 1_000}, task={"ttl": 60_000})
        task_id = made["task"]["taskId"]
        cancelled = await raw.ask("tasks/cancel", {"taskId": task_id})
        assert cancelled["status"] == "working"
        assert "goes on" in cancelled["statusMessage"]
        result = await raw.ask("tasks/result", {"taskId": task_id})
        assert result["structuredContent"]["amount"] == amount
        assert result["_meta"]["io.modelcontextprotocol/related-task"] == {"taskId": task_id}
        assert (await raw.refused("tasks/cancel", {"taskId": task_id}))["code"] == -32602
        listed = (await raw.ask("tasks/list"))["tasks"]
        assert task_id in [task["taskId"] for task in listed]


async def test_tasks_are_for_their_principal_and_for_clients_that_take_them(world: World, amount: int) -> None:
    key = await asyncio.to_thread(world.new_key, f"other-{amount}", "agent", "supervisor")
    async with raw_of(world) as raw, raw_of(world, key=key) as other:
        task = await raw.call("bank__refund", {"amount": amount}, tasks=True)
        refused = await raw.refused("tasks/get", {"taskId": task["taskId"]})
        assert refused["code"] == -32021
        assert refused["data"]["requiredCapabilities"] == {"extensions": {TASKS: {}}}
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            foreign = await other.refused(method, {"taskId": task["taskId"]}, tasks=True)
            missing = await other.refused(method, {"taskId": "0" * 36}, tasks=True)
            assert foreign == missing
            assert foreign["code"] == -32602
        assert "taskId" not in await raw.call("bank__balance", {}, tasks=True)


async def test_a_broken_handle_is_handed_out_again(world: World, amount: int) -> None:
    """The re-issue of a call whose handle did not arrive gets the same handle; one after it arrived, another."""
    meta = {"tga/proposed-key": f"p-{amount}"}
    async with raw_of(world) as raw:
        first = await raw.call("bank__refund", {"amount": amount}, tasks=True, meta=meta)
        again = await raw.call("bank__refund", {"amount": amount}, tasks=True, meta=meta)
        other = await raw.call("bank__refund", {"amount": amount}, tasks=True)
        assert first["taskId"] == again["taskId"] != other["taskId"]


async def test_while_a_call_waits_the_client_is_told(world: World, amount: int) -> None:
    async with raw_of(world) as raw:
        message, headers = raw.request(
            "tools/call", {"name": "bank__refund", "arguments": {"amount": amount}}, meta={"progressToken": "t"}
        )
        sent = {**raw.headers, **headers}
        async with raw.session.post(f"{world.url}/mcp", json=message, headers=sent) as response:
            assert response.content_type == "text/event-stream"
            text = await response.text()
        assert text.count("notifications/progress") == 1
        assert "waits for a person" in text


async def test_who_listens_is_told_of_a_tasks_end(world: World, amount: int) -> None:
    async with raw_of(world) as raw:
        task = await raw.call("bank__refund", {"amount": amount}, tasks=True)
        wanted = {"notifications": {"taskIds": [task["taskId"], "0" * 36], "toolsListChanged": True}}
        message, headers = raw.request("subscriptions/listen", wanted, tasks=True)
        sent = {**raw.headers, **headers}
        async with raw.session.post(f"{world.url}/mcp", json=message, headers=sent) as response:
            first = await response.content.readuntil(b"\n\n")
            assert b"notifications/subscriptions/acknowledged" in first
            assert f'"taskIds":["{task["taskId"]}"]'.encode() in first
            await decide(raw, amount, "tga__deny")
            async with asyncio.timeout(HANG_S):
                told = await response.content.readuntil(b"\n\n")
            assert b'"notifications/tasks"' in told
            assert b'"status":"completed"' in told
            assert b"CALL_DENIED" in told


class _TaskResult(Result):
    model_config = ConfigDict(extra="allow")
    result_type: Literal["task"] = Field("task", alias="resultType")
    task_id: str = Field(alias="taskId")


async def test_the_official_client_follows_a_task_with_an_extension_of_a_few_lines(world: World, amount: int) -> None:
    """As docs/mcp.md shows it."""
    polled: list[str] = []

    async def follow(task: _TaskResult, context: ClaimContext) -> CallToolResult:
        polled.append(task.task_id)
        async with raw_of(world) as raw:
            while True:
                found = await raw.ask("tasks/get", {"taskId": task.task_id}, tasks=True)
                if found["status"] != "working":
                    return CallToolResult.model_validate(found["result"])
                await asyncio.sleep(0.05)

    class Tasks(ClientExtension):
        identifier = TASKS

        def claims(self) -> list[ResultClaim[Any]]:
            return [ResultClaim(result_type="task", model=_TaskResult, resolve=follow)]

    async with create_mcp_http_client(headers={"Authorization": f"Bearer {world.admin_key()}"}) as http:
        transport = streamable_http_client(f"{world.url}/mcp", http_client=http)
        async with Client(transport, mode=MODERN, extensions=[Tasks()]) as client, raw_of(world) as raw:
            calling = asyncio.create_task(client.call_tool("bank__refund", {"amount": amount}))
            await decide(raw, amount)
            result = await calling
    assert polled
    assert result.structured_content is not None
    assert result.structured_content["amount"] == amount


async def test_an_old_or_wrong_decision_decides_nothing(world: World, amount: int) -> None:
    async with raw_of(world) as raw:
        await raw.call("bank__refund", {"amount": amount}, tasks=True)
        item = await waiting_trace(raw, amount)
        wrong = await raw.call("tga__approve", {"trace_id": item["trace_id"], "action_request_digest": "0" * 64})
        assert wrong["content"][0]["text"].startswith("REQUEST_MISMATCH")
        bad = await raw.call("tga__approve", {"trace_id": "x", "action_request_digest": "0" * 64})
        assert bad["content"][0]["text"].startswith("SCHEMA_VIOLATION")
        assert refunded(world, amount) == 0
