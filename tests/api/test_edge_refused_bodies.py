"""A request that is refused before its body has arrived: the refusal reaches the client, whatever it still sends.

The client sends everything before it reads anything, as most HTTP libraries do.
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import suppress
from typing import ClassVar

import pytest

from app.config import LimitsConfig
from app.core.limits import DISCARDED_BYTES_MAX
from app.edge.protocol import BoundedProtocol
from tests.api.wire import CALL, Front, open_front, request
from tests.connectors.servers import until

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


@pytest.mark.parametrize("how", ["keeps alive", "closes", "is no request"])
async def test_a_body_without_end_is_cut_off_at_the_bound(front: Front, how: str) -> None:
    raw = head("/v1/tool-calls", "POST", "agent", is_chunked=True, closes=how == "closes", size=0)
    if how == "is no request":
        raw = raw.replace(b"Host: gateway", b"Host: a\r\nHost: b")

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


# Other refusals, and clients that take their time.


HASTY = LimitsConfig(requests_per_second=1, burst=1)
FULL = LimitsConfig(requests_per_second=1_000_000, burst=1_000_000, in_flight=1)
BROKEN: dict[str, tuple[bytes, bytes, int]] = {
    "two hosts": (b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 6291456\r\n\r\n", b"", 400),
    "no host": (b"POST / HTTP/1.1\r\nContent-Length: 6291456\r\n\r\n", b"", 400),
    "another coding": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", b"", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nContent-Length: 8\r\n\r\n", b"", 400),
    "length and coding": (
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"",
        400,
    ),
    "no chunk": (
        b"POST /v1/tool-calls HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer agent\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"zz\r\n",
        400,
    ),
    "not HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"", 400),
    "a tunnel": (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", b"", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", 400),
    "headers": (b"POST / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000, b"", 431),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_the_answer_to_what_is_no_request_arrives_too(front: Front, what: str) -> None:
    begin, then, status = BROKEN[what]
    raw = begin + then + b"x" * LARGE_BYTES
    for _ in range(3):
        said = await asyncio.to_thread(send_all_then_read, front.port, raw)
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), said[:200]


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
async def test_the_answer_to_who_is_too_fast_or_too_many_arrives_too(is_chunked: bool) -> None:
    raw = head("/v1/tool-calls", "POST", "agent", is_chunked=is_chunked, closes=True, size=LARGE_BYTES)
    raw += body(LARGE_BYTES, is_chunked=is_chunked)
    async with open_front(limits=HASTY) as hasty:
        assert (await hasty.ask(request(body=CALL))).status == 200
        said = await asyncio.to_thread(send_all_then_read, hasty.port, raw)
        assert said.startswith(b"HTTP/1.1 429 "), said[:200]
    async with open_front(limits=FULL) as full:
        full.services.admission.begin()
        said = await asyncio.to_thread(send_all_then_read, full.port, raw)
        assert said.startswith(b"HTTP/1.1 503 "), said[:200]
        full.services.admission.end()


class Counted(BoundedProtocol):
    """Knows how many connections there are."""

    present: ClassVar[set[BoundedProtocol]]

    def __init_subclass__(cls) -> None:
        cls.present = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.present.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.present.discard(self)
        super().connection_lost(exc)


class Hurried(Counted):
    linger_ms = 1_500
    linger_ms_max = 6_000


@pytest.mark.parametrize("closes", [False, True], ids=["keeps alive", "closes"])
@pytest.mark.parametrize("path", ["/v1/tool-calls", "broken"])
async def test_a_slow_client_is_listened_to_as_long_as_it_sends(path: str, closes: bool) -> None:
    """In all it sends for longer than it may be silent."""
    async with open_front(protocol=Hurried) as front, await front.open() as wire:
        if path == "broken":
            await wire.send(BROKEN["two hosts"][0])
        else:
            await wire.send(head(path, "POST", None, is_chunked=False, closes=closes, size=LARGE_BYTES))
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * Hurried.linger_ms / 1000:
            await wire.send(b"x" * 1_024)
            await asyncio.sleep(0.02)
        assert (await wire.reply()).status == (400 if path == "broken" else 401)


@pytest.mark.parametrize("pause_s", [0.02, 60], ids=["sends on for ever", "falls silent"])
async def test_nobody_is_listened_to_for_ever(pause_s: float) -> None:
    async with open_front(protocol=Hurried) as front, await front.open() as wire:
        await wire.send(head("/v1/tool-calls", "POST", None, is_chunked=False, closes=True, size=LARGE_BYTES))
        assert (await wire.reply()).status == 401

        async def send_on() -> None:
            with suppress(OSError):
                while True:
                    await wire.send(b"x" * 16)
                    await asyncio.sleep(pause_s)

        sending = asyncio.create_task(send_on())
        try:
            await until(lambda: not Hurried.present)
        finally:
            sending.cancel()


async def test_those_who_are_listened_to_take_no_more_places_than_others() -> None:
    class Narrow(Counted):
        connections_max = 16

    raw = head("/v1/tool-calls", "POST", None, is_chunked=False, closes=True, size=LARGE_BYTES)
    async with open_front(protocol=Narrow) as narrow:
        wires = [await narrow.open() for _ in range(40)]
        for wire in wires:
            with suppress(OSError):
                await wire.send(raw + b"x" * 1_000)
        await until(lambda: len(Narrow.present) <= 16 + 1)
        assert (await wires[0].reply()).status == 401
        for wire in wires:
            wire.writer.close()
        await until(lambda: not Narrow.present)
        assert (await narrow.ask(request("/healthz", method="GET"))).status == 200
