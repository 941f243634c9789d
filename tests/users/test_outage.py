"""A tool server that is away for a while: what a caller meets, and what an operator sees."""

from __future__ import annotations

import http.server
import json
import shutil
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from app.config import load_config
from tests.cli.world import World, wait_for
from tests.conftest import make_home


class Till(http.server.BaseHTTPRequestHandler):
    """Answers every call, and notes its key."""

    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Idempotency-Key"])
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def away() -> Iterator[socket.socket]:
    """An address that nobody listens at, and that nobody else can take meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


@contextmanager
def back(taken: socket.socket) -> Iterator[list[str | None]]:
    """The server is back, at the same address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Till, bind_and_activate=False)
    server.socket.close()
    server.socket = taken.dup()
    server.server_activate()
    Till.keys = []
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    try:
        yield Till.keys
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.fixture
def world() -> Iterator[World]:
    home = make_home()
    made = World(home)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(home)


def start(world: World, **servers: tuple[socket.socket, str, str]) -> None:
    tables = [
        f'[servers.{name}]\ntransport = "http"\nbase_url = "http://127.0.0.1:{taken.getsockname()[1]}"\n{settings}\n'
        f'[servers.{name}.tools.pay]\nclass = "write"\n{tool}\n'
        for name, (taken, settings, tool) in servers.items()
    ]
    world.config.write_text(world.config.read_text() + "\n".join(tables))
    world.start()


def call(world: World, server: str, key: str, *, wait_ms: int) -> tuple[int, dict[str, Any]]:
    body = {"server_id": server, "tool_name": "pay", "arguments": {}, "idempotency_key": key, "wait_ms": wait_ms}
    return ask(world, "/v1/tool-calls", body)


def ask(world: World, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {world.admin_key()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(world.url + path, data=data, headers=headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_call_to_a_server_that_is_away_is_made_when_it_is_back_with_the_same_key(world: World) -> None:
    with away() as till:
        start(world, till=(till, "max_attempts = 1", ""))
        assert load_config(world.config).servers["till"].unreachable_for_ms == 120_000
        status, answer = call(world, "till", "order-1", wait_ms=0)
        assert (status, answer["state"]) == (202, "EXECUTING")
        trace = answer["trace_id"]
        status, answer = call(world, "till", "order-1", wait_ms=0)  # a repeat, while it is in flight
        assert (answer.get("code"), answer["trace_id"]) == ("CALL_IN_FLIGHT", trace)
        wait_for(lambda: "server till is down: Connection refused" in world.told.read_text())
        with back(till) as keys:
            status, answer = call(world, "till", "order-1", wait_ms=30_000)
            assert (status, answer["state"], answer["trace_id"]) == (200, "COMPLETED", trace)
            assert len(keys) == 1
            assert [one["result"] for one in answer["tool_effect"]["attempts"]] == ["answered"]


def test_a_call_that_was_given_up_says_that_nothing_was_executed_and_that_a_new_key_is_safe(world: World) -> None:
    with away() as till:
        start(world, till=(till, "unreachable_for_ms = 300", ""))
        status, answer = call(world, "till", "order-1", wait_ms=30_000)
        assert (status, answer["state"]) == (200, "FAILED")
        error = answer["tool_effect"]["error"]
        assert error["code"] == "NOT_SENT"
        assert "certainly nothing was executed" in error["message"]
        with back(till) as keys:
            _, again = call(world, "till", "order-1", wait_ms=30_000)
            assert (again["replayed"], again["tool_effect"]["error"], keys) == (True, error, [])
            _, other = call(world, "till", "order-2", wait_ms=30_000)
            assert (other["state"], len(keys)) == ("COMPLETED", 1)
    told = world.tga("call", "till", "pay", "-k", "order-1")
    assert (told.returncode, "certainly nothing was executed" in told.stderr) == (1, True)
    errors = urllib.request.urlopen(f"{world.url}/errors", timeout=10).read().decode()  # noqa: S310
    assert "NOT_SENT" in errors


def test_after_a_crash_in_between_on_unknown_outcome_decides(world: World) -> None:
    hold = 'on_unknown_outcome = "hold"'
    with away() as till, away() as shop:
        start(world, till=(till, "", hold), shop=(shop, "", ""))
        held = call(world, "till", "order-1", wait_ms=0)[1]["trace_id"]
        sent = call(world, "shop", "order-1", wait_ms=0)[1]["trace_id"]
        wait_for(lambda: all(f"server {name} is down" in world.told.read_text() for name in ("till", "shop")))
        world.stop(signal.SIGKILL)
        world.start()
        with back(shop) as keys:  # nobody can know any more that nothing was sent
            wait_for(lambda: ask(world, f"/v1/traces/{held}")[1]["waiting"] == "operator")
            wait_for(lambda: ask(world, f"/v1/traces/{sent}")[1]["state"] == "COMPLETED")
            assert len(keys) == 1
