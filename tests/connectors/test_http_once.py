"""What is sent, that it is sent at most once, and when it is certain that nothing was sent."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import __version__
from app.connectors.http import HttpConnector
from app.core.canonical import canonical_bytes
from app.core.limits import CONNECTIONS_PER_SERVER_MAX
from app.domain.tga.ports import Answered, NotSent, Unknown, Withheld
from tests.connectors.servers import always, dispatched, effect_of, output_of, raw_server, response, tool_call, until
from tests.traces import uuid7

# What is sent.


async def test_the_request_carries_the_ids_and_the_canonical_arguments() -> None:
    async with raw_server(response("200 OK", b"{}")) as raw:
        connector = HttpConnector(raw.url + "/base/")
        await connector.dispatch(tool_call(tool_name="a/b?#%"), timeout_ms=5000)
        await connector.close()
    head, _, body = raw.requests[0].partition(b"\r\n\r\n")
    line, *written = head.decode().split("\r\n")
    assert line == "POST /base/tools/a%2Fb%3F%23%25 HTTP/1.1"
    assert body == canonical_bytes(tool_call().arguments) == b'{"amount":5,"b":1}'
    headers = {name.lower(): value for name, _, value in (text.partition(": ") for text in written)}
    assert len(headers) == len(written)
    trace, call = uuid7(1), uuid7(1, role="tool_call")
    assert headers == {
        "host": raw.url.removeprefix("http://"),
        "idempotency-key": "key-1",
        "tga-tool-call-id": call,
        "tga-trace-id": trace,
        "traceparent": f"00-{trace.replace('-', '')}-{call.replace('-', '')[-16:]}-01",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "user-agent": f"tga/{__version__}",
        "accept-encoding": "identity",
        "accept": "*/*",
    }


async def test_a_server_that_two_tenants_share_is_told_whose_key_it_is() -> None:
    async with raw_server(always(response("200 OK"))) as raw:
        connector = HttpConnector(raw.url)
        for server_id in ("bank", "acme/bank"):
            await connector.dispatch(tool_call(server_id=server_id), timeout_ms=5000)
        await connector.close()
    assert b"\r\nIdempotency-Key: key-1\r\n" in raw.requests[0]
    assert b"\r\nIdempotency-Key: acme/key-1\r\n" in raw.requests[1]


@pytest.mark.parametrize("flags", ["00", "01", "03"])
async def test_the_callers_trace_goes_on_with_the_call_as_parent(flags: str) -> None:
    async with raw_server(response("200 OK")) as raw:
        connector = HttpConnector(raw.url)
        given = f"00-{'ab' * 16}-{'cd' * 8}-{flags}"
        assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000, traceparent=given), Answered)
        await connector.close()
    span = uuid7(1, role="tool_call").replace("-", "")[-16:]
    assert f"\r\ntraceparent: 00-{'ab' * 16}-{span}-{flags}\r\n".encode() in raw.requests[0]
    assert b"cdcdcdcd" not in raw.requests[0]


@pytest.mark.parametrize("given", ["", "x", f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'cd' * 8}-01\r\nX: y"])
async def test_a_traceparent_that_is_none_is_not_passed_on(given: str) -> None:
    async with raw_server(response("200 OK")) as raw:
        connector = HttpConnector(raw.url)
        await connector.dispatch(tool_call(), timeout_ms=5000, traceparent=given)
        await connector.close()
    assert f"\r\ntraceparent: 00-{uuid7(1).replace('-', '')}-".encode() in raw.requests[0]


async def test_arguments_that_were_put_back_are_sent_instead_of_the_recorded_ones() -> None:
    async with raw_server(always(response("200 OK"))) as raw:
        connector = HttpConnector(raw.url)
        await connector.dispatch(
            tool_call(arguments={"card": {"$redacted": {}}}), timeout_ms=5000, arguments={"card": "4"}
        )
        await connector.dispatch(tool_call(), timeout_ms=5000, arguments={})
        await connector.close()
    assert [request.partition(b"\r\n\r\n")[2] for request in raw.requests] == [b'{"card":"4"}', b"{}"]


async def test_arguments_that_cannot_be_written_are_not_sent_and_not_shown() -> None:
    async with raw_server(response("200 OK")) as raw:
        connector = HttpConnector(raw.url)
        result = await connector.dispatch(tool_call(), timeout_ms=5000, arguments={"hunter2": float("nan")})
        await connector.close()
    assert isinstance(result, NotSent)
    assert "hunter2" not in result.detail
    assert raw.requests == []


async def test_a_call_without_a_key_sends_none() -> None:
    async with raw_server(response("200 OK")) as raw:
        connector = HttpConnector(raw.url)
        await connector.dispatch(tool_call(idempotency_key=None, tool_class="read"), timeout_ms=5000)
        await connector.close()
    assert b"idempotency-key" not in raw.requests[0].lower()


async def test_no_proxy_is_taken_from_the_environment_and_no_cookie_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(response("200 OK", b"1", "Set-Cookie: session=abc"))

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        for _ in range(2):
            assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000), Answered)
        await connector.close()
    assert raw.connections == 1  # pooled
    assert b"cookie" not in raw.requests[1].lower()


# Once, and no more.


async def test_a_stale_connection_breaks_the_dispatch_and_is_not_sent_again() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        if count == 1:
            writer.write(response("200 OK", b"1"))
        else:  # the server's idle time ran out just as the second request came
            writer.transport.abort()

    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000), Answered)
        result = await connector.dispatch(tool_call(), timeout_ms=5000)
        await asyncio.sleep(0.05)
        await connector.close()
    assert isinstance(result, Unknown)
    assert result.result == "disconnected"
    assert raw.connections == 1
    assert len(raw.requests) == 2


async def test_a_connection_closed_between_two_calls_costs_no_second_request() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(response("200 OK", b"1"))

    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        results = []
        for _ in range(5):
            before = len(raw.requests)
            results.append(await connector.dispatch(tool_call(), timeout_ms=5000))
            assert len(raw.requests) - before <= 1
            raw.writers[-1].close()  # seen by the client now or only when it writes
            await asyncio.sleep(0)
        await connector.close()
    assert isinstance(results[0], Answered)
    assert all(isinstance(result, Answered | Unknown) for result in results)


async def test_an_answer_nobody_asked_for_is_not_taken_for_the_next_calls_answer() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(response("200 OK", str(count).encode()))

    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        assert output_of(await connector.dispatch(tool_call(), timeout_ms=5000)) == {"encoding": "json", "value": 1}
        raw.writers[0].write(response("200 OK", b'"unasked"'))
        await asyncio.sleep(0.05)
        assert output_of(await connector.dispatch(tool_call(), timeout_ms=5000)) == {"encoding": "json", "value": 2}
        await connector.close()
    assert raw.connections == 2


async def test_a_cancelled_dispatch_is_cancelled() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        await asyncio.sleep(60)

    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        task = asyncio.ensure_future(connector.dispatch(tool_call(), timeout_ms=5000))
        await until(lambda: raw.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await connector.close()


# Certainly not sent.


async def test_a_refused_connection_is_not_sent() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        connector = HttpConnector(f"http://127.0.0.1:{free.getsockname()[1]}")
        result = await connector.dispatch(tool_call(), timeout_ms=5000)
        await connector.close()
    assert isinstance(result, NotSent)
    effect_of(result)


async def test_an_unresolvable_name_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    connector = HttpConnector("http://tools.invalid")
    assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000), NotSent)
    await connector.close()


@pytest.mark.parametrize("speaks", [True, False])
async def test_a_tls_handshake_that_fails_or_never_ends_is_not_sent(speaks: bool) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if speaks:
            writer.write(b"HTTP/1.1 400 plain\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    connector = HttpConnector(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    result = await connector.dispatch(tool_call(), timeout_ms=5000 if speaks else 200)
    assert isinstance(result, NotSent)
    assert ("within 200 ms" in result.detail) is not speaks
    await connector.close()
    server.close()
    await asyncio.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="how a full backlog behaves is the system's choice")
async def test_a_connection_that_is_not_made_in_time_is_not_sent() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(3):  # nobody accepts: the queue is full, and the next one's packets are dropped
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(full.getsockname())
        connector = HttpConnector(f"http://127.0.0.1:{full.getsockname()[1]}")
        result = await connector.dispatch(tool_call(), timeout_ms=200)
        await connector.close()
        for client in waiting:
            client.close()
    assert result == NotSent("no connection within 200 ms")


async def test_a_call_that_finds_no_free_connection_in_time_is_not_sent() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        await asyncio.sleep(60)

    async with raw_server(answer) as raw:
        connector = HttpConnector(raw.url)
        busy = [
            asyncio.ensure_future(connector.dispatch(tool_call(), timeout_ms=3000))
            for _ in range(CONNECTIONS_PER_SERVER_MAX)
        ]
        await until(lambda: len(raw.requests) == CONNECTIONS_PER_SERVER_MAX)
        result = await connector.dispatch(tool_call(), timeout_ms=50)
        await connector.close()
        assert all(isinstance(answer, Unknown) for answer in await asyncio.gather(*busy))
    assert isinstance(result, NotSent)
    assert len(raw.requests) == raw.connections == CONNECTIONS_PER_SERVER_MAX


async def test_a_closed_connector_sends_nothing() -> None:
    async with raw_server(response("200 OK")) as raw:
        connector = HttpConnector(raw.url)
        await connector.close()
        assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000), NotSent)
    assert raw.requests == []


# Whatever the server sends.

_STATUS = st.sampled_from([b"200", b"204", b"302", b"404", b"409", b"500", b"100", b"101", b"000", b"2000", b"xyz"])
_HEADER = st.one_of(
    st.sampled_from(
        [
            b"Content-Length: 3",
            b"Content-Length: -1",
            b"Content-Length: 99999999999999999999",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: gzip, chunked",
            b"Content-Encoding: gzip",
            b"Content-Type: application/json",
            b"Content-Type: \xff\xfe/\x80",
            b"Set-Cookie: \xff=;;;=\x01",
            b"Retry-After: 1",
            b"Connection: upgrade",
            b"Upgrade: websocket",
            b"Connection: close",
            b"Location: ::://",
        ]
    ),
    st.binary(max_size=40),
)
_CHUNKS = st.sampled_from(
    [b"3\r\nabc\r\n0\r\n\r\n", b"3\r\nabc\r\n0\r\nX: y\r\n\r\n", b"-3\r\n", b"ffffffffffffffffff\r\n"]
)
_RESPONSES = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda version, status, reason, headers, body: (
            version + b" " + status + b" " + reason + b"\r\n" + b"".join(h + b"\r\n" for h in headers) + b"\r\n" + body
        ),
        st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2", b"ICY"]),
        _STATUS,
        st.binary(max_size=20),
        st.lists(_HEADER, max_size=5),
        st.one_of(st.binary(max_size=50), _CHUNKS),
    ),
)


def test_whatever_bytes_come_a_dispatch_ends_in_something_that_can_be_stored() -> None:
    with asyncio.Runner() as runner:

        @settings(max_examples=int(os.environ.get("TGA_TEST_EXAMPLES", "400")), deadline=None)
        @given(_RESPONSES)
        def check(sent: bytes) -> None:
            result = runner.run(dispatched(sent, timeout_ms=2000))
            assert isinstance(result, Answered | Unknown)
            if isinstance(result, Answered):
                assert sent.startswith((b"HTTP/1.", b"HTTP/0.9 ", b"HTTP/2 ", b"ICY "))

        check()


# The last word before the first byte.


async def test_the_last_word_is_asked_for_once_when_the_connection_is_there() -> None:
    """Names, connections and places in a line take their time; after the question nothing is waited for."""
    async with raw_server(always(response("200 OK", b"{}"))) as raw:
        connector, seen = HttpConnector(raw.url), []

        async def may_send() -> bool:
            await until(lambda: raw.connections == 1)
            seen.append(len(raw.requests))
            return True

        assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000, may_send=may_send), Answered)
        await connector.close()
    assert seen == [0]
    assert (raw.connections, len(raw.requests)) == (1, 1)


@pytest.mark.parametrize("idle", [True, False])
async def test_a_call_that_may_not_be_sent_leaves_no_byte(idle: bool) -> None:
    async with raw_server(always(response("200 OK", b"{}"))) as raw:
        connector = HttpConnector(raw.url)
        if idle:  # on a connection that is there already
            await connector.dispatch(tool_call(), timeout_ms=5000)
        before = len(raw.requests)

        async def may_send() -> bool:
            return False

        assert await connector.dispatch(tool_call(), timeout_ms=5000, may_send=may_send) == Withheld()
        assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000), Answered)
        await connector.close()
    assert len(raw.requests) == before + 1


async def test_an_answer_that_comes_before_the_last_word_is_no_answer() -> None:
    """The server speaks while the gateway still asks whether it may send: nothing was sent, so nothing was answered."""
    async with raw_server(always(b"")) as raw:
        connector = HttpConnector(raw.url)
        asked = asyncio.Event()

        async def may_send() -> bool:
            await until(lambda: bool(raw.writers))
            raw.writers[0].write(response("200 OK", b"{}"))
            await asked.wait()  # for ever
            return True

        result = await connector.dispatch(tool_call(), timeout_ms=5000, may_send=may_send)
        await connector.close()
    assert isinstance(result, NotSent), result
    assert raw.requests == []
