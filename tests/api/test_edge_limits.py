"""Back-pressure: beyond a limit the answer is quick and says when to come back; what was accepted is finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.config import LimitsConfig
from app.core.errors import GatewayBusy, RateLimited, TooManyInFlight, Unauthenticated
from app.core.limits import PRINCIPALS_REMEMBERED
from app.domain.identity import Principal, StoredKey, secret_digest
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from app.edge.admission import Admission
from app.edge.authentication import Authenticator
from tests.api.wire import AGENT, AGENT_2, CALL, STRANGER, Front, OneServer, completed, open_front, request
from tests.patience import HANG_S


class Watch:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def admission(watch: Watch | None = None, **limits: int) -> Admission:
    return Admission(LimitsConfig(**limits), now=watch or Watch())


def test_a_principal_has_its_burst_then_its_rate_and_no_other_principal_pays_for_it() -> None:
    watch = Watch()
    counted = admission(watch, requests_per_second=10, burst=3)
    for _ in range(3):
        counted.leave(counted.enter(AGENT))
    with pytest.raises(RateLimited) as refused:
        counted.enter(AGENT)
    assert refused.value.retry_after_s == 1
    counted.enter(AGENT_2)
    counted.enter(STRANGER)  # the same name in another tenant
    watch.now += 0.1
    counted.enter(AGENT)
    with pytest.raises(RateLimited):
        counted.enter(AGENT)
    watch.now += 3_600
    for _ in range(3):
        counted.enter(AGENT)
    with pytest.raises(RateLimited):
        counted.enter(AGENT)


def test_retry_after_is_the_whole_seconds_that_it_takes() -> None:
    watch = Watch()
    counted = admission(watch, requests_per_second=1, burst=1)
    counted.enter(AGENT)
    watch.now += 0.5
    with pytest.raises(RateLimited) as refused:
        counted.enter(AGENT)
    assert refused.value.retry_after_s == 1
    watch.now += 0.5
    counted.enter(AGENT)


def test_a_refused_request_takes_no_place() -> None:
    counted = admission(in_flight_per_principal=2)
    lines = [counted.enter(AGENT) for _ in range(2)]
    for _ in range(5):
        with pytest.raises(TooManyInFlight):
            counted.enter(AGENT)
    counted.enter(AGENT_2)
    counted.leave(lines[0])
    counted.enter(AGENT)
    with pytest.raises(TooManyInFlight):
        counted.enter(AGENT)


def test_all_together_have_a_limit_too() -> None:
    counted = admission(in_flight=2)
    counted.begin()
    counted.begin()
    with pytest.raises(GatewayBusy):
        counted.begin()
    counted.end()
    counted.begin()
    assert counted.in_flight == 2


def test_a_tool_servers_line_has_a_limit_of_its_own() -> None:
    counted = admission()
    counted.enter_server("crm", 2)
    counted.enter_server("crm", 2)
    with pytest.raises(GatewayBusy):
        counted.enter_server("crm", 2)
    counted.enter_server("pay", 2)
    counted.leave_server("crm")
    with pytest.raises(GatewayBusy):  # its callers have gone, its calls have not
        counted.enter_server("crm", 2, at_work=2)
    counted.enter_server("crm", 2)


def test_those_who_follow_events_are_counted_apart_and_keep_no_request_out() -> None:
    counted = admission(event_subscribers=1, in_flight=2)
    counted.begin()
    with counted.subscription(AGENT):
        assert (counted.in_flight, counted.subscribed) == (0, 1)
        with pytest.raises(TooManyInFlight), counted.subscription(AGENT):
            pass
        with counted.subscription(AGENT_2), pytest.raises(GatewayBusy), counted.subscription(STRANGER):
            pass
    assert (counted.in_flight, counted.subscribed) == (1, 0)
    with pytest.raises(ZeroDivisionError), counted.subscription(AGENT):
        raise ZeroDivisionError
    assert (counted.in_flight, counted.subscribed) == (1, 0)


def test_idle_principals_are_forgotten_and_busy_ones_are_not() -> None:
    watch = Watch()
    counted = admission(watch, requests_per_second=1, burst=1)
    busy = counted.enter(AGENT)
    for round_number in range(5):
        for number in range(PRINCIPALS_REMEMBERED):
            name = f"p-{round_number}-{number}"
            counted.leave(counted.enter(Principal(principal_id=name, tenant="default")))
        watch.now += 2
    assert len(counted._loads) <= 2 * PRINCIPALS_REMEMBERED
    assert counted._loads["default", "agent-1"] is busy


@asynccontextmanager
async def held(front: Front, count: int, **sent: Any) -> AsyncIterator[asyncio.Event]:
    """So many calls under way, until the event is set; all of them are answered."""
    release = asyncio.Event()

    async def answering(call: CheckedCall) -> Answer:
        await release.wait()
        return completed(call)

    front.runtime.answering = answering
    asked = [asyncio.create_task(front.ask(request(body=CALL, **sent))) for _ in range(count)]
    async with asyncio.timeout(HANG_S):
        while len(front.runtime.calls) < count:
            await asyncio.sleep(0.005)
    try:
        yield release
    finally:
        release.set()
        assert [reply.status for reply in await asyncio.gather(*asked)] == [200] * count


async def test_the_limits_hold_over_the_wire() -> None:
    limits = LimitsConfig(in_flight_per_principal=2, in_flight=3)
    async with open_front(limits=limits) as front, held(front, 2):
        reply = await front.ask(request(body=CALL))
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "TOO_MANY_IN_FLIGHT", "1")
        async with held_third(front):
            reply = await front.ask(request(body=CALL, who="stranger"))
            assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "GATEWAY_BUSY", "1")
            assert (await front.ask(request("/healthz", method="GET"))).status == 200
            assert (await front.ask(request("/readyz", method="GET"))).status == 200


@asynccontextmanager
async def held_third(front: Front) -> AsyncIterator[None]:
    asked = asyncio.create_task(front.ask(request(body=CALL, who="agent-2")))
    async with asyncio.timeout(HANG_S):
        while len(front.runtime.calls) < 3:
            await asyncio.sleep(0.005)
    yield
    asked.cancel()


async def test_a_full_server_line_is_503_over_the_wire() -> None:
    registry = OneServer(max_in_flight=1)
    async with open_front(registry=registry) as front:
        async with held(front, 1):
            reply = await front.ask(request(body=CALL, who="agent-2"))
            assert (reply.status, reply.code, reply.headers["retry-after"]) == (503, "GATEWAY_BUSY", "1")
            other = {**CALL, "server_id": "elsewhere"}
            asked = asyncio.create_task(front.ask(request(body=other)))
            await asyncio.sleep(0.05)
        assert (await asked).status == 200
        front.runtime.driving = 1
        assert (await front.ask(request(body=CALL))).code == "GATEWAY_BUSY"


async def test_the_rate_is_429_over_the_wire() -> None:
    async with open_front(limits=LimitsConfig(requests_per_second=1, burst=2)) as front:
        replies = [await front.ask(request(body=CALL)) for _ in range(4)]
        assert [reply.status for reply in replies[:2]] == [200, 200]
        assert (replies[3].status, replies[3].code) == (429, "RATE_LIMITED")
        assert int(replies[3].headers["retry-after"]) >= 1
        assert (await front.ask(request(body=CALL, who="agent-2"))).status == 200


class Book:
    """Keys with a memory: `looked_up` counts the looks at the store."""

    def __init__(self, *remembered: str) -> None:
        self.remembered = remembered
        self.looked_up = 0

    def cached_key(self, key_id: str) -> StoredKey | None:
        return _stored(key_id) if key_id in self.remembered else None

    async def load_key(self, key_id: str) -> StoredKey | None:
        self.looked_up += 1
        return _stored(key_id) if key_id.startswith("a") else None


class AnyToken:
    async def verify(self, token: str) -> Principal | None:
        return AGENT if token == "a.good.token" else None  # noqa: S105


def _stored(key_id: str) -> StoredKey:
    return StoredKey(key_id, secret_digest("s" * 43), "agent-1", "default", ("agent",), True)


def _key(number: int, first: str = "b") -> str:
    return f"Bearer tga_{first}{number:015x}_{'s' * 43}"


async def test_what_costs_no_look_is_refused_without_one() -> None:
    book = Book(f"a{1:015x}")
    authenticator = Authenticator(book, AnyToken())
    await authenticator.authenticate(_key(1, "a"))  # remembered
    await authenticator.authenticate("Bearer a.good.token")
    for nobody in (None, "Bearer a.bad.token", "Bearer tga_nothing"):
        with pytest.raises(Unauthenticated):
            await authenticator.authenticate(nobody)
    assert book.looked_up == 0


async def test_a_key_that_exists_is_never_refused_for_those_that_do_not() -> None:
    book = Book()
    authenticator = Authenticator(book, AnyToken())
    for number in range(2_000):
        with pytest.raises(Unauthenticated):
            await authenticator.authenticate(_key(number))
    assert (await authenticator.authenticate(_key(3, "a"))).principal_id == "agent-1"


async def test_every_place_is_given_back_whatever_happens() -> None:
    async with open_front() as front:
        async with await front.open() as wire:
            for raw in (
                request(body=CALL),
                request(body=b"{"),
                request(body=CALL, who="nobody"),
                request(body=CALL, who="operator"),
                request("/nowhere"),
                request("/v1/traces/x/recover"),
            ):
                await wire.ask(raw)
        assert front.services.admission.in_flight == 0
        assert front.services.admission._of_server == {}
        assert [line.in_flight for line in front.services.admission._loads.values()] == [0] * 2
