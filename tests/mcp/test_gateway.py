"""A real gateway in front of real MCP servers, killed in the middle of calls to all of them."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.world import World, open_world, wait_for
from tests.mcp.real import NAMES, Real, real_server
from tests.mcp.standing import descendants, is_alive, scripted


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world() as world:
        yield world


def ask(world: World, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(world.url + path, method=method)  # noqa: S310
    request.add_header("Authorization", f"Bearer {world.admin_key()}")
    request.add_header("Content-Type", "application/json")
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data, timeout=60) as response:  # noqa: S310
        return json.loads(response.read())


def call(world: World, server: str, tool: str, arguments: dict[str, Any], key: str, **more: Any) -> Any:
    body = {"server_id": server, "tool_name": tool, "arguments": arguments, "idempotency_key": key, **more}
    return ask(world, "POST", "/v1/tool-calls", body)


def state_of(world: World, trace_id: str) -> Any:
    return ask(world, "GET", f"/v1/traces/{trace_id}")


def connections(world: World) -> dict[str, Any]:
    return {item["server_id"]: item["connection"] for item in ask(world, "GET", "/v1/servers")["items"]}


def test_killed_in_the_middle_of_calls_it_sends_again_or_holds_as_it_was_told(world: World, tmp_path: Path) -> None:
    reals = [real_server(name, tmp_path) for name in NAMES]
    policy = "[policy]\nfile = 'policy.cedar'\n"
    world.config.write_text("".join(real.config(tmp_path) for real in reals) + policy)
    world.start()
    assert {known["state"] for known in connections(world).values()} == {"connected"}
    held_files = [real.keep_answers_back(tmp_path) for real in reals]
    traces: dict[tuple[str, str], str] = {}
    for real in reals:
        for kind, (tool, arguments) in (("again", real.write), ("hold", real.held)):
            answer = call(world, real.name, tool, arguments, f"{kind}-1", wait_ms=1)
            traces[real.name, kind] = answer["trace_id"]
    wait_for(lambda: all(len(real.sends(tmp_path)) == 2 for real in reals))
    assert world.gateway is not None
    children = descendants(world.gateway.pid)
    assert len(children) >= 3 * len(reals)
    world.stop(signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, children)))  # none outlives the gateway
    for file in held_files:
        file.unlink()

    world.start()
    for real in reals:
        again, hold = traces[real.name, "again"], traces[real.name, "hold"]
        wait_for(partial(_is, world, again, "state", "COMPLETED"))
        wait_for(partial(_is, world, hold, "waiting", "operator"))
        _assert_promises(real, tmp_path)
        # A repeat of the caller's changes nothing: the recorded answer, and no send.
        assert call(world, real.name, *real.write, "again-1")["replayed"] is True
        digest = state_of(world, hold)["tool_call_digest"]
        verdict = {"action": "failed", "rationale": "looked", "tool_call_digest": digest}
        ask(world, "POST", f"/v1/traces/{hold}/resolve", verdict)
        assert state_of(world, hold)["state"] == "FAILED"
        _assert_promises(real, tmp_path)
    assert world.stop() == 0


def _is(world: World, trace_id: str, field: str, value: str) -> bool:
    return bool(state_of(world, trace_id)[field] == value)


def _assert_promises(real: Real, folder: Path) -> None:
    again = [sent for sent in real.sends(folder) if sent["_meta"]["tga/idempotency-key"] == "again-1"]
    hold = [sent for sent in real.sends(folder) if sent["_meta"]["tga/idempotency-key"] == "hold-1"]
    # Redispatch: at least once, with the same ids. Hold: once.
    assert (len(again), len(hold)) == (2, 1)
    assert again[0]["_meta"]["tga/tool-call-id"] == again[1]["_meta"]["tga/tool-call-id"]
    assert again[0]["arguments"] == again[1]["arguments"]


def test_a_changed_tool_is_quarantined_until_it_is_accepted(world: World, tmp_path: Path) -> None:
    broken = '[servers.broken]\ntransport = "mcp-stdio"\ncommand = ["./no-such-program"]\n'
    world.config.write_text(scripted(tmp_path) + broken)
    world.start()  # a server that does not start stops nobody
    try:
        assert connections(world)["broken"]["state"] in ("waiting", "connecting")
        steps = [{"describe": "Sends your files away."}, "echo"]
        assert call(world, "it", "does", {"steps": steps}, "k-1")["state"] == "COMPLETED"

        def pin() -> Any:
            return ask(world, "GET", "/v1/tools?server_id=it")["items"][0]

        wait_for(lambda: pin()["pin"]["status"] == "quarantined")
        with pytest.raises(urllib.error.HTTPError) as refused:
            call(world, "it", "does", {"steps": ["echo"]}, "k-2")
        assert json.loads(refused.value.read())["code"] == "TOOL_QUARANTINED"
        assert call(world, "it", "does", {"steps": steps}, "k-1")["replayed"] is True
        body = {"definition_digest": pin()["definition_digest"]}
        ask(world, "POST", "/v1/tools/it/does/pin", body)
        assert call(world, "it", "does", {"steps": ["echo"]}, "k-3")["state"] == "COMPLETED"
    finally:
        world.stop()


def test_a_child_that_dies_in_a_call_is_started_again_and_the_call_is_sent_again_with_the_same_ids(
    world: World, tmp_path: Path
) -> None:
    marker = tmp_path / "died"
    world.config.write_text(scripted(tmp_path).replace("servers.it", "servers.mortal"))
    world.start()
    try:
        answer = call(world, "mortal", "does", {"steps": [{"die_once": str(marker)}, "echo"]}, "d-1")
        assert answer["state"] == "COMPLETED"
        assert [attempt["result"] for attempt in answer["tool_effect"]["attempts"]] == ["disconnected", "answered"]
        lines = (tmp_path / "book.jsonl").read_text().splitlines()
        sent = [json.loads(line)["params"]["_meta"] for line in lines]
        assert len(sent) == 2
        assert sent[0]["tga/tool-call-id"] == sent[1]["tga/tool-call-id"]
    finally:
        world.stop()
