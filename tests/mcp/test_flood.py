"""MCP servers that talk without end: what is heard of it is bounded in number, bytes and rate."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from app.connectors.mcp.large import Unasked
from app.connectors.mcp.sse import EventReader
from app.connectors.mcp.wire import Inbox, Message
from app.core.limits import (
    MCP_REPLIES_PER_SECOND_MAX,
    MCP_UNASKED_BYTES_PER_MINUTE_MAX,
    MCP_UNASKED_PER_MINUTE_MAX,
)
from app.domain.tga.ports import Unknown
from tests.connectors.servers import until
from tests.mcp.http_server import event, http_mcp
from tests.mcp.standing import scripted, standing, structured, value_of

_COUNT = "app.connectors.mcp.large.MCP_UNASKED_PER_MINUTE_MAX"
_BYTES = "app.connectors.mcp.large.MCP_UNASKED_BYTES_PER_MINUTE_MAX"
_NOTE = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
_PING = json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"})
_CHANGED = json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})


async def flooded(request: web.Request, unit: bytes) -> web.StreamResponse:
    """Write it until the other side goes away."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(unit)
        await asyncio.sleep(0)


def config(url: str) -> str:
    return f'[servers.it]\ntransport = "mcp-http"\nurl = "{url}"\n'


@pytest.mark.parametrize("era", ["modern", "legacy"])
@pytest.mark.parametrize(
    "unit",
    [b"data: " + _NOTE.encode() + b"\n\n", b"data:\n\n", b"event: x\n\n", b"data: junk\n\n", b": c\n", b"\n", b"x"],
    ids=["notes", "no-data", "names", "junk", "comments", "lines", "a-line"],
)
async def test_a_stream_without_an_answer_in_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, era: str, unit: bytes
) -> None:
    monkeypatch.setattr(_COUNT, 2_000)
    monkeypatch.setattr(_BYTES, 200_000)

    async def call(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await flooded(request, unit * (1 + 4_096 // len(unit)))

    async with http_mcp(era, call) as server, standing(tmp_path, config(server.url)) as world:
        known = await world.call(timeout_ms=60_000)
        assert len(server.calls()) == 1
    assert isinstance(known, Unknown), known
    assert known.result == "disconnected"


@pytest.mark.parametrize("unit", [_NOTE, "", "hello", '{"jsonrpc":"2.0","id":1,"result":{}}', "x" * 1_000])
async def test_a_child_that_talks_without_end_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    monkeypatch.setattr(_COUNT, 2_000)
    monkeypatch.setattr(_BYTES, 1_000_000)
    async with standing(tmp_path, scripted(tmp_path)) as world:
        known = await world.call({"repeat": unit, "times": 2_100}, "echo", timeout_ms=60_000)
        assert isinstance(known, Unknown), known
        assert known.result == "disconnected"
        assert "says too much" in known.detail
        await until(lambda: world.connection().connects == 2)
        assert structured(await world.call("echo")) == {"steps": ["echo"]}


async def test_a_child_that_answers_much_is_not_taken_for_one_that_talks_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_COUNT, 20)
    async with standing(tmp_path, scripted(tmp_path)) as world:
        for _ in range(40):
            assert structured(await world.call("echo")) == {"steps": ["echo"]}
        assert world.connection().connects == 1


async def test_complaints_without_end_hold_up_no_call(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        known = await world.call({"complain": "c" * 65_536, "times": 128}, {"text": 1}, timeout_ms=60_000)
        assert value_of(known)


async def test_what_a_server_says_of_its_own_accord_is_left_too_and_calls_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_COUNT, 2_000)

    async def get(request: web.Request) -> web.StreamResponse:
        return await flooded(request, (f"data: {_NOTE}\n\n" * 50).encode())

    async with http_mcp("legacy", get=get) as server, standing(tmp_path, config(server.url)) as world:
        await until(lambda: len(server.gets) >= 2)  # the first was left, and it listens again
        assert structured(await world.call("x")) == {"steps": ["x"]}
        assert world.connection().connects == 1


async def test_pings_without_end_are_not_answered_without_end(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    async def get(request: web.Request) -> web.StreamResponse:
        return await flooded(request, (f"data: {_PING}\n\n" * 10).encode())

    async with http_mcp("legacy", get=get) as server, standing(tmp_path, config(server.url)) as world:
        began = loop.time()

        def replies() -> int:
            return sum(heard.body.get("id") == "p" for heard in server.requests)

        await until(lambda: replies() > MCP_REPLIES_PER_SECOND_MAX)
        assert structured(await world.call("x")) == {"steps": ["x"]}
        assert replies() <= MCP_REPLIES_PER_SECOND_MAX * (2 + loop.time() - began)


def test_replies_are_bounded_in_a_second_and_not_for_ever() -> None:
    now = 0.0
    inbox = Inbox(lambda: None, clock=lambda: now)
    ping = Message({"id": 1, "method": "ping"})
    answered = sum(inbox.take(ping) is not None for _ in range(100))
    assert answered == MCP_REPLIES_PER_SECOND_MAX
    now = 1.0
    assert inbox.take(ping) is not None


async def test_tools_that_change_all_the_time_are_listed_more_and_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.connectors.mcp.server.MCP_REFRESH_PAUSE_MS", 10)
    loop = asyncio.get_running_loop()

    async def get(request: web.Request) -> web.StreamResponse:
        return await flooded(request, event(json.loads(_CHANGED)))

    async with http_mcp("legacy", get=get) as server, standing(tmp_path, config(server.url)):
        listed = [loop.time()]
        while len(listed) < 8:
            known = len(server.calls("tools/list"))
            await until(lambda known=known: len(server.calls("tools/list")) > known)  # type: ignore[misc]
            listed.append(loop.time())
        # 10, 20, 40 ... ms at least: on a slow machine it takes longer.
        assert listed[-1] - listed[-3] > 4 * 0.01 * 2**3


def test_what_was_not_asked_for_is_counted_for_a_minute() -> None:
    now = 0.0
    unasked = Unasked(lambda: now)
    assert not any(unasked.note(1) for _ in range(MCP_UNASKED_PER_MINUTE_MAX))
    assert unasked.note(1)
    now = 61.0
    assert not unasked.note(1)
    assert unasked.note(MCP_UNASKED_BYTES_PER_MINUTE_MAX)


def events_of(raw: bytes, cuts: list[int]) -> list[tuple[str, Any, str | None, int | None]]:
    reader = EventReader()
    found = []
    edges = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    for start, end in itertools.pairwise(edges):
        found += [event for event in reader.feed(raw[start:end]) if event is not None]
    return [(event.name, event.data, event.event_id, event.retry_ms) for event in found]


def test_events_are_read_the_same_in_whatever_pieces_they_come() -> None:
    raw = (
        b": hi\r\n\r\nid: 7\r\ndata: a\r\ndata:b\ndata\ndata: \n\nretry: 5\r\revent:x\ndata:  c\n\nevent: y\n\n"
        b"dat: no\nid\nretry: x\nid: \x01\n\n\n\r\n\rdata:{}\n\n: last\ndata: cut"
    )
    expected = [
        ("message", b"a\nb\n\n", "7", None),
        ("message", b"", None, 5),
        ("x", b" c", None, None),
        ("y", b"", None, None),
        ("message", b"", None, None),
        ("message", b"{}", None, None),
    ]
    for step in (1, 2, 3, 5, 7, 11, 1_000):
        assert events_of(raw, list(range(step, len(raw), step))) == expected
    for cut in range(len(raw)):
        assert events_of(raw, [cut]) == expected
