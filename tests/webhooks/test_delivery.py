"""Webhooks are told of every request that waits: signed, at least once, whatever receivers and deliverers do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature

from app.connectors.webhooks import Webhooks, backoff_ms
from app.core.errors import ChecksumMismatch, SettingInvalid, StoreUnavailable
from app.domain.tga.announcements import Announcement, OutboxRow
from app.domain.tga.documents import TraceId
from app.keys.keyring import Keyring
from app.postgres.database import Database
from app.postgres.outbox import PostgresOutbox
from tests.conftest import Admin
from tests.connectors.servers import endless, raw_server, response, until
from tests.patience import HANG_S
from tests.traces import action_request, trace_id
from tests.webhooks.sending import OK, Delivery, HandClock, answering, decide, fill, make_due, rows_of, webhooks

ROOT = Path(__file__).parents[2]


async def test_a_delivery_says_who_asks_for_what_and_is_signed(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    await fill(admin, 1)
    row_id = await admin.fetchval("SELECT id FROM tga.outbox")
    async with raw_server(OK) as receiver:
        deliverer = webhooks({"approvals": f"{receiver.url}/hook?token=t"}, outbox, keyring)
        assert await deliverer.deliver_due() == 1
        await deliverer.close()
    (delivery,) = map(Delivery.of, receiver.requests)
    request = action_request(1, arguments={"card": "4111-SECRET"})
    assert delivery.head == "POST /hook?token=t HTTP/1.1"
    assert delivery.document == {
        "event": "approval_requested",
        "delivery_id": f"{trace_id(1)}-{row_id}",
        "trace_id": trace_id(1),
        "action_request_digest": request.digest(),
        "server_id": "crm",
        "tool_name": "create_ticket",
        "principal_id": "agent-1",
        "tenant": "default",
        "requested_at": request.requested_at,
        "expires_at": None,
    }
    assert delivery.id == delivery.document["delivery_id"]
    assert delivery.headers["content-type"] == "application/json"
    assert delivery.headers["webhook-timestamp"] == "1767323045"
    assert delivery.headers["tga-key-id"] == keyring.key_id
    delivery.verify(keyring.public_key_bytes)
    for part in ("webhook-id", "webhook-timestamp"):
        changed = Delivery(delivery.head, {**delivery.headers, part: delivery.headers[part] + "1"}, delivery.body)
        with pytest.raises(InvalidSignature):
            changed.verify(keyring.public_key_bytes)
    with pytest.raises(InvalidSignature):
        Delivery(delivery.head, delivery.headers, delivery.body + b" ").verify(keyring.public_key_bytes)
    assert b"SECRET" not in receiver.requests[0]
    assert await rows_of(admin) == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (response("500 Internal Server Error"), "the receiver answered 500"),
        (response("404 Not Found"), "the receiver answered 404"),
        (response("302 Found", b"", "Location: /elsewhere"), "the receiver answered 302"),
        (response("304 Not Modified"), "the receiver answered 304"),
        (b"", "Disconnected: the server closed the connection"),
        (b"HTTP/1.1 200", "Disconnected: the server closed the connection"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "NotHttp: not HTTP"),
    ],
)
async def test_after_a_failure_the_same_delivery_is_repeated_until_it_is_taken(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring, answer: bytes, error: str
) -> None:
    await fill(admin, 1)
    async with raw_server(answering(answer, answer, OK)) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring)
        for attempt in (1, 2):
            assert await deliverer.deliver_due() == 0
            (row,) = await rows_of(admin)
            assert row["attempts"] == attempt
            assert row["last_error"] in error.split("|")
            assert await deliverer.deliver_due() == 0, "it is not due yet"
            assert len(receiver.requests) == attempt
            await make_due(admin)
        assert await deliverer.deliver_due() == 1
        await deliverer.close()
    deliveries = [Delivery.of(raw) for raw in receiver.requests]
    assert len({delivery.id for delivery in deliveries}) == 1
    assert len(deliveries) == 3
    for delivery in deliveries:
        delivery.verify(keyring.public_key_bytes)
    assert await rows_of(admin) == []


@pytest.mark.parametrize(
    ("first", "unit", "error"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "NotHttp: more than 16 informational answers"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", "NotHttp: more than 256 headers"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y", "NotHttp: more than 65536 bytes before the body"),
    ],
    ids=["100", "headers", "a-header"],
)
async def test_a_receiver_that_answers_without_end_is_left_and_tried_again(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring, first: bytes, unit: bytes, error: str
) -> None:
    sent: list[int] = []
    await fill(admin, 1)
    async with raw_server(endless(first, unit, sent)) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring)
        assert await deliverer.deliver_due() == 0
        (row,) = await rows_of(admin)
        assert row["last_error"] == error
        await deliverer.close()
    assert sum(sent) < 16_000_000
    assert len(receiver.requests) == 1


async def test_a_receiver_that_does_not_answer_is_left_in_time(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    async def silent(writer: asyncio.StreamWriter, count: int) -> None:
        if count == 2:
            writer.write(OK)

    await fill(admin, 1)
    async with raw_server(silent) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring, timeout_ms=200)
        assert await asyncio.wait_for(deliverer.deliver_due(), timeout=HANG_S) == 0
        (row,) = await rows_of(admin)
        assert row["last_error"] == "no answer within 200 ms"
        await make_due(admin)
        assert await deliverer.deliver_due() == 1
        await deliverer.close()


async def test_a_receiver_that_is_away_is_told_when_it_comes_back(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    await fill(admin, 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, but not listening
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        deliverer = webhooks({"approvals": url}, outbox, keyring)
        assert await deliverer.deliver_due() == 0
        (row,) = await rows_of(admin)
        assert row["last_error"] == "NotConnected: Connection refused"
        await deliverer.close()
    await make_due(admin)
    async with raw_server(OK) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring)
        assert await deliverer.deliver_due() == 1
        await deliverer.close()


async def test_the_status_decides_and_an_endless_answer_keeps_nobody(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    async def endless(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.001)

    await fill(admin, 1)
    async with raw_server(endless) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring)
        assert await asyncio.wait_for(deliverer.deliver_due(), timeout=HANG_S) == 1
        await deliverer.close()
    assert len(receiver.requests) == 1
    assert await rows_of(admin) == []


async def test_a_slow_webhook_does_not_hold_up_another(outbox: PostgresOutbox, admin: Admin, keyring: Keyring) -> None:
    async def silent(writer: asyncio.StreamWriter, count: int) -> None:
        return None

    await fill(admin, 30, webhook="slow")
    await fill(admin, 30, webhook="quick")
    async with raw_server(silent) as slow, raw_server(OK) as quick:
        patient = {"timeout_ms": 3_600_000, "lease_ms": 4_000_000}  # nothing of the quick one comes after giving up
        deliverer = webhooks({"slow": slow.url, "quick": quick.url}, outbox, keyring, **patient)
        running = asyncio.create_task(deliverer.run())
        async with asyncio.timeout(HANG_S):  # a row goes after its answer has come
            while any(row["webhook"] == "quick" for row in await rows_of(admin)):
                await asyncio.sleep(0.01)
        assert (len(slow.requests), len(quick.requests)) == (4, 30), "of the slow one as many at once as is allowed"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_two_deliverers_at_once_deliver_each_row_once(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    await fill(admin, 60)
    async with raw_server(OK) as receiver:
        pair = [webhooks({"approvals": receiver.url}, outbox, keyring) for _ in range(2)]
        settled = await asyncio.gather(*(deliverer.deliver_due() for deliverer in pair))
        settled.append(await pair[0].deliver_due())
        for deliverer in pair:
            await deliverer.close()
    assert sum(settled) == 60
    assert min(settled[:2]) > 0
    ids = [Delivery.of(raw).id for raw in receiver.requests]
    assert len(ids) == len(set(ids)) == 60
    assert await rows_of(admin) == []


async def test_a_deliverer_killed_between_post_and_done_is_followed_by_one_that_repeats_it(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring, database: Database, home: Path
) -> None:
    await fill(admin, 1)
    killed: list[int] = []

    async def kill_the_first(writer: asyncio.StreamWriter, count: int) -> None:
        if not killed:
            process.send_signal(signal.SIGKILL)
            killed.append(await process.wait())
        writer.write(OK)

    async with raw_server(kill_the_first) as receiver:
        command = [sys.executable, "-m", "tests.webhooks.deliverer", database.gateway_url, receiver.url, "1500"]
        process = await asyncio.create_subprocess_exec(*command, str(home / "keys"), cwd=ROOT)
        await until(lambda: killed)
        assert killed == [-signal.SIGKILL]
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring)
        assert await deliverer.deliver_due() == 0, "the dead one's lease still runs"
        assert len(receiver.requests) == 1
        async with asyncio.timeout(HANG_S):
            while await deliverer.deliver_due() == 0:
                await asyncio.sleep(0.05)
        await deliverer.close()
    first, second = map(Delivery.of, receiver.requests)
    assert first.id == second.id
    second.verify(keyring.public_key_bytes)
    assert await rows_of(admin) == []


async def test_a_request_that_waits_no_longer_is_not_announced(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    async def nothing(trace: TraceId) -> Announcement | None:
        return None

    await fill(admin, 3)
    async with raw_server(OK) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring, load=nothing)
        assert await deliverer.deliver_due() == 3
        await deliverer.close()
    assert receiver.requests == []
    assert await rows_of(admin) == []


async def test_a_request_that_cannot_be_read_is_tried_again_and_stops_no_other(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    async def load(trace: TraceId) -> Announcement | None:
        if trace == trace_id(1):
            raise ChecksumMismatch("tampered", found="4111-SECRET")
        if trace == trace_id(2):
            raise ZeroDivisionError("4111-SECRET")
        return Announcement.of(action_request(3))

    await fill(admin, 3)
    async with raw_server(OK) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring, load=load)
        assert await deliverer.deliver_due() == 1
        await deliverer.close()
    assert [Delivery.of(raw).document["trace_id"] for raw in receiver.requests] == [trace_id(3)]
    assert [row["last_error"] for row in await rows_of(admin)] == [
        "the request could not be read: STATE_CHECKSUM_MISMATCH",
        "ZeroDivisionError",
    ]


async def test_rows_of_a_webhook_that_is_not_configured_wait_for_it_until_they_are_needless(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    await fill(admin, 2, webhook="gone")
    async with raw_server(OK) as receiver:
        without = webhooks({"approvals": receiver.url}, outbox, keyring)
        assert await without.deliver_due() == 0
        assert await without.drop_decided() == 0
        await decide(admin, 1)
        assert await without.drop_decided() == 1
        again = webhooks({"gone": receiver.url}, outbox, keyring)
        assert await again.deliver_due() == 1
        for deliverer in (without, again):
            await deliverer.close()
    assert [Delivery.of(raw).document["trace_id"] for raw in receiver.requests] == [trace_id(2)]


def test_waiting_doubles_up_to_ten_minutes_with_jitter_over_half_of_it() -> None:
    assert [backoff_ms(n, 1.0) for n in range(1, 13)] == [
        *(1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000, 256_000, 512_000, 600_000, 600_000)
    ]
    assert [backoff_ms(n, 0.0) for n in (1, 2, 11)] == [500, 1_000, 300_000]
    assert backoff_ms(10**9, 0.5) == 450_000


@pytest.mark.parametrize(("jitter", "expected"), [(0.0, [500, 1000, 2000]), (1.0, [1000, 2000, 4000])])
async def test_the_outbox_is_told_to_wait_as_long_as_the_clock_s_jitter_says(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring, jitter: float, expected: list[int]
) -> None:
    await fill(admin, 1)
    async with raw_server(response("500 No")) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring, clock=HandClock(jitters=jitter))
        for retry_ms in expected:
            await deliverer.deliver_due()
            (row,) = await rows_of(admin)
            assert retry_ms - 400 < row["due_in_ms"] <= retry_ms
            await make_due(admin)
        await deliverer.close()


class FlakyOutbox:
    """A store that is away for a while, then has one row."""

    def __init__(self) -> None:
        self.failures_left = 3
        self.done_ids: list[int] = []
        self.cleaned = 0

    async def take(self, names: Sequence[str], *, lease_ms: int, at_most: int) -> list[OutboxRow]:
        self.failures_left -= 1
        if self.failures_left == 1:
            raise ZeroDivisionError("a defect")
        if self.failures_left >= 0:
            raise StoreUnavailable("away")
        return [] if self.done_ids else [OutboxRow(7, names[0], f"trace:{trace_id(1)}", 1, "2026-01-01T00:00:00.000Z")]

    async def done(self, rows: Sequence[OutboxRow]) -> None:
        self.done_ids += [row.id for row in rows]

    async def failed(self, row: OutboxRow, error: str, *, retry_ms: int) -> None:
        raise NotImplementedError

    async def drop_decided(self, *, at_most: int) -> int:
        self.cleaned += 1
        return 0


async def test_running_outlives_a_store_that_is_away_and_a_defect(
    keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    flaky, clock = FlakyOutbox(), HandClock()
    async with raw_server(OK) as receiver:
        running = asyncio.create_task(webhooks({"approvals": receiver.url}, flaky, keyring, clock=clock).run())
        await until(lambda: flaky.done_ids == [7] and flaky.cleaned > 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert set(clock.slept_s) == {1.0, 60.0}
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "WARNING"]


async def test_cancelled_in_the_middle_of_a_post_it_leaves_the_row(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring
) -> None:
    async def silent(writer: asyncio.StreamWriter, count: int) -> None:
        return None

    await fill(admin, 1)
    async with raw_server(silent) as receiver:
        running = asyncio.create_task(webhooks({"approvals": receiver.url}, outbox, keyring).run())
        await until(lambda: receiver.requests)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    (row,) = await rows_of(admin)
    assert (row["attempts"], row["last_error"]) == (1, None)
    assert row["due_in_ms"] > 20_000


async def test_a_token_in_an_address_is_in_no_error_and_no_log(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="app")
    await fill(admin, 2)
    async with raw_server(answering(response("500 TOKEN"), b"TOKEN\r\n\r\n")) as receiver:
        url = receiver.url.replace("://", "://user:TOKEN@") + "/TOKEN?TOKEN"
        deliverer = webhooks({"approvals": url}, outbox, keyring)
        await deliverer.deliver_due()
        await deliverer.close()
    assert len(receiver.requests) == 2
    errors = [row["last_error"] for row in await rows_of(admin)]
    assert all(errors)
    assert "TOKEN" not in str(errors) + caplog.text
    assert "approvals" in caplog.text


@pytest.mark.parametrize(
    "url", ["", "TOKEN", "ftp://host/TOKEN", "http:///TOKEN", "http://host:99999/TOKEN", "//host/TOKEN"]
)
def test_an_address_that_cannot_be_used_is_refused_and_not_shown(url: str, keyring: Keyring) -> None:
    with pytest.raises(SettingInvalid, match="approvals") as caught:
        webhooks({"approvals": url}, FlakyOutbox(), keyring)
    assert "TOKEN" not in str(caught.value)


def test_a_lease_shorter_than_a_delivery_is_refused(keyring: Keyring) -> None:
    given: dict[str, Any] = {"timeout_ms": 1000, "lease_ms": 1000}
    with pytest.raises(SettingInvalid, match="lease"):
        webhooks({}, FlakyOutbox(), keyring, **given)
    assert isinstance(webhooks({}, FlakyOutbox(), keyring), Webhooks)
