"""Readers take turns, and connections leave room: neither keeps from others what they need."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

import pytest

from app.core.errors import GatewayBusy
from app.core.limits import CONNECTIONS_MAX, DESCRIPTORS_RESERVED, READ_PAUSE_MS_MAX, READ_PAUSE_TIMES
from app.edge.protocol import BoundedProtocol
from app.edge.read_scheduler import ReadingSessions, ReadScheduler, reader
from app.gateway.serving import connections_within
from app.postgres.sessions import Sessions
from tests.api.wire import CALL, open_front, request
from tests.patience import HANG_S


async def _read(read_scheduler: ReadScheduler, who: str, order: list[str], *, hold_s: float = 0.002) -> None:
    reader.set(("default", who))
    async with read_scheduler.taken():
        order.append(who)
        await asyncio.sleep(hold_s)


def test_every_way_to_read_is_taken_in_turn() -> None:
    """One that was inherited would go past the turns, to sessions that are not there."""
    ways = {name for name, made in vars(Sessions).items() if inspect.isfunction(made) and not name.startswith("_")}
    assert ways >= {"reading", "fetch", "fetch_page", "fetch_in_order", "commit"}
    assert ways <= set(vars(ReadingSessions))


async def test_a_principal_with_one_read_does_not_wait_behind_anothers_hundred() -> None:
    read_scheduler, order = ReadScheduler(1), list[str]()
    many = [asyncio.create_task(_read(read_scheduler, "many", order)) for _ in range(100)]
    await asyncio.sleep(0)
    one = asyncio.create_task(_read(read_scheduler, "one", order))
    await asyncio.gather(*many, one)
    assert order.index("one") <= 2


async def test_no_more_read_at_once_than_there_are_places_and_every_place_comes_back() -> None:
    read_scheduler, at_once, most = ReadScheduler(3), 0, 0

    async def read() -> None:
        nonlocal at_once, most
        async with read_scheduler.taken():
            at_once += 1
            most = max(most, at_once)
            try:
                await asyncio.sleep(0.001)
            finally:
                at_once -= 1

    reads = [asyncio.create_task(read()) for _ in range(60)]
    await asyncio.sleep(0.002)
    for given_up in reads[::2]:
        given_up.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    assert (most, read_scheduler._free, len(read_scheduler._waiting)) == (3, 3, 0)


async def test_a_turn_that_comes_as_its_reader_goes_is_passed_on() -> None:
    read_scheduler, order = ReadScheduler(1), list[str]()
    async with read_scheduler.taken():
        gone, last = (asyncio.create_task(_read(read_scheduler, who, order)) for who in ("gone", "last"))
        await asyncio.sleep(0.01)
    gone.cancel()  # in the same step in which its turn came
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(gone, last, return_exceptions=True)
    assert order == ["last"]
    assert read_scheduler._free == 1


async def test_who_waits_for_a_turn_for_too_long_is_told_so() -> None:
    read_scheduler, order = ReadScheduler(1, wait_ms=20), list[str]()
    first = asyncio.create_task(_read(read_scheduler, "slow", order, hold_s=0.2))
    await asyncio.sleep(0)
    with pytest.raises(GatewayBusy):
        await _read(read_scheduler, "other", order)
    await first
    await _read(read_scheduler, "other", order)


async def test_readers_pause_while_a_call_is_under_way_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, pauses = asyncio.get_running_loop(), list[float]()

    def pass_on(delay: float, callback: Callable[[], None]) -> None:
        pauses.append(delay)
        loop.call_soon(callback)

    async def read_thrice(read_scheduler: ReadScheduler) -> None:
        async def read() -> None:
            async with read_scheduler.taken():
                began = loop.time()
                while loop.time() < began + 0.002:
                    await asyncio.sleep(0)

        with monkeypatch.context() as changed:
            changed.setattr(loop, "call_later", pass_on)
            await asyncio.gather(read(), read(), read())

    read_scheduler = ReadScheduler(1)
    await read_thrice(read_scheduler)
    assert pauses == []
    with read_scheduler.behind():
        await read_thrice(read_scheduler)
    assert len(pauses) == 2, "after each reader that has another behind it"
    assert min(pauses) >= min(READ_PAUSE_TIMES * 0.002, READ_PAUSE_MS_MAX / 1000)


class Few(BoundedProtocol):
    connections_max = 2
    headers_wait_ms = 400


async def test_beyond_the_connections_there_are_one_is_refused_at_once_and_a_silent_one_makes_room() -> None:
    async with open_front(protocol=Few) as front:
        held = [await front.open() for _ in range(2)]
        for wire in held:
            assert (await wire.ask(request(body=CALL))).status == 200
        async with await front.open() as refused:
            reply = await refused.reply()
            assert (reply.status, reply.code) == (503, "GATEWAY_BUSY")
            assert await refused.is_closed()
        held[0].writer.close()
        await asyncio.sleep(0.05)
        silent = await front.open()
        await asyncio.sleep(0.05)
        async with await front.open() as refused:
            assert (await refused.reply()).status == 503
        assert await silent.is_closed()
        async with await front.open() as taken:
            assert (await taken.ask(request(body=CALL))).status == 200
        for wire in (*held, silent):
            wire.writer.close()


def test_connections_leave_descriptors_for_everything_else() -> None:
    assert connections_within(1_000_000, dispatching=64) == CONNECTIONS_MAX
    for descriptors in (1_024, 4_096):
        most = connections_within(descriptors, dispatching=64)
        # With what may be accepted in one turn, and what is refused and listened to a little longer.
        assert most + most // 4 + most // 16 + DESCRIPTORS_RESERVED + 64 <= descriptors
        assert most >= descriptors // 3
    assert 0 < connections_within(64, dispatching=64) < 32


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"Host: a\r\nHost: b\r\n",
        b"Host: a\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"Host: a\r\nTransfer-Encoding: chunked, chunked\r\n",
        b"Host: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    ],
)
async def test_framing_that_others_may_read_differently_is_refused(lines: bytes) -> None:
    async with open_front() as front, await front.open() as wire:
        await wire.send(b"GET /healthz HTTP/1.1\r\n" + lines + b"\r\n")
        reply = await wire.reply()
        assert (reply.status, reply.code) == (400, "INPUT_MALFORMED")
        assert await wire.is_closed()


async def test_space_around_an_idempotency_key_is_not_part_of_it() -> None:
    async with open_front() as front:
        await front.ask(request(body=CALL, headers={"Idempotency-Key": " \tk-1 \t"}))
        assert [call.idempotency_key for call in front.runtime.calls] == ["k-1"]
