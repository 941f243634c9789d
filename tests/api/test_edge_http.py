"""HTTP itself: whatever bytes come in, an answer with a code goes out, in its turn, and bounded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from app.core.limits import HEADER_BYTES_MAX, PIPELINED_REQUESTS_MAX
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from app.edge.protocol import BoundedProtocol
from tests.api.wire import CALL, Front, Wire, completed, open_front, request
from tests.patience import HANG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


IDLE_S: Final = 0.2


class Hasty(BoundedProtocol):
    headers_wait_ms = 300
    body_wait_ms = 600


class Impatient(BoundedProtocol):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive = IDLE_S  # type: ignore[assignment]  # of any length


class Layered(BoundedProtocol):
    """With a layer around the application that adds a header to every answer."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        app: Any = self.app

        async def layered(scope: Scope, receive: Receive, send: Send) -> None:
            async def adding(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-layer", b"1")]
                await send(message)

            await app(scope, receive, adding)

        self.app = layered


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty_front() -> AsyncIterator[Front]:
    async with open_front(protocol=Hasty) as opened:
        yield opened


@pytest.fixture
def front(lasting_front: Front) -> Front:
    lasting_front.runtime.calls.clear()
    lasting_front.runtime.answering = None
    return lasting_front


GARBAGE = {
    "words": b"hello there\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.7": b"GET / HTTP/3.7\r\n\r\n",
    "zeros": bytes(100),
    "no version": b"GET /healthz\r\n\r\n",
    "bad header": b"GET /healthz HTTP/1.1\r\nHo st: x\r\n\r\n",
    "folded header": b"GET /healthz HTTP/1.1\r\nHost: x\r\n y\r\n\r\n",
    "two lengths": b"POST /v1/tool-calls HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": (
        b"POST /v1/tool-calls HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "negative length": b"POST /v1/tool-calls HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "length no number": b"POST /v1/tool-calls HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n",
    "length of many digits": b"POST /v1/tool-calls HTTP/1.1\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n",
    "path not ASCII": "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "no path": b"GET http://gateway HTTP/1.1\r\nHost: x\r\n\r\n",
    "tunnel": b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad chunk": (
        b"POST /v1/tool-calls HTTP/1.1\r\nAuthorization: Bearer agent\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    ),
}


@pytest.mark.parametrize("raw", GARBAGE.values(), ids=GARBAGE)
async def test_what_is_not_http_is_answered_with_a_problem_and_hung_up_on(front: Front, raw: bytes) -> None:
    async with await front.open() as wire:
        reply = await wire.ask(raw)
        assert reply.status == 400
        assert reply.code == "INPUT_MALFORMED"
        assert reply.headers["connection"] == "close"
        assert await wire.is_closed()
    assert front.runtime.calls == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(min_size=1, max_size=300))
async def test_whatever_bytes_come_in_nothing_but_http_comes_out(hasty_front: Front, raw: bytes) -> None:
    async with await hasty_front.open() as wire:
        await wire.send(raw + b"\r\n\r\n")
        with suppress(asyncio.IncompleteReadError):  # empty lines alone are no request
            assert (await wire.reply()).status < 500
    assert (await hasty_front.ask(request("/healthz", method="GET"))).status == 200


async def test_headers_as_large_as_allowed_are_taken_and_larger_ones_are_not(front: Front) -> None:
    async with await front.open() as wire:
        reply = await wire.ask(request(body=CALL, headers={"X-Fill": "x" * (HEADER_BYTES_MAX - 300)}))
        assert reply.status == 200
        reply = await wire.ask(request(body=CALL, headers={"X-Fill": "x" * HEADER_BYTES_MAX}))
        assert (reply.status, reply.code) == (431, "HEADERS_TOO_LARGE")
        assert await wire.is_closed()
    many = {f"X-{number}": "y" for number in range(HEADER_BYTES_MAX // 8)}
    assert (await front.ask(request(body=CALL, headers=many))).code == "HEADERS_TOO_LARGE"
    assert (await front.ask(request("/" + "x" * HEADER_BYTES_MAX, method="GET"))).code == "HEADERS_TOO_LARGE"


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"], ids=["line", "value", "many"]
)
async def test_endless_headers_are_cut_off(front: Front, start: bytes) -> None:
    piece = b"x: y\r\n" * 700 if start.endswith(b"\r\n") else b"x" * 4_096
    async with await front.open() as wire:
        await wire.send(start)
        for _ in range(HEADER_BYTES_MAX // 4_096 + 3):
            await wire.send(piece)
            await asyncio.sleep(0.005)
        assert (await wire.reply()).code == "HEADERS_TOO_LARGE"
        assert await wire.is_closed()


@pytest.mark.parametrize("tail", [b"0\r\nX: ", b"1;"], ids=["trailer", "chunk extension"])
async def test_endless_trailers_are_cut_off(front: Front, tail: bytes) -> None:
    start = (
        b"POST /v1/tool-calls HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer agent\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    async with await front.open() as wire:
        await wire.send(start + tail)
        for _ in range(HEADER_BYTES_MAX // 4_096 + 3):
            await wire.send(b"x" * 4_096)
            await asyncio.sleep(0.005)
        assert (await wire.reply()).code == "HEADERS_TOO_LARGE"
        assert await wire.is_closed()


async def test_slow_headers_get_a_timeout_and_silence_gets_none(hasty_front: Front) -> None:
    async with await hasty_front.open() as slow, await hasty_front.open() as silent:
        await slow.send(b"GET /healthz HTTP/1.1\r\nHost")
        for _ in range(3):
            await asyncio.sleep(0.05)
            await slow.send(b"x")
        reply = await slow.reply()
        assert (reply.status, reply.code) == (408, "REQUEST_TIMEOUT")
        assert await slow.is_closed()
        assert await silent.is_closed()


async def test_empty_lines_do_not_keep_a_connection(hasty_front: Front) -> None:
    async with await hasty_front.open() as wire:
        assert (await wire.ask(request("/healthz", method="GET"))).status == 200
        await wire.send(b"\r\n")
        assert await wire.is_closed()


async def test_a_slow_body_gets_a_timeout(hasty_front: Front) -> None:
    raw = request(body=CALL)
    async with await hasty_front.open() as wire:
        await wire.send(raw[:-5])
        reply = await wire.reply()
        assert (reply.status, reply.code) == (408, "REQUEST_TIMEOUT")
        assert await wire.is_closed()
    async with await hasty_front.open() as wire:
        await wire.send(raw[:-5])
        await asyncio.sleep(0.3)  # longer than headers may take, but it is a body
        await wire.send(raw[-5:])
        assert (await wire.reply()).status == 200


async def test_a_slow_body_of_a_request_that_is_answered_does_not_keep_the_connection(hasty_front: Front) -> None:
    async with await hasty_front.open() as wire:
        await wire.send(request(body=CALL, who="nobody")[:-5])
        assert (await wire.reply()).code == "UNAUTHENTICATED"
        assert await wire.is_closed()


async def test_a_long_call_is_no_slow_request(hasty_front: Front) -> None:
    async def slowly(call: CheckedCall) -> Answer:
        await asyncio.sleep(0.8)
        return completed(call)

    hasty_front.runtime.answering = slowly
    assert (await hasty_front.ask(request(body=CALL))).status == 200
    hasty_front.runtime.answering = None


async def test_an_idle_connection_is_hung_up_on_and_one_with_a_request_under_way_is_not() -> None:
    async def slowly(call: CheckedCall) -> Answer:
        await asyncio.sleep(4 * IDLE_S)  # so the timer of the wait before it ends meanwhile
        return completed(call)

    async with open_front(protocol=Impatient) as front, await front.open() as wire:
        assert (await wire.ask(request(body=CALL))).status == 200
        front.runtime.answering = slowly
        assert (await wire.ask(request(body=CALL))).status == 200
        answered_s = asyncio.get_running_loop().time()
        assert await wire.is_closed()
        assert asyncio.get_running_loop().time() - answered_s > IDLE_S / 2


async def test_a_request_may_come_byte_by_byte(front: Front) -> None:
    async with await front.open() as wire:
        for byte in request(body=CALL):
            await wire.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await wire.reply()).status == 200


async def test_pipelined_requests_are_answered_in_their_order(front: Front) -> None:
    async def slower_first(call: CheckedCall) -> Answer:
        await asyncio.sleep(0.1 if call.tool_name == "t0" else 0)
        return completed(call)

    front.runtime.answering = slower_first
    traces = [f"0197c2a4-5f0e-7c3a-9d54-00000000000{number}" for number in range(5)]
    calls = [{**CALL, "tool_name": f"t{number}", "trace_id": trace} for number, trace in enumerate(traces)]
    async with await front.open() as wire:
        await wire.send(b"".join(request(body=call) for call in calls))
        assert [(await wire.reply()).document["trace_id"] for _ in calls] == traces


async def test_garbage_behind_a_request_is_answered_after_it(front: Front) -> None:
    async def slowly(call: CheckedCall) -> Answer:
        await asyncio.sleep(0.1)
        return completed(call)

    front.runtime.answering = slowly
    async with await front.open() as wire:
        await wire.send(request(body=CALL) + request(body=CALL) + b"garbage\r\n\r\n")
        assert [(await wire.reply()).status for _ in range(3)] == [200, 200, 400]
        assert await wire.is_closed()


async def test_a_broken_body_behind_a_request_is_answered_after_it(front: Front) -> None:
    async def slowly(call: CheckedCall) -> Answer:
        await asyncio.sleep(0.1)
        return completed(call)

    front.runtime.answering = slowly
    broken = b"POST /v1/tool-calls HTTP/1.1\r\nAuthorization: Bearer agent\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    async with await front.open() as wire:
        await wire.send(request(body=CALL) + broken)
        assert [(await wire.reply()).status for _ in range(2)] == [200, 400]
        assert await wire.is_closed()
    assert len(front.runtime.calls) == 1


async def test_too_many_requests_ahead_of_their_answers_are_refused(front: Front) -> None:
    async def slowly(call: CheckedCall) -> Answer:
        await asyncio.sleep(0.2)
        return completed(call)

    front.runtime.answering = slowly
    ahead = request("/healthz", method="GET")
    async with await front.open() as wire:
        await wire.send(request(body=CALL) + ahead * (PIPELINED_REQUESTS_MAX + 10))
        statuses = [(await wire.reply()).status for _ in range(PIPELINED_REQUESTS_MAX + 1)]
        assert statuses == [200] * (PIPELINED_REQUESTS_MAX + 1)
        assert (await wire.reply()).code == "TOO_MANY_IN_FLIGHT"
        assert await wire.is_closed()


async def test_a_connection_survives_every_error_of_a_whole_request(front: Front) -> None:
    async with await front.open() as wire:
        for raw, status in (
            (request(body=b"{"), 400),
            (request(body=CALL, who="nobody"), 401),
            (request(body=CALL, who="operator"), 403),
            (request("/nowhere", CALL), 404),
            (request(body=CALL, method="PUT"), 405),
            (request(body=b"[" * 100_000), 413),
            (request(body={}), 422),
            (request(body=CALL), 200),
        ):
            assert (await wire.ask(raw)).status == status


async def test_http_1_0_is_answered_and_closed(front: Front) -> None:
    async with await front.open() as wire:
        reply = await wire.ask(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert reply.status == 200
        assert await wire.is_closed()


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_an_upgrade_is_ignored_and_its_body_is_not(front: Front, protocol: str) -> None:
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAMAAABk"}
    async with await front.open() as wire:
        assert (await wire.ask(request(body=CALL, headers=upgrade))).status == 200
        assert (await wire.ask(request(body=CALL))).status == 200
        await wire.send(request(body=CALL, headers=upgrade)[:-5])
        await asyncio.sleep(0.02)
        await wire.send(request(body=CALL)[-5:])
        assert (await wire.reply()).status == 200
    assert len(front.runtime.calls) == 3


async def test_expect_100_is_honoured(front: Front) -> None:
    raw = request(body=CALL, headers={"Expect": "100-continue"})
    head, _, body = raw.partition(b"\r\n\r\n")
    async with await front.open() as wire:
        await wire.send(head + b"\r\n\r\n")
        assert (await wire.reply()).status == 100
        await wire.send(body)
        assert (await wire.reply()).status == 200


async def test_expect_100_with_a_body_that_is_there_is_answered_in_order(front: Front) -> None:
    """`100 Continue` waits for the loop to turn, so the answer must not overtake it: it would be read as the beginning
    of the next answer."""
    async with await front.open() as wire:
        for _ in range(2):
            await wire.send(request(body=CALL, headers={"Expect": "100-continue"}))
            assert [(await wire.reply()).status, (await wire.reply()).status] == [100, 200]
        await wire.send(request(body=CALL, headers={"Expect": "100-continue", "Connection": "close"}))
        assert [(await wire.reply()).status, (await wire.reply()).status] == [100, 200]
        assert await wire.is_closed()


async def test_an_answer_that_is_all_there_passes_through_every_layer() -> None:
    async with open_front(protocol=Layered) as front, await front.open() as wire:
        for raw in (request(body=CALL), request("/errors", method="GET")):
            reply = await wire.ask(raw)
            assert (reply.status, reply.headers.get("x-layer")) == (200, "1")


async def test_head_is_get_without_its_body(front: Front) -> None:
    async with await front.open() as wire:
        await wire.send(request("/errors", method="HEAD"))
        head = await wire.reply(is_head=True)
        got = await wire.ask(request("/errors", method="GET"))
        assert head.status == got.status == 200
        assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.body))


async def test_unknown_paths_and_methods_are_problems(front: Front) -> None:
    for path in ("/", "/v1", "/v1/", "/v1/tool-calls/", "/v1/tool-calls%2f", "/../etc/passwd", "/%00", "/%ff", "//"):
        reply = await front.ask(request(path, method="GET"))
        assert (reply.status, reply.code) == (404, "ROUTE_NOT_FOUND"), path
    assert (await front.ask(request("*", method="OPTIONS"))).code == "ROUTE_NOT_FOUND"
    for method in ("GET", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"):
        reply = await front.ask(request(method=method))
        assert (reply.status, reply.code) == (405, "METHOD_NOT_ALLOWED"), method
        assert reply.headers["allow"] == "OPTIONS, POST"
    reply = await front.ask(request(method="OPTIONS"))
    assert (reply.status, reply.headers["allow"]) == (204, "OPTIONS, POST")
    assert "access-control-allow-origin" not in reply.headers
    assert (await front.ask(request("/healthz", method="POST"))).headers["allow"] == "GET, HEAD, OPTIONS"


async def test_a_defect_is_a_500_with_an_incident_and_nothing_else(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(call: CheckedCall) -> Answer:
        raise ZeroDivisionError("a secret detail")

    front.runtime.answering = broken
    with caplog.at_level(logging.ERROR, logger="tga"):
        async with await front.open() as wire:
            reply = await wire.ask(request(body=CALL))
            front.runtime.answering = None
            assert (await wire.ask(request(body=CALL))).status == 200
    assert (reply.status, reply.code) == (500, "INTERNAL")
    assert b"secret" not in reply.body
    assert reply.document["incident"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_nothing_says_what_the_server_is_made_of(front: Front) -> None:
    for raw in (request(body=CALL), request("/nowhere"), b"garbage\r\n\r\n"):
        assert "server" not in (await front.ask(raw)).headers


async def test_a_client_that_goes_away_in_the_middle_of_a_body_harms_nobody(front: Front) -> None:
    async with await front.open() as wire:
        await wire.send(request(body=CALL)[:-3])
    await asyncio.sleep(0.05)
    assert front.runtime.calls == []
    assert front.services.admission.in_flight == 0


async def test_a_call_whose_caller_hangs_up_goes_on(front: Front) -> None:
    ended = asyncio.Event()

    async def slowly(call: CheckedCall) -> Answer:
        await asyncio.sleep(0.1)
        ended.set()
        return completed(call)

    front.runtime.answering = slowly
    wire = await Wire.open(front.port)
    async with wire:
        await wire.send(request(body=CALL))
        await asyncio.sleep(0.05)
    async with asyncio.timeout(HANG_S):
        await ended.wait()
