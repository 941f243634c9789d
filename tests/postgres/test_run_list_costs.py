"""Lists of runs, their questions, what is due and what is ready: many runs cost no more than few."""

from __future__ import annotations

from typing import Any

from app.core.limits import LIST_PREFIX_ROWS_MAX
from app.domain.ledger.queries import Visibility
from app.postgres import approvals, run_lists
from app.postgres.ledger import PostgresLedger
from app.postgres.run_lists import list_runs
from app.postgres.sessions import Sessions
from tests.postgres.test_listing import Admin, plan_and_buffers, scanned_whole
from tests.runs import samples
from tests.sampling import IS_SOAK

SMALL, LARGE = 2_000, 100_000 if IS_SOAK else 12_000
STATES = ("WAITING", "COMPLETED", "RUNNING", "FAILED", "SCHEDULED")
EMPTY = {"at_rest", "workers", "erasures", "in_work"}  # in this test: read whole, they cost nothing
LATER = "9999-12-31"
OLD = ("2026-01-01T00:00:00Z", "2026-01-01T00:20:00Z")  # the oldest runs began then, whatever came later
SINCE = run_lists._began_since(run_lists._RUNS, 11)
FAILED_SINCE = run_lists._began_since(run_lists._RUNS_IN_STATES[1], 12)


async def add_runs(admin: Admin, first: int, last: int) -> None:
    """Rows in bulk, as lists and sweeps read nothing else. Of twenty runs one is of procedure p3. Of those that wait
    some of the oldest wait for time, all others for a person. Nothing is due: timers are an hour away, and their worker
    was heard."""
    async with admin.transaction():
        await admin.execute("ALTER TABLE tga.heads DISABLE TRIGGER ALL")
        await admin.execute(
            "INSERT INTO tga.heads (stream, sequence_number, entry_digest, artifact_digest, state, is_open, waiting,"
            "                       tenant, principal_id, subject, name)"
            " SELECT 'run:' || CASE n % 100 WHEN 0 THEN 'seldom-' ELSE 'often-' END || to_char(n, 'FM00000000'),"
            "        1, h.entry_digest, h.artifact_digest, s.state, s.state <> 'COMPLETED',"
            "        CASE WHEN s.state = 'WAITING'"
            "             THEN CASE WHEN n % 2 = 1 AND n <= 1000 THEN 'time' ELSE 'person' END END,"
            "        'default', 'agent-' || n % 20, 'p' || n % 20, '1'"
            "   FROM generate_series($1::integer, $2::integer) AS n"
            "   JOIN unnest($3::text[]) WITH ORDINALITY AS s(state, place) ON s.place = n / 2 % 5 + 1"
            "   JOIN tga.heads h ON h.stream = 'run:small'",
            first,
            last,
            list(STATES),
        )
        await admin.execute(
            "INSERT INTO tga.runs (stream_no, tenant, procedure, program, state, waits_for_person, attempt, worker,"
            "                      due_at, failures, created_at)"
            " SELECT h.stream_no, h.tenant, h.subject, '1@aa', h.state, coalesce(h.waiting = 'person', false), 1,"
            "        CASE h.state WHEN 'RUNNING' THEN 'worker-one' END,"
            "        statement_timestamp() + interval '1 hour', 0,"
            "        '2026-01-01'::timestamptz + h.stream_no * interval '1 second'"
            "   FROM tga.heads h WHERE h.stream LIKE 'run:%-%' ON CONFLICT DO NOTHING"
        )
        await admin.execute(
            "INSERT INTO tga.run_requests (stream_no, path, sequence_number, tenant, expires_at, asked_at)"
            " SELECT h.stream_no, '1', 1, h.tenant, statement_timestamp() + h.stream_no * interval '1 hour',"
            "        statement_timestamp()"
            "   FROM tga.heads h WHERE h.waiting = 'person' ON CONFLICT DO NOTHING"
        )
        await admin.execute(
            "INSERT INTO tga.payloads SELECT h.stream_no, p.sequence_number, p.artifacts"
            "   FROM tga.heads h, tga.payloads p WHERE h.waiting = 'person' AND p.sequence_number = 1"
            "    AND p.stream_no = (SELECT o.stream_no FROM tga.heads o WHERE o.stream = 'run:small')"
            "     ON CONFLICT DO NOTHING"
        )
    for table in ("heads", "runs", "run_requests", "payloads"):
        await admin.execute(f"VACUUM ANALYZE tga.{table}")


def page(**given: Any) -> tuple[Any, ...]:
    names = ("own", "principal_id", "procedure", "prefix", "waits_for_person")
    own, principal, procedure, prefix, waits = (given.get(name) for name in names)
    waits = None if waits is None else str(waits).lower()  # of states it is always said
    until = given.get("until", LATER)
    return ("default", until, 0, own, principal, procedure, prefix or "run:", waits, 30_000, 51)


QUESTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "all": (run_lists._RUNS, page()),
    "own": (run_lists._RUNS, page(own="agent-3")),
    "of a principal": (run_lists._RUNS, page(principal_id="agent-3")),
    "of a procedure": (run_lists._RUNS, page(procedure="p3")),
    "began before a moment": (run_lists._RUNS, page(until=OLD[1])),
    "began in a time": (SINCE, (*page(until=OLD[1]), OLD[0])),
    "began lately, none": (SINCE, (*page(), "2099-01-01")),
    "began since, all": (SINCE, (*page(), "2025-01-01")),
    "failed, began in a time": (FAILED_SINCE, (*page(until=OLD[1], waits_for_person=False), "FAILED", OLD[0])),
    "failed, began since, all": (FAILED_SINCE, (*page(waits_for_person=False), "FAILED", "2025-01-01")),
    "own, began since, all": (SINCE, (*page(own="agent-3"), "2025-01-01")),
    "failed": (run_lists._RUNS_IN_STATES[1], (*page(waits_for_person=False), "FAILED")),
    "failed, of a procedure": (run_lists._RUNS_IN_STATES[1], (*page(procedure="p6", waits_for_person=False), "FAILED")),
    "running": (run_lists._RUNS_IN_STATES[2], (*page(waits_for_person=False), "SCHEDULED", "RUNNING")),
    "waiting for a person": (run_lists._RUNS_IN_STATES[1], (*page(waits_for_person=True), "WAITING")),
    "waiting for others": (run_lists._RUNS_IN_STATES[1], (*page(waits_for_person=False), "WAITING")),
    "a prefix that few have": (run_lists._RUNS_OF_PREFIX[0], page(prefix="run:seldom-000001")),
    "likewise, failed": (run_lists._RUNS_OF_PREFIX[1], (*page(prefix="run:seldom-00000"), "FAILED")),
    "likewise, of two states": (
        run_lists._RUNS_OF_PREFIX[2],
        (*page(prefix="run:seldom-00000"), "SCHEDULED", "RUNNING"),
    ),
    "whether few have it": (run_lists._ARE_FEW, ("run:often",)),
    "a prefix that many have": (run_lists._RUNS, page(prefix="run:often")),
    "questions to people": (approvals._WAITING, ("default", "1970-01-01", 0, "", None, 52)),
    "what is due": ("SELECT * FROM tga.hold_due_runs($1, $2, $3)", (100, 5_000, 30_000)),
    "what is ready": (
        "SELECT * FROM tga.hold_ready_runs($1, $2, $3, $4, $5)",
        ("default", "{p4,p8}", "{1@aa,1@aa}", 10, 5_000),
    ),
    "when something is": ("SELECT tga.next_ready_ms($1, $2, $3)", ("default", "{p4,p8}", "{1@aa,1@aa}")),
    "a beat": (
        "SELECT * FROM tga.beat_worker($1, $2, $3, $4, $5)",
        ("worker-two", "default", "worker-1", "here", "{}"),
    ),
}


async def test_many_runs_cost_a_page_and_a_sweep_no_more_than_few(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await samples.store(ledger, samples.small())
    await admin.execute(
        "INSERT INTO tga.workers VALUES ('worker-one', 'default', 'worker-1', 'here', '{}',"
        " statement_timestamp() + interval '1 hour')"
    )
    found: dict[int, dict[str, int]] = {}
    made = 0
    for size in (SMALL, LARGE):
        await add_runs(admin, made, size)
        made = size + 1
        found[size] = {}
        for name, (statement, asked) in QUESTIONS.items():
            plan, found[size][name] = await plan_and_buffers(admin, statement, *asked)
            assert size == SMALL or scanned_whole(plan) <= EMPTY, (name, plan)
    print(found)
    # Among few runs the planner reads all heads at once, which is cheaper: the list without a time says what is dear.
    found[SMALL]["own, began since, all"] = found[LARGE]["own"]
    for name in QUESTIONS:
        assert found[LARGE][name] <= 2 * found[SMALL][name] + 8, (name, found)


async def test_a_prefix_finds_old_runs_at_once_and_pages_through_them_in_order(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    """Whichever way is taken: with few runs of that prefix, and with more than are looked at by it."""
    await samples.store(ledger, samples.small())
    await add_runs(admin, 1, 6_500)
    everything = await admin.fetch(
        "SELECT substr(h.stream, 5) AS id, h.state FROM tga.heads h ORDER BY h.stream_no DESC"
    )
    for prefix in ("seldom-0000", "seldom-00000", "seldom-00000100", "often-0000640", "often-", "nothing", "small"):
        for states in (None, ["FAILED"], ["SCHEDULED", "RUNNING"]):
            seen: list[str] = []
            before, pages = None, 0
            while True:
                part = await list_runs(
                    sessions,
                    Visibility("default", None),
                    states=states,
                    prefix=prefix,
                    before=before,
                    limit=40 if prefix.startswith("seldom") else 200,
                    worker_seen_ms=30_000,
                )
                seen += [item.run_id for item in part.items]
                pages += 1
                if part.next is None:
                    break
                before = part.next
            fits = [row["id"] for row in everything if row["id"].startswith(prefix) and row["id"] != "small"]
            wanted = {row["id"] for row in everything if states is None or row["state"] in states}
            assert seen == [run_id for run_id in fits if run_id in wanted], (prefix, states)
            if prefix == "seldom-00000100":
                assert pages == 1  # the oldest of all, without a page of others before it
    assert LIST_PREFIX_ROWS_MAX < 6_000
