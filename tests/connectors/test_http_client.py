"""The HTTP client against raw sockets: what servers may send is bounded, and no answer is taken for another's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import ssl
import tracemalloc
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from app.connectors.http_client import HttpPool, Origin
from app.connectors.http_connection import Disconnected, HttpFailure, NotConnected, NotHttp
from app.core.limits import (
    IDLE_CONNECTION_MS,
    RESPONSE_FRAMING_BYTES_MAX,
    RESPONSE_HEADERS_MAX,
    RESPONSE_INFORMATIONAL_MAX,
)
from tests.connectors.servers import always, endless, raw_server, response, until
from tests.patience import HANG_S

_LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
_EXAMPLES = int(os.environ.get("TGA_TEST_EXAMPLES", "150"))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(params=_LOOPS)
def run(request: pytest.FixtureRequest) -> Any:
    """Runs a coroutine function in either loop: the gateway's, and the standard library's."""

    def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            async with asyncio.timeout(60):
                return await work()

        with asyncio.Runner(loop_factory=_LOOPS[request.param]) as runner:
            return runner.run(whole())

    return in_loop


async def read(pool: HttpPool, url: str, *, bytes_max: int = 10**6, **how: Any) -> tuple[int, bytes]:
    """One POST, read to its end."""
    body = b""
    async with pool.request("POST", Origin.of(URL(url)), "/x", body=b"{}", **how) as answer:
        while len(body) < bytes_max and (part := await answer.read_some()):
            body += part
        return answer.status, body


# Without end.

_HEAD = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "unit"),
    [
        (b"", _CONTINUE),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
        (b"", b"HTTP/1.1 199 Odd\r\n\r\n"),
        (_CONTINUE, b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 10_000 + b"\r\n\r\n"),
        (b"HTTP/1.1 200 ", b"x"),
        (_HEAD + b"X: ", b"x"),
        (_HEAD, b"X"),
        (_HEAD, b"X: y\r\n"),
        (_HEAD, b"X:\r\n"),
        (_HEAD + b"X: y", b"\r\n y"),
        (b"", b"\r\n"),
        (b"", b"\x00"),
    ],
    ids=[
        "100",
        "102",
        "103",
        "199",
        "long-103",
        "reason",
        "value",
        "name",
        "headers",
        "empty",
        "folded",
        "lines",
        "nul",
    ],
)
def test_nothing_before_the_body_is_read_without_end(run: Any, first: bytes, unit: bytes) -> None:
    async def work() -> None:
        sent: list[int] = []
        async with raw_server(endless(first, unit, sent)) as raw:
            pool = HttpPool()
            with pytest.raises(NotHttp) as told:
                await read(pool, raw.url)
            assert str(told.value).isascii()
            assert len(str(told.value)) < 200
            await pool.close()
        assert sum(sent) < 16_000_000  # what the system's buffers take

    run(work)


@pytest.mark.parametrize(
    ("first", "unit"),
    [
        (_CHUNKED + b"1;", b"x"),
        (_CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n"),
        (_CHUNKED + b"0\r\nX: ", b"x"),
        (_CHUNKED, b"1;" + b"x" * 2_000 + b"\r\nx\r\n"),
        (_CHUNKED, b"0" * 1_000),
    ],
    ids=["extension", "trailers", "trailer", "extensions", "zeros"],
)
def test_nothing_around_the_body_is_read_without_end(run: Any, first: bytes, unit: bytes) -> None:
    async def work() -> None:
        sent: list[int] = []
        async with raw_server(endless(first, unit, sent)) as raw:
            pool = HttpPool()
            with pytest.raises(NotHttp):
                await read(pool, raw.url)
            await pool.close()
        assert sum(sent) < 16_000_000

    run(work)


def test_chunks_of_one_byte_are_framing_enough_and_read_to_the_end(run: Any) -> None:
    async def work() -> None:
        count = RESPONSE_FRAMING_BYTES_MAX
        async with raw_server(always(_CHUNKED + b"1\r\nx\r\n" * count + b"0\r\nX: y\r\n\r\n")) as raw:
            pool = HttpPool()
            for _ in range(2):
                assert await read(pool, raw.url) == (200, b"x" * count)
            await pool.close()
        assert raw.connections == 1

    run(work)


def test_up_to_the_bounds_everything_is_read(run: Any) -> None:
    async def work() -> None:
        hints = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * RESPONSE_INFORMATIONAL_MAX
        headers = [f"X-{n}: y" for n in range(RESPONSE_HEADERS_MAX - RESPONSE_INFORMATIONAL_MAX - 1)]
        async with raw_server(always(hints + response("200 OK", b"1", *headers))) as raw:
            pool = HttpPool()
            for _ in range(3):
                async with pool.request("POST", Origin.of(URL(raw.url)), "/", body=b"") as answer:
                    assert answer.headers["x-7"] == "y"
                    assert "link" not in answer.headers
                    assert await answer.read_some() == b"1"
                    assert await answer.read_some() == b""
            await pool.close()
        assert raw.connections == 1

    run(work)


@pytest.mark.parametrize(
    ("first", "unit"),
    [(b"", _CONTINUE), (_HEAD + b"Content-Length: 100000000\r\n\r\n", b"x" * 1_000), (_CHUNKED, b"1\r\nx\r\n")],
    ids=["100", "body", "chunks"],
)
def test_memory_is_flat_however_much_is_sent_and_nothing_is_fetched_that_nobody_reads(
    run: Any, first: bytes, unit: bytes
) -> None:
    async def work() -> None:
        sent: list[int] = []
        async with raw_server(endless(first, unit, sent)) as raw:
            pool = HttpPool()
            tracemalloc.start()
            try:
                try:
                    async with pool.request("POST", Origin.of(URL(raw.url)), "/", body=b"") as answer:
                        await answer.read_some()
                        still = -1
                        while still != sum(sent):  # until the server is held back
                            still = sum(sent)
                            await asyncio.sleep(0.2)
                except NotHttp:
                    pass
                assert tracemalloc.get_traced_memory()[1] < 4_000_000
            finally:
                tracemalloc.stop()
            await pool.close()
        assert sum(sent) < 32_000_000

    run(work)


# Which answer belongs to which request.


@pytest.mark.parametrize(
    "sent",
    [
        response("200 OK", b"1") + response("200 OK", b"2"),
        response("200 OK", b"1") + b"x",
        response("200 OK", b"1") + _CONTINUE,
        response("200 OK", b"1", "Connection: close"),
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n1",
        _HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n\r\nHTTP/1.1",
        response("204 No Content").replace(b"Content-Length: 0\r\n", b"") + b"left over",
    ],
)
def test_after_such_an_answer_the_connection_is_not_used_again(run: Any, sent: bytes) -> None:
    async def work() -> None:
        async with raw_server(always(sent)) as raw:
            pool = HttpPool()
            for _ in range(3):
                status, body = await read(pool, raw.url)
                assert (status, body) in ((200, b"1"), (204, b""))
            await pool.close()
        assert raw.connections == 3

    run(work)


def test_an_answer_that_is_not_read_is_dropped_and_with_it_its_connection_unless_it_is_there_whole(run: Any) -> None:
    async def work() -> None:
        for size, connections in ((10, 1), (10**7, 3)):
            async with raw_server(always(response("200 OK", b"x" * size))) as raw:
                pool = HttpPool()
                for _ in range(3):
                    async with pool.request("POST", Origin.of(URL(raw.url)), "/", body=b"") as answer:
                        assert answer.status == 200
                await pool.close()
            assert raw.connections == connections

    run(work)


def test_bytes_that_come_unasked_spoil_an_idle_connection_even_if_the_loop_has_not_seen_them(run: Any) -> None:
    async def work() -> None:
        async with raw_server(always(response("200 OK", b"1"))) as raw:
            pool = HttpPool()
            for number in range(1, 4):
                assert await read(pool, raw.url) == (200, b"1")
                assert raw.connections == number
                raw.writers[-1].write(response("200 OK", b"unasked"))
                # No pause: that the bytes are there is told by the system, not by the loop.
            await pool.close()

    run(work)


def test_a_connection_that_the_server_closed_is_not_written_to(run: Any) -> None:
    async def work() -> None:
        async with raw_server(always(response("200 OK", b"1"))) as raw:
            pool = HttpPool()
            for number in range(1, 4):
                assert await read(pool, raw.url) == (200, b"1")
                assert len(raw.requests) == raw.connections == number
                raw.writers[-1].close()
                await raw.writers[-1].wait_closed()
            await pool.close()

    run(work)


@pytest.mark.parametrize("leaves", [False, True])
def test_what_comes_while_it_is_asked_whether_to_send_is_no_answer_and_nothing_is_sent(run: Any, leaves: bool) -> None:
    async def work() -> None:
        async with raw_server(always(response("200 OK", b"1"))) as raw:
            pool = HttpPool()
            assert await read(pool, raw.url) == (200, b"1")

            async def may_send() -> bool:
                raw.writers[-1].write(response("200 OK", b"unasked"))
                if leaves:
                    raw.writers[-1].close()
                return True

            sending = Sending()
            with pytest.raises(NotConnected):
                await read(pool, raw.url, sending=sending, may_send=may_send)
            assert not sending.may_be_sent
            assert len(raw.requests) == 1
            await pool.close()

    run(work)


class Sending:
    may_be_sent = False


def test_a_request_is_told_to_be_sent_before_its_first_byte_and_never_otherwise(run: Any) -> None:
    async def work() -> None:
        async with raw_server(b"") as raw:
            pool = HttpPool()
            sending = Sending()
            with pytest.raises(Disconnected):
                await read(pool, raw.url, sending=sending)
            assert sending.may_be_sent
            assert len(raw.requests) == 1
            for name, value in (("X", "a\r\nY: b"), ("X", "a\x00"), ("X Y", "a"), ("X:", "a"), ("", "a")):
                sending = Sending()
                with pytest.raises(ValueError, match="cannot be written"):
                    await read(pool, raw.url, sending=sending, headers={name: value})
                assert not sending.may_be_sent
        sending = Sending()
        with pytest.raises(NotConnected):
            await read(pool, raw.url, sending=sending)
        assert not sending.may_be_sent
        await pool.close()
        with pytest.raises(NotConnected):
            await read(pool, raw.url, sending=sending)
        assert not sending.may_be_sent

    run(work)


# Connections.


def test_so_many_connections_and_no_more_and_waiting_is_first_come_first_served(run: Any) -> None:
    async def work() -> None:
        release = asyncio.Event()

        async def answer(writer: asyncio.StreamWriter, count: int) -> None:
            await release.wait()
            writer.write(response("200 OK", b"1"))

        async with raw_server(answer) as raw:
            pool = HttpPool(connections_per_server=3)
            order: list[int] = []

            async def ask(number: int) -> None:
                await read(pool, raw.url)
                order.append(number)

            asking = [asyncio.create_task(ask(number)) for number in range(9)]
            await until(lambda: len(raw.requests) == 3)
            asking[4].cancel()
            await asyncio.sleep(0.05)
            assert len(raw.requests) == 3
            release.set()
            await asyncio.gather(*asking, return_exceptions=True)
            assert sorted(order) == [0, 1, 2, 3, 5, 6, 7, 8]
            assert raw.connections == 3
            await pool.close()

    run(work)


def test_idle_connections_are_closed_after_a_while(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.connectors.http_client.IDLE_CONNECTION_MS", 50)
    assert IDLE_CONNECTION_MS > 50

    async def work() -> None:
        async with raw_server(always(response("200 OK", b"1"))) as raw:
            pool = HttpPool()
            await asyncio.gather(*(read(pool, raw.url) for _ in range(3)))
            await until(lambda: all(writer.is_closing() for writer in raw.writers))
            assert await read(pool, raw.url) == (200, b"1")
            await pool.close()

    run(work)


def test_every_address_of_a_name_is_tried(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with raw_server(always(response("200 OK", b"1"))) as raw:
            port = int(URL(raw.url).port or 0)
            addresses = [(2, 1, 6, "", ("127.0.0.2", port)), (2, 1, 6, "", ("127.0.0.1", port))]

            async def getaddrinfo(*_: Any, **__: Any) -> Any:
                return addresses

            loop = asyncio.get_running_loop()
            if not isinstance(loop, uvloop.Loop):
                monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
                pool = HttpPool()
                assert await read(pool, f"http://tools.example:{port}") == (200, b"1")
                assert b"Host: tools.example:%d\r\n" % port in raw.requests[0]
                await pool.close()

    run(work)


def _certificate(folder: Path, name: str) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    alternatives = x509.SubjectAlternativeName([x509.IPAddress(ip_address(name))])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    builder = builder.add_extension(alternatives, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    made = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@pytest.mark.parametrize(("name", "is_trusted"), [("127.0.0.1", True), ("127.0.0.2", True), ("127.0.0.1", False)])
def test_tls_is_verified_and_its_connections_are_kept(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_trusted: bool
) -> None:
    context = _certificate(tmp_path, name)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem" if is_trusted else "/dev/null"))
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)
                writer.write(response("200 OK", b"x" * 300_000))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    async def work() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        pool = HttpPool()
        sending = Sending()
        if is_trusted and name == "127.0.0.1":
            for _ in range(3):
                assert await read(pool, url) == (200, b"x" * 300_000)
            assert connections == 1
        else:
            with pytest.raises(NotConnected, match="TLS"):
                await read(pool, url, sending=sending)
            assert not sending.may_be_sent
        await pool.close()
        server.close()

    run(work)


# Whatever is sent, in whatever pieces.

_BODIES = st.binary(max_size=60)


def _chunked(body: bytes, cuts: list[int], extension: bytes) -> bytes:
    edges = sorted({0, len(body), *(min(cut, len(body)) for cut in cuts)})
    parts = [body[a:b] for a, b in itertools.pairwise(edges) if b > a]
    written = b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts)
    return b"Transfer-Encoding: chunked\r\n\r\n" + written + b"0\r\nTrailer: x\r\n\r\n"


_FRAMED = st.one_of(
    st.builds(lambda body: (body, b"Content-Length: %d\r\n\r\n%s" % (len(body), body)), _BODIES),
    st.builds(
        lambda body, cuts, extension: (body, _chunked(body, cuts, extension)),
        _BODIES,
        st.lists(st.integers(0, 60), max_size=4),
        st.sampled_from([b"", b";a=b", b';a="\xff"']),
    ),
)
_ANSWERS = st.builds(
    lambda hints, status, framed: (status, framed[0], _CONTINUE * hints + b"HTTP/1.1 %d X\r\n" % status + framed[1]),
    st.integers(0, 3),
    st.sampled_from([200, 201, 404, 503]),
    _FRAMED,
)


@pytest.mark.parametrize("loop", _LOOPS)
def test_answers_are_read_the_same_in_whatever_pieces_they_come(loop: str) -> None:
    with asyncio.Runner(loop_factory=_LOOPS[loop]) as runner:

        async def exchange(answers: list[tuple[int, bytes, bytes]], cuts: list[int]) -> list[tuple[int, bytes]]:
            async def answer(writer: asyncio.StreamWriter, count: int) -> None:
                sent = answers[count - 1][2]
                edges = sorted({0, len(sent), *(min(cut, len(sent)) for cut in cuts)})
                for start, end in itertools.pairwise(edges):
                    writer.write(sent[start:end])
                    await writer.drain()
                    await asyncio.sleep(0)

            async with raw_server(answer) as raw, asyncio.timeout(HANG_S):
                pool = HttpPool()
                heard = [await read(pool, raw.url) for _ in answers]
                await pool.close()
            assert raw.connections == 1
            return heard

        @settings(max_examples=_EXAMPLES, deadline=None)
        @given(st.lists(_ANSWERS, min_size=1, max_size=4), st.lists(st.integers(0, 250), max_size=6))
        def check(answers: list[tuple[int, bytes, bytes]], cuts: list[int]) -> None:
            heard = runner.run(exchange(answers, cuts))
            assert heard == [(status, body) for status, body, _ in answers]

        check()


_RAW = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [
                _CONTINUE,
                b"HTTP/1.1 ",
                b"200 OK\r\n",
                b"Content-Length: 5\r\n",
                b"Content-Length: 5, 5\r\n",
                b"Transfer-Encoding: chunked\r\n",
                b"Transfer-Encoding: chunked, identity\r\n",
                b"Transfer-Encoding: x\r\n",
                b"\r\n",
                b"\r\n\r\n",
                b"5\r\nhello\r\n",
                b"0\r\n\r\n",
                b"RTSP/1.0 200 OK\r\n",
                b"ICE/1.0 200 OK\r\n",
                b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
                b"HTTP/9.9 200 OK\r\n",
                b"HTTP/1.1 099 X\r\n\r\n",
            ]
        ),
    ),
    max_size=10,
).map(b"".join)


@pytest.mark.parametrize("loop", _LOOPS)
def test_whatever_bytes_come_a_request_ends_and_was_sent_once(loop: str) -> None:
    with asyncio.Runner(loop_factory=_LOOPS[loop]) as runner:

        async def exchange(sent: bytes) -> None:
            async with raw_server(sent) as raw, asyncio.timeout(HANG_S):
                pool = HttpPool()
                with contextlib.suppress(HttpFailure):
                    status, _ = await read(pool, raw.url)
                    assert 200 <= status <= 999
                    assert sent.startswith(b"HTTP/")
                await pool.close()
            assert len(raw.requests) == 1

        @settings(max_examples=_EXAMPLES, deadline=None)
        @given(_RAW)
        def check(sent: bytes) -> None:
            runner.run(exchange(sent))

        check()
