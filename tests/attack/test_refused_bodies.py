"""Large bodies that a real gateway refuses, over HTTP and MCP: each client gets its answer, and none of it is kept."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urlsplit

import pytest

from tests.api.test_edge_refused_bodies import body, head
from tests.attack.test_exhaustion import memory_bytes
from tests.cli.world import World

LARGE_BYTES: Final = 8 * 2**20
AT_ONCE: Final = 16
REFUSED: Final[dict[str, tuple[str, str, bool, int]]] = {
    "nobody": ("/mcp", "POST", False, 401),
    "another host": ("/mcp", "POST", True, 403),
    "another method": ("/mcp", "PUT", True, 405),
    "too large": ("/mcp", "POST", True, 413),
    "too large for one server": ("/mcp/bank", "POST", True, 413),
    "no such server": ("/mcp/nobody", "POST", True, 404),
    "nobody, for a trace": ("/v1/traces/x/decision", "POST", False, 401),
    "no such route": ("/nothing", "PUT", False, 404),
}


def answered(world: World, raw: bytes) -> bytes:
    """Everything is sent before anything is read."""
    parts = urlsplit(world.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(raw)
        return connection.recv(65_536)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("what", REFUSED)
def test_every_client_gets_its_answer_and_nothing_is_kept(world: World, what: str, is_chunked: bool) -> None:
    path, method, has_key, status = REFUSED[what]
    who = world.admin_key() if has_key else None
    for closes in (True, False):
        raw = head(path, method, who, is_chunked=is_chunked, closes=closes, size=LARGE_BYTES)
        if status != 403:
            raw = raw.replace(b"Host: gateway", b"Host: localhost")
        raw += body(LARGE_BYTES, is_chunked=is_chunked)
        answered(world, raw)
        before = memory_bytes(world)
        with ThreadPoolExecutor(AT_ONCE) as at_once:
            said = [done.result() for done in [at_once.submit(answered, world, raw) for _ in range(AT_ONCE)]]
        assert {words[:12] for words in said} == {f"HTTP/1.1 {status}".encode()}
        # All of it would be eight times as much; what a connection reads at once comes and goes.
        assert memory_bytes(world) - before < AT_ONCE * LARGE_BYTES // 8
