"""`tga servers`: what there is, what changed, and accepting a change."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.world import World


def test_servers_and_tools_are_listed_with_pins_and_health(world: World) -> None:
    world.tga("call", "bank", "balance")
    told = world.tga("servers")
    assert told.returncode == 0
    assert "bank" in told.stdout
    assert "pinned" in told.stdout
    document = world.json("servers")
    assert {tool["tool_name"]: tool["pin"]["status"] for tool in document["tools"]}["charge"] == "pinned"
    (bank,) = [server for server in document["servers"] if server["server_id"] == "bank"]
    assert bank["health"]["answered"] >= 1


def test_a_changed_tool_is_not_called_until_its_change_is_accepted(world: World) -> None:
    first = world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "before")
    world.stop()
    world.config.write_text(world.config.read_text().replace("Charge an amount.", "Charge twice."))
    world.start()
    told = world.tga("servers")
    assert (told.returncode, "quarantined" in told.stdout) == (1, True)
    assert "tga servers accept bank charge" in told.stdout
    refused = world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "after")
    assert (refused.returncode, "TOOL_QUARANTINED" in refused.stderr) == (1, True)
    assert world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "before").stdout == first.stdout
    wrong = world.tga("servers", "accept", "bank", "charge", "--digest", "0" * 64, "--yes")
    assert (wrong.returncode, "REQUEST_MISMATCH" in wrong.stderr) == (1, True)
    supervisor = world.new_key("sue", "supervisor")
    assert world.tga("servers", "accept", "bank", "charge", "--yes", TGA_API_KEY=supervisor).returncode == 1
    (pin,) = [tool["pin"] for tool in tools(world) if tool["tool_name"] == "charge" and tool["server_id"] == "bank"]
    accepted = world.tga("servers", "accept", "bank", "charge", "--digest", pin["found_digest"], "--yes")
    assert accepted.returncode == 0, accepted.stderr
    assert pin["pinned_digest"] in accepted.stderr
    assert pin["found_digest"] in accepted.stderr
    assert world.tga("servers").returncode == 0
    assert world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "after").returncode == 0
    assert "Nothing to accept" in world.tga("servers", "accept", "bank", "charge").stdout


def tools(world: World) -> list[dict[str, Any]]:
    return list(json.loads(world.tga("servers", "--json").stdout)["tools"])


def test_a_tool_that_is_not_there_cannot_be_accepted(world: World) -> None:
    for server, tool in (("bank", "nothing"), ("nobody", "charge")):
        told = world.tga("servers", "accept", server, tool, "--yes")
        assert (told.returncode, "TOOL_NOT_FOUND" in told.stderr) == (2, True)
