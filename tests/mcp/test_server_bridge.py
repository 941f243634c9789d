"""`tga mcp`: MCP on stdin and stdout. Its gateway may come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.cli.world import World, wait_for
from tests.mcp.served import LEGACY, MODERN, executions, mcp_world
from tests.mcp.test_server_reissue import is_requested, requested
from tests.patience import HANG_S


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with mcp_world() as made:
        made.config.write_text(made.config.read_text().replace('on_unknown_outcome = "hold"', ""))
        made.start()
        yield made


@asynccontextmanager
async def lasting_address(world: World) -> AsyncIterator[str]:
    """One address for all the gateways that the world has one after the other."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(65_536):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Bridged:
    """The process, spoken to line by line. Whatever it writes to stdout must be a message."""

    def __init__(self, process: asyncio.subprocess.Process, version: str) -> None:
        self.process = process
        self.version = version
        self.changes = 0  # of the tools, told unasked
        self._id = 0

    async def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        await self.process.stdin.drain()

    async def request(self, method: str, params: dict[str, Any]) -> int:
        self._id += 1
        if self.version == MODERN:
            capabilities: dict[str, Any] = {}
            meta = {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientCapabilities": capabilities,
            }
            params = {**params, "_meta": meta}
        await self.send({"id": self._id, "method": method, "params": params})
        return self._id

    async def read(self, *, within_s: float = HANG_S) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(within_s):
            while True:
                message = json.loads(await self.process.stdout.readline())
                assert message["jsonrpc"] == "2.0"
                if message.get("method") != "notifications/tools/list_changed":
                    return dict(message)
                self.changes += 1

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        request_id = await self.request(method, params)
        answer = await self.read()
        assert answer["id"] == request_id
        return answer


@asynccontextmanager
async def bridged(world: World, version: str, **environment: str) -> AsyncIterator[Bridged]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "app.main",
        "mcp",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**24,
        env=world.environment(**environment),
    )
    try:
        made = Bridged(process, version)
        if version == LEGACY:
            hello = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
            assert (await made.ask("initialize", hello))["result"]["protocolVersion"] == LEGACY
            await made.send({"method": "notifications/initialized"})
        yield made
    finally:
        assert process.stdin is not None
        process.stdin.close()
        _, said = await process.communicate()
        assert b"Traceback" not in said, said
        assert process.returncode == 0


def executed(world: World, amount: int) -> int:
    return len([line for line in executions(world, "slow_charge") if line["arguments"]["amount"] == amount])


async def test_a_client_of_the_handshake_is_told_when_its_tools_change(world: World) -> None:
    async with bridged(world, LEGACY) as bridge:
        assert "bank__fail" in {tool["name"] for tool in (await bridge.ask("tools/list", {}))["result"]["tools"]}
        policy = world.policy.read_text()
        world.policy.write_text(f'{policy}\nforbid(principal, action, resource == Tool::"bank/fail");\n')
        try:
            async with asyncio.timeout(40):
                while bridge.changes == 0:
                    await bridge.ask("ping", {})
                    await asyncio.sleep(0.05)
            assert "bank__fail" not in {
                tool["name"] for tool in (await bridge.ask("tools/list", {}))["result"]["tools"]
            }
        finally:
            world.policy.write_text(policy)


@pytest.mark.parametrize("version", [MODERN, LEGACY])
async def test_a_call_outlives_the_gateway_that_was_carrying_it(world: World, version: str) -> None:
    amount = 1 if version == MODERN else 2
    async with lasting_address(world) as url, bridged(world, version, TGA_URL=url) as bridge:
        before = requested(world, "slow_charge")
        asked = await bridge.request(
            "tools/call", {"name": "bank__slow_charge", "arguments": {"amount": amount, "ms": 1_000}}
        )
        await asyncio.to_thread(wait_for, lambda: is_requested(world, "slow_charge", before))
        await asyncio.to_thread(world.stop, signal.SIGKILL)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(world.start)
        answer = await bridge.read()
        assert answer["id"] == asked
        assert answer["result"]["structuredContent"]["amount"] == amount
        assert executed(world, amount) == 1
        again = await bridge.ask("tools/call", {"name": "bank__slow_charge", "arguments": {"amount": amount, "ms": 1}})
        assert not again["result"]["isError"]
        assert executed(world, amount) == 2


async def test_a_call_that_the_client_gave_up_and_made_again_is_the_same_call(world: World) -> None:
    arguments = {"amount": 3, "ms": 1_500}
    async with bridged(world, LEGACY) as bridge:
        before = requested(world, "slow_charge")
        given_up = await bridge.request("tools/call", {"name": "bank__slow_charge", "arguments": arguments})
        await asyncio.to_thread(wait_for, lambda: is_requested(world, "slow_charge", before))
        await bridge.send({"method": "notifications/cancelled", "params": {"requestId": given_up}})
        answer = await bridge.ask("tools/call", {"name": "bank__slow_charge", "arguments": arguments})
        assert answer["result"]["structuredContent"]["amount"] == 3
    assert executed(world, 3) == 1


async def test_a_bridge_that_was_killed_in_the_middle_leaves_a_call_that_is_recognised(world: World) -> None:
    arguments = {"amount": 4, "ms": 1_500}
    before = requested(world, "slow_charge")
    with contextlib.suppress(AssertionError):
        async with bridged(world, LEGACY) as bridge:
            await bridge.request("tools/call", {"name": "bank__slow_charge", "arguments": arguments})
            await asyncio.to_thread(wait_for, lambda: is_requested(world, "slow_charge", before))
            bridge.process.kill()
    async with bridged(world, LEGACY) as bridge:
        answer = await bridge.ask("tools/call", {"name": "bank__slow_charge", "arguments": arguments})
        assert answer["result"]["structuredContent"]["amount"] == 4
    assert executed(world, 4) == 1


async def test_what_is_no_message_is_told_so_and_harms_nobody(world: World) -> None:
    async with bridged(world, LEGACY) as bridge:
        assert bridge.process.stdin is not None
        for line, code in ((b"{", -32700), (b"[]", -32600), (b'{"id":1}', -32600)):
            bridge.process.stdin.write(line + b"\n")
            assert (await bridge.read())["error"]["code"] == code
        assert (await bridge.ask("nonsense", {}))["error"]["code"] == -32601
        assert (await bridge.ask("ping", {}))["result"] == {}


async def test_a_key_that_does_not_do_is_told_to_the_client(world: World) -> None:
    async with bridged(world, MODERN, TGA_API_KEY="tga_wrong") as bridge:
        answer = await bridge.ask("tools/list", {})
        assert answer["error"]["data"]["code"] == "UNAUTHENTICATED"


async def test_every_try_of_a_call_carries_the_same_key(world: World) -> None:
    """To somebody who takes the call and hangs up, twice, before answering."""
    seen: list[dict[str, Any]] = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        seen.append(json.loads(await reader.readexactly(size)))
        if len(seen) > 2:
            result = {"content": [], "isError": False, "resultType": "complete"}
            body = json.dumps({"jsonrpc": "2.0", "id": seen[-1]["id"], "result": result}).encode()
            head_out = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head_out.encode() + body)
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, bridged(world, MODERN, TGA_URL=url) as bridge:
        for _ in range(2):
            await bridge.ask("tools/call", {"name": "bank__charge", "arguments": {"amount": 1}})
    keys = [message["params"]["_meta"]["tga/proposed-key"] for message in seen]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]
