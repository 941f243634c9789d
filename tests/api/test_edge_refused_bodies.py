"""A request that is refused before its body has arrived: the refusal reaches the client, whatever it still sends.

The client sends everything before it reads anything, as most HTTP libraries do.
"""

from __future__ import annotations

import asyncio
import socket

import pytest

from app.core.limits import DISCARDED_BYTES_MAX
from tests.api.wire import Front, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE_BYTES = 6 * 1024 * 1024


@pytest.fixture
def front(lasting_front: Front) -> Front:
    lasting_front.runtime.calls.clear()
    lasting_front.runtime.answering = None
    return lasting_front


def head(path: str, method: str, who: str | None, *, is_chunked: bool, closes: bool, size: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway"]
    lines.append("Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {size}")
    if who is not None:
        lines.append(f"Authorization: Bearer {who}")
    if closes:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def body(size: int, *, is_chunked: bool) -> bytes:
    if not is_chunked:
        return b"x" * size
    piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    return piece * (size // 0x10000) + b"0\r\n\r\n"


def send_all_then_read(port: int, raw: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(raw)
        return connection.recv(65536)


REFUSALS: dict[str, tuple[str, str, str | None, int]] = {
    "too large": ("/v1/tool-calls", "POST", "agent", 413),
    "nobody": ("/v1/tool-calls", "POST", None, 401),
    "no such route": ("/v1/nothing", "POST", "agent", 404),
    "no such method": ("/v1/tool-calls", "DELETE", "agent", 405),
}


@pytest.mark.parametrize("closes", [False, True], ids=["keeps alive", "closes"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_the_answer_arrives_although_the_client_was_still_sending(
    front: Front, refusal: tuple[str, str, str | None, int], is_chunked: bool, closes: bool
) -> None:
    path, method, who, status = refusal
    raw = head(path, method, who, is_chunked=is_chunked, closes=closes, size=LARGE_BYTES)
    raw += body(LARGE_BYTES, is_chunked=is_chunked)
    for _ in range(5):  # a reset overtakes the answer only sometimes
        said = await asyncio.to_thread(send_all_then_read, front.port, raw)
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), said[:200]
    assert front.runtime.calls == []


async def test_a_body_without_end_is_cut_off_at_the_bound(front: Front) -> None:
    raw = head("/v1/tool-calls", "POST", "agent", is_chunked=True, closes=False, size=0)

    def send_for_ever(piece: bytes) -> int:
        sent = 0
        with socket.create_connection(("127.0.0.1", front.port), timeout=60) as connection:
            connection.sendall(raw)
            try:
                while sent < 8 * DISCARDED_BYTES_MAX:
                    connection.sendall(piece)
                    sent += len(piece)
            except OSError:
                return sent
        return sent

    sent = await asyncio.to_thread(send_for_ever, b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    # What stood in the buffers of both sides comes on top.
    assert DISCARDED_BYTES_MAX // 2 < sent < 2 * DISCARDED_BYTES_MAX + 16 * 1024 * 1024


async def test_after_a_refused_body_the_connection_goes_on(front: Front) -> None:
    raw = head("/v1/tool-calls", "POST", None, is_chunked=False, closes=False, size=LARGE_BYTES) + b"x" * LARGE_BYTES

    def twice(port: int) -> list[bytes]:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(raw)
            first = connection.recv(65536)
            connection.sendall(request("/healthz", method="GET"))
            return [first, connection.recv(65536)]

    first, second = await asyncio.to_thread(twice, front.port)
    assert (first[:12], second[:12]) == (b"HTTP/1.1 401", b"HTTP/1.1 200")
