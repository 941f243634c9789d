"""A stolen key that was revoked: what happens afterwards is not told to who still listens with it."""

from __future__ import annotations

import json
import time
from contextlib import closing

from tests.attack.client import Client
from tests.cli.world import World

_META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "thief", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
}


def test_a_revoked_key_hears_nothing_more_over_mcp(world: World) -> None:
    key = world.new_key("victim", "agent")
    with (
        closing(Client(world.url, key)) as thief,
        closing(Client(world.url, world.new_key("boss", "supervisor"))) as boss,
    ):
        trace_id = thief.call("bank", "refund", {"amount": 5}).body["trace_id"]
        digest = boss.ask("GET", f"/v1/traces/{trace_id}").body["action_request_digest"]
        notifications = {"notifications": {"taskIds": [trace_id]}, "_meta": _META}
        asked = {"jsonrpc": "2.0", "id": 7, "method": "subscriptions/listen", "params": notifications}
        headers = {
            "Authorization": f"Bearer {key}",
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": "2026-07-28",
            "Mcp-Method": "subscriptions/listen",
        }
        thief.connection.request("POST", "/mcp", json.dumps(asked), headers)
        stream = thief.connection.getresponse()
        assert stream.status == 200
        assert b"acknowledged" in stream.read1() + stream.read1()
        assert world.tga("keys", "revoke", key.split("_")[1]).returncode == 0
        assert boss.decide(trace_id, "APPROVE", digest).status == 200
        thief.connection.sock.settimeout(4)
        heard, until = b"", time.monotonic() + 4
        while time.monotonic() < until:
            try:
                piece = stream.read1()
            except TimeoutError:
                break
            if not piece:
                break
            heard += piece
    assert b"refund_id" not in heard
