"""Following a trace and the ledger: without gap or repeat from any place on, and ended when it should be."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.config import LimitsConfig
from app.domain.tga.transitions import TRACE
from app.edge.watching import StreamWatch
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.queries import PostgresQueries
from app.postgres.sessions import Sessions
from tests.api.reading import Event, Front, Subscriber, World
from tests.invariants.plans import plan_of
from tests.patience import HANG_S
from tests.traces import PATHS, completed_trace, denied_trace, pending_trace, trace_id

EVENTS = f"/v1/traces/{trace_id(1)}/events"


@pytest.fixture
def world(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> World:
    return World.of(database, sessions, ledger, tmp_path)


@pytest.fixture
async def front(world: World) -> AsyncIterator[Front]:
    async with world.open() as opened:
        yield opened


async def until(holds: Callable[[], bool], *, timeout_s: float = HANG_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


async def quiet_until(subscriber: Subscriber, holds: Callable[[], bool]) -> None:
    """Read on until it holds; no event comes meanwhile."""
    reading = asyncio.create_task(subscriber.next_event())
    await until(lambda: holds() or reading.done())
    assert not reading.done()
    reading.cancel()


def numbers(events: list[Event]) -> list[int]:
    return [event.data["sequence_number"] for event in events if event.name == "entry"]


@pytest.mark.parametrize("path", ["COMPLETED", "FAILED", "DENIED"])
async def test_a_finished_trace_is_told_from_any_entry_on_and_ended(front: Front, path: str) -> None:
    records = PATHS[path](1)
    await front.append_trace(records)
    for after in range(len(records)):
        headers = {"Last-Event-ID": str(after)} if after else {}
        async with front.follow(EVENTS, **headers) as subscriber:
            events = await subscriber.all_events()
        assert numbers(events) == list(range(after + 1, len(records) + 1))
        assert [event.identity for event in events[:-1]] == [str(n) for n in numbers(events)]
        assert (events[-1].name, events[-1].data["state"]) == ("end", path)
    items = (await front.page(f"/v1/traces/{trace_id(1)}/entries"))["items"]
    async with front.follow(EVENTS) as subscriber:
        assert [event.data for event in await subscriber.all_events()][:-1] == items
    # All was received: an EventSource stops at 204.
    async with front.follow(EVENTS, **{"Last-Event-ID": str(len(records))}) as subscriber:
        assert subscriber.response.status == 204
    async with front.follow(f"{EVENTS}?after_seq=1", **{"Last-Event-ID": "2"}) as subscriber:
        assert numbers(await subscriber.all_events()) == list(range(3, len(records) + 1))


async def test_a_follower_hears_of_every_entry_soon_after_it_stands(front: Front) -> None:
    records = completed_trace(1)
    await front.append_trace(records[:1])
    async with front.follow(EVENTS) as subscriber:
        first = await subscriber.next_event()
        assert first is not None
        assert first.identity == "1"
        await asyncio.sleep(1.2)  # it has become slow to look
        for record in records[1:]:
            await front.append_trace([record])
            async with asyncio.timeout(HANG_S):
                event = await subscriber.next_event()
            assert event is not None
            assert event.data["entry_digest"] == record.entry.entry_digest
        end = await subscriber.next_event()
        assert end is not None
        assert end.name == "end"
        assert await subscriber.next_event() is None


async def test_cut_anywhere_and_resumed_nothing_is_missing_or_repeated(front: Front) -> None:
    """The connection breaks after any number of bytes; the client goes on after the last whole event."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    records = completed_trace(1)
    writer = asyncio.create_task(_append_slowly(front, records))
    found: list[Event] = []
    last: str | None = None
    while not (found and found[-1].name == "end"):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0.02, 0.4)):
                headers = {} if last is None else {"Last-Event-ID": last}
                async with front.follow(EVENTS, **headers) as subscriber:
                    if subscriber.response.status == 404:  # nothing stands yet
                        continue
                    while (event := await subscriber.next_event()) is not None:
                        found.append(event)
                        last = event.identity or last
    await writer
    assert numbers(found) == [1, 2, 3, 4]
    await until(lambda: front.services.admission.subscribed == 0)


async def _append_slowly(front: Front, records: list[Any]) -> None:
    for record in records:
        await asyncio.sleep(0.25)
        await front.append_trace([record])


async def test_two_hundred_followers_of_one_trace_look_as_one(
    front: Front, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = pages = 0

    look, bring = StreamWatch._look, StreamWatch._bring  # each is one query, for all followers

    async def count_look(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return await look(*arguments)

    async def count_page(*arguments: Any) -> Any:
        nonlocal pages
        pages += 1
        return await bring(*arguments)

    monkeypatch.setattr(StreamWatch, "_look", count_look)
    monkeypatch.setattr(StreamWatch, "_bring", count_page)
    records = completed_trace(1)
    await front.append_trace(records[:1])

    async def follow() -> list[Event]:
        async with front.follow(EVENTS) as subscriber:
            return await subscriber.all_events()

    followers = [asyncio.create_task(follow()) for _ in range(200)]
    await until(lambda: front.services.admission.subscribed == 200, timeout_s=30)
    looks = pages = 0
    begun = asyncio.get_running_loop().time()
    for record in records[1:]:
        await front.append_trace([record])
        await asyncio.sleep(0.3)
    for follower in followers:
        assert numbers(await follower) == [1, 2, 3, 4]
    # One look in 50 ms at most, and each new page read once, for all of them.
    assert looks <= (asyncio.get_running_loop().time() - begun) / 0.05 + 5
    assert pages <= 3
    await until(lambda: front.services.admission.subscribed == 0)
    at_rest = looks
    await asyncio.sleep(0.3)
    assert looks == at_rest, "nobody follows, nobody looks"


async def test_what_was_brought_for_one_place_is_not_given_to_a_follower_at_another(
    ledger: PostgresLedger, sessions: Sessions
) -> None:
    records = completed_trace(1)
    await ledger.commit(plan_of(records[:1]))
    with StreamWatch(PostgresQueries(sessions)).watching(TRACE.stream(trace_id(1)), 1) as watched:
        await ledger.commit(plan_of(records[1:3]))
        page = await watched.beyond(1)
        assert page is not None
        assert [stored.sequence_number for stored in page.items] == [2, 3]
        assert await watched.beyond(2) is None, "who has read 2 reads on from the store"


async def test_no_more_may_follow_than_the_limit_says(world: World) -> None:
    async with world.open(LimitsConfig(event_subscribers=3)) as front:
        await front.append_trace(pending_trace(1))
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                subscriber = await stack.enter_async_context(front.follow(EVENTS))
                assert await subscriber.next_event() is not None
            for path in (EVENTS, "/v1/events"):
                status, document, _ = await front.get(path, Accept="text/event-stream")
                assert (status, document["code"]) == (429, "TOO_MANY_IN_FLIGHT")
            assert (await front.get("/v1/traces"))[0] == 200
        await until(lambda: front.services.admission.subscribed == 0)
        async with front.follow(EVENTS) as subscriber:
            assert await subscriber.next_event() is not None


async def test_a_stopping_gateway_ends_its_streams_whole(front: Front) -> None:
    await front.append_trace(pending_trace(1))
    async with front.follow(EVENTS) as of_trace, front.follow("/v1/events") as of_ledger:
        for subscriber in (of_trace, of_ledger):
            assert await subscriber.next_event() is not None
        front.services.stopping.set()
        for subscriber in (of_trace, of_ledger):
            while (event := await subscriber.next_event()) is not None:
                assert event.name == "entry"


async def test_a_quiet_stream_beats(world: World) -> None:
    async with world.open_events(heartbeat_ms=50) as front:
        await front.append_trace(pending_trace(1))
        for path in (EVENTS, "/v1/events"):
            async with front.follow(path) as subscriber:
                assert await subscriber.next_event() is not None
                await quiet_until(subscriber, lambda heard=subscriber: heard.beats >= 3)  # type: ignore[misc]


async def test_a_credential_that_is_withdrawn_ends_its_streams(world: World) -> None:
    async with world.open_events(heartbeat_ms=50) as front:
        await front.append_trace(pending_trace(1))
        async with front.follow(EVENTS, "auditor") as ended, front.follow(EVENTS, "agent") as kept:
            for subscriber in (ended, kept):
                assert await subscriber.next_event() is not None
            front.tokens.revoked.add("auditor")
            assert await ended.next_event() is None
            await front.append_trace(denied_trace(1)[1:])
            event = await kept.next_event()
            assert event is not None
            assert event.identity == "2"


async def test_a_client_that_takes_nothing_is_ended(world: World) -> None:
    async with world.open_events(heartbeat_ms=100, send_wait_ms=300) as front:
        for n in range(40):
            await front.append_trace(completed_trace(n, arguments={"text": "x" * 200_000}))
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
        writer.write(
            b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer auditor\r\nAccept: text/event-stream\r\n\r\n"
        )
        await until(lambda: front.services.admission.subscribed == 1)
        await until(lambda: front.services.admission.subscribed == 0)
        assert reader.at_eof() is False
        writer.transport.abort()
        # Another one, which reads, is served whole.
        async with front.follow("/v1/events") as subscriber:
            found = [await subscriber.next_event() for _ in range(160)]
        assert len({(event.data["stream"], event.data["sequence_number"]) for event in found if event}) == 160


async def feed_by_pages(front: Front, who: str, done: asyncio.Event) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    after = ""
    while True:
        is_over = done.is_set()
        page = await front.page(f"/v1/events?limit=13{after}", who)
        found += [(item["stream"], item["sequence_number"]) for item in page["items"]]
        if is_over and after == f"&after={page['next']}":
            return found
        after = f"&after={page['next']}"


async def feed_by_events(front: Front, who: str, done: asyncio.Event, chance: random.Random) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    last: str | None = None
    while not (done.is_set() and last and (await front.page(f"/v1/events?after={last}", who))["items"] == []):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0.2, 0.7)):
                headers = {} if last is None else {"Last-Event-ID": last}
                async with front.follow("/v1/events", who, **headers) as subscriber:
                    while (event := await subscriber.next_event()) is not None:
                        found.append((event.data["stream"], event.data["sequence_number"]))
                        last = subscriber.last_id
    return found


async def test_the_feed_is_whole_for_everyone_while_many_write(front: Front) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    owners = {
        n: chance.choice([("agent-1", "default"), ("agent-2", "default"), ("agent-1", "acme")]) for n in range(90)
    }
    done = asyncio.Event()

    async def write(some: list[int]) -> None:
        for n in some:
            who, tenant = owners[n]
            records = completed_trace(n, principal={"principal_id": who, "tenant": tenant}, server_id=f"{tenant}/x")
            await front.append_trace(records[:3])
            await asyncio.sleep(chance.uniform(0, 0.02))
            await front.append_trace(records[3:])

    readers: dict[tuple[str, str], Awaitable[list[tuple[str, int]]]] = {}
    for who in ("auditor", "agent", "acme"):
        readers[who, "pages"] = asyncio.create_task(feed_by_pages(front, who, done))
        readers[who, "events"] = asyncio.create_task(feed_by_events(front, who, done, chance))
    await asyncio.gather(*(write(list(range(start, 90, 6))) for start in range(6)))
    done.set()
    sees: dict[str, Callable[[str, str], bool]] = {
        "auditor": lambda who, tenant: tenant == "default",
        "agent": lambda who, tenant: (who, tenant) == ("agent-1", "default"),
        "acme": lambda who, tenant: tenant == "acme",
    }
    for (reader, way), reading in readers.items():
        found = await reading
        expected = {
            (f"trace:{trace_id(n)}", place) for n in owners if sees[reader](*owners[n]) for place in range(1, 5)
        }
        assert len(found) == len(set(found)), (reader, way)
        assert set(found) == expected, (reader, way)
        for stream in {stream for stream, _ in found}:
            assert [place for at, place in found if at == stream] == [1, 2, 3, 4]


async def test_the_feeds_cursor_moves_past_what_one_may_not_see(front: Front) -> None:
    await front.append(*(plan_of(completed_trace(n)) for n in range(5)))
    page = await front.page("/v1/events", "acme")
    assert page["items"] == []
    async with front.follow("/v1/events", "acme") as subscriber:
        await quiet_until(subscriber, lambda: subscriber.last_id == page["next"])
