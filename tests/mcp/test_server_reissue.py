"""Calls without a key: what is taken for a re-issue of a broken call, and what for another call.

Each row of the table in docs/mcp.md is a test here. The bank's book says what was executed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from tests.cli.world import World, wait_for
from tests.mcp.served import LEGACY, MODERN, Raw, executions, mcp_world, raw_of

VERSIONS = [MODERN, LEGACY]
_amounts = iter(range(100, 10_000))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with mcp_world() as made:
        # The bank honours keys; and a secret that it does not know of does not disturb it.
        changed = made.config.read_text().replace('on_unknown_outcome = "hold"', 'secret_arguments = ["/card"]')
        made.config.write_text(changed)
        made.start()
        yield made


@pytest.fixture
def amount() -> int:
    """One that no other test charges."""
    return next(_amounts)


def executed(world: World, amount: int, tool: str = "slow_charge") -> int:
    return len([line for line in executions(world, tool) if line["arguments"]["amount"] == amount])


def is_requested(world: World, tool: str, before: int) -> bool:
    lines = [json.loads(line) for line in world.book.read_text().splitlines()] if world.book.exists() else []
    return len([line for line in lines if line["event"] == "request" and line["tool"] == tool]) > before


def requested(world: World, tool: str) -> int:
    lines = [json.loads(line) for line in world.book.read_text().splitlines()] if world.book.exists() else []
    return len([line for line in lines if line["event"] == "request" and line["tool"] == tool])


def written(raw: Raw, tool: str, arguments: dict[str, Any], **how: Any) -> bytes:
    message, headers = raw.request("tools/call", {"name": tool, "arguments": arguments}, **how)
    body = json.dumps(message).encode()
    sent = {**raw.headers, **headers, "Host": "localhost", "Content-Length": str(len(body))}
    return ("POST /mcp HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in sent.items()) + "\r\n").encode() + body


def port_of(world: World) -> int:
    return int(world.url.rpartition(":")[2])


async def broken_off(raw: Raw, tool: str, arguments: dict[str, Any], bank_tool: str, **how: Any) -> None:
    """The call reaches the bank; then the client's connection is gone."""
    before = requested(raw.world, bank_tool)
    _, writer = await asyncio.open_connection("127.0.0.1", port_of(raw.world))
    writer.write(written(raw, tool, arguments, **how))
    await writer.drain()
    await asyncio.to_thread(wait_for, lambda: is_requested(raw.world, bank_tool, before))
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_call_made_again_after_its_answer_is_another_call(world: World, amount: int, version: str) -> None:
    async with raw_of(world, version) as raw:
        made = [await raw.call("bank__charge", {"amount": amount}) for _ in range(3)]
    assert executed(world, amount, "charge") == 3
    assert len({one["_meta"]["tga/trace-id"] for one in made}) == 3


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_call_whose_connection_broke_while_it_ran_is_the_same_call_again(
    world: World, amount: int, version: str
) -> None:
    arguments = {"amount": amount, "ms": 700}
    async with raw_of(world, version) as raw:
        await broken_off(raw, "bank__slow_charge", arguments, "slow_charge")
        again = await raw.call("bank__slow_charge", arguments)
        assert again["structuredContent"]["amount"] == amount
        assert executed(world, amount) == 1
        # Its answer has arrived now: the next one is another call.
        await raw.call("bank__slow_charge", arguments)
        assert executed(world, amount) == 2


async def test_a_call_that_ended_after_its_connection_broke_is_answered_from_the_record(
    world: World, amount: int
) -> None:
    arguments = {"amount": amount, "ms": 200}
    async with raw_of(world) as raw:
        await broken_off(raw, "bank__slow_charge", arguments, "slow_charge")
        await asyncio.to_thread(wait_for, lambda: executed(world, amount) == 1)
        again = await raw.call("bank__slow_charge", arguments)
        assert again["structuredContent"]["amount"] == amount
        assert again["_meta"]["tga/replayed"] is True
        assert executed(world, amount) == 1


async def test_an_answer_that_could_not_be_read_the_second_time_is_still_owed(world: World, amount: int) -> None:
    """The call came again while the store could not show what is recorded of it: the third time it is the same call."""
    arguments = {"amount": amount, "ms": 200}
    async with raw_of(world) as raw:
        await broken_off(raw, "bank__slow_charge", arguments, "slow_charge")
        await asyncio.to_thread(wait_for, lambda: executed(world, amount) == 1)
        session = await asyncpg.connect(world.admin_url)
        try:
            # Looked at when a trace is read, and not when one is written.
            await session.execute("BEGIN; LOCK TABLE tga.erasures IN ACCESS EXCLUSIVE MODE")
            assert (await raw.call("bank__slow_charge", arguments))["isError"]
        finally:
            await session.close()
        again = await raw.call("bank__slow_charge", arguments)
        assert again["_meta"]["tga/replayed"] is True
        assert executed(world, amount) == 1


async def test_equal_calls_at_once_are_two_calls(world: World, amount: int) -> None:
    """The second waits until it is known that the first one's answer arrived."""
    arguments = {"amount": amount, "ms": 300}
    async with raw_of(world) as raw:
        made = await asyncio.gather(*(raw.call("bank__slow_charge", arguments) for _ in range(3)))
    assert executed(world, amount) == 3
    assert len({one["structuredContent"]["charge_id"] for one in made}) == 3


async def test_a_call_at_once_with_one_that_breaks_is_that_call_again(world: World, amount: int) -> None:
    """A client that switched networks comes back before anybody here knows that its first connection is dead."""
    arguments = {"amount": amount, "ms": 1_500}
    async with raw_of(world) as raw:
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(world))
        before = requested(world, "slow_charge")
        writer.write(written(raw, "bank__slow_charge", arguments))
        await asyncio.to_thread(wait_for, lambda: is_requested(world, "slow_charge", before))
        again = asyncio.create_task(raw.call("bank__slow_charge", arguments))
        await asyncio.sleep(0.3)
        writer.close()
        assert (await again)["structuredContent"]["amount"] == amount
    assert executed(world, amount) == 1


async def test_an_answer_that_the_other_side_never_acknowledged_did_not_arrive(world: World) -> None:
    """Written is not arrived: the client's system takes no more than a little of it, and then the client is gone."""
    arguments = {"label": "x" * 150_000, "seconds": 0}
    book = world.home / "fixture.book"
    async with raw_of(world) as raw:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(deaf, ("127.0.0.1", port_of(world)))
        await loop.sock_sendall(deaf, written(raw, "fixture__slow_compute", arguments))
        await asyncio.to_thread(wait_for, lambda: book.exists() and "xxx" in book.read_text())
        await asyncio.sleep(1)  # answered and, as far as this side can write, written
        deaf.close()
        again = await raw.call("fixture__slow_compute", arguments)
        assert again["content"][0]["text"].endswith("xxx")
        sent = [line for line in book.read_text().splitlines() if "xxx" in line]
        assert len(sent) == 1


@pytest.mark.parametrize("is_finished_before", [False, True])
async def test_a_call_that_a_killed_gateway_was_answering_is_the_same_call_again(
    world: World, amount: int, is_finished_before: bool
) -> None:
    arguments = {"amount": amount, "ms": 1_000 if not is_finished_before else 300}
    async with raw_of(world) as raw:
        before = requested(world, "slow_charge")
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(world))
        writer.write(written(raw, "bank__slow_charge", arguments))
        await asyncio.to_thread(wait_for, lambda: is_requested(world, "slow_charge", before))
        await asyncio.to_thread(world.stop, signal.SIGKILL)
        writer.close()
        if is_finished_before:
            await asyncio.to_thread(wait_for, lambda: executed(world, amount) == 1)
        await asyncio.to_thread(world.start)
    async with raw_of(world) as raw:
        again = await raw.call("bank__slow_charge", arguments)
        assert again["structuredContent"]["amount"] == amount
    assert executed(world, amount) == 1


async def test_others_and_other_arguments_are_other_calls(world: World, amount: int) -> None:
    key = await asyncio.to_thread(world.new_key, f"other-{amount}", "agent")
    arguments = {"amount": amount, "ms": 300}
    async with raw_of(world) as raw, raw_of(world, key=key) as other:
        await broken_off(raw, "bank__slow_charge", arguments, "slow_charge")
        theirs = await other.call("bank__slow_charge", arguments)
        changed = await raw.call("bank__slow_charge", {**arguments, "ms": 301})
        assert not theirs["isError"]
        assert not changed["isError"]
        await asyncio.to_thread(wait_for, lambda: executed(world, amount) == 3)


async def test_a_call_that_differs_only_in_a_secret_is_another_call(world: World, amount: int) -> None:
    first = {"amount": amount, "ms": 300, "card": "4111111111111111"}
    async with raw_of(world) as raw:
        await broken_off(raw, "bank__slow_charge", first, "slow_charge")
        second = await raw.call("bank__slow_charge", {**first, "card": "5500005555555559"})
        assert not second["isError"], second
        await asyncio.to_thread(wait_for, lambda: executed(world, amount) == 2)


async def test_a_broken_call_with_a_secret_is_recognised_too(world: World, amount: int) -> None:
    arguments = {"amount": amount, "ms": 300, "card": "4111111111111111"}
    async with raw_of(world) as raw:
        await broken_off(raw, "bank__slow_charge", arguments, "slow_charge")
        assert not (await raw.call("bank__slow_charge", arguments))["isError"]
    assert executed(world, amount) == 1


async def test_a_clients_own_key_decides_alone(world: World, amount: int) -> None:
    meta = {"tga/idempotency-key": f"own-{amount}"}
    async with raw_of(world) as raw:
        made = [await raw.call("bank__charge", {"amount": amount}, meta=meta) for _ in range(2)]
        assert [one["_meta"].get("tga/replayed") for one in made] == [None, True]
        assert made[0]["structuredContent"] == made[1]["structuredContent"]
    assert executed(world, amount, "charge") == 1


async def test_a_proposed_key_is_used_by_every_try_and_gives_way_to_a_broken_calls(world: World, amount: int) -> None:
    """What the bridge sends: its own tries are one call, and so is what its client makes again through a new bridge."""
    arguments = {"amount": amount, "ms": 300}
    first, second = ({"tga/proposed-key": f"{name}-{amount}"} for name in ("first", "second"))
    async with raw_of(world) as raw:
        made = [await raw.call("bank__slow_charge", arguments, meta=first) for _ in range(2)]
        assert executed(world, amount) == 1
        assert made[0]["_meta"]["tga/idempotency-key"] == f"first-{amount}"
        await broken_off(raw, "bank__slow_charge", arguments, "slow_charge", meta=second)
        third = await raw.call("bank__slow_charge", arguments, meta={"tga/proposed-key": f"third-{amount}"})
        assert third["_meta"]["tga/idempotency-key"] == f"second-{amount}"
        assert executed(world, amount) == 2


def test_what_was_done_is_sound_and_nothing_is_left_open(world: World) -> None:
    verified = world.tga("verify", "--all")
    assert verified.returncode == 0, verified.stdout + verified.stderr
