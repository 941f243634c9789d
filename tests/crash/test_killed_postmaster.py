"""The embedded PostgreSQL is killed beside a living gateway: the gateway starts it again, and goes on.

A real gateway in a process of its own, the only user of its database; kill -9 of real server processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.postgres.embedded.postmaster import recorded_pid
from app.postgres.embedded.server import EmbeddedPostgres
from tests.cli.test_serving import call_slowly
from tests.cli.world import World, trace_of, wait_for
from tests.conftest import make_home
from tests.patience import HANG_S

pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")


class Receiver(http.server.ThreadingHTTPServer):
    """A webhook's receiver, which keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver.Handler)
        self.told: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.server.told.append(body.decode())  # type: ignore[attr-defined]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def alone(receiver: Receiver) -> Iterator[World]:
    """A world whose gateway is the only user of its database, as in production."""
    home = make_home()
    world = World(home)
    world.config.write_text(
        f'{world.config.read_text()}\n[webhooks.people]\nurl = "http://127.0.0.1:{receiver.server_port}/"\n'
    )
    try:
        world._postgres.stop()
        world.start()
        yield world
    finally:
        world.close()
        if processes_in(home):  # whatever went wrong, nothing is left behind
            with EmbeddedPostgres(home):
                pass
        shutil.rmtree(home)


def data_of(home: Path) -> Path:
    return Path(os.path.realpath(home / "postgres" / "data"))


def processes_in(home: Path) -> list[int]:
    """The server's processes: those that work in its data directory."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and os.readlink(process / "cwd") == str(data_of(home)):
                found.append(int(process.name))
    return found


def postmaster_of(world: World) -> int:
    """The living postmaster, once there is one that can be called."""
    found: list[int] = []

    def is_there() -> bool:
        pid = recorded_pid(data_of(world.home) / "postmaster.pid")
        found[:] = [] if pid is None or pid not in processes_in(world.home) else [pid]
        return bool(found)

    wait_for(is_there)
    return found[0]


def call(world: World, key: str, **more: str) -> str:
    """Repeat the call until it is answered, as a caller does who gets a 503; the id of its trace."""
    traces: list[str] = []

    def is_answered() -> bool:
        told = world.tga("call", "bank", "charge", "-a", "amount=5", "-k", key, **more)
        traces[:] = [trace_of(told)] if told.returncode == 0 else []
        return bool(traces)

    wait_for(is_answered, seconds=60)
    assert world.executions(key) == 1
    return traces[0]


def readyz(world: World) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{world.url}/readyz", timeout=HANG_S) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def outage(world: World) -> str:
    """What readyz says once it says that the server ended."""
    said: list[str] = []

    def is_said() -> bool:
        status, answer = readyz(world)
        if "the embedded PostgreSQL ended" in answer.get("detail", ""):
            assert (status, answer["code"]) == (503, "STORE_UNAVAILABLE")
            said.append(answer["detail"])
        return bool(said)

    wait_for(is_said)
    return said[0]


def executor_of(world: World, trace: str) -> str:
    async def ask() -> str:
        session = await asyncpg.connect(world.admin_url)
        try:
            entry = await session.fetchval(
                "SELECT convert_from(entry, 'UTF8')::jsonb ->> 'executor_id' FROM tga.entries WHERE stream = $1",
                f"trace:{trace}",
            )
            return str(entry)
        finally:
            await session.close()

    return asyncio.run(ask())


def test_a_killed_postmaster_is_started_again_and_everything_goes_on(alone: World, receiver: Receiver) -> None:
    world = alone
    gateway, killed = world.gateway, postmaster_of(world)
    agent = world.new_key("someone", "agent")
    before = call(world, "before", TGA_API_KEY=agent)
    with contextlib.ExitStack() as stack:
        slow = stack.enter_context(call_slowly(world, "in flight", 1500))  # the bank has it
        stack.callback(slow.kill)
        os.kill(killed, signal.SIGKILL)
        after = call(world, "after", TGA_API_KEY=agent)
        slow.communicate(timeout=60)
    assert postmaster_of(world) != killed
    assert world.gateway is gateway
    assert not world.gateway_is_gone()
    assert "the embedded PostgreSQL ended; it is started again now" in world.told.read_text()
    wait_for(lambda: "the embedded PostgreSQL runs again" in world.told.read_text())
    assert executor_of(world, before) != executor_of(world, after), "a lost session is a dead id"
    # What was in flight is settled: its answer was read, and is recorded, not asked for again.
    repeat = ("call", "bank", "slow_charge", "-a", "amount=7", "-a", "ms=1500", "-k", "in flight")
    wait_for(lambda: world.tga(*repeat).returncode == 0)
    assert (world.requests("in flight"), world.executions("in flight")) == (1, 1)
    # The sequencer, the outbox and the listener are back: a proof, an announcement, a revocation that is heard.
    wait_for(lambda: world.tga("receipt", after).returncode == 0)
    pending = world.pending("asked after")
    wait_for(lambda: any(pending in told for told in receiver.told))
    world.tga("keys", "revoke", agent.split("_")[1])
    wait_for(lambda: world.tga("traces", TGA_API_KEY=agent).returncode == 1)
    wait_for(lambda: readyz(world) == (200, {"status": "ok", "log": "ok"}))


def test_a_server_of_which_every_process_was_killed_is_started_again(alone: World) -> None:
    killed = processes_in(alone.home)
    assert len(killed) > 5
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    call(alone, "after all")
    assert not set(killed) & set(processes_in(alone.home))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a server as somebody else")
def test_under_root_it_is_started_again_as_the_owner_of_its_cluster(alone: World) -> None:
    os.kill(postmaster_of(alone), signal.SIGKILL)
    call(alone, "as another")
    owner = data_of(alone.home).stat().st_uid
    assert owner != 0
    assert Path(f"/proc/{postmaster_of(alone)}").stat().st_uid == owner


def test_one_that_is_killed_again_and_again_is_started_after_pauses_and_readyz_says_so(alone: World) -> None:
    alone.stop()
    alone.start()
    said = []
    for number in range(4):
        os.kill(postmaster_of(alone), signal.SIGKILL)
        if number >= 2:
            said.append(outage(alone))
        call(alone, f"again {number}")
    assert said == [
        "the embedded PostgreSQL ended, the 3. time in a row; it is started again in 1 s",
        "the embedded PostgreSQL ended, the 4. time in a row; it is started again in 2 s",
    ]
    wait_for(lambda: alone.told.read_text().count("the embedded PostgreSQL runs again") == 4)


def test_a_shutdown_right_after_a_kill_leaves_no_process_behind(alone: World) -> None:
    os.kill(postmaster_of(alone), signal.SIGKILL)
    assert alone.stop() == 0
    assert processes_in(alone.home) == []
    alone.start()
    call(alone, "after the shutdown")


def test_a_shutdown_while_it_is_started_again_leaves_no_process_behind(alone: World) -> None:
    """A child that does not leave keeps the new server from being started; it is ended, by the start or by the stop."""
    alone.stop()
    alone.start()
    postmaster = postmaster_of(alone)
    lingering = next(pid for pid in processes_in(alone.home) if pid != postmaster)
    os.kill(lingering, signal.SIGSTOP)
    os.kill(postmaster, signal.SIGKILL)
    wait_for(lambda: "it is started again now" in alone.told.read_text())
    assert alone.stop() == 0
    assert processes_in(alone.home) == []
