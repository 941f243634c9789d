"""Statistics from the store: each call once, what it counts as now, by time, server and tool; and of one tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.api.documents import ServerPage
from app.api.statistics_documents import StatisticsDocument
from app.edge.replays import ReplayCounts
from app.postgres import statistics
from app.postgres.call_facts import count_replays, fold_all, rebuild_calls
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.statistics import Tally
from tests.api.reading import ACME, Front, World, folded
from tests.invariants.plans import plan_of
from tests.postgres.test_listing import plan_and_buffers
from tests.traces import completed_trace, denied_trace, failed_trace, pending_trace

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

DAY = "since=2026-01-01T00:00:00Z&until=2026-01-02T00:00:00Z"


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        yield opened


async def stats(front: Front, query: str = DAY, who: str = "auditor") -> Any:
    found = await front.page(f"/v1/stats?{query}", who)
    StatisticsDocument.model_validate(found)
    return found


async def test_each_call_counts_once_as_what_it_is_now(front: Front, sessions: Sessions, database: Database) -> None:
    whole = completed_trace(0, server_id="pay", tool_name="charge")
    await front.append(plan_of(whole[:1]))
    for n in range(1, 4):
        await front.append_trace(completed_trace(n, server_id="pay", tool_name="charge"))
    await front.append_trace(failed_trace(4, server_id="pay", tool_name="balance"))
    await front.append_trace(denied_trace(5, server_id="pay", tool_name="charge"))
    await front.append_trace(pending_trace(6, server_id="pay", tool_name="charge"))
    await front.append_trace(completed_trace(7, **ACME))
    await folded(sessions)
    before = await stats(front)
    assert (before["total"]["asked"], before["total"]["completed"], before["total"]["open"]) == (7, 3, 2)

    await front.append(plan_of(whole[1:]))  # the first one goes on to its end
    await folded(sessions)
    await folded(sessions)  # and nothing is counted twice
    now = await stats(front)
    total = now["total"]
    counted = {name: total[name] for name in ("asked", "completed", "failed", "denied", "open", "sent")}
    assert counted == {"asked": 7, "completed": 4, "failed": 1, "denied": 1, "open": 1, "sent": 5}
    assert total["latency"]["calls"] == 5
    assert now["decided_by"] == {"policy": 6}
    assert now["rules"] == {"rule-1": 6}
    assert sum(now["errors"].values()) == 1
    assert [(one["server_id"], one["tool_name"], one["asked"]) for one in now["by_tool"]] == [
        ("pay", "charge", 6),
        ("pay", "balance", 1),
    ]
    assert [(one["server_id"], one["asked"]) for one in now["by_server"]] == [("pay", 7)]
    assert sum(one["asked"] for one in now["by_time"]) == 7
    assert now["folded_leaves"] == now["tree_size"] > 0
    assert (await stats(front, DAY + "&tool_name=balance"))["total"]["asked"] == 1
    assert (await stats(front, DAY, "acme"))["total"]["asked"] == 1
    assert (await stats(front, "since=2025-12-30T00:00:00Z&until=2025-12-31T00:00:00Z"))["total"]["asked"] == 0
    for span_s, until in ((1_800, "2026-01-02"), (14_400, "2026-01-06"), (86_400, "2026-02-01")):
        found = await stats(front, f"since=2025-12-31T12:00:00Z&until={until}T00:00:00Z")
        assert found["span_s"] == span_s
        assert found["total"] | {"asked_per_minute": 0} == total | {"asked_per_minute": 0}
        assert sum(one["asked"] for one in found["by_time"]) == 7
        assert (found["decided_by"], found["rules"], found["errors"]) == (
            now["decided_by"],
            now["rules"],
            now["errors"],
        )

    assert await rebuild_calls(sessions, database.admin_url) == 8
    assert await stats(front) == now


async def test_repeats_from_the_record_are_counted_and_a_rebuild_leaves_them(
    front: Front, sessions: Sessions, database: Database
) -> None:
    replays = ReplayCounts()
    for _ in range(3):
        replays.add("default", "pay", "charge")
    replays.add("acme", "acme/crm", "create_ticket")
    taken = replays.take()
    await count_replays(sessions, taken)
    assert not replays.take()
    replays.restore(taken)
    await count_replays(sessions, replays.take())
    for _ in range(2):
        assert (await front.page("/v1/stats"))["total"]["replayed"] == 6
        assert (await front.page("/v1/stats", "acme"))["total"]["replayed"] == 2
        await rebuild_calls(sessions, database.admin_url)
    page = await front.page("/v1/servers")
    ServerPage.model_validate(page)
    assert [one["lately"]["replayed"] for one in page["items"]] == [6]


async def test_a_server_says_how_it_answered_by_minute(front: Front, admin: Admin) -> None:
    """From the counts of the last hour, of the tenant's own servers, whatever the tool; older minutes are left out."""
    counts = [
        (2, "pay", "charge", "asked", "", 5),
        (2, "pay", "charge", "failed", "", 2),
        (2, "pay", "balance", "asked", "", 1),
        (2, "pay", "charge", "latency", "20", 3),
        (2, "pay", "balance", "latency", "28", 1),
        (40, "pay", "charge", "asked", "", 1),
        (70, "pay", "charge", "asked", "", 9),
    ]
    for minutes, subject, tool, measure, detail, calls in counts:
        await admin.execute(
            "INSERT INTO tga.call_counts (tenant, span_s, began, subject, name, measure, detail, calls)"
            " VALUES ('default', 60, date_trunc('minute', now()) - $1 * interval '1 minute', $2, $3, $4, $5, $6)",
            minutes,
            subject,
            tool,
            measure,
            detail,
            calls,
        )
    (server,) = ServerPage.model_validate(await front.page("/v1/servers")).items
    lately = server.lately
    assert (lately.asked, lately.failed, lately.latency.calls) == (7, 2, 4)
    told = [(one.asked, one.failed, one.p50_ms, one.p95_ms) for one in lately.by_minute]
    assert told == [(1, 0, None, None), (6, 2, round(2 ** (21 / 4)), round(2 ** (29 / 4)))]
    assert lately.by_minute[0].began < lately.by_minute[1].began


async def test_a_document_that_cannot_be_read_does_not_stop_the_fold(
    front: Front, sessions: Sessions, admin: Admin
) -> None:
    for n in range(3):
        await front.append_trace(completed_trace(n))
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    async with admin.transaction():
        await admin.execute("ALTER TABLE tga.payloads DISABLE TRIGGER ALL")
        await admin.execute(
            "UPDATE tga.payloads SET artifacts = ARRAY['\\xff'::bytea, '\\xff', '\\xff', '{']"
            " WHERE stream_no = (SELECT max(stream_no) FROM tga.heads WHERE stream LIKE 'trace:%')"
        )
    await fold_all(sessions)
    found = await stats(front)
    assert (found["total"]["asked"], found["total"]["completed"], found["total"]["latency"]["calls"]) == (3, 3, 2)


@pytest.mark.parametrize("who", ["agent", "worker", "nobody"])
async def test_who_sees_only_its_own_gets_no_statistics_of_all(front: Front, who: str) -> None:
    status, problem, _ = await front.get("/v1/stats", who)
    assert (status, problem["code"]) == (403, "FORBIDDEN")


@pytest.mark.parametrize(
    "query",
    [
        "since=yesterday",
        "since=2026-13-01T00:00:00Z",
        "since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z",
        "since=2020-01-01T00:00:00Z&until=2026-01-01T00:00:00Z",
        "bucket=1",
    ],
)
async def test_a_window_that_is_none_is_refused(front: Front, query: str) -> None:
    status, problem, _ = await front.get(f"/v1/stats?{query}")
    assert (status, problem["code"]) == (400, "INPUT_MALFORMED")


def test_percentiles_are_right_to_a_fifth() -> None:
    tally, times = Tally(), [3, 9, 17, 40, 41, 90, 200, 800, 1600, 5000]
    for ms in times:
        step = 0
        while 2 ** ((step + 1) / 4) <= ms + 1e-9:
            step += 1
        tally.add("latency", f"{step:03}", 1)
    for share, exact in ((0.5, 41), (0.95, 5000), (0.99, 5000), (0.1, 3)):
        found = tally.percentile_ms(share)
        assert found is not None
        assert exact <= found <= exact * 1.2 + 1
    assert Tally().percentile_ms(0.5) is None


async def test_the_cost_follows_spans_and_tools_and_not_calls(admin: Admin) -> None:
    """Ten times as many spans before the window, and another tenant's: the same buffers, give or take."""
    found = []
    for size in (2_000, 20_000):
        await admin.execute(
            "INSERT INTO tga.call_counts"
            " SELECT t, 1800, '2026-01-01'::timestamptz - n * interval '30 minutes', 's', 't', 'asked', '', 1"
            " FROM generate_series(1, $1::integer) AS n, unnest(ARRAY['default', 'other']) AS t"
            " ON CONFLICT DO NOTHING",
            size,
        )
        await admin.execute("VACUUM ANALYZE tga.call_counts")
        asked = ("default", 1800, "2025-12-31T00:00:00Z", "2026-01-01T00:00:00Z", None, None)
        await plan_and_buffers(admin, statistics._COUNTS, *asked)  # the session makes the plan, and keeps it
        found.append((await plan_and_buffers(admin, statistics._COUNTS, *asked))[1])
    assert found[1] <= 2 * found[0]
