"""Stopping: nothing new is taken, what is in flight is answered, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.core.errors import CallInFlight, ConcurrentExecution, KeyReused, SettingInvalid, TgaError
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.ports import StoredTrace
from app.domain.tga.replay import LogRecord, fold
from app.domain.tga.runtime import CheckedCall
from tests.api.wire import CALL, Front, NoTraces, completed, open_front, request
from tests.patience import HANG_S
from tests.traces import completed_trace, executing_trace, trace_id


async def until_called(front: Front, count: int = 1) -> None:
    async with asyncio.timeout(HANG_S):
        while len(front.runtime.calls) < count:
            await asyncio.sleep(0.005)


def first_waits(front: Front, *, then: TgaError) -> Callable[[CheckedCall], Awaitable[Answer]]:
    """A call that does not end; asked once more, the runtime says `then`."""

    async def answering(call: CheckedCall) -> Answer:
        if len(front.runtime.calls) > 1:
            raise then
        await asyncio.Event().wait()
        return completed(call)

    return answering


class OneTrace(NoTraces):
    def __init__(self, records: list[LogRecord]) -> None:
        self._records = records

    async def load_trace(self, trace_id: TraceId) -> StoredTrace:
        state = fold(self._records)
        assert state is not None
        return StoredTrace(state, self._records, [], None, None, None, None)


async def test_an_idle_gateway_stops_at_once_and_hangs_up() -> None:
    async with open_front(grace_ms=3_600_000) as front, await front.open() as wire:
        assert (await wire.ask(request(body=CALL))).status == 200
        front.services.stopping.set()
        async with asyncio.timeout(HANG_S):
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
        front.services.stopping.set()
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
    still = CallInFlight("still being executed", stream=f"trace:{trace_id(1)}")
    traces = OneTrace(executing_trace(1))
    async with open_front(grace_ms=100, traces=traces) as front, await front.open() as wire:
        front.runtime.answering = first_waits(front, then=still)
        await wire.send(request(body=CALL))
        await until_called(front)
        front.services.stopping.set()
        reply = await wire.reply()
        assert reply.status == 202
        assert reply.headers["location"] == f"/v1/traces/{trace_id(1)}"
        assert reply.document == {"trace_id": trace_id(1), "state": "EXECUTING", "waiting": None}
        assert front.runtime.waits_ms == [30_000, 0]
        async with asyncio.timeout(HANG_S):
            await front.serving


async def test_a_call_that_is_not_durable_yet_is_not_acknowledged() -> None:
    async def answering(call: CheckedCall) -> Answer:
        await asyncio.Event().wait()
        return completed(call)

    without_key = {"server_id": "crm", "tool_name": "read", "arguments": {}}
    async with open_front(grace_ms=100) as front, await front.open() as wire:
        front.runtime.answering = answering
        await wire.send(request(body=without_key))
        await until_called(front)
        front.services.stopping.set()
        reply = await wire.reply()
        assert (reply.status, reply.code) == (503, "SHUTTING_DOWN")


@pytest.mark.parametrize(
    ("then", "code"),
    [
        (ConcurrentExecution("this process already executes the trace"), "SHUTTING_DOWN"),
        (KeyReused("the key belongs to another call"), KeyReused.code),
    ],
    ids=["its claim is not durable yet", "its key is another's"],
)
async def test_a_call_with_a_key_is_told_what_its_key_stands_for_and_nothing_else(then: TgaError, code: str) -> None:
    async with open_front(grace_ms=100) as front, await front.open() as wire:
        front.runtime.answering = first_waits(front, then=then)
        await wire.send(request(body=CALL))
        await until_called(front)
        front.services.stopping.set()
        assert (await wire.reply()).code == code


@pytest.mark.parametrize(("whose", "status"), [("agent-1", 200), ("agent-2", 503)], ids=["its own", "another's"])
async def test_a_trace_that_ended_is_answered_to_whose_it_is(whose: str, status: int) -> None:
    """Who names a trace_id may name another's; the runtime may not have come to look at it."""
    without_key = {"server_id": "crm", "tool_name": "read", "arguments": {}, "trace_id": trace_id(1)}
    traces = OneTrace(completed_trace(1, principal={"principal_id": whose, "tenant": "default"}))
    async with open_front(grace_ms=100, traces=traces) as front, await front.open() as wire:
        front.runtime.answering = first_waits(front, then=CallInFlight("not asked"))
        await wire.send(request(body=without_key))
        await until_called(front)
        front.services.stopping.set()
        assert (await wire.reply()).status == status


async def test_a_client_that_is_still_sending_does_not_keep_it_from_stopping() -> None:
    async with open_front(grace_ms=100) as front, await front.open() as wire:
        await wire.send(request(body=CALL)[:-3])
        await asyncio.sleep(0.05)
        front.services.stopping.set()
        assert (await wire.reply()).code == "SHUTTING_DOWN"
        async with asyncio.timeout(HANG_S):
            await front.serving


async def test_a_taken_port_is_a_setting_that_is_wrong() -> None:
    async with open_front() as front:
        with pytest.raises(SettingInvalid):
            async with open_front(port=front.port):
                pass
