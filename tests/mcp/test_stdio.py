"""Calls to an MCP server over its pipes: sent once each, and what is known afterwards."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import mcp_types
import pytest
from mcp_types import jsonrpc, version

from app.connectors.mcp import wire
from app.core.limits import DOCUMENT_BYTES_MAX, MCP_LINE_BYTES_READ_MAX, MCP_MESSAGE_BYTES_MAX
from app.domain.tga.ports import Answered, NotSent, Unknown, Withheld
from tests.connectors.servers import output_of, tool_call, until
from tests.mcp.standing import scripted, standing, structured, value_of
from tests.traces import uuid7

ERAS = ["modern", "legacy"]
OK = '{"jsonrpc":"2.0","id":$ID,"result":%s}'


@pytest.mark.parametrize("era", ERAS)
async def test_the_call_carries_the_ids_and_the_trace_in_meta(tmp_path: Path, era: str) -> None:
    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        meta = structured(await world.call("meta"))
    trace, call = uuid7(1), uuid7(1, role="tool_call")
    assert {key: value for key, value in meta.items() if not key.startswith("io.")} == {
        "tga/idempotency-key": "key-1",
        "tga/tool-call-id": call,
        "tga/trace-id": trace,
        "traceparent": f"00-{trace.replace('-', '')}-{call.replace('-', '')[-16:]}-01",
    }
    assert ("io.modelcontextprotocol/protocolVersion" in meta) == (era == "modern")


@pytest.mark.parametrize(("era", "version"), [("modern", "2026-07-28"), ("legacy", "2025-11-25")])
async def test_the_newest_protocol_that_the_server_speaks_is_spoken(tmp_path: Path, era: str, version: str) -> None:
    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        assert world.connection().protocol_version == version
        assert world.connection().state == "connected"


async def test_a_server_that_dies_of_an_unknown_question_is_asked_in_the_older_protocol(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path, "dies_on_probe")) as world:
        await until(lambda: world.connection().state == "connected")
        assert structured(await world.call("echo")) == {"steps": ["echo"]}


async def test_a_server_of_the_newest_protocol_that_died_once_is_asked_in_it_again(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path, "fragile")) as world:
        await until(lambda: world.connection().state == "connected")
        assert world.connection().protocol_version == "2026-07-28"


async def test_a_server_that_passes_over_the_newest_protocol_is_asked_in_the_older_one(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path, "silent", more="start_timeout_ms = 500")) as world:
        await until(lambda: world.connection().state == "connected")
        assert world.connection().protocol_version == "2025-11-25"


async def test_a_call_without_a_key_carries_none(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        meta = structured(await world.call("meta", idempotency_key=None, tool_class="read"))
    assert "tga/idempotency-key" not in meta


# What an answer means.


@pytest.mark.parametrize(
    "result",
    [
        '{"content":[{"type":"image","data":"AAAA","mimeType":"image/png"}],"_meta":{"a/b":1},"isError":false}',
        '{"content":[{"type":"resource_link","uri":"file:///x","name":"x"}],"structuredContent":{"a":[1.5,null]}}',
        '{"resultType":"complete","content":[],"whatever":{"z":1,"a":2}}',
    ],
)
async def test_a_result_comes_through_unchanged(tmp_path: Path, result: str) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call(OK % result)
    assert isinstance(answer, Answered)
    assert answer.outcome == "SUCCESS"
    assert value_of(answer) == json.loads(result)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (OK % '{"content":[{"type":"text","text":"no funds"}],"isError":true}', "MCP_TOOL_ERROR", "no funds"),
        ('{"jsonrpc":"2.0","id":$ID,"error":{"code":-32603,"message":"oops","data":[1]}}', "MCP_-32603", "oops"),
        ('{"jsonrpc":"2.0","id":$ID,"error":{"code":-32602,"message":"bad"}}', "MCP_-32602", "bad"),
        ('{"jsonrpc":"2.0","id":$ID,"error":{"code":"x"}}', "MCP_ERROR", "x"),
        ('{"jsonrpc":"2.0","id":$ID,"error":7}', "MCP_ERROR", "error None"),
        (OK % '{"resultType":"input_required","inputRequests":{}}', "MCP_INPUT_REQUIRED", "more input"),
        (OK % "[1]", "MCP_BAD_RESULT", "not an object"),
        (OK % "null", "MCP_BAD_RESULT", "not an object"),
    ],
)
async def test_a_definite_failure_says_why(tmp_path: Path, line: str, code: str, message: str) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call(line)
        assert len(world.noted()) == 1
    assert isinstance(answer, Answered)
    assert (answer.outcome, answer.error_code) == ("FAILURE", code)
    assert message in (answer.error_message or "")


@pytest.mark.parametrize("code", [-32000, -32001])
async def test_an_error_of_something_behind_the_server_leaves_the_outcome_unknown(tmp_path: Path, code: int) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call(f'{{"jsonrpc":"2.0","id":$ID,"error":{{"code":{code},"message":"gone"}}}}')
    assert isinstance(answer, Unknown)
    assert answer.result == "retryable_answer"


@pytest.mark.parametrize(
    "result",
    ['{"content":[],"n":9007199254740993}', '{"content":[],"a":1,"a":2}', '{"content":[],"n":NaN}'],
)
async def test_a_result_that_is_not_strict_json_is_kept_as_its_bytes(tmp_path: Path, result: str) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        output = output_of(await world.call(OK % result))
    assert output is not None
    assert base64.b64decode(output["data"]).decode() == result
    assert output["media_type"] == "application/json"


async def test_a_large_result_is_kept_as_its_digest_and_is_a_success(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call({"text": DOCUMENT_BYTES_MAX})
    expected = json.dumps({"content": [{"type": "text", "text": "x" * DOCUMENT_BYTES_MAX}]}).encode()
    assert output_of(answer) == {
        "encoding": "digest",
        "sha256": hashlib.sha256(expected).hexdigest(),
        "size_bytes": len(expected),
        "truncated": True,
    }


@pytest.mark.parametrize("kind", ["text", "last"])  # the id comes first, or last
async def test_a_result_too_large_to_be_read_is_an_answer_all_the_same(tmp_path: Path, kind: str) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call({kind: MCP_MESSAGE_BYTES_MAX}, timeout_ms=20_000)
        assert isinstance(answer, Answered), answer
        output = output_of(answer)
        assert output is not None
        assert (answer.outcome, output["encoding"]) == ("SUCCESS", "digest")
        assert structured(await world.call("echo")) == {"steps": ["echo"]}  # and the connection goes on
        assert len(world.noted()) == 2


async def test_a_line_without_an_end_ends_the_server_and_not_the_gateway(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call({"endless": MCP_LINE_BYTES_READ_MAX + 2**20}, timeout_ms=30_000)
        assert isinstance(answer, Unknown)
        assert answer.result == "disconnected"
        assert len(world.noted()) == 1


async def test_what_is_no_message_is_passed_over(tmp_path: Path) -> None:
    rubbish = [
        "Welcome!",
        "",
        "[]",
        "{",
        '{"jsonrpc":"2.0"}',
        '{"id":$ID}',
        "[" * 5000,
        '{"id":$ID,"result":{}',
    ]
    unasked = ['{"id":1,"result":{}}', '{"id":"$ID","result":{}}', '{"id":{},"method":"ping"}', '{"id":1,"method":"x"}']
    async with standing(tmp_path, scripted(tmp_path)) as world:
        assert structured(await world.call(*rubbish, *unasked, "echo"))["steps"][0] == "Welcome!"


async def test_a_second_answer_to_the_same_request_changes_nothing(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answer = await world.call(OK % '{"content":[],"n":1}', OK % '{"content":[],"n":2}')
        assert value_of(answer)["n"] == 1
        assert structured(await world.call("echo")) == {"steps": ["echo"]}


# Once, and no more.


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_that_is_not_answered_in_time_was_sent_once_and_is_unknown(tmp_path: Path, era: str) -> None:
    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        answer = await world.call({"sleep": 0.5}, "echo", timeout_ms=200)
        assert isinstance(answer, Unknown)
        assert answer.result == "timed_out"
        assert structured(await world.call("echo")) == {"steps": ["echo"]}  # the late answer is nobody's
        await until(lambda: world.noted("notifications/cancelled"))
        assert len(world.noted()) == 2
        assert len(world.noted("notifications/cancelled")) == 1


@pytest.mark.parametrize("era", ERAS)
async def test_a_server_that_dies_in_a_call_leaves_it_unknown_and_is_started_again(tmp_path: Path, era: str) -> None:
    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        answer = await world.call({"die": 7})
        assert isinstance(answer, Unknown)
        assert answer.result == "disconnected"
        assert "code 7" in answer.detail
        assert structured(await world.call("echo")) == {"steps": ["echo"]}  # waited for, and sent to the new one
        assert len(world.noted()) == 2
        assert world.connection().connects == 2


async def test_a_server_that_answers_and_dies_has_answered(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        assert structured(await world.call("echo", {"die": 0})) == {"steps": ["echo", {"die": 0}]}


async def test_calls_to_one_server_run_beside_each_other(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        answers = await asyncio.gather(*(world.call("echo", {"n": n}) for n in range(50)))
    assert [structured(answer)["steps"][1]["n"] for answer in answers] == list(range(50))


async def test_to_a_server_that_does_not_read_nothing_more_is_written(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        stuck = asyncio.create_task(world.call({"sleep": 3}, timeout_ms=5000))
        await until(lambda: len(world.noted()) == 1)
        big = {"pad": "x" * 200_000}
        first = await world.call(big, timeout_ms=300)  # fills the pipe
        second = await world.call(big, timeout_ms=300)
        assert isinstance(first, Unknown)
        assert isinstance(second, NotSent)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_arguments_that_cannot_be_written_are_not_sent_and_not_shown(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world, world.registry.place("it") as connector:
        call = tool_call(server_id="it", tool_name="does")
        answer = await connector.dispatch(call, timeout_ms=1000, arguments={"hunter2": float("nan")})
        assert isinstance(answer, NotSent)
        assert "hunter2" not in answer.detail
        assert world.noted() == []


async def test_secret_arguments_that_were_put_back_are_sent(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world, world.registry.place("it") as connector:
        call = tool_call(server_id="it", tool_name="does", arguments={"card": {"$redacted": {}}})
        await connector.dispatch(call, timeout_ms=5000, arguments={"card": "4"})
        assert world.noted()[0]["params"]["arguments"] == {"card": "4"}


# Progress and cancellation.


@pytest.mark.parametrize("era", ERAS)
async def test_progress_reaches_who_watches_the_trace(tmp_path: Path, era: str) -> None:
    told: list[dict[str, Any]] = []
    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        with world.registry.watch_progress(uuid7(1), told.append):
            await world.call({"progress": 1}, {"progress": 2}, "echo")
        await world.call({"progress": 3}, "echo")
    assert [params["progress"] for params in told] == [1, 2]


async def test_a_cancelled_call_is_unknown_and_the_server_is_told(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        calling = asyncio.create_task(world.call({"sleep": 6}, timeout_ms=20_000))
        await until(lambda: world.noted())
        assert world.registry.cancel(uuid7(1))
        answer = await calling
        assert isinstance(answer, Unknown)
        assert answer.is_cancelled
        assert not world.registry.cancel(uuid7(1))
        assert len(world.noted()) == 1


async def test_a_cancelled_call_that_is_answered_all_the_same_has_that_outcome(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        calling = asyncio.create_task(world.call({"sleep": 0.5}, "echo", timeout_ms=20_000))
        await until(lambda: world.noted())
        world.registry.cancel(uuid7(1))
        assert isinstance(await calling, Answered)
        await until(lambda: world.noted("notifications/cancelled"))


async def test_a_reconciling_tool_answers_with_its_structured_content(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        line = OK % '{"content":[],"structuredContent":{"executed":true}}'
        answer = await world.call(line, reconcile_tool="does", on_unknown_outcome="reconcile")
    assert value_of(answer) == {"executed": True}


# What the child is given, and what is kept of it.


async def test_the_child_gets_what_is_configured_and_nothing_else_of_the_gateways(tmp_path: Path) -> None:
    more = '[servers.it.env]\nLITERAL = "yes"\nTOKEN = { env = "UPSTREAM_TOKEN" }\n'
    given = {"UPSTREAM_TOKEN": "t-1", "TGA_SEALING_KEY": "hunter2", "OTHER": "hunter2"}
    async with standing(tmp_path, scripted(tmp_path, more=more), environment=given) as world:
        seen = structured(await world.call("environment"))
    assert (seen["LITERAL"], seen["TOKEN"]) == ("yes", "t-1")
    assert set(seen) - {"LC_CTYPE"} == {"LITERAL", "TOKEN", "PATH", "HOME"}


async def test_what_it_complains_of_is_kept_and_bounded(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        await world.call({"complain": "a" * 100_000 + "the end"}, "echo")
        await until(lambda: world.connection().stderr.endswith("the end"))
        assert len(world.connection().stderr) <= 8192


async def test_a_command_that_cannot_be_started_stops_nobody_and_is_reported(tmp_path: Path) -> None:
    config = scripted(tmp_path) + '[servers.gone]\ntransport = "mcp-stdio"\ncommand = ["./no-such-program"]\n'
    async with standing(tmp_path, config) as world:
        assert structured(await world.call("echo")) == {"steps": ["echo"]}
        assert world.connection("gone").state in ("waiting", "connecting")
        assert "cannot be started" in world.connection("gone").stderr
        assert isinstance(await world.dispatch("gone", "x", {}, timeout_ms=100), NotSent)


def test_the_constants_are_those_of_the_official_package() -> None:
    assert wire.HANDSHAKE_VERSIONS == version.HANDSHAKE_PROTOCOL_VERSIONS
    assert (wire.MODERN_VERSION,) == version.MODERN_PROTOCOL_VERSIONS
    assert wire.VERSION_META == mcp_types.PROTOCOL_VERSION_META_KEY
    assert wire.CLIENT_META == mcp_types.CLIENT_INFO_META_KEY
    assert wire.CAPABILITIES_META == mcp_types.CLIENT_CAPABILITIES_META_KEY
    assert wire.SERVER_META == mcp_types.SERVER_INFO_META_KEY
    assert wire.CONNECTION_CLOSED == jsonrpc.CONNECTION_CLOSED
    assert wire.REQUEST_TIMEOUT == jsonrpc.REQUEST_TIMEOUT
    assert wire.METHOD_NOT_FOUND == jsonrpc.METHOD_NOT_FOUND


# The last word before the first byte.


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_that_may_not_be_sent_is_not_written(tmp_path: Path, era: str) -> None:
    said = [True, False]

    async def may_send() -> bool:
        return said.pop()

    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        call = tool_call(server_id="it", tool_name="does", arguments={"steps": ["echo"]})
        async with world.registry.place("it") as connector:
            assert await connector.dispatch(call, timeout_ms=5000, may_send=may_send) == Withheld()
            assert isinstance(await connector.dispatch(call, timeout_ms=5000, may_send=may_send), Answered)
    assert len(world.noted()) == 1
    assert said == []
