"""Answers that are too large to be kept are still read for their outcome; what is not told is never a success."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from app.connectors.mcp.answers import conclude
from app.connectors.mcp.large import Arriving, Large
from app.connectors.mcp.wire import Oversize, Reply, read_large, read_message
from app.core.limits import (
    DOCUMENT_BYTES_MAX,
    MCP_LINE_BYTES_READ_MAX,
    MCP_MESSAGE_BYTES_MAX,
    MCP_READ_AT_ONCE_BYTES_MAX,
    OUTPUT_VALUES_MAX,
    RESPONSE_BYTES_READ_MAX,
)
from app.domain.tga.ports import Answered, Dispatched, Unknown
from tests.connectors.servers import output_of
from tests.mcp.http_server import http_mcp, stream
from tests.mcp.standing import scripted, standing, structured
from tests.patience import HANG_S

ERAS = ["modern", "legacy"]
SIZES = [DOCUMENT_BYTES_MAX + 100_000, MCP_MESSAGE_BYTES_MAX + 1_000]

# What the server writes, with $ID and $X, which is long; and what is known then.
CASES = {
    "success": ('{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"type":"text","text":"$X"}]}}', "SUCCESS", None),
    "not-an-error": ('{"id":$ID,"result":{"isError":false,"a":"$X"}}', "SUCCESS", None),
    "error-null": ('{"error":null,"result":{"a":"$X"},"id":$ID}', "SUCCESS", None),
    "said-elsewhere": ('{"id":$ID,"result":{"a":{"isError":true},"b":"\\"isError\\":true,$X"}}', "SUCCESS", None),
    "tool-error-first": ('{"id":$ID,"result":{"isError":true,"content":["$X"]}}', "FAILURE", "MCP_TOOL_ERROR"),
    "tool-error-last": ('{"result":{"content":["$X"],"isError":true},"id":$ID}', "FAILURE", "MCP_TOOL_ERROR"),
    "tool-error-escaped": ('{"id":$ID,"result":{"a":"$X","is\\u0045rror": true}}', "FAILURE", "MCP_TOOL_ERROR"),
    "error-first": ('{"error":{"code":-32603,"message":"no","data":"$X"},"id":$ID}', "FAILURE", "MCP_-32603"),
    "error-last": ('{"id":$ID,"error":{"data":"$X","message":"no","code":-32602}}', "FAILURE", "MCP_-32602"),
    "error-odd": ('{"id":$ID,"error":["$X"]}', "FAILURE", "MCP_ERROR"),
    "error-beside-result": ('{"id":$ID,"result":{"a":"$X"},"error":{"code":5}}', "FAILURE", "MCP_5"),
    "no-object": ('{"id":$ID,"result":["$X"]}', "FAILURE", "MCP_BAD_RESULT"),
    "text": ('{"id":$ID,"result":"$X"}', "FAILURE", "MCP_BAD_RESULT"),
    "more-input": ('{"id":$ID,"result":{"a":"$X","resultType":"input_required"}}', "FAILURE", "MCP_INPUT_REQUIRED"),
    "twice": ('{"id":$ID,"result":{"isError":true,"a":"$X","isError":false}}', "FAILURE", "ANSWER_TOO_LARGE"),
    "results": ('{"id":$ID,"result":{"isError":true},"a":"$X","result":{}}', "FAILURE", "ANSWER_TOO_LARGE"),
    "deep": ('{"id":$ID,"a":"$X","result":' + '{"a":' * 600 + "1" + "}" * 601, "FAILURE", "ANSWER_TOO_LARGE"),
    "unsettled": ('{"id":$ID,"error":{"code":-32001,"message":"$X"}}', "retryable_answer", None),
}


def written(case: str, size: int, request_id: Any) -> str:
    return CASES[case][0].replace("$X", "x" * size).replace("$ID", str(request_id))


def verify(case: str, known: Dispatched) -> None:
    _, outcome, code = CASES[case]
    if isinstance(known, Unknown):
        assert known.result == outcome
        return
    assert isinstance(known, Answered), known
    assert (known.outcome, known.error_code) == (outcome, code)
    assert known.error_message is None or len(known.error_message) <= 4_096


async def over_http(folder: Path, era: str, write: Callable[[int], Any], *, timeout_ms: int = 60_000) -> Dispatched:
    """What one call gives, answered by bytes (JSON) or a list of them (a stream)."""

    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = write(body["id"])
        if isinstance(answer, list):
            return await stream(request, *answer)
        return web.Response(body=answer, content_type="application/json")

    async with http_mcp(era, call) as server:
        config = f'[servers.it]\ntransport = "mcp-http"\nurl = "{server.url}"\n'
        async with standing(folder, config) as world:
            known = await world.call(timeout_ms=timeout_ms)
        assert len(server.calls()) == 1
    return known


def as_event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


@pytest.mark.parametrize("era", ERAS)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_over_http_every_outcome_is_told_of_a_large_answer(tmp_path: Path, era: str, is_stream: bool) -> None:
    cases = iter(CASES)
    case = ""

    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = written(case, size, body["id"])
        if is_stream:
            return await stream(request, as_event(text))
        return web.Response(body=text.encode(), content_type="application/json")

    async with http_mcp(era, call) as server:
        config = f'[servers.it]\ntransport = "mcp-http"\nurl = "{server.url}"\n'
        async with standing(tmp_path, config) as world:
            for number, case in enumerate(cases):
                size = SIZES[number % 2]
                verify(case, await world.call(timeout_ms=60_000))
        assert len(server.calls()) == len(CASES)


@pytest.mark.parametrize("era", ERAS)
async def test_over_pipes_every_outcome_is_told_of_a_large_answer(tmp_path: Path, era: str) -> None:
    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        for number, case in enumerate(CASES):
            size = SIZES[(number + 1) % 2]
            steps = {"write": CASES[case][0], "x": size}
            verify(case, await world.call(steps, timeout_ms=60_000))
        assert structured(await world.call("echo")) == {"steps": ["echo"]}  # and the connection goes on


@pytest.mark.parametrize("size", [MCP_READ_AT_ONCE_BYTES_MAX // 2, *SIZES])
async def test_a_large_notification_is_not_the_answer(tmp_path: Path, size: int) -> None:
    notes = [
        '{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"$X"}}',
        '{"jsonrpc":"2.0","params":{"data":"$X","result":{"isError":false}},"method":"notifications/message"}',
        '{"jsonrpc":"2.0","result":{"a":"$X"},"method":"notifications/odd","id":$ID}',
        '{"jsonrpc":"2.0","id":1,"result":{"a":"$X"}}',
        "$X",
    ]

    def write(request_id: int) -> list[bytes]:
        said = [note.replace("$X", "x" * size).replace("$ID", str(request_id)) for note in notes]
        failed = f'{{"id":{request_id},"result":{{"isError":true}}}}'
        return [as_event(text) for text in (*said, failed)]

    known = await over_http(tmp_path, "modern", write)
    assert isinstance(known, Answered)
    assert (known.outcome, known.error_code) == ("FAILURE", "MCP_TOOL_ERROR")
    async with standing(tmp_path, scripted(tmp_path)) as world:
        steps = [{"write": note, "x": size} for note in notes]
        known = await world.call(*steps, '{"id":$ID,"result":{"isError":true}}', timeout_ms=60_000)
    assert isinstance(known, Answered)
    assert (known.outcome, known.error_code) == ("FAILURE", "MCP_TOOL_ERROR")


@pytest.mark.parametrize(
    "junk",
    [
        b": " + b"x" * MCP_MESSAGE_BYTES_MAX,
        b":\n" * 100_000,
        b"\n" * MCP_MESSAGE_BYTES_MAX,
        b"x" * MCP_MESSAGE_BYTES_MAX + b"\n",
        b"event: " + b"x" * MCP_MESSAGE_BYTES_MAX + b"\n\n",
        b"id: " + b"x" * MCP_MESSAGE_BYTES_MAX + b"\nretry: " + b"1" * MCP_MESSAGE_BYTES_MAX + b"\n\n",
    ],
    ids=["a-comment", "comments", "empty-lines", "an-unknown-field", "a-name", "an-id"],
)
async def test_a_stream_of_junk_only_leaves_the_outcome_unknown(tmp_path: Path, junk: bytes) -> None:
    known = await over_http(tmp_path, "modern", lambda _: [junk, b"\n\n"])
    assert isinstance(known, Unknown)
    assert known.result == "disconnected"
    answer = '{{"id":{},"result":{{"content":[]}}}}'
    known = await over_http(tmp_path, "modern", lambda request_id: [junk, b"\n\n", as_event(answer.format(request_id))])
    assert isinstance(known, Answered)
    assert known.outcome == "SUCCESS"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_without_an_end_is_a_failure_and_not_a_success(tmp_path: Path, is_stream: bool) -> None:
    def write(request_id: int) -> bytes | list[bytes]:
        text = f'{{"id":{request_id},"result":{{"isError":false,"content":["'.encode() + b"x" * RESPONSE_BYTES_READ_MAX
        return [b"data: " + text] if is_stream else text

    known = await over_http(tmp_path, "modern", write)
    assert isinstance(known, Answered)
    assert (known.outcome, known.error_code) == ("FAILURE", "ANSWER_TOO_LARGE")
    output = output_of(known)
    assert output is not None
    assert output["encoding"] == "digest"


async def test_a_large_answer_that_breaks_off_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    def write(request_id: int) -> list[bytes]:
        return [b"data: " + f'{{"id":{request_id},"result":{{"content":["'.encode() + b"x" * MCP_MESSAGE_BYTES_MAX]

    known = await over_http(tmp_path, "modern", write)
    assert isinstance(known, Unknown)
    assert known.result == "disconnected"


@pytest.mark.parametrize("status", [400, 500])
async def test_a_large_error_with_a_status_of_its_own_is_never_a_success(tmp_path: Path, status: int) -> None:
    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status, body=written("success", SIZES[1], body["id"]).encode())

    async with http_mcp("modern", call) as server:
        config = f'[servers.it]\ntransport = "mcp-http"\nurl = "{server.url}"\n'
        async with standing(tmp_path, config) as world:
            known = await world.call(timeout_ms=60_000)
    assert not (isinstance(known, Answered) and known.outcome == "SUCCESS")


def arrived(raw: bytes, piece: int) -> bytes | Large:
    arriving = Arriving()
    for at in range(0, len(raw), piece):
        for _ in arriving.take(raw[at : at + piece]):
            pass
    return arriving.end()


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][2] != "ANSWER_TOO_LARGE"])
@pytest.mark.parametrize("piece", [997, 65_536, 10**9])
def test_looking_through_an_answer_tells_what_reading_it_whole_tells(case: str, piece: int) -> None:
    raw = written(case, MCP_READ_AT_ONCE_BYTES_MAX, 5).encode()
    large = arrived(raw, piece)
    assert isinstance(large, Large)
    assert large.is_told
    looked = conclude(Oversize(large), has_session=False)
    read = conclude(Reply(read_message(raw)), has_session=False)
    assert type(looked) is type(read)
    if isinstance(looked, Answered) and isinstance(read, Answered):
        assert (looked.outcome, looked.error_code) == (read.outcome, read.error_code)
        if read.error_code in (None, "MCP_TOOL_ERROR", "MCP_BAD_RESULT", "MCP_INPUT_REQUIRED"):
            assert looked.output == read.output


def test_the_digest_is_that_of_the_result_as_the_server_wrote_it() -> None:
    result = b'{ "content" : ["' + b"x" * DOCUMENT_BYTES_MAX + b'"] }'
    large = arrived(b'{"id":1, "result" : ' + result + b" }", 4_096)
    assert isinstance(large, Large)
    known = conclude(read_large(large, "tools/call"), has_session=False)
    digest = {"sha256": hashlib.sha256(result).hexdigest(), "size_bytes": len(result), "truncated": True}
    assert output_of(known) == {"encoding": "digest", **digest}


def test_few_bytes_with_many_values_are_kept_as_bytes_and_not_parsed() -> None:
    raw = json.dumps({"id": 1, "result": {"content": [[]] * OUTPUT_VALUES_MAX, "isError": False}}).encode()
    assert MCP_READ_AT_ONCE_BYTES_MAX < len(raw) < DOCUMENT_BYTES_MAX
    large = arrived(raw, 4_096)
    assert isinstance(large, Large)
    heard = read_large(large, "tools/call")
    assert isinstance(heard, Oversize)
    known = conclude(heard, has_session=False)
    assert isinstance(known, Answered)
    assert known.outcome == "SUCCESS"
    output = output_of(known)
    assert output is not None
    assert output["encoding"] == "base64"
    assert isinstance(read_large(large, "tools/list"), Reply)


async def test_a_line_that_never_ends_is_looked_at_in_bounded_memory_and_ends_the_child(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        endless = {"write_endless": '{"id":$ID,"result":{"content":["', "x": MCP_LINE_BYTES_READ_MAX + 2**20}
        known = await world.call(endless, timeout_ms=120_000)
        assert isinstance(known, Unknown)
        assert known.result == "disconnected"
        async with asyncio.timeout(HANG_S):
            while world.connection().connects < 2:
                await asyncio.sleep(0.05)
        assert structured(await world.call("echo")) == {"steps": ["echo"]}
