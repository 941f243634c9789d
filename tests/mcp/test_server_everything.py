"""Every tool of server-everything, which nobody here wrote: the official client sees through the gateway what it sees
directly, value by value, over HTTP and stdio, in both protocol versions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters

from tests.cli.world import World
from tests.mcp.npm import npm_servers
from tests.mcp.served import LEGACY, MODERN, mcp_world, raw_of
from tests.mcp.test_server_calls import over, told
from tests.patience import HANG_S

# What a tool needs to answer; the others take nothing.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "echo": {"message": "héllo \U0001f600"},
    "get-annotated-message": {"messageType": "error", "includeImage": True},
    "get-resource-links": {"count": 3},
    "get-resource-reference": {"resourceType": "Text", "resourceId": 1},
    "get-structured-content": {"location": "Chicago"},
    "get-sum": {"a": 1, "b": 2.5},
    "gzip-file-as-resource": {"name": "x.gz", "data": "data:text/plain;base64,eA==", "outputType": "resource"},
    "simulate-research-query": {"topic": "x"},
    "trigger-long-running-operation": {"duration": 0.2, "steps": 2},
}
WRONG: dict[str, dict[str, Any]] = {"get-resource-reference": {"resourceType": "Text", "resourceId": -1}}
# They say what the process is given, and when; not the same in two processes.
OF_THE_PROCESS = {"get-env", "toggle-simulated-logging", "toggle-subscriber-updates"}
# It is a task of the server's own, which is no task of the gateway's.
NEEDS_TASKS = {"simulate-research-query"}


@pytest.fixture(scope="module")
def command() -> list[str]:
    return ["node", str(npm_servers() / "server-everything" / "dist" / "index.js")]


@pytest.fixture(scope="module")
def world(command: list[str]) -> Iterator[World]:
    quoted = ", ".join(f'"{word}"' for word in command)
    with mcp_world(f'[servers.everything]\ntransport = "mcp-stdio"\ncommand = [{quoted}]\n') as made:
        made.start()
        yield made


async def answered(client: Client, tool: str, arguments: dict[str, Any]) -> Any:
    try:
        return without_times(told(await client.call_tool(tool, arguments)))
    except MCPError as error:
        return (error.code, error.message)


def without_times(said: Any) -> Any:
    """A resource says when it was made, to the second; the two that are compared may be made in different ones."""
    if isinstance(said, dict):
        return {name: without_times(value) for name, value in said.items()}
    if isinstance(said, list):
        return [without_times(value) for value in said]
    return re.sub(r"created at [\d:]+( [AP]M)?", "created at TIME", said) if isinstance(said, str) else said


@pytest.mark.parametrize("version", [MODERN, LEGACY])
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_each_tool_answers_as_it_does_directly(
    world: World, command: list[str], transport: str, version: str
) -> None:
    parameters = StdioServerParameters(command=command[0], args=command[1:])
    async with Client(parameters, mode="legacy") as plain, over(world, transport, version, server="everything") as ours:
        tools = {tool.name: tool for tool in (await plain.list_tools()).tools}
        found = {tool.name: tool for tool in (await ours.list_tools()).tools}
        assert set(found) == set(tools)
        assert len(tools) >= 10
        for name, tool in tools.items():
            assert found[name].model_dump(exclude={"execution"}) == tool.model_dump(exclude={"execution"})
            for arguments in filter(None, (ARGUMENTS.get(name, {"_": 0}), WRONG.get(name))):
                given = {} if arguments == {"_": 0} else arguments
                theirs = await answered(plain, name, given)
                mine = await answered(ours, name, given)
                if name in OF_THE_PROCESS or name in NEEDS_TASKS:
                    assert type(mine) is type(theirs) or name in NEEDS_TASKS, (name, mine, theirs)
                else:
                    assert mine == theirs, (name, arguments)


async def test_a_task_that_is_cancelled_is_cancelled_at_its_server_and_its_outcome_recorded_as_unknown(
    world: World,
) -> None:
    async with raw_of(world, LEGACY) as raw:
        long = {"duration": 30, "steps": 3}
        made = await raw.call("everything__trigger-long-running-operation", long, task={"ttl": 60_000})
        task_id = made["task"]["taskId"]
        async with asyncio.timeout(HANG_S):
            while True:  # it may still be on its way to the server
                cancelled = await raw.ask("tasks/cancel", {"taskId": task_id})
                if "its server was told" in cancelled.get("statusMessage", ""):
                    break
                await asyncio.sleep(0.05)
            while (trace := await raw.get(f"/v1/traces/{task_id}"))["state"] == "EXECUTING":
                await asyncio.sleep(0.1)
        effect = trace["artifacts"]["tool_effect"]
        assert (trace["state"], effect["basis"], len(effect["attempts"])) == ("FAILED", "unknown", 1)
