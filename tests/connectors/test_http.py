"""How answers are read: every row of "Answers of a tool server" (ARCHITECTURE.md, section 4), against real sockets."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import tracemalloc
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from app.core.limits import DOCUMENT_BYTES_MAX, KEYS_MAX, OUTPUT_VALUES_MAX, RESPONSE_BYTES_READ_MAX, RETRY_AFTER_MS_MAX
from app.domain.tga.ports import Answered, Unknown
from tests.connectors.servers import digest_output, dispatched, output_of, raw_server, response

_SHORT = [prefix + chr(code) for prefix in ("", "a", "b") for code in range(33, 127) if chr(code) not in '"\\[]{}']
_MANY_SHORT_KEYS = json.dumps([dict.fromkeys(_SHORT[:242], 0)] * 40, separators=(",", ":")).encode()


# Definite answers.


@pytest.mark.parametrize("media_type", ["application/json", "application/vnd.x+json", "text/plain", ""])
async def test_2xx_with_strict_json_is_success_with_the_value(media_type: str) -> None:
    result = await dispatched(response("200 OK", b' {"a": [1, 2.5, "\xc3\xa9"]} ', f"Content-Type: {media_type}"))
    assert isinstance(result, Answered)
    assert result.outcome == "SUCCESS"
    assert (result.error_code, result.error_message) == (None, None)
    assert output_of(result) == {"encoding": "json", "value": {"a": [1, 2.5, "é"]}}


@pytest.mark.parametrize("status", ["200 OK", "201 Created", "202 Accepted", "204 No Content", "299 Odd"])
async def test_2xx_without_a_body_is_success_without_output(status: str) -> None:
    result = await dispatched(response(status))
    assert result == Answered("SUCCESS", None)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"hello",
        b'{"a":1,"a":2}',
        b"[NaN]",
        b"[1e400]",
        b"[9007199254740993]",
        b'"\\ud800"',
        b'"\\u0000"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"[" * 100 + b"]" * 100,
    ],
)
async def test_2xx_with_a_body_that_is_not_strict_json_is_success_with_the_bytes(body: bytes) -> None:
    result = await dispatched(response("200 OK", body, "Content-Type: application/json; charset=utf-8"))
    assert isinstance(result, Answered)
    assert result.outcome == "SUCCESS"
    data = base64.b64encode(body).decode()
    assert output_of(result) == {"encoding": "base64", "media_type": "application/json", "data": data}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({str(n): n for n in range(KEYS_MAX)}).encode(),  # with the effect's own keys there are too many
        _MANY_SHORT_KEYS,  # the same, in few bytes
        b"[" * 60 + b"]" * 60,  # within its effect it is too deep
        b"[" + b",".join([b"1e15"] * 9_000 + [b'"' + b"x" * 180_000 + b'"']) + b"]",  # longer in its canonical form
        b"[" + b",".join([b"[]"] * OUTPUT_VALUES_MAX) + b"]",  # too many values to be parsed at once
    ],
    ids=["keys", "short-keys", "depth", "growth", "values"],
)
async def test_json_that_its_effect_could_not_hold_is_kept_as_bytes(body: bytes) -> None:
    result = await dispatched(response("200 OK", body))
    output = output_of(result)
    assert output is not None
    assert output["encoding"] == "base64"
    assert base64.b64decode(output["data"]) == body


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("Text/HTML; charset=utf-8", "text/html"),
        ("application/octet-stream", "application/octet-stream"),
        ("", "application/octet-stream"),
        ("not a type", "application/octet-stream"),
        ("text/\xe9t\xe9", "application/octet-stream"),
        ("x/" + "y" * 127, "application/octet-stream"),
        ("x/" + "y" * 126, "x/" + "y" * 126),
    ],
)
async def test_the_media_type_is_bounded_printable_ascii(written: str, expected: str) -> None:
    output = output_of(await dispatched(response("200 OK", b"<p>", f"Content-Type: {written}")))
    assert output == {"encoding": "base64", "media_type": expected, "data": "PHA+"}


async def test_a_compressed_body_is_kept_as_it_came() -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    assert len(bomb) < DOCUMENT_BYTES_MAX
    answer = response("200 OK", bomb, "Content-Type: application/json", "Content-Encoding: gzip")
    output = output_of(await dispatched(answer))
    data = base64.b64encode(bomb).decode()
    assert output == {"encoding": "base64", "media_type": "application/gzip", "data": data}


@pytest.mark.parametrize("size_bytes", [DOCUMENT_BYTES_MAX, DOCUMENT_BYTES_MAX + 1])
async def test_a_body_above_the_limit_is_kept_as_its_digest(size_bytes: int) -> None:
    body = b'"' + b"a" * (size_bytes - 2) + b'"'
    output = output_of(await dispatched(response("200 OK", body)))
    assert output is not None
    if size_bytes > DOCUMENT_BYTES_MAX:
        assert output == digest_output(body)
    else:
        assert output == {"encoding": "json", "value": "a" * (size_bytes - 2)}


async def test_a_body_of_a_gigabyte_is_read_up_to_the_bound_in_bounded_memory() -> None:
    chunk = b"x" * 65_536
    sent_bytes = 0

    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        nonlocal sent_bytes
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while sent_bytes < 10**9:
            writer.write(chunk)
            await writer.drain()
            sent_bytes += len(chunk)

    tracemalloc.start()
    try:
        result = await dispatched(answer, timeout_ms=30_000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(result, Answered)
    assert result.outcome == "SUCCESS"
    assert output_of(result) == digest_output(b"x" * RESPONSE_BYTES_READ_MAX)
    assert sent_bytes < 10**8
    assert peak_bytes < 8_000_000


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize(("status", "outcome"), [("200 OK", "SUCCESS"), ("404 Not Found", "FAILURE")])
async def test_a_body_that_breaks_off_leaves_the_status_to_decide(framing: str, status: str, outcome: str) -> None:
    body = b'{"a":1}'
    sent = b"7\r\n" + body + b"\r\n" if "chunked" in framing else body
    result = await dispatched(f"HTTP/1.1 {status}\r\n{framing}\r\n\r\n".encode() + sent)
    assert isinstance(result, Answered)
    assert result.outcome == outcome
    assert output_of(result) == digest_output(body)


async def test_what_arrived_before_the_break_counts_even_if_both_come_at_once() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b'7\r\n{"a":1}\r\nnot a size\r\n')

    result = await dispatched(answer)
    assert isinstance(result, Answered)
    assert result.outcome == "SUCCESS"
    assert output_of(result) == digest_output(b'{"a":1}')


@pytest.mark.parametrize("body", [b"", b"12"])
@pytest.mark.parametrize(("status", "outcome"), [("200 OK", "SUCCESS"), ("404 Not Found", "FAILURE")])
async def test_a_body_that_does_not_end_in_time_leaves_the_status_to_decide(
    status: str, outcome: str, body: bytes
) -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        if body:
            writer.write(b"2\r\n" + body + b"\r\n")

    result = await dispatched(answer, timeout_ms=150)
    assert isinstance(result, Answered)
    assert result.outcome == outcome
    assert output_of(result) == digest_output(body)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 413, 418, 422, 451, 499])
async def test_4xx_is_failure_with_its_code_and_body(status: int) -> None:
    result = await dispatched(response(f"{status} No", b'{"error":"e"}', "Content-Type: application/json"))
    assert isinstance(result, Answered)
    assert result.outcome == "FAILURE"
    assert result.error_code == f"HTTP_{status}"
    assert result.error_message == f"the server answered {status} No"
    assert output_of(result) == {"encoding": "json", "value": {"error": "e"}}


@pytest.mark.parametrize("reason", [b"caf\xe9 \xed\xa0\x80", b"x" * 5000, b""])
async def test_what_a_server_says_can_always_be_stored(reason: bytes) -> None:
    result = await dispatched(b"HTTP/1.1 404 " + reason + b"\r\nContent-Length: 0\r\n\r\n")
    assert isinstance(result, Answered)
    assert result.error_message is not None
    assert result.error_message.isascii()
    assert len(result.error_message) < 400


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
async def test_a_redirect_is_a_failure_and_is_not_followed(status: int) -> None:
    async with raw_server(response("200 OK")) as other:
        result = await dispatched(response(f"{status} Elsewhere", b"", f"Location: {other.url}/tools/charge"))
    assert isinstance(result, Answered)
    assert result.outcome == "FAILURE"
    assert result.error_code == f"HTTP_{status}"
    assert "redirects are not followed" in str(result.error_message)
    assert other.requests == []


# Unknown outcomes.


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 501, 502, 503, 504, 599, 600, 999])
async def test_answers_that_decide_nothing_are_unknown_and_not_repeated(status: int) -> None:
    result = await dispatched(response(f"{status} Later", b"{}"))
    assert isinstance(result, Unknown)
    assert result.result == "retryable_answer"
    assert str(status) in result.detail
    assert result.retry_after_ms is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0", 0),
        ("2", 2000),
        (" 7 ", 7000),
        ("999999999", RETRY_AFTER_MS_MAX),
        ("9" * 40, None),
        ("-1", None),
        ("1.5", None),
        ("\xb2", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Wed, 21 Oct 2999 07:28:00 GMT", RETRY_AFTER_MS_MAX),
        ("Wed, 31 Feb 2999 07:28:00 GMT", None),
        ("Wed, 21 Oct 2999 99:28:00 GMT", None),
        ("Wed, 21 Xyz 2999 07:28:00 GMT", None),
        ("Wed, 21 Oct 2999 07:28:00 +0100", None),
        ("Wednesday, 21-Oct-99 07:28:00 GMT", None),
    ],
)
async def test_retry_after_is_taken_in_seconds_or_as_a_date_and_bounded(written: str, expected: int | None) -> None:
    result = await dispatched(response("429 Slow", b"", f"Retry-After: {written}"))
    assert isinstance(result, Unknown)
    assert result.retry_after_ms == expected


async def test_a_date_to_retry_after_is_as_far_away_as_it_is() -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    result = await dispatched(response("503 Later", b"", f"Retry-After: {in_a_minute}"))
    assert isinstance(result, Unknown)
    assert result.retry_after_ms is not None
    assert 50_000 < result.retry_after_ms <= 60_000


async def test_a_retryable_answer_is_not_read_to_its_end() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 503 No\r\nContent-Length: 9\r\n\r\n1")

    result = await asyncio.wait_for(dispatched(answer, timeout_ms=60_000), 10)
    assert isinstance(result, Unknown)
    assert result.result == "retryable_answer"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HT",
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"SSH-2.0-x\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    ],
    ids=[
        "nothing",
        "half-a-version",
        "half-a-status-line",
        "half-a-header",
        "ssh",
        "nul",
        "no-colon",
        "two-lengths",
        "only-continue",
        "switching-protocols",
        "huge-header",
        "many-headers",
    ],
)
async def test_no_answer_or_one_that_is_not_http_is_disconnected(sent: bytes) -> None:
    result = await dispatched(sent)
    assert isinstance(result, Unknown)
    assert result.result == "disconnected"
    assert result.detail.isascii()


async def test_informational_answers_before_the_real_one_are_passed_over() -> None:
    sent = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + response("200 OK", b"1")
    assert output_of(await dispatched(sent)) == {"encoding": "json", "value": 1}


async def test_headers_of_ordinary_size_are_no_obstacle() -> None:
    sent = response("200 OK", b"1", "Set-Cookie: a=" + "x" * 30_000)
    assert output_of(await dispatched(sent)) == {"encoding": "json", "value": 1}


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le"])
async def test_no_status_in_time_is_timed_out(sent: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(sent)

    result = await dispatched(answer, timeout_ms=100)
    assert isinstance(result, Unknown)
    assert result.result == "timed_out"


async def test_the_timeout_is_for_the_whole_call_however_slowly_it_drips() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        for byte in response("200 OK", b"x" * 1000):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    started = asyncio.get_running_loop().time()
    result = await dispatched(answer, timeout_ms=300)
    assert isinstance(result, Unknown)
    assert result.result == "timed_out"
    assert asyncio.get_running_loop().time() - started < 2


async def test_endless_headers_are_refused_in_bounded_memory() -> None:
    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(10_000):
            writer.write(b"X: " + b"x" * 10_000 + b"\r\n")
            await writer.drain()

    tracemalloc.start()
    try:
        result = await dispatched(answer)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(result, Unknown)
    assert result.result == "disconnected"
    assert peak_bytes < 16_000_000
