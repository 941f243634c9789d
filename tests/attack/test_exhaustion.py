"""Strangers and idle followers: what they hold is not what accepted calls need."""

from __future__ import annotations

import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

from tests.attack.client import Client
from tests.cli.world import World

_FILES = 256
_HONEST = 10
_FOLLOWERS = 100
_BYTES_PER_FOLLOWER = 400_000
_GUESSERS = 8
_GUESSES = 200


def _address(world: World) -> tuple[str, int]:
    parts = urlsplit(world.url)
    return str(parts.hostname), int(parts.port or 0)


def test_connections_of_strangers_do_not_fail_a_call_that_was_accepted(still_world: World) -> None:
    world = still_world
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, hard))  # inherited; 1024 is what most machines give
    try:
        world.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        key = world.new_key("honest", "agent")
        with ExitStack() as held, ThreadPoolExecutor(_HONEST) as at_once:
            honest = [held.enter_context(closing(Client(world.url, key))) for _ in range(_HONEST)]
            for one in honest:
                assert one.ask("GET", "/v1/traces?limit=1").status == 200  # connected before the others come
            for _ in range(_FILES + 50):
                held.enter_context(socket.create_connection(_address(world)))
            time.sleep(1)  # for the gateway to accept as many as it can
            called = [at_once.submit(one.call, "bank", "slow_charge", {"amount": 1, "ms": 300}) for one in honest]
            assert [done.result().body.get("state") for done in called] == ["COMPLETED"] * _HONEST
    finally:
        world.stop()


def test_followers_that_never_read_take_little_memory(still_world: World) -> None:
    world = still_world
    world.start()
    try:
        with ExitStack() as held, closing(Client(world.url, world.new_key("honest", "agent"))) as honest:
            for _ in range(6):
                assert honest.call("bank", "charge", {"amount": 1, "note": "n" * 240_000}).status == 200
            key = world.new_key("follower", "auditor")
            before = memory_bytes(world)
            followers = [held.enter_context(_follower(world, key)) for _ in range(_FOLLOWERS)]
            for follower in followers:
                assert follower.recv(1).startswith(b"H")  # it is answered; the rest stays where it is
            time.sleep(2)  # what is going to be read for them has been
            assert memory_bytes(world) - before < _FOLLOWERS * _BYTES_PER_FOLLOWER
    finally:
        world.stop()


def _follower(world: World, key: str) -> socket.socket:
    made = socket.socket()
    made.settimeout(30)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    made.connect(_address(world))
    head = f"GET /v1/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer {key}"
    made.sendall(f"{head}\r\n\r\n".encode())
    return made


def memory_bytes(world: World) -> int:
    assert world.gateway is not None
    status = Path(f"/proc/{world.gateway.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def test_made_up_keys_right_after_a_start_lock_out_nobody_who_has_one(still_world: World) -> None:
    """Keys that the gateway has not seen yet, each used for the first time beside a flood of made-up ones."""
    world = still_world
    world.start()
    try:
        keys = [world.new_key(f"newcomer-{number}", "agent") for number in range(8)]
        with ThreadPoolExecutor(_GUESSERS) as at_once:
            guessing = [at_once.submit(_guess, world.url, number) for number in range(_GUESSERS)]
            while not all(done.done() for done in guessing) and keys:
                with closing(Client(world.url, keys.pop())) as newcomer:
                    assert newcomer.ask("GET", "/v1/traces?limit=1").status == 200
            answers = [status for done in guessing for status in done.result()]
        assert set(answers) == {401}
        assert len(answers) == _GUESSERS * _GUESSES
    finally:
        world.stop()


def _guess(url: str, number: int) -> list[int]:
    said = []
    for guess in range(_GUESSES):
        with closing(Client(url, f"tga_{number:08x}{guess:08x}_{'x' * 43}")) as client:
            said.append(client.ask("GET", "/v1/traces?limit=1").status)
    return said
