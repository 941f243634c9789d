"""Eight tool servers that send without end: what another caller notices of them, and what they take."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.attack.client import Client
from tests.attack.test_exhaustion import memory_bytes
from tests.cli.world import World
from tests.mcp.standing import descendants

_SCRIPT = str(Path(__file__).parent / "hostile_servers.py")
_CALLS_PER_BLOCK = 12
_BLOCKS_PER_ROUND = 5
_ROUNDS_MAX = 8
_CROWDING_MAX = 4.0
_MEMORY_BYTES_MAX = 48_000_000

_HTTP = """
[servers.{kind}]
transport = "http"
base_url = "http://127.0.0.1:{port}"
timeout_ms = 600000
max_attempts = 100

[servers.{kind}.tools.does]
class = "read"
"""
_MCP = """
[servers.{kind}]
transport = "{transport}"
{where}
timeout_ms = 600000
max_attempts = 100
"""


@pytest.mark.one_in(3)
def test_another_callers_p99_at_most_doubles_beside_eight_hostile_servers(still_world: World) -> None:
    world = still_world
    with _hostile_servers() as (hostile, ports):
        kinds = _configure(world, ports)
        assert len(kinds) >= 8
        world.start()
        try:
            with closing(Client(world.url, world.new_key("honest", "agent"))) as honest:
                for kind in kinds:
                    asked = honest.call(kind, "does", {}, wait_ms=0)
                    assert asked.body.get("trace_id"), asked
                _measure(world, hostile, honest)
        finally:
            world.stop()


def _measure(world: World, hostile: subprocess.Popen[str], honest: Client) -> None:
    assert world.gateway is not None
    quiet: list[float] = []
    loud: list[float] = []
    crowding: list[float] = []
    _calls(honest)  # everything is warm
    before_bytes = memory_bytes(world)
    for _ in range(_ROUNDS_MAX):
        for _ in range(_BLOCKS_PER_ROUND):
            loud += _calls(honest)
            with _stopped(hostile.pid, *_flooding_children(world)):
                quiet += _calls(honest)
                crowding.append(_crowding())
        found = f"p99 {_p99(quiet) * 1000:.1f} ms quiet, {_p99(loud) * 1000:.1f} ms loud; "
        found += f"median {statistics.median(quiet) * 1000:.1f} and {statistics.median(loud) * 1000:.1f} ms; "
        found += f"the machine is crowded {statistics.median(crowding):.1f} times; "
        found += f"memory {(memory_bytes(world) - before_bytes) // 1_000_000:+} MB"
        print(found)
        assert memory_bytes(world) - before_bytes < _MEMORY_BYTES_MAX, found
        if _p99(loud) <= 2 * _p99(quiet) * min(statistics.median(crowding), _CROWDING_MAX):
            return
    raise AssertionError(found)


def _calls(honest: Client) -> list[float]:
    took = []
    for _ in range(_CALLS_PER_BLOCK):
        began = time.perf_counter()
        said = honest.call("bank", "charge", {"amount": 1})
        took.append(time.perf_counter() - began)
        assert said.body.get("state") == "COMPLETED", said
    return took


def _crowding() -> float:
    """How many times longer work takes than it needs, because others want the processors too; 1 on an idle machine.

    On a crowded one every turn of the gateway's loop waits to be run, and the longest waits say nothing of the gateway.
    """
    began, worked = time.perf_counter(), time.thread_time()
    while time.thread_time() - worked < 0.02:
        pass
    return max(1.0, (time.perf_counter() - began) / (time.thread_time() - worked))


def _p99(took: list[float]) -> float:
    return statistics.quantiles(took, n=100, method="inclusive")[98]


def _configure(world: World, ports: dict[str, int]) -> list[str]:
    written = world.config.read_text()
    for kind, port in ports.items():
        if kind in ("notes", "nested", "unasked"):
            where = f'url = "http://127.0.0.1:{port}/mcp"'
            written += _MCP.format(kind=kind, transport="mcp-http", where=where)
        else:
            written += _HTTP.format(kind=kind, port=port)
    command = json.dumps([sys.executable, _SCRIPT, "stdio"])
    written += _MCP.format(kind="pipes", transport="mcp-stdio", where=f"command = {command}")
    world.config.write_text(written)
    return [*ports, "pipes"]


@contextmanager
def _hostile_servers() -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    with subprocess.Popen(
        [sys.executable, _SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def _flooding_children(world: World) -> list[int]:
    assert world.gateway is not None
    found = []
    for pid in descendants(world.gateway.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if _SCRIPT.encode() in command and b"child_guard" not in command:
            found.append(pid)
    return found


@contextmanager
def _stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
