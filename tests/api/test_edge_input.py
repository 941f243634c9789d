"""Section 10, as far as the edge decides it: bad input gets a code, and nothing reaches the runtime."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.limits import DISCARDED_BYTES_MAX, DOCUMENT_BYTES_MAX
from tests.api.wire import CALL, Front, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALID = orjson.dumps(CALL)


@pytest.fixture
def front(lasting_front: Front) -> Front:
    lasting_front.runtime.calls.clear()
    return lasting_front


def with_arguments(raw: bytes) -> bytes:
    return b'{"server_id":"crm","tool_name":"create","idempotency_key":"k-1","arguments":' + raw + b"}"


MALFORMED = {
    "nothing": b"",
    "half": VALID[:-1],
    "two documents": VALID + VALID,
    "array": b"[]",
    "string": b'"x"',
    "null": b"null",
    "repeated key": with_arguments(b'{"a":1,"a":2}'),
    "repeated key at the top": VALID[:-1] + b',"server_id":"other"}',
    "BOM": b"\xef\xbb\xbf" + VALID,
    "NaN": with_arguments(b'{"a":NaN}'),
    "Infinity": with_arguments(b'{"a":-Infinity}'),
    "1e400": with_arguments(b'{"a":1e400}'),
    "2^53": with_arguments(b'{"a":9007199254740992}'),
    "1e20": with_arguments(b'{"a":1e20}'),
    "lone surrogate": with_arguments(rb'{"a":"\ud800"}'),
    "lone surrogate as a key": with_arguments(rb'{"\udfff":1}'),
    "NUL": with_arguments(rb'{"a":"\u0000"}'),
    "raw NUL": with_arguments(b'{"a":"\x00"}'),
    "invalid UTF-8": with_arguments(b'{"a":"\xff"}'),
    "overlong UTF-8": with_arguments(b'{"a":"\xc0\xaf"}'),
    "UTF-16": VALID.decode().encode("utf-16"),
    "comment": VALID + b"// see",
    "trailing comma": VALID[:-1] + b",}",
}
TOO_LARGE = {
    "bytes": with_arguments(b'{"a":"' + b"x" * DOCUMENT_BYTES_MAX + b'"}'),
    "depth": with_arguments(b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
    "keys": with_arguments(b"{" + b",".join(b'"%d":1' % n for n in range(10_001)) + b"}"),
    "digits": with_arguments(b'{"a":' + b"7" * 5_000 + b"}"),
    "digits of a fraction": with_arguments(b'{"a":0.' + b"7" * 5_000 + b"}"),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_not_strict_json_is_refused_before_the_runtime(front: Front, raw: bytes) -> None:
    reply = await front.ask(request(body=raw))
    assert (reply.status, reply.code) == (400, "INPUT_MALFORMED")
    assert front.runtime.calls == []


@pytest.mark.parametrize("raw", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_what_is_too_large_is_refused_before_the_runtime(front: Front, raw: bytes) -> None:
    reply = await front.ask(request(body=raw))
    assert (reply.status, reply.code) == (413, "INPUT_TOO_LARGE")
    assert front.runtime.calls == []


async def test_the_largest_body_that_is_allowed_is_taken(front: Front) -> None:
    raw = with_arguments(b'{"a":"' + b"x" * DOCUMENT_BYTES_MAX + b'"}')
    fill = DOCUMENT_BYTES_MAX - (len(raw) - DOCUMENT_BYTES_MAX)
    raw = with_arguments(b'{"a":"' + b"x" * fill + b'"}')
    assert len(raw) == DOCUMENT_BYTES_MAX
    reply = await front.ask(request(body=raw))
    assert reply.status == 200
    assert (await front.ask(request(body=raw + b" "))).code == "INPUT_TOO_LARGE"


async def test_a_body_that_only_claims_to_be_too_large_is_refused_before_it_is_sent(front: Front) -> None:
    async with await front.open() as wire:
        await wire.send(
            b"POST /v1/tool-calls HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer agent\r\n"
            b"Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"
        )
        reply = await wire.reply()  # and no 100 before it
        assert (reply.status, reply.code) == (413, "INPUT_TOO_LARGE")


async def test_an_endless_chunked_body_is_refused_and_hung_up_on(front: Front) -> None:
    piece = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    sent = 0
    async with await front.open() as wire:
        await wire.send(
            b"POST /v1/tool-calls HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer agent\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with suppress(OSError):  # reset, or a broken pipe
            while sent < 4 * DISCARDED_BYTES_MAX:
                await wire.send(piece)
                sent += 65_536
                await asyncio.sleep(0)
        assert sent < 2 * DISCARDED_BYTES_MAX
    async with await front.open() as wire:
        await wire.send(
            b"POST /v1/tool-calls HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer agent\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n" + piece * 5
        )
        assert (await wire.reply()).code == "INPUT_TOO_LARGE"


async def test_a_chunked_body_is_a_body_like_any_other(front: Front) -> None:
    chunks = b"".join(b"1\r\n%b\r\n" % VALID[n : n + 1] for n in range(len(VALID)))
    raw = (
        b"POST /v1/tool-calls HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer agent\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    async with await front.open() as wire:
        assert (await wire.ask(raw + chunks + b"0\r\n\r\n")).status == 200
        assert (await wire.ask(request(body=CALL))).status == 200


async def test_trailers_are_no_headers(front: Front) -> None:
    raw = b"POST /v1/tool-calls HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(VALID), VALID)
    reply = await front.ask(raw + chunk + b"0\r\nAuthorization: Bearer agent\r\n\r\n")
    assert reply.code == "UNAUTHENTICATED"


FIELDS: dict[str, tuple[Any, str]] = {
    "unknown": ({**CALL, "priority": 1}, "/priority"),
    "python's own": ({**CALL, "self": 1}, "/self"),
    "python's own too": ({**CALL, "cls": 1}, "/cls"),
    "missing": ({"server_id": "crm", "tool_name": "create"}, "/arguments"),
    "arguments no object": ({**CALL, "arguments": [1]}, "/arguments"),
    "number for a name": ({**CALL, "server_id": 7}, "/server_id"),
    "space in a name": ({**CALL, "tool_name": "a b"}, "/tool_name"),
    "empty key": ({**CALL, "idempotency_key": ""}, "/idempotency_key"),
    "long key": ({**CALL, "idempotency_key": "k" * 256}, "/idempotency_key"),
    "long intent": ({**CALL, "intent": "i" * 5_000}, "/intent"),
    "UUIDv4": ({**CALL, "trace_id": "0197c2a4-5f0e-4c3a-9d54-3a1f0b8e2c11"}, "/trace_id"),
    "upper case": ({**CALL, "trace_id": "0197C2A4-5F0E-7C3A-9D54-3A1F0B8E2C11"}, "/trace_id"),
    "negative wait": ({**CALL, "wait_ms": -1}, "/wait_ms"),
    "long wait": ({**CALL, "wait_ms": 120_001}, "/wait_ms"),
    "true is no number": ({**CALL, "wait_ms": True}, "/wait_ms"),
    "fraction": ({**CALL, "wait_ms": 1.5}, "/wait_ms"),
}


@pytest.mark.parametrize(("body", "path"), FIELDS.values(), ids=FIELDS)
async def test_a_field_that_does_not_fit_is_named(front: Front, body: dict[str, Any], path: str) -> None:
    reply = await front.ask(request(body=body))
    assert (reply.status, reply.code) == (422, "SCHEMA_VIOLATION")
    assert path in reply.document["detail"]
    assert front.runtime.calls == []


async def test_a_huge_unknown_field_is_not_echoed(front: Front) -> None:
    reply = await front.ask(request(body={**CALL, "x" * 100_000: 1}))
    assert reply.code == "SCHEMA_VIOLATION"
    assert len(reply.body) < 2_000


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": 'application/json; CHARSET="UTF-16"'},
        {"Content-Encoding": "gzip"},
    ],
    ids=str,
)
async def test_a_body_in_another_encoding_is_refused(front: Front, headers: dict[str, str]) -> None:
    assert (await front.ask(request(body=CALL, headers=headers))).code == "INPUT_MALFORMED"


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; charset=UTF-8", "x", ""])
async def test_any_other_content_type_is_taken(front: Front, content_type: str) -> None:
    assert (await front.ask(request(body=CALL, headers={"Content-Type": content_type}))).status == 200


DOCUMENTED: dict[int, set[str | None]] = {
    200: {None},
    400: {"INPUT_MALFORMED"},
    413: {"INPUT_TOO_LARGE"},
    422: {"SCHEMA_VIOLATION"},
}


def hostile() -> st.SearchStrategy[bytes]:
    edits = st.lists(st.tuples(st.integers(0, len(VALID)), st.binary(max_size=4), st.integers(0, 4)), max_size=6)

    def edited(changes: list[tuple[int, bytes, int]]) -> bytes:
        raw = VALID
        for place, inserted, removed in changes:
            raw = raw[:place] + inserted + raw[place + removed :]
        return raw

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
    fields = st.dictionaries(st.sampled_from([*CALL, "trace_id", "intent", "wait_ms", "x"]), json_values)
    documents = fields.map(lambda some: json.dumps({**CALL, **some}).encode("utf-8", "surrogatepass"))
    return st.binary(max_size=200) | edits.map(edited) | documents


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=hostile())
async def test_whatever_the_body_is_the_answer_is_documented(front: Front, raw: bytes) -> None:
    async with await front.open() as wire:
        reply = await wire.ask(request(body=raw))
        code = None if reply.status == 200 else reply.code
        assert code in DOCUMENTED[reply.status]
        assert (await wire.ask(request(body=CALL))).status == 200  # the connection is as good as before
