"""The folds behind the sequencer: the same facts at once as one by one, both in turns, and never further and further
behind."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

import asyncpg
import pytest

from app.core.limits import FOLD_BEHIND_MS_MAX, FOLD_PAUSE_MS_MAX
from app.edge.read_scheduler import ReadScheduler
from app.edge.replays import ReplayCounts
from app.gateway import call_folding
from app.gateway.call_folding import CallFolding, FoldPace
from app.postgres.call_facts import fold_acts, fold_all, fold_calls
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.invariants.plans import plan_of
from tests.traces import PATHS, completed_trace

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def stored(ledger: PostgresLedger, sessions: Sessions) -> int:
    """Traces that have come as far as there are states, and some that are alike; how many."""
    records = [PATHS[state](n) for n, state in enumerate(sorted(PATHS))]
    records += [completed_trace(100 + n) for n in range(5)]
    plans = [plan_of(one) for one in records]
    assert await ledger.commit_batch(plans) == [None] * len(plans)
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    return len(plans)


async def facts_one_by_one(admin: Admin) -> list[asyncpg.Record]:
    return await admin.fetch(
        "SELECT f.* FROM tga.heads h CROSS JOIN LATERAL tga.facts_of(h.stream_no) AS f"
        " WHERE h.stream LIKE 'trace:%' ORDER BY f.stream_no"
    )


async def test_facts_of_many_traces_at_once_are_those_of_each(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    count = await stored(ledger, sessions)
    numbers = [row["stream_no"] for row in await admin.fetch("SELECT stream_no FROM tga.heads")]
    for erased in (False, True):
        if erased:  # as far as the facts are concerned
            async with admin.transaction():
                await admin.execute("ALTER TABLE tga.payloads DISABLE TRIGGER ALL")
                await admin.execute("DELETE FROM tga.payloads WHERE stream_no % 2 = 0")
        at_once = await admin.fetch("SELECT f.* FROM tga.facts_of_all($1) AS f ORDER BY f.stream_no", numbers)
        assert at_once == await facts_one_by_one(admin)
        assert len(at_once) == count


async def test_what_is_counted_does_not_depend_on_how_much_is_folded_at_once(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await stored(ledger, sessions)
    counted = []
    for rows_max in (1, 3, 1000):
        await admin.execute("SELECT tga.forget_calls()")
        while await fold_calls(sessions, rows_max) == rows_max:
            pass
        counted.append(await admin.fetch("SELECT * FROM tga.call_counts ORDER BY 1, 2, 3, 4, 5, 6, 7"))
        assert await admin.fetch("SELECT * FROM tga.call_facts ORDER BY stream_no") == await facts_one_by_one(admin)
    assert counted[0] == counted[1] == counted[2] != []
    latencies = sum(row["calls"] for row in counted[0] if row["measure"] == "latency" and row["span_s"] == 86400)
    dispatched = await admin.fetchval("SELECT count(*) FROM tga.call_facts WHERE dispatch_ms IS NOT NULL")
    assert latencies == dispatched < len(await facts_one_by_one(admin))


async def test_the_folds_take_turns_so_that_neither_waits_until_the_other_is_done(
    ledger: PostgresLedger, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(ledger, sessions)
    turns: list[str] = []

    async def calls(sessions: Sessions, rows_max: int) -> int:
        turns.append("calls")
        return await fold_calls(sessions, rows_max)

    async def acts(sessions: Sessions, rows_max: int) -> int:
        turns.append("acts")
        return await fold_acts(sessions, rows_max)

    monkeypatch.setattr(call_folding, "fold_calls", calls)
    monkeypatch.setattr(call_folding, "fold_acts", acts)
    monkeypatch.setattr(call_folding, "FOLD_ROWS_MAX", 2)
    await CallFolding(sessions, ReplayCounts(), ReadScheduler(), asyncio.Event()).once()
    assert len(turns) >= 6
    assert turns == ["calls", "acts"] * (len(turns) // 2)
    looked_at = await fold_calls(sessions, 2), await fold_acts(sessions, 2)
    assert looked_at == (0, 0)
    await fold_all(sessions)


def test_folds_that_are_behind_for_long_take_more_time_until_they_have_caught_up() -> None:
    pace, late_s = FoldPace(), FOLD_BEHIND_MS_MAX / 1000
    first = pace.pause_s(1000.0, worked_s=0.01)
    assert pace.pause_s(1000.0 + late_s, worked_s=0.01) == first
    later = pace.pause_s(1000.0 + late_s + 1, worked_s=0.01)
    assert later < first / 4
    pace.reached_the_end()
    assert pace.pause_s(2000.0, worked_s=0.01) == first
    assert pace.pause_s(2000.0, worked_s=1e6) == FOLD_PAUSE_MS_MAX / 1000
