"""Servers that nobody here wrote, as they come from npm and PyPI: listed, called, failing, and killed in a call."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from mcp.client.client import Client
from mcp.client.stdio import stdio_client

from app.domain.tga.ports import Answered, Unknown
from tests.connectors.servers import until
from tests.mcp.npm import npm_servers
from tests.mcp.real import NAMES, Real, real_server
from tests.mcp.standing import TAP, Standing, descendants, standing, value_of
from tests.traces import uuid7

# What a server has is listed here, so that a server that lists nothing does not pass.
SOME_TOOLS = {
    "everything": {"echo", "get-sum", "get-tiny-image", "trigger-long-running-operation"},
    "files": {"read_text_file", "write_file", "move_file"},
    "memory": {"create_entities", "read_graph", "open_nodes"},
    "git": {"git_status", "git_commit", "git_log"},
    "time": {"get_current_time", "convert_time"},
}


async def listed_directly(real: Real) -> list[dict[str, Any]]:
    """By the official client, without the gateway."""
    parameters = StdioServerParameters(command=real.command[0], args=real.command[1:], env=real.env)
    async with Client(stdio_client(parameters, errlog=subprocess.DEVNULL)) as client:  # type: ignore[arg-type]
        result = await client.list_tools()
    return [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in result.tools]


@pytest.mark.parametrize("name", NAMES)
async def test_every_tool_of_it_is_found_as_the_official_client_finds_it(tmp_path: Path, name: str) -> None:
    real = real_server(name, tmp_path)
    direct = {tool["name"]: tool for tool in await listed_directly(real)}
    async with standing(tmp_path, real.config(tmp_path)) as world:
        known = world.connection(name)
        assert (known.state, known.protocol_version, known.problems) == ("connected", real.version, ())
        tools = {tool.tool_name: tool for tool in world.registry.tools()}
    assert set(tools) == set(direct) >= SOME_TOOLS[name]
    for tool_name, tool in tools.items():
        assert tool.input_schema == direct[tool_name]["inputSchema"]
        assert tool.description == direct[tool_name].get("description")


@pytest.mark.parametrize("name", NAMES)
async def test_reading_writing_and_failing_are_told_apart(tmp_path: Path, name: str) -> None:
    real = real_server(name, tmp_path)
    async with standing(tmp_path, real.config(tmp_path)) as world:
        for tool, arguments in (real.read, real.write):
            answer = await world.dispatch(name, tool, arguments)
            assert isinstance(answer, Answered)
            assert answer.outcome == "SUCCESS", answer
            assert value_of(answer)["content"]
        failed = await world.dispatch(name, *real.fails)
        assert isinstance(failed, Answered)
        assert (failed.outcome, failed.error_code) == ("FAILURE", "MCP_TOOL_ERROR")
        assert value_of(failed)["isError"] is True
        sends = real.sends(tmp_path)
        assert [sent["name"] for sent in sends] == [real.read[0], real.write[0], real.fails[0]]
        assert {sent["_meta"]["tga/idempotency-key"] for sent in sends} == {"key-1"}


def _is_tap(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return words[1:2] == [str(TAP)]


@pytest.mark.parametrize("name", NAMES)
async def test_killed_in_a_call_it_leaves_it_unknown_sent_once_and_comes_back(tmp_path: Path, name: str) -> None:
    real = real_server(name, tmp_path)
    async with standing(tmp_path, real.config(tmp_path)) as world:
        held = real.keep_answers_back(tmp_path)
        calling = asyncio.create_task(world.dispatch(name, *real.write))
        await until(lambda: real.sends(tmp_path))
        taps = [pid for pid in descendants(os.getpid()) if _is_tap(pid)]
        assert len(taps) == 1
        os.kill(taps[0], signal.SIGKILL)  # its guard ends the server
        answer = await calling
        assert isinstance(answer, Unknown)
        assert answer.result == "disconnected"
        assert len(real.sends(tmp_path)) == 1
        held.unlink()
        again = await world.dispatch(name, *real.write)  # what `redispatch` does: at least once, here twice
        assert isinstance(again, Answered)
        assert again.outcome == "SUCCESS"
        assert len(real.sends(tmp_path)) == 2


async def test_images_resource_links_and_structure_come_through_as_the_server_gives_them(tmp_path: Path) -> None:
    real = real_server("everything", tmp_path)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("get-tiny-image", {}),
        ("get-resource-links", {"count": 3}),
        ("get-structured-content", {"location": "Chicago"}),
        ("get-annotated-message", {"messageType": "error", "includeImage": True}),
        ("get-resource-reference", {"resourceType": "Text", "resourceId": 1}),
    ]
    parameters = StdioServerParameters(command=real.command[0], args=real.command[1:])
    direct = []
    async with Client(stdio_client(parameters, errlog=subprocess.DEVNULL)) as client:  # type: ignore[arg-type]
        for tool, arguments in calls:
            result = await client.call_tool(tool, arguments)
            direct.append(result.model_dump(mode="json", by_alias=True, exclude_none=True))
    async with standing(tmp_path, real.config(tmp_path)) as world:
        for (tool, arguments), expected in zip(calls, direct, strict=True):
            value = value_of(await world.dispatch("everything", tool, arguments))
            for field in ("content", "structuredContent"):
                assert _timeless(value.get(field)) == _timeless(expected.get(field)), tool


def _timeless(value: Any) -> Any:
    return "time" if "created at" in json.dumps(value) else value


async def test_its_progress_comes_through(tmp_path: Path) -> None:
    real = real_server("everything", tmp_path)
    told: list[dict[str, Any]] = []
    async with standing(tmp_path, real.config(tmp_path)) as world:
        with world.registry.watch_progress(uuid7(1), told.append):
            arguments = {"duration": 0.3, "steps": 3}
            await world.dispatch("everything", "trigger-long-running-operation", arguments)
    assert [(params["progress"], params["total"]) for params in told] == [(1, 3), (2, 3), (3, 3)]


# Over streamable HTTP.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def serve_everything(port: int) -> subprocess.Popen[bytes]:
    program = npm_servers() / "server-everything" / "dist" / "index.js"
    return subprocess.Popen(
        ["node", str(program), "streamableHttp"],
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def _connected(world: Standing, name: str) -> None:
    await until(lambda: world.connection(name).state == "connected")


async def test_over_http_it_is_called_killed_in_a_call_and_found_again(tmp_path: Path) -> None:
    port = free_port()
    server = serve_everything(port)
    config = f'[servers.it]\ntransport = "mcp-http"\nurl = "http://127.0.0.1:{port}/mcp"\n'
    try:
        async with standing(tmp_path, config) as world:
            await _connected(world, "it")
            assert world.connection("it").protocol_version == "2025-11-25"
            value = value_of(await world.dispatch("it", "echo", {"message": "hi"}))
            assert value["content"][0]["text"] == "Echo: hi"
            long = {"duration": 30, "steps": 3}
            calling = asyncio.create_task(world.dispatch("it", "trigger-long-running-operation", long))
            await asyncio.sleep(0.5)
            server.kill()
            answer = await calling
            assert isinstance(answer, Unknown)
            assert answer.result == "disconnected"
            await asyncio.to_thread(server.wait)
            server = serve_everything(port)
            answer = await world.dispatch("it", "echo", {"message": "again"}, timeout_ms=20_000)
            for _ in range(20):
                if isinstance(answer, Answered):
                    break
                await asyncio.sleep(0.5)  # as the runtime does between attempts
                answer = await world.dispatch("it", "echo", {"message": "again"}, timeout_ms=20_000)
            assert value_of(answer)["content"][0]["text"] == "Echo: again"
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("version", ["2026-07-28", "2025-11-25"])
async def test_a_server_of_the_official_package_is_spoken_to_in_both_protocols(tmp_path: Path, version: str) -> None:
    port = free_port()
    program = Path(__file__).parent / "official_server.py"
    server = subprocess.Popen([sys.executable, str(program), str(port)], stderr=subprocess.DEVNULL)
    config = (
        f'[servers.it]\ntransport = "mcp-http"\nurl = "http://127.0.0.1:{port}/mcp"\nprotocol_version = "{version}"\n'
    )
    try:
        async with standing(tmp_path, config) as world:
            await _connected(world, "it")
            assert world.connection("it").protocol_version == version
            value = value_of(await world.dispatch("it", "add", {"a": 2, "b": 3}))
            assert value["structuredContent"] == {"result": 5}
            failed = await world.dispatch("it", "add", {"a": "x"})
            assert isinstance(failed, Answered)
            assert failed.outcome == "FAILURE"
            await asyncio.sleep(0.5)  # until it is listened to
            await world.dispatch("it", "grow", {})
            await until(lambda: "grown" in {tool.tool_name for tool in world.registry.tools()})
    finally:
        server.kill()
        server.wait()
