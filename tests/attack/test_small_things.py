"""Framing that the gateway does not understand, and damage that `tga doctor` does not see."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from urllib.parse import urlsplit

import asyncpg

from tests.attack.client import Client
from tests.attacker import disarm, rearm
from tests.cli.world import World
from tests.patience import HANG_S


def test_a_body_in_a_transfer_coding_that_nobody_undoes_is_refused(world: World) -> None:
    parts = urlsplit(world.url)
    body = b'{"server_id":"bank","tool_name":"balance","arguments":{}}'
    head = f"POST /v1/tool-calls HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {world.new_key('agent-1', 'agent')}\r\n"
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=HANG_S) as sent:
        sent.sendall(head.encode() + b"Transfer-Encoding: gzip, chunked\r\n\r\n")
        sent.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert sent.recv(65_536).split()[1] in (b"400", b"501")


def test_doctor_does_not_call_a_tampered_log_as_it_must_be(world: World) -> None:
    with closing(Client(world.url, world.new_key("agent-2", "agent"))) as agent:
        trace_id = agent.call("bank", "charge", {"amount": 1}).body["trace_id"]
    asyncio.run(_tamper(world.admin_url, f"trace:{trace_id}"))
    assert world.tga("verify", "--all").returncode == 1
    told = world.tga("doctor").stdout
    assert "Everything is as it must be" not in told or "verify" in told


async def _tamper(url: str, stream: str) -> None:
    session = await asyncpg.connect(url)
    try:
        await disarm(session)
        done = await session.execute("UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream = $1", stream)
        assert done != "UPDATE 0"
        await rearm(session)
    finally:
        await session.close()
