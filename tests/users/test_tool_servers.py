"""What an operator sees of tool servers that start late or never: in `tga servers`, doctor, readyz and the log."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.config import ServerConfig, load_config
from tests.cli.world import Told, World, wait_for
from tests.conftest import make_home
from tests.mcp.served import raw_of

SERVER = Path(__file__).parent / "starting_server.py"


def stdio_table(name: str, *words: str, start_timeout_ms: int | None = None) -> str:
    command = json.dumps([sys.executable, str(SERVER), *words])
    limit = "" if start_timeout_ms is None else f"start_timeout_ms = {start_timeout_ms}\n"
    return f'\n[servers.{name}]\ntransport = "mcp-stdio"\ncommand = {command}\n{limit}'


@dataclass
class Broken:
    """A gateway with one server of each kind: late, ending at once, mute, and an HTTP server that is not there."""

    world: World
    gate: Path
    closed: socket.socket

    def readyz(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.world.url}/readyz", timeout=10) as answer:  # noqa: S310
            return dict(json.load(answer))

    def missing(self) -> dict[str, dict[str, Any]]:
        return {server["server_id"]: server for server in self.readyz().get("servers", ())}

    def status(self, server_id: str) -> dict[str, Any]:
        servers = json.loads(self.world.tga("servers", "--json").stdout)["servers"]
        return dict(next(server["status"] for server in servers if server["server_id"] == server_id))

    def doctor(self) -> tuple[Told, dict[str, dict[str, Any]]]:
        told = self.world.tga("doctor", "--json")
        return told, {finding["what"]: finding for finding in json.loads(told.stdout)}


@pytest.fixture(scope="module")
def broken() -> Iterator[Broken]:
    home = make_home()
    world = World(home)
    gate = home / "gate"
    with socket.socket() as taken:  # bound and not listening: whoever connects is refused
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        dead = f'[servers.gone]\ntransport = "http"\nbase_url = "http://127.0.0.1:{port}"\n'
        late = stdio_table("late", "held", str(gate))
        ends = stdio_table("ends", "dies")
        mute = stdio_table("mute", "mute", start_timeout_ms=300)
        world.config.write_text(world.config.read_text() + dead + late + ends + mute)
        try:
            world.start()
            wait_for(lambda: {"gone", "ends", "mute"} <= {s["server_id"] for s in readyz_down(world)})
            yield Broken(world, gate, taken)
        finally:
            world.close()
            shutil.rmtree(home)


def readyz_down(world: World) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{world.url}/readyz", timeout=10) as answer:  # noqa: S310
        return [server for server in json.load(answer).get("servers", ()) if server["state"] == "down"]


def test_a_server_has_a_minute_to_start_unless_the_operator_says_otherwise(broken: Broken) -> None:
    servers = load_config(broken.world.config).servers
    assert servers["late"].start_timeout_ms == ServerConfig.model_fields["start_timeout_ms"].default == 60_000
    assert servers["mute"].start_timeout_ms == 300


def test_servers_that_are_broken_are_seen_by_tga_servers_with_the_reason_and_what_to_do(broken: Broken) -> None:
    told = broken.world.tga("servers")
    assert told.returncode == 1
    for said in (
        "late is still starting. Its tools appear when it is ready.",
        "it ended with code 3",
        "its stderr: cannot open its mailbox: no such folder",
        "else run servers.ends.command by hand",
        "no answer within 300 ms",
        "raise servers.mute.start_timeout_ms (now 300)",
        "Connection refused",
        "correct servers.gone.base_url in tga.toml",
    ):
        assert said in told.stdout, told.stdout
    states = {name: broken.status(name)["state"] for name in ("bank", "late", "ends", "mute", "gone")}
    assert states == {"bank": "up", "late": "starting", "ends": "down", "mute": "down", "gone": "down"}
    # It is tried again all the time, and the state is as old as the first failure.
    since = broken.status("ends")["since"]
    assert broken.status("ends")["since"] == since


def test_servers_that_are_broken_make_doctor_exit_1(broken: Broken) -> None:
    told, found = broken.doctor()
    assert told.returncode == 1
    assert not any(found[f"server {name}"]["ok"] for name in ("ends", "mute", "gone"))
    assert "it ended with code 3" in found["server ends"]["found"]
    assert "start_timeout_ms" in found["server mute"]["remedy"]
    assert "Connection refused" in found["server gone"]["found"]
    late = found["server late"]
    assert (late["ok"], late["warning"]) == (True, True)
    assert late["found"].startswith("starting since ")
    assert found["server bank"]["ok"]
    wrong = {what for what, finding in found.items() if not finding["ok"]}
    assert wrong == {"server ends", "server mute", "server gone"}


def test_servers_that_are_broken_are_named_by_readyz_and_the_gateway_is_ready_all_the_same(broken: Broken) -> None:
    missing = broken.missing()
    assert {name: server["state"] for name, server in missing.items()} == {
        "late": "starting",
        "ends": "down",
        "mute": "down",
        "gone": "down",
    }
    assert "code 3" in missing["ends"]["reason"]
    assert "reason" not in missing["late"]


def test_servers_that_are_broken_are_in_the_log_once_for_each_reason(broken: Broken) -> None:
    log = broken.world.told.read_text()
    assert "Still starting: late." in log
    assert log.count("server ends is down: ") <= 2  # at the newer question, and at the older one
    assert "it ended with code 3" in log
    assert log.count("server gone is down: Connection refused. Start it, or correct servers.gone.base_url") == 1
    assert "server mute is down" in log


def test_an_agent_reads_no_words_of_the_server_itself(broken: Broken) -> None:
    key = broken.world.new_key("ann", "agent")
    request = urllib.request.Request(f"{broken.world.url}/v1/servers", headers={"Authorization": f"Bearer {key}"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        servers = {server["server_id"]: server for server in json.load(answer)["items"]}
    assert servers["ends"]["status"]["state"] == "down"
    assert servers["ends"]["status"]["remedy"] is None
    assert "mailbox" not in json.dumps(servers)


async def test_a_late_server_connects_when_it_is_ready_and_its_tools_are_announced(broken: Broken) -> None:
    async with raw_of(broken.world) as raw:
        message, headers = raw.request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        async with raw.session.post(
            broken.world.url + "/mcp", json=message, headers={**raw.headers, **headers}
        ) as stream:
            await stream.content.readuntil(b"\n\n")  # it is listened to
            assert "late__send" not in {tool["name"] for tool in (await raw.ask("tools/list"))["tools"]}
            broken.gate.touch()
            while b"notifications/tools/list_changed" not in await stream.content.readuntil(b"\n\n"):
                pass
        assert "late__send" in {tool["name"] for tool in (await raw.ask("tools/list"))["tools"]}
        answer = await raw.call("late__send", {"text": "hello"})
        assert answer["content"] == [{"type": "text", "text": "sent"}]
    assert "late" not in broken.missing()
    assert (await asyncio.to_thread(broken.status, "late"))["state"] == "up"


def test_a_server_that_comes_back_is_up_again(broken: Broken) -> None:
    broken.closed.listen()
    wait_for(lambda: broken.status("gone")["state"] == "up")
    assert "gone" not in broken.missing()
    assert "server gone is up again" in broken.world.told.read_text()
