"""The feed: every entry that a scope sees, once, in the order of the ledger, whatever is written meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.core.errors import StoreUnfit
from app.core.limits import FEED_ROWS_LOOKED_AT_MAX
from app.domain.ledger.plans import Plan
from app.domain.ledger.queries import FeedItem, FeedPosition, Visibility
from app.domain.system.documents import PolicySet
from app.domain.system.log import SystemState, plan_system
from app.postgres import feed
from app.postgres.database import Database
from app.postgres.feed import PostgresFeed
from app.postgres.ledger import PostgresLedger, _columns
from app.postgres.sessions import Sessions
from tests.attacker import disarm
from tests.invariants.plans import plan_of
from tests.postgres.test_listing import append, plan_and_buffers, principal
from tests.traces import EXECUTOR, completed_trace, time_at, trace_id

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

DEFAULT = Visibility("default", None)


async def read(
    sessions: Sessions, scope: Visibility, after: FeedPosition, **bounds: Any
) -> tuple[list[FeedItem], FeedPosition]:
    """All there is from `after` on."""
    found: list[FeedItem] = []
    while True:
        page = await PostgresFeed(sessions).page(scope, after=after, **{"limit": 50, **bounds})
        found += page.items
        if page.next == after:
            return found, after
        assert page.next > after
        after = page.next


def places(items: list[FeedItem]) -> list[tuple[str, int]]:
    return [(item.stored.stream, item.stored.sequence_number) for item in items]


def system_plan(tenant: str) -> Plan:
    document = PolicySet(
        system_id=tenant, recorded_at=time_at(0), recorded_by="gateway", policy_digest="0" * 64, text="permit(...);"
    )
    return plan_system(SystemState(tenant), [document], executor_id=EXECUTOR, recorded_at=time_at(0))


async def append_slowly(connection: Admin, plan: Plan) -> None:
    """The real append, in a transaction that its caller keeps open."""
    columns = _columns([plan])
    holes = ", ".join(f"${n}" for n in range(1, len(columns) + 2))
    (row,) = await connection.fetch(f"SELECT * FROM tga.append({holes})", 1000, *columns)
    assert row["code"] is None


async def test_every_entry_comes_once_in_order_at_every_page_size(ledger: PostgresLedger, sessions: Sessions) -> None:
    await append(ledger, [plan_of(completed_trace(n)) for n in range(70)])
    whole, end = await read(sessions, DEFAULT, FeedPosition())
    assert sorted(places(whole)) == sorted((f"trace:{trace_id(n)}", place) for n in range(70) for place in range(1, 5))
    order = [(item.position.xid, item.stored.stream, item.stored.sequence_number) for item in whole]
    assert order == sorted(order)
    for bounds in ({"limit": 1}, {"limit": 7}, {"limit": 200}, {"bytes_max": 1}, {"bytes_max": 5000}):
        assert (await read(sessions, DEFAULT, FeedPosition(), **bounds))[0] == whole
    # From every place the rest, and nothing else.
    for place in range(0, len(whole), 13):
        assert (await read(sessions, DEFAULT, whole[place].position))[0] == whole[place + 1 :]
    assert await PostgresFeed(sessions).latest() == end.xid


async def test_a_scope_sees_its_own_and_what_its_tenants_gateway_did(
    ledger: PostgresLedger, sessions: Sessions
) -> None:
    owners = {1: ("a", "one"), 2: ("b", "one"), 3: ("a", "two")}
    await append(
        ledger,
        [plan_of(completed_trace(n, principal=principal(*owner), server_id="x")) for n, owner in owners.items()]
        + [system_plan("one"), system_plan("two")],
    )
    traces = {n: [(f"trace:{trace_id(n)}", place) for place in range(1, 5)] for n in owners}
    for scope, expected in (
        (Visibility("one", None), [("system:one", 1), *traces[1], *traces[2]]),
        (Visibility("one", "a"), traces[1]),
        (Visibility("one", "gateway"), []),
        (Visibility("two", None), [("system:two", 1), *traces[3]]),
        (Visibility("none", None), []),
    ):
        items, end = await read(sessions, scope, FeedPosition())
        assert sorted(places(items)) == sorted(expected)
        assert end > FeedPosition(), "what may not be seen is still left behind"


async def test_an_open_transaction_holds_back_what_comes_after_it(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await ledger.commit(plan_of(completed_trace(1)))
    before, at = await read(sessions, DEFAULT, FeedPosition())
    slow = admin.transaction()
    await slow.start()
    await append_slowly(admin, plan_of(completed_trace(2)))
    await ledger.commit(plan_of(completed_trace(3)))
    assert await read(sessions, DEFAULT, at) == ([], at)
    await slow.commit()
    rest, _ = await read(sessions, DEFAULT, at)
    assert places(before + rest) == [(f"trace:{trace_id(n)}", place) for n in (1, 2, 3) for place in range(1, 5)]


async def test_no_gap_and_no_repeat_while_many_write_and_some_are_slow(
    database: Database, ledger: PostgresLedger, sessions: Sessions
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    numbers = itertools.count(1)
    done = asyncio.Event()

    async def write() -> None:
        for _ in range(25):
            n = next(numbers)
            records = completed_trace(n, principal=principal(tenant="default" if n % 3 else "two"), server_id="x")
            await ledger.commit(plan_of(records[:3]))
            await ledger.commit(plan_of(records[3:]))

    async def write_slowly(pause_s: float) -> None:
        connection = await asyncpg.connect(database.admin_url)
        try:
            for turn in range(6):
                n = next(numbers)
                transaction = connection.transaction()
                await transaction.start()
                await append_slowly(connection, plan_of(completed_trace(n, server_id="x")))
                await asyncio.sleep(chance.uniform(0, pause_s))
                if turn % 3 == 2:
                    await transaction.rollback()
                else:
                    await transaction.commit()
        finally:
            await connection.close()

    async def follow(limit: int) -> list[FeedItem]:
        found: list[FeedItem] = []
        at = FeedPosition()
        while True:
            is_over = done.is_set()
            page = await PostgresFeed(sessions).page(DEFAULT, after=at, limit=limit)
            found += page.items
            if is_over and page.next == at:
                return found
            at = page.next
            await asyncio.sleep(0.002)

    readers = [asyncio.create_task(follow(limit)) for limit in (1, 5, 100)]
    await asyncio.gather(*(write() for _ in range(6)), write_slowly(0.15), write_slowly(0.02))
    done.set()
    expected, _ = await read(sessions, DEFAULT, FeedPosition())
    assert len(places(expected)) == len(set(places(expected)))
    seen = {stream for stream, _ in places(expected)}
    tenants = await sessions.fetch("SELECT stream FROM tga.heads WHERE tenant = 'default'")
    assert seen == {row["stream"] for row in tenants}
    assert len(expected) == 4 * len(seen)
    for reader in readers:
        assert await reader == expected


async def test_a_page_looks_at_so_many_rows_and_no_more(
    ledger: PostgresLedger, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bound at 10, a page may be empty and still lead on."""
    monkeypatch.setattr(feed, "_PAGE", feed._PAGE.replace(f"LIMIT {FEED_ROWS_LOOKED_AT_MAX}", "LIMIT 10"))
    mine = {0, 21, 22}
    await append(
        ledger,
        [plan_of(completed_trace(n, principal=principal("me" if n in mine else "other"))) for n in range(40)],
    )
    scope = Visibility("default", "me")
    items, _ = await read(sessions, scope, FeedPosition())
    assert places(items) == [(f"trace:{trace_id(n)}", place) for n in sorted(mine) for place in range(1, 5)]
    page = await PostgresFeed(sessions).page(scope, after=items[3].position, limit=50)
    assert page.items == []
    assert page.next > items[3].position


async def test_a_page_costs_the_same_wherever_it_starts(ledger: PostgresLedger, admin: Admin) -> None:
    costs = []
    for round_ in range(2):
        await append(ledger, [plan_of(completed_trace(n)) for n in range(600 * round_, 600 * round_ + 600)])
        await admin.execute("ANALYZE tga.links; ANALYZE tga.heads; ANALYZE tga.payloads")
        last = await admin.fetchval("SELECT max(xid::text::bigint) FROM tga.entries")
        for xid in (0, last - 2):
            plan, buffers = await plan_and_buffers(admin, feed._PAGE, str(xid), 0, "default", None, 20, 10**6)
            assert "links_by_commit" in plan
            costs.append((round_, xid, buffers, [n for n in _nodes(json.loads(plan)) if n[0] == "Seq Scan"]))
    assert not any(scans for *_, scans in costs)
    assert costs[2][2] <= costs[0][2] * 1.1
    assert costs[3][2] < costs[2][2]


def _nodes(plan: dict[str, Any]) -> list[tuple[str, str | None]]:
    inner = [node for part in plan.get("Plans", []) for node in _nodes(part)]
    return [(plan["Node Type"], plan.get("Relation Name")), *inner]


async def test_a_ledger_restored_into_another_cluster_is_refused_and_never_shown_with_holes(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await append(ledger, [plan_of(completed_trace(n)) for n in range(3)])
    async with admin.transaction():
        await disarm(admin)
        await admin.execute("UPDATE tga.entries SET xid = '9000000000' WHERE stream = $1", f"trace:{trace_id(1)}")
    with pytest.raises(StoreUnfit):
        await PostgresFeed(sessions).page(DEFAULT, after=FeedPosition(), limit=10)
