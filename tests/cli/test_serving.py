"""`tga serve`: what it says, what it does by itself, and how it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import pytest

from app.core.errors import StoreUnavailable
from app.core.limits import SWEEP_EVERY_MS
from app.gateway.background import BackgroundWork
from tests.attacker import disarm, rearm
from tests.cli.world import POLICY, World, wait_for
from tests.patience import HANG_S


@pytest.fixture(autouse=True)
def running(still_world: World) -> None:
    if still_world.gateway_is_gone():
        still_world.start()


@pytest.fixture
def world(still_world: World) -> World:
    return still_world


def test_it_says_where_it_listens_and_where_the_key_is_and_not_the_key(world: World) -> None:
    told = world.told.read_text()
    assert f"Listening on {world.url}" in told
    assert str(world.home / "admin.key") in told
    assert world.admin_key() is not None
    assert str(world.admin_key()) not in told


def test_a_port_that_is_taken_is_exit_2_and_named(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = world.tga_process("serve", TGA_PORT=str(taken.getsockname()[1]))
    assert told.returncode == 2
    assert "TGA_PORT" in told.stderr


def call_slowly(world: World, key: str, ms: int) -> subprocess.Popen[str]:
    arguments = ["call", "bank", "slow_charge", "-a", "amount=7", "-a", f"ms={ms}", "-k", key]
    caller = subprocess.Popen(
        [sys.executable, "-m", "app.main", *arguments],
        env=world.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_for(lambda: world.requests(key) == 1 or caller.poll() is not None)
        assert caller.poll() is None, "the call ended before it was under way"
    except AssertionError:
        caller.kill()
        caller.communicate()
        raise
    return caller


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_answers_what_it_has_taken_and_ends_with_0(world: World, number: signal.Signals) -> None:
    caller = call_slowly(world, f"stop-{number}", 1000)
    assert world.stop(number) == 0
    told, _ = caller.communicate(timeout=HANG_S)
    assert (caller.returncode, json.loads(told)["amount"]) == (0, 7)
    assert world.executions(f"stop-{number}") == 1
    assert "Stopped taking requests" in world.told.read_text()


def test_what_a_killed_gateway_left_is_continued_by_the_next(world: World) -> None:
    caller = call_slowly(world, "killed-1", 300)
    world.stop(signal.SIGKILL)
    caller.communicate(timeout=HANG_S)
    assert caller.returncode == 3
    world.start()
    wait_for(lambda: "waits for operator" in world.told.read_text())
    (trace,) = world.json("traces", "--state", "executing")
    assert trace["waiting"] == "operator"
    resolved = world.tga("resolve", trace["trace_id"], "succeeded", "-r", "the book has it", "--output", "{}")
    assert (resolved.returncode, resolved.stdout) == (0, "{}\n")
    assert (world.requests("killed-1"), world.executions("killed-1")) == (1, 1)
    again = world.tga("resolve", trace["trace_id"], "failed", "-r", "no")
    assert (again.returncode, "TRACE_NOT_HELD" in again.stderr) == (1, True)
    assert "known by resolution" in world.tga("trace", trace["trace_id"]).stdout
    assert world.tga("resolve", trace["trace_id"], "maybe", "-r", "x").returncode == 2
    assert world.tga("resolve", trace["trace_id"], "failed", "-r", "x", "--output", "{}").returncode == 2


def test_a_trace_that_cannot_be_recovered_is_told_of_once_and_stops_no_other(world: World) -> None:
    callers = [call_slowly(world, "poison-1", 20_000), call_slowly(world, "poison-2", 20_000)]
    world.stop(signal.SIGKILL)
    for caller in callers:
        caller.communicate(timeout=HANG_S)
    poisoned = asyncio.run(poison(world))
    dry = world.tga("recover", "--all", "--dry-run")
    assert (dry.returncode, "2 to recover; nothing was changed." in dry.stdout) == (1, True)
    world.start()
    wait_for(lambda: "waits for operator" in world.told.read_text())
    wait_for(lambda: poisoned in world.told.read_text())
    time.sleep(2.2 * SWEEP_EVERY_MS / 1000)
    assert world.told.read_text().count(f"{poisoned}  found") == 1
    told = world.tga("recover", poisoned)
    assert (told.returncode, "STATE_CHECKSUM_MISMATCH" in told.stdout) == (1, True)


async def poison(world: World) -> str:
    """Change a stored entry of the oldest trace that is not finished, behind the gateway's back."""
    session = await asyncpg.connect(world.admin_url)
    try:
        stream = await session.fetchval(
            "SELECT stream FROM tga.heads WHERE is_open AND waiting IS NULL AND stream LIKE 'trace:%' ORDER BY stream"
        )
        await disarm(session)
        await session.execute(
            "UPDATE tga.entries SET entry = set_byte(entry, 9, 0) WHERE stream = $1 AND sequence_number = 2", stream
        )
        await rearm(session)
        return str(stream).removeprefix("trace:")
    finally:
        await session.close()


def test_a_changed_policy_decides_and_is_on_the_record_and_a_broken_one_changes_nothing(world: World) -> None:
    assert world.tga("call", "bank", "charge", "-a", "amount=14", "-k", "policy-1").returncode == 0
    world.policy.write_text(POLICY.replace("== 13", "== 14"))
    wait_for(lambda: "The policy file was read again" in world.told.read_text())
    assert world.tga("call", "bank", "charge", "-a", "amount=14", "-k", "policy-2").returncode == 1
    digest = json.loads(world.tga("policy", "check", str(world.policy), "--json").stdout)["digest"]
    wait_for(lambda: asyncio.run(recorded_policy(world)) == digest)
    world.policy.write_text("permit(")
    wait_for(lambda: "POLICY_INVALID" in world.told.read_text())
    assert world.tga("call", "bank", "charge", "-a", "amount=14", "-k", "policy-3").returncode == 1
    assert world.tga("call", "bank", "charge", "-a", "amount=15", "-k", "policy-4").returncode == 0
    world.policy.write_text(POLICY)
    wait_for(lambda: world.told.read_text().count("The policy file was read again") == 2)
    assert world.told.read_text().count("POLICY_INVALID") == 1
    assert world.tga("call", "bank", "charge", "-a", "amount=14", "-k", "policy-5").returncode == 0


async def recorded_policy(world: World) -> str:
    session = await asyncpg.connect(world.admin_url)
    try:
        raw = await session.fetchval(
            "SELECT convert_from(artifact, 'UTF8') FROM tga.artifacts WHERE stream = 'system:default'"
            " AND convert_from(artifact, 'UTF8') LIKE '%tga/v1/policy_set%' ORDER BY sequence_number DESC LIMIT 1"
        )
        return str(json.loads(raw)["policy_digest"])
    finally:
        await session.close()


def test_nothing_that_waits_for_too_long_is_left_waiting(world: World) -> None:
    world.stop()
    world.config.write_text(
        world.config.read_text().replace('tags = ["approval"]', 'tags = ["approval"]\napproval_timeout_ms = 1000')
    )
    world.start()
    trace_id = world.pending("late-1")
    wait_for(lambda: world.json("trace", trace_id)["state"] == "DENIED")
    assert "DENY by expiry" in world.tga("trace", trace_id).stdout
    assert world.tga("approve", trace_id, "--yes").returncode == 1


def test_a_second_signal_ends_it_at_once(world: World) -> None:
    caller = call_slowly(world, "twice-1", 20_000)
    gateway = world.gateway
    assert gateway is not None
    gateway.send_signal(signal.SIGTERM)
    wait_for(lambda: "Stopping" in world.told.read_text())
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(timeout=HANG_S) == -signal.SIGTERM
    caller.kill()
    caller.communicate()


def own_work(**parts: Any) -> BackgroundWork:
    services = SimpleNamespace(stopping=asyncio.Event())
    policy = SimpleNamespace(digest="d")
    return BackgroundWork(cast("Any", SimpleNamespace(services=services, policy=policy, **parts)))


async def test_work_that_fails_is_tried_again_and_an_outage_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    work = own_work()
    outcomes = [StoreUnavailable("away"), StoreUnavailable("away"), ValueError("a defect"), None, None]
    done = 0

    async def failing() -> None:
        nonlocal done
        done += 1
        if done == len(outcomes):
            work._stopping.set()
        outcome = outcomes[done - 1]
        if outcome is not None:
            raise outcome

    caplog.set_level(logging.INFO)
    await asyncio.wait_for(work.repeat("test", failing, 1), timeout=HANG_S)
    assert done == len(outcomes)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "test waits",
        "a defect in the gateway's test; it goes on",
        "test goes on",
    ]


def test_a_host_that_is_not_ours_is_said_to_be_none(world: World) -> None:
    told = world.tga_process("serve", TGA_HOST="192.0.2.1", TGA_PORT="0")
    assert (told.returncode, "TGA_HOST" in told.stderr) == (2, True)
