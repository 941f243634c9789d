"""Pages of traces and approvals: complete, in order, within their scope, and at a cost that others do not raise."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.core.limits import LIST_ROWS_LOOKED_AT_MAX
from app.domain.ledger.plans import Plan
from app.domain.ledger.queries import Page, Visibility
from app.domain.tga.transitions import TRACE
from app.postgres import approvals, listing, queries
from app.postgres.approvals import WaitingCall, count_waiting, list_waiting
from app.postgres.call_facts import fold_all
from app.postgres.ledger import PostgresLedger
from app.postgres.listing import DecidedBy, TraceFilters, list_traces
from app.postgres.queries import PostgresQueries
from app.postgres.sessions import Sessions
from tests.attacker import disarm
from tests.invariants.plans import plan_of
from tests.traces import PATHS, completed_trace, pending_trace, trace_id

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

DEFAULT = Visibility("default", None)


def principal(name: str = "agent-1", tenant: str = "default") -> dict[str, str]:
    return {"principal_id": name, "tenant": tenant}


def waiting(n: int, **overrides: Any) -> Plan:
    return plan_of(pending_trace(n, **overrides))._replace(waiting_after="supervisor")


async def append(ledger: PostgresLedger, plans: Sequence[Plan]) -> None:
    for start in range(0, len(plans), 64):
        batch = plans[start : start + 64]
        assert await ledger.commit_batch(batch) == [None] * len(batch)


async def all_pages(sessions: Sessions, scope: Visibility, **filters: Any) -> list[str]:
    found: list[str] = []
    before, limit = None, filters.pop("limit")
    while True:
        page = await list_traces(sessions, scope, TraceFilters(**filters), before=before, limit=limit)
        found += [item.trace_id for item in page.items]
        if page.next is None:
            return found
        before = page.next


async def test_traces_come_newest_first_and_each_once(ledger: PostgresLedger, sessions: Sessions) -> None:
    await append(ledger, [plan_of(completed_trace(n)) for n in range(25)])
    assert await all_pages(sessions, DEFAULT, limit=7) == [trace_id(n) for n in reversed(range(25))]
    exact = await list_traces(sessions, DEFAULT, limit=25)
    assert (len(exact.items), exact.next) == (25, None)


async def test_filters_take_out_exactly_what_does_not_fit(ledger: PostgresLedger, sessions: Sessions) -> None:
    states = sorted(PATHS)
    plans = [
        plan_of(
            PATHS[states[n % len(states)]](
                n,
                server_id=f"server-{n % 2}",
                tool_name=f"tool-{n % 3}",
                principal=principal(f"agent-{n % 5}"),
            )
        )
        for n in range(60)
    ]
    await append(ledger, plans)
    for state in states:
        expected = [trace_id(n) for n in reversed(range(60)) if states[n % len(states)] == state]
        assert await all_pages(sessions, DEFAULT, states=[state], limit=4) == expected
    for filters, fits in (
        ({"server_id": "server-1"}, lambda n: n % 2 == 1),
        ({"tool_name": "tool-2"}, lambda n: n % 3 == 2),
        ({"principal_id": "agent-4"}, lambda n: n % 5 == 4),
        ({"server_id": "server-0", "tool_name": "tool-1"}, lambda n: n % 2 == 0 and n % 3 == 1),
        ({"server_id": "nowhere"}, lambda n: False),
    ):
        expected = [trace_id(n) for n in reversed(range(60)) if fits(n)]
        assert await all_pages(sessions, DEFAULT, limit=3, **filters) == expected


async def test_a_scope_ends_at_its_tenant_and_its_principal(ledger: PostgresLedger, sessions: Sessions) -> None:
    owners = {1: ("a", "one"), 2: ("b", "one"), 3: ("a", "two"), 4: ("a", "two!"), 5: ("a", "on")}
    await append(
        ledger,
        [
            plan_of(completed_trace(n, principal=principal(who, tenant), server_id=f"{tenant}/crm"))
            for n, (who, tenant) in owners.items()
        ],
    )
    scopes = [Visibility(tenant, who) for tenant in ("on", "one", "two", "two!", "none") for who in (None, "a", "b")]
    for scope in scopes:
        expected = [
            trace_id(n)
            for n, (who, tenant) in reversed(owners.items())
            if tenant == scope.tenant and scope.principal_id in (None, who)
        ]
        assert await all_pages(sessions, scope, limit=1) == expected
        visible = [
            n for n in (*owners, 99) if await PostgresQueries(sessions).is_visible(TRACE.stream(trace_id(n)), scope)
        ]
        assert [trace_id(n) for n in reversed(visible)] == expected


async def test_pages_are_complete_while_traces_are_added(ledger: PostgresLedger, sessions: Sessions) -> None:
    await append(ledger, [plan_of(completed_trace(2 * n)) for n in range(100)])
    done = asyncio.Event()

    async def add() -> None:
        for n in range(100):  # between the old ones, and after them
            await ledger.commit(plan_of(completed_trace(2 * n + 1)))
        done.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(add())
        while not done.is_set():
            found = await all_pages(sessions, DEFAULT, limit=9)
            assert found == sorted(set(found), reverse=True)
            assert {trace_id(2 * n) for n in range(100)} <= set(found)
    assert len(await all_pages(sessions, DEFAULT, limit=200)) == 200


async def test_a_page_looks_at_so_many_rows_and_no_more(
    ledger: PostgresLedger, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bound at 10: pages that hold nothing lead on, none is skipped, and no cursor names a foreign trace."""
    for module, name in ((listing, "_TRACES"), (listing, "_TRACES_OF_PRINCIPAL"), (approvals, "_WAITING")):
        statement = getattr(module, name).replace(str(LIST_ROWS_LOOKED_AT_MAX + 1), "11")
        monkeypatch.setattr(module, name, statement.replace(str(LIST_ROWS_LOOKED_AT_MAX), "10"))
    for module in (queries, approvals):
        monkeypatch.setattr(module, "LIST_ROWS_LOOKED_AT_MAX", 10)
    mine = {0, 3, 35, 36, 37, 38, 60}
    plans = [
        waiting(n, principal=principal("me" if n in mine else "other"), server_id="mine" if n in mine else "other")
        for n in range(64)
    ]
    await append(ledger, plans)
    scope, at_mine = Visibility("default", "me"), TraceFilters(server_id="mine")
    others = {trace_id(n) for n in range(64) if n not in mine}
    for limit in (1, 2, 10):
        newest: list[Page[Any]] = [await list_traces(sessions, DEFAULT, at_mine, limit=limit)]
        while newest[-1].next is not None:
            newest.append(await list_traces(sessions, DEFAULT, at_mine, before=newest[-1].next, limit=limit))
        own: list[Page[Any]] = [await list_traces(sessions, scope, limit=limit)]
        while own[-1].next is not None:
            own.append(await list_traces(sessions, scope, before=own[-1].next, limit=limit))
        assert [page.items for page in own if page.items] == [own[n].items for n in range(-(-len(mine) // limit))]
        oldest: list[Page[Any]] = [await list_waiting(sessions, scope, limit=limit)]
        while oldest[-1].next is not None:
            oldest.append(await list_waiting(sessions, scope, after=oldest[-1].next, limit=limit))
        for pages, expected in ((newest, sorted(mine, reverse=True)), (oldest, sorted(mine))):
            assert [item.trace_id for page in pages for item in page.items] == [trace_id(n) for n in expected]
            assert any(not page.items and page.next for page in pages)
            assert not others & {str(page.next).removesuffix("~") for page in pages}
        assert [item.trace_id for page in own for item in page.items] == [
            trace_id(n) for n in sorted(mine, reverse=True)
        ]


async def test_approvals_are_what_waits_and_is_in_time(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    far, past = "2999-01-01T00:00:00.000Z", "2020-01-01T00:00:00.000Z"
    await append(
        ledger,
        [
            waiting(1, expires_at=far, intent="buy", arguments={"amount": 7}),
            waiting(2, expires_at=past),
            waiting(3, expires_at=None),
            plan_of(pending_trace(4)),
            plan_of(completed_trace(5)),
            waiting(6, principal=principal("x", "two"), server_id="two/crm"),
        ],
    )
    page = await list_waiting(sessions, DEFAULT)
    calls = [item for item in page.items if isinstance(item, WaitingCall)]
    assert [item.trace_id for item in calls] == [trace_id(1), trace_id(3)]
    count = await count_waiting(sessions, DEFAULT)
    assert (count.calls, count.questions, count.is_exact) == (2, 0, True)
    first = calls[0]
    (record,) = pending_trace(1, expires_at=far, intent="buy", arguments={"amount": 7})
    assert first.action_request_digest == record.entry.artifact_digest
    assert first.request is not None
    assert (first.request["arguments"], first.request["intent"]) == ({"amount": 7}, "buy")
    assert (first.expires_at, first.problem, first.request["tool_class"]) == (far, None, "write")
    assert (first.server_id, first.tool_name) == ("crm", "create_ticket")


async def test_what_expires_soonest_comes_first_and_what_never_does_comes_last_page_by_page(
    ledger: PostgresLedger, sessions: Sessions
) -> None:
    ends = {1: 5, 2: None, 3: 1, 4: 9, 5: None, 6: 1, 7: 3}
    when = {n: None if year is None else f"299{year}-01-01T00:00:00.000Z" for n, year in ends.items()}
    await append(ledger, [waiting(n, expires_at=when[n]) for n in ends])
    expected = [trace_id(n) for n in sorted(ends, key=lambda n: (ends[n] is None, ends[n], n))]
    for limit in (1, 2, 3, 7):
        found: list[str] = []
        after = None
        while True:
            page = await list_waiting(sessions, DEFAULT, after=after, limit=limit)
            found += [item.trace_id for item in page.items if isinstance(item, WaitingCall)]
            after = page.next
            if after is None:
                break
        assert found == expected


async def test_times_states_waits_and_keys_take_out_what_does_not_fit(
    ledger: PostgresLedger, sessions: Sessions
) -> None:
    states = sorted(PATHS)
    await append(ledger, [plan_of(PATHS[states[n % len(states)]](n)) for n in range(30)])
    await append(ledger, [waiting(n) for n in range(30, 34)])
    begins_ms = 1_767_225_600_000

    async def listed(**filters: Any) -> list[str]:
        return await all_pages(sessions, DEFAULT, limit=3, **filters)

    def newest(*numbers: int) -> list[str]:
        return [trace_id(n) for n in sorted(numbers, reverse=True)]

    assert await listed(since_ms=begins_ms + 31) == newest(31, 32, 33)
    assert await listed(until_ms=begins_ms + 2) == newest(0, 1)
    assert await listed(since_ms=begins_ms + 2, until_ms=begins_ms + 5) == newest(2, 3, 4)
    assert await listed(waiting="supervisor") == newest(30, 31, 32, 33)
    assert await listed(waiting="operator") == []
    assert await listed(waiting="supervisor", since_ms=begins_ms + 32) == newest(32, 33)
    for chosen in (["FAILED", "DENIED"], ["COMPLETED", "FAILED"], ["PENDING"], ["FAILED", "FAILED"]):
        fits = [n for n in range(34) if (states[n % len(states)] if n < 30 else "PENDING") in chosen]
        assert await listed(states=chosen) == newest(*fits)
    assert await listed(idempotency_key="key-7", tools=[("crm", "create_ticket")]) == newest(7)
    assert await listed(idempotency_key="key-7") == []  # of no tool that there is now, and not folded yet
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)
    assert await listed(idempotency_key="key-7") == newest(7)
    assert await all_pages(sessions, Visibility("two", None), limit=3, idempotency_key="key-7") == []


async def test_what_a_list_says_of_a_trace_is_the_same_before_and_after_it_was_folded(
    ledger: PostgresLedger, sessions: Sessions
) -> None:
    await append(ledger, [plan_of(PATHS[state](n)) for n, state in enumerate(sorted(PATHS))])
    before = await list_traces(sessions, DEFAULT)
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)
    assert (await list_traces(sessions, DEFAULT)).items == before.items
    by_state = {item.state: item for item in before.items}
    done, failed, denied = by_state["COMPLETED"], by_state["FAILED"], by_state["DENIED"]
    assert done.idempotency_key == f"key-{sorted(PATHS).index('COMPLETED')}"
    assert (done.attempts, done.decided_by, done.error_code) == (1, DecidedBy("policy", "policy-1"), None)
    assert done.dispatch_ms is not None
    assert done.total_ms is not None
    assert failed.error_code is not None
    assert (denied.attempts, denied.dispatch_ms) == (0, None)
    assert (by_state["PENDING"].decided_by, by_state["PENDING"].total_ms) == (None, None)
    assert by_state["EXECUTING"].attempts == 1


async def test_a_request_that_was_changed_is_not_shown_and_hides_no_other(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await append(ledger, [waiting(n, arguments={"amount": 1}) for n in range(4)])
    async with admin.transaction():
        await disarm(admin)
        await admin.execute(
            "UPDATE tga.artifacts SET artifact = convert_to(replace(convert_from(artifact, 'UTF8'),"
            " '\"amount\":1', '\"amount\":9'), 'UTF8') WHERE stream = $1",
            f"trace:{trace_id(1)}",
        )
        await admin.execute("DELETE FROM tga.artifacts WHERE stream = $1", f"trace:{trace_id(2)}")
    items = (await list_waiting(sessions, DEFAULT)).items
    assert [item.problem for item in items] == [None, "STATE_CHECKSUM_MISMATCH", "STATE_RECOVERY_FAILED", None]
    assert [item.request and item.request["arguments"] for item in items] == [{"amount": 1}, None, None, {"amount": 1}]


async def test_entries_come_as_stored_and_within_their_bytes(ledger: PostgresLedger, sessions: Sessions) -> None:
    records = completed_trace(1, arguments={"text": "x" * 1000})
    await ledger.commit(plan_of(records))
    stream = TRACE.stream(trace_id(1))
    page = await PostgresQueries(sessions).entries(stream, after_seq=0, limit=10)
    assert page is not None
    assert (page.head, page.state, page.is_open) == (4, "COMPLETED", False)
    assert [(e.entry, e.artifact) for e in page.items] == [
        (r.entry.body_bytes(), r.artifact.to_bytes()) for r in records if r.artifact
    ]
    for bytes_max in (1, 1500, 3000, 10_000):
        after, found, largest = 0, [], 0
        while (
            part := await PostgresQueries(sessions).entries(
                TRACE.stream(trace_id(1)), after_seq=after, limit=3, bytes_max=bytes_max
            )
        ) and (part.last is not None):
            found += [item.sequence_number for item in part.items]
            largest = max(largest, len(part.items))
            after = part.last
        assert found == [1, 2, 3, 4]
        assert largest == {1: 1, 1500: 2, 3000: 3, 10_000: 3}[bytes_max]
    assert await PostgresQueries(sessions).entries(TRACE.stream(trace_id(2)), after_seq=0, limit=1) is None


EMPTY = {"in_work", "run_requests", "erasures"}  # in these tests: read whole, they cost nothing


def scanned_whole(plan: str) -> set[str]:
    """The tables that a plan reads from end to end."""
    return {found[1] for found in re.finditer(r'"Seq Scan"[^{}]*?"Relation Name": "(\w+)"', plan)}


async def plan_and_buffers(
    admin: Admin, statement: str, *arguments: Any, settings: str = "SET LOCAL plan_cache_mode = force_generic_plan"
) -> tuple[str, int]:
    """The plan, and the buffers that running it took: a generic plan, as a session settles on."""
    written = ", ".join("NULL" if a is None else str(a) if isinstance(a, int) else f"'{a}'" for a in arguments)
    async with admin.transaction():
        await admin.execute(settings)
        await admin.execute(f"PREPARE asked AS {statement}")
        raw = await admin.fetchval(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE asked{f'({written})' if written else ''}"
        )
        await admin.execute("DEALLOCATE asked")
    plan = json.loads(raw)[0]["Plan"]
    return json.dumps(plan), plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


async def test_pages_of_what_waits_run_by_the_plan_that_tests_explain(
    ledger: PostgresLedger, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans for the very values sort all that waits for a page of it (ADR 59). Nothing else of the session changes."""
    await append(ledger, [waiting(1)])
    asked, fetch_page = list[str](), Sessions.fetch_page

    async def seen(self: Sessions, statement: str, *arguments: Any) -> Any:
        asked.append(statement)
        return await fetch_page(self, statement, *arguments)

    monkeypatch.setattr(Sessions, "fetch_page", seen)
    for filters in (TraceFilters(states=["PENDING"]), TraceFilters(waiting="supervisor")):
        assert len((await list_traces(sessions, DEFAULT, filters)).items) == 1
    assert asked == [listing._TRACES_IN_STATES[1], listing._TRACES_WAITING]
    (inside,) = await sessions.fetch_page("SHOW plan_cache_mode")
    (outside,) = await sessions.fetch("SHOW plan_cache_mode")
    assert (inside[0], outside[0]) == ("force_generic_plan", "auto")


async def test_other_tenants_cost_a_page_nothing(ledger: PostgresLedger, sessions: Sessions, admin: Admin) -> None:
    await append(ledger, [plan_of(completed_trace(10 * n)) for n in range(100)])
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)
    none = (None, None, None, None)
    streams = ("default", "trace:", "trace;", *none, None, 52)
    traces = (*streams, None, None)
    in_states = ("default", "trace:", "trace;", None, "{FAILED,DENIED}", None, None, None, 52, None, None)
    rest = ("default", "trace:", "trace;", *none, None, 52, "operator", None)
    waits = ("default", "1970-01-01", 0, "", None, 52)
    seen = ("default", f"trace:{trace_id(10)}", None)
    foreign, missing = ("two", *seen[1:]), ("two", f"trace:{trace_id(11)}", None)
    before: list[tuple[str, int]] = []
    after: list[tuple[str, int]] = []
    for found in (before, after):
        await admin.execute("ANALYZE tga.heads; ANALYZE tga.at_rest; ANALYZE tga.call_facts")
        for statement, asked in (
            (queries._STREAMS, streams),
            (approvals._WAITING, waits),
            (queries._VISIBLE, seen),
            (queries._VISIBLE, foreign),
            (queries._VISIBLE, missing),
            (listing._TRACES_IN_STATES[2], in_states),
            (listing._TRACES, traces),
            (listing._TRACES_WAITING, rest),
            (approvals._COUNT, waits),
        ):
            found.append(await plan_and_buffers(admin, statement, *asked))
        if found is before:
            # As many foreign ones as a test can afford, put there as they are: only heads are read here.
            async with admin.transaction():
                await admin.execute("ALTER TABLE tga.heads DISABLE TRIGGER ALL")
                await admin.execute(
                    "INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, is_open, waiting, tenant)"
                    " SELECT stream || n, 1, entry_digest, state, is_open, 'supervisor', 'other-' || n % 7"
                    " FROM tga.heads, generate_series(1, 300) AS n"
                )
                await admin.execute(
                    "INSERT INTO tga.at_rest SELECT stream_no, stream, tenant, state, waiting, expires_at"
                    " FROM tga.heads WHERE tenant LIKE 'other-%'"
                )
    for plan, _ in after:
        assert scanned_whole(plan) <= {*EMPTY, "call_facts"}  # which is small here
    assert "heads_tenant" in after[6][0]
    assert "at_rest_in_state" in after[5][0]
    assert "at_rest_by_expiry" in after[1][0]
    assert '"Sort"' not in after[0][0]
    for place, ((_, small), (_, large)) in enumerate(zip(before, after, strict=True)):
        assert large <= small + 8, place
    assert after[3][1] == after[4][1], "a foreign trace and a missing one cost the same"


async def test_ten_times_as_many_traces_cost_a_page_no_more_than_twice(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """Of one tenant, each folded: heads and facts in bulk, as lists read nothing else. A million in the soak."""
    small_size, large_size = (1_000, 1_000_000) if os.environ.get("TGA_SOAK") else (2_000, 20_000)
    await append(ledger, [waiting(0, expires_at="2999-01-01T00:00:00.000Z"), plan_of(completed_trace(1))])
    found: dict[int, list[int]] = {}
    made = 0
    for size in (small_size, large_size):
        async with admin.transaction():
            await admin.execute("ALTER TABLE tga.heads DISABLE TRIGGER ALL")
            await admin.execute(
                "INSERT INTO tga.heads (stream, sequence_number, entry_digest, artifact_digest, state, is_open,"
                "       waiting, tenant, principal_id, subject, name, idempotency_key, expires_at)"
                " SELECT substr(h.stream, 1, 19) || to_char(n, 'FM0000000000000000'), h.sequence_number,"
                "        h.entry_digest, h.artifact_digest, h.state, h.is_open, h.waiting, 'default', 'agent-1',"
                "        'crm', 't' || n % 20, 'k' || n, h.expires_at"
                "   FROM generate_series($1::integer, $2::integer) AS n JOIN tga.heads h ON h.is_open = (n % 10 = 0)"
                "  WHERE h.idempotency_key IN ('key-0', 'key-1')",
                made,
                size,
            )
            await admin.execute(
                "INSERT INTO tga.at_rest SELECT stream_no, stream, tenant, state, waiting, expires_at"
                " FROM tga.heads WHERE waiting IS NOT NULL ON CONFLICT DO NOTHING"
            )
            await admin.execute(
                "INSERT INTO tga.call_facts (stream_no, sequence_number, tenant, idempotency_key, state, attempts)"
                " SELECT stream_no, sequence_number, tenant, idempotency_key, state, 1 FROM tga.heads"
                "  WHERE NOT is_open ON CONFLICT DO NOTHING"
            )
            await admin.execute(
                "INSERT INTO tga.payloads SELECT h.stream_no, p.sequence_number, p.artifacts"
                "   FROM tga.heads h, tga.payloads p WHERE h.is_open"
                "    AND p.stream_no = (SELECT min(stream_no) FROM tga.heads) ON CONFLICT DO NOTHING"
            )
        made = size + 1
        for table in ("heads", "at_rest", "call_facts", "payloads"):
            await admin.execute(f"VACUUM ANALYZE tga.{table}")
        lists = ("default", "trace:", "trace;", None)
        costs = []
        for statement, asked in (
            (listing._TRACES, (*lists, None, None, None, None, 52, None, None)),
            (listing._TRACES, (*lists, None, "crm", "t3", None, 52, None, None)),
            (listing._TRACES_WAITING, (*lists, None, None, None, None, 52, "supervisor", None)),
            (listing._TRACES_IN_STATES[2], (*lists, "{PENDING,FAILED}", None, None, None, 52, None, None)),
            (listing._TRACES_BY_KEY, (*lists, None, None, None, None, 52, None, "k1001", "{crm}", "{t1}")),
            (approvals._WAITING, ("default", "1970-01-01", 0, "", None, 52)),
        ):
            plan, buffers = await plan_and_buffers(admin, statement, *asked)
            assert size == small_size or scanned_whole(plan) <= EMPTY, statement
            costs.append(buffers)
        found[size] = costs
    print(found)
    for small, large in zip(found[small_size], found[large_size], strict=True):
        assert large <= 2 * small + 8, found
