"""Stopping: nothing new is taken, what is in flight is answered, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.core.errors import CallInFlight, SettingInvalid
from app.domain.tga.drive import Answer
from app.domain.tga.models import TraceId
from app.domain.tga.runtime import CheckedCall
from tests.api.wire import CALL, TRACE_ID, Front, NoTraces, completed, open_front, request


async def until_called(front: Front, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while len(front.runtime.calls) < count:
            await asyncio.sleep(0.005)


async def test_an_idle_gateway_stops_at_once_and_hangs_up() -> None:
    async with open_front() as front, await front.open() as wire:
        assert (await wire.ask(request(body=CALL))).status == 200
        front.edge.stopping.set()
        async with asyncio.timeout(2):
            await front.serving
        assert await wire.is_closed()
        with pytest.raises(OSError):  # noqa: PT011 - refused
            await front.open()


async def test_while_it_stops_what_is_in_flight_is_finished_and_what_is_new_is_told_to_come_back() -> None:
    release = asyncio.Event()

    async def answering(call: CheckedCall) -> Answer:
        await release.wait()
        return completed(call)

    async with (
        open_front() as front,
        await front.open() as idle,
        await front.open() as busy,
    ):
        await idle.ask(request(body=CALL))
        front.runtime.answering = answering
        await busy.send(request(body=CALL))
        await until_called(front, 2)
        front.edge.stopping.set()
        await asyncio.sleep(0.05)
        async with await front.open() as new:
            for wire in (idle, new):
                reply = await wire.ask(request(body=CALL))
                assert (reply.status, reply.code) == (503, "SHUTTING_DOWN")
                assert reply.headers["connection"] == "close"
                assert int(reply.headers["retry-after"]) >= 1
                assert await wire.is_closed()
        assert (await front.ask(request("/readyz", method="GET"))).code == "SHUTTING_DOWN"
        assert (await front.ask(request("/healthz", method="GET"))).status == 200
        assert len(front.runtime.calls) == 2
        release.set()
        assert (await busy.reply()).status == 200
        assert await busy.is_closed()


async def test_a_call_that_takes_longer_than_the_grace_is_answered_with_where_it_is() -> None:
    async def answering(call: CheckedCall) -> Answer:
        if len(front.runtime.calls) > 1:
            raise CallInFlight("still being executed", stream=f"trace:{TRACE_ID}")
        await asyncio.sleep(60)
        return completed(call)

    class Executing(NoTraces):
        async def load_trace(self, trace_id: TraceId) -> Any:
            return SimpleNamespace(state=SimpleNamespace(state="EXECUTING", tool_call_id=None), waiting=None)

    async with open_front(grace_ms=100, traces=Executing()) as front, await front.open() as wire:
        front.runtime.answering = answering
        await wire.send(request(body=CALL))
        await until_called(front)
        front.edge.stopping.set()
        reply = await wire.reply()
        assert reply.status == 202
        assert reply.headers["location"] == f"/v1/traces/{TRACE_ID}"
        assert reply.document == {"trace_id": TRACE_ID, "state": "EXECUTING", "waiting": None}
        assert front.runtime.waits_ms == [30_000, 0]
        async with asyncio.timeout(3):
            await front.serving


async def test_a_call_that_is_not_durable_yet_is_not_acknowledged() -> None:
    async def answering(call: CheckedCall) -> Answer:
        await asyncio.sleep(60)
        return completed(call)

    without_key = {"server_id": "crm", "tool_name": "read", "arguments": {}}
    async with open_front(grace_ms=100) as front, await front.open() as wire:
        front.runtime.answering = answering
        await wire.send(request(body=without_key))
        await until_called(front)
        front.edge.stopping.set()
        reply = await wire.reply()
        assert (reply.status, reply.code) == (503, "SHUTTING_DOWN")


async def test_a_client_that_is_still_sending_does_not_keep_it_from_stopping() -> None:
    async with open_front(grace_ms=100) as front, await front.open() as wire:
        await wire.send(request(body=CALL)[:-3])
        await asyncio.sleep(0.05)
        front.edge.stopping.set()
        assert (await wire.reply()).code == "SHUTTING_DOWN"
        async with asyncio.timeout(4):
            await front.serving


async def test_a_taken_port_is_a_setting_that_is_wrong() -> None:
    async with open_front() as front:
        with pytest.raises(SettingInvalid):
            async with open_front(port=front.port):
                pass
