"""The line to a server: so many calls at once, none lost, no place leaked, and what is known of the server's health."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.connectors.registry import Registry
from app.connectors.server_slots import ServerSlots
from app.core.limits import CONNECTIONS_PER_SERVER_MAX
from app.domain.tga.documents import ToolCall
from app.domain.tga.ports import Answered, Dispatched, MaySend, NotSent, Unknown
from tests.connectors.servers import Raw, always, raw_server, response, tool_call, until


def registry_for(tmp_path: Path, *urls: str, concurrency: int) -> Registry:
    path = tmp_path / "tga.toml"
    path.write_text(
        "".join(
            f'[servers.s{n}]\ntransport = "http"\nbase_url = "{url}"\nmax_concurrency = {concurrency}\n'
            for n, url in enumerate(urls)
        )
    )
    return Registry.from_config(load_config(path))


class Gate:
    """Answers only when it is opened, and counts how many wait at the server."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.inside = self.most = 0

    async def answer(self, writer: asyncio.StreamWriter, count: int) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.is_open.wait()
            await asyncio.sleep(random.random() / 100)
        finally:
            self.inside -= 1
        writer.write(response("200 OK", b"1"))


async def test_of_a_hundred_calls_only_so_many_are_sent_at_once_and_all_are_sent_once(tmp_path: Path) -> None:
    gate = Gate()
    async with raw_server(gate.answer) as raw:
        registry = registry_for(tmp_path, raw.url, concurrency=8)
        tasks = [
            asyncio.ensure_future(registry.of("s0").dispatch(tool_call(arguments={"n": n}), timeout_ms=10_000))
            for n in range(100)
        ]
        await until(lambda: len(raw.requests) == 8)
        await asyncio.sleep(0.1)
        assert len(raw.requests) == 8
        health = registry.servers()[0].health
        assert (health.dispatching, health.waiting) == (8, 92)
        gate.is_open.set()
        results = await asyncio.gather(*tasks)
        await registry.close()
    assert all(isinstance(result, Answered) for result in results)
    assert gate.most == 8
    bodies = [request.partition(b"\r\n\r\n")[2] for request in raw.requests]
    assert sorted(bodies) == sorted(f'{{"n":{n}}}'.encode() for n in range(100))
    health = registry.servers()[0].health
    assert (health.dispatching, health.waiting, health.answered, health.failed) == (0, 0, 100, 0)


async def test_cancelled_calls_leave_no_place_behind(tmp_path: Path) -> None:
    gate = Gate()
    chance = random.Random(4)
    async with raw_server(gate.answer) as raw:
        registry = registry_for(tmp_path, raw.url, concurrency=5)
        line = registry.of("s0")
        tasks = [asyncio.ensure_future(line.dispatch(tool_call(), timeout_ms=10_000)) for _ in range(100)]
        await until(lambda: len(raw.requests) == 5)
        doomed = chance.sample(tasks, 60) + tasks[:2]  # those that wait and those that are at the server
        for task in doomed:
            task.cancel()
        gate.is_open.set()
        for task in chance.sample(tasks, 20):  # and some in the moment that they are given a place
            await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, Answered | asyncio.CancelledError) for result in results)
        health = line.health()
        assert (health.dispatching, health.waiting) == (0, 0)
        gate.is_open.clear()
        await until(lambda: gate.inside == 0)
        before = len(raw.requests)
        again = [asyncio.ensure_future(line.dispatch(tool_call(), timeout_ms=10_000)) for _ in range(20)]
        await until(lambda: len(raw.requests) == before + 5)  # all five places are still there
        await asyncio.sleep(0.05)
        assert len(raw.requests) == before + 5
        gate.is_open.set()
        assert all(isinstance(result, Answered) for result in await asyncio.gather(*again))
        await registry.close()


async def test_waiting_for_a_place_is_not_counted_as_waiting_for_the_server(tmp_path: Path) -> None:
    gate = Gate()
    async with raw_server(gate.answer) as raw:
        registry = registry_for(tmp_path, raw.url, concurrency=1)
        line = registry.of("s0")
        first = asyncio.ensure_future(line.dispatch(tool_call(), timeout_ms=10_000))
        await until(lambda: raw.requests)
        second = asyncio.ensure_future(line.dispatch(tool_call(), timeout_ms=300))
        await asyncio.sleep(0.6)
        assert not second.done()
        assert len(raw.requests) == 1
        gate.is_open.set()
        assert isinstance(await first, Answered)
        assert isinstance(await second, Answered)
        await registry.close()


async def test_one_servers_line_does_not_hold_up_anothers(tmp_path: Path) -> None:
    gate = Gate()
    async with raw_server(gate.answer) as raw:  # one address, so that connections might be short too
        registry = registry_for(tmp_path, raw.url, raw.url, concurrency=CONNECTIONS_PER_SERVER_MAX)
        stuck = [
            asyncio.ensure_future(registry.of(server).dispatch(tool_call(), timeout_ms=10_000))
            for server in ("s0", "s1")
            for _ in range(CONNECTIONS_PER_SERVER_MAX)
        ]
        await until(lambda: len(raw.requests) == 2 * CONNECTIONS_PER_SERVER_MAX)
        gate.is_open.set()
        assert all(isinstance(result, Answered) for result in await asyncio.gather(*stuck))
        await registry.close()


async def test_places_are_given_in_the_order_of_asking(tmp_path: Path) -> None:
    async with raw_server(always(response("200 OK", b"1"))) as raw:
        registry = registry_for(tmp_path, raw.url, concurrency=1)
        line = registry.of("s0")
        await asyncio.gather(*[line.dispatch(tool_call(arguments={"n": n}), timeout_ms=5000) for n in range(20)])
        await registry.close()
    assert [request.partition(b"\r\n\r\n")[2] for request in raw.requests] == [
        f'{{"n":{n}}}'.encode() for n in range(20)
    ]


async def test_who_holds_a_place_may_look_before_sending(tmp_path: Path) -> None:
    async with raw_server(always(response("200 OK", b"1"))) as raw:
        registry = registry_for(tmp_path, raw.url, concurrency=1)
        line = registry.of("s0")
        async with line.place() as connector:
            assert line.health().dispatching == 1
            waiting = asyncio.ensure_future(line.dispatch(tool_call(), timeout_ms=5000))
            await asyncio.sleep(0.05)
            assert raw.requests == []
            assert isinstance(await connector.dispatch(tool_call(), timeout_ms=5000), Answered)
            assert len(raw.requests) == 1
        assert isinstance(await waiting, Answered)
        with pytest.raises(LookupError):
            async with line.place():
                raise LookupError
        assert isinstance(await line.dispatch(tool_call(), timeout_ms=5000), Answered)
        await registry.close()


class Scripted:
    """Gives what it is told to; an exception is raised."""

    def __init__(self) -> None:
        self.next: Dispatched | Exception = NotSent("")
        self.given: dict[str, Any] = {}

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        self.given = {
            "timeout_ms": timeout_ms,
            "traceparent": traceparent,
            "arguments": arguments,
            "may_send": may_send,
        }
        if isinstance(self.next, Exception):
            raise self.next
        return self.next


async def test_health_tells_the_last_answer_and_the_last_failure() -> None:
    inner, times = Scripted(), iter(["t1", "t2", "t3", "t4", "t5"])
    line = ServerSlots(inner, concurrency=1, now=lambda: next(times))
    seen = []
    for result in (
        NotSent("detail"),
        Answered("FAILURE", None),
        Unknown("timed_out", "detail"),
        Answered("SUCCESS", None),
        Unknown("retryable_answer", "detail"),
    ):
        inner.next = result
        assert await line.dispatch(tool_call(), timeout_ms=7, traceparent="t", arguments={"a": 1}) is result
        health = line.health()
        seen.append((health.last_answer_at, health.last_failure_at, health.last_failure_kind))
    assert inner.given == {"timeout_ms": 7, "traceparent": "t", "arguments": {"a": 1}, "may_send": None}
    assert seen == [
        (None, "t1", "not_sent"),
        ("t2", "t1", "not_sent"),
        ("t2", "t3", "timed_out"),
        ("t4", "t3", "timed_out"),
        ("t4", "t5", "retryable_answer"),
    ]
    assert (health.answered, health.failed, health.dispatching, health.waiting) == (2, 3, 0, 0)


async def test_a_defect_in_a_connector_gives_its_place_back() -> None:
    inner = Scripted()
    line = ServerSlots(inner, concurrency=1, now=lambda: "t")
    inner.next = RuntimeError("a defect")
    for _ in range(3):
        with pytest.raises(RuntimeError):
            await asyncio.wait_for(line.dispatch(tool_call(), timeout_ms=1), 5)
    assert (line.health().dispatching, line.health().waiting) == (0, 0)


async def test_what_waits_when_the_registry_closes_is_not_sent(tmp_path: Path) -> None:
    gate = Gate()
    raw: Raw
    async with raw_server(gate.answer) as raw:
        registry = registry_for(tmp_path, raw.url, concurrency=1)
        tasks = [asyncio.ensure_future(registry.of("s0").dispatch(tool_call(), timeout_ms=5000)) for _ in range(5)]
        await until(lambda: raw.requests)
        await registry.close()
        results = await asyncio.gather(*tasks)
    assert isinstance(results[0], Unknown)
    assert all(isinstance(result, NotSent) for result in results[1:])
    assert len(raw.requests) == 1
