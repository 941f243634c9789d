"""Runs on the ledger: the append function admits what the table admits and nothing else, by its rows alone."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from app.core.canonical import canonical_bytes
from app.core.chain import Head
from app.core.digest import digest_of_bytes
from app.core.errors import ConcurrentExecution, InvalidTransition, RecoveryFailed
from app.core.limits import BATCH_PLANS_MAX
from app.domain.ledger.plans import Plan, PlannedEntry
from app.domain.ledger.queries import Visibility
from app.domain.runs.documents import RunDocument
from app.domain.runs.replay import RUN_DOCUMENTS, RunRecord, fold
from app.domain.runs.transitions import RUN
from app.domain.runs.waiting import waiting_for
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import acquire_stream
from app.postgres.queries import PostgresQueries
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.runs.journal import Journal, answer, attempt, checkpoint, end, intent, resumption, running, suspension
from tests.runs.test_run_table import ARTIFACTS
from tests.traces import EXECUTOR, OTHER_EXECUTOR, time_at

TOKEN = OTHER_EXECUTOR  # of a worker's lease


def journal_in(state: str) -> Journal:
    """A short run that stands in this state."""
    if state == "SCHEDULED":
        return Journal()
    if state == "RUNNING":
        return running()
    if state == "WAITING":
        made = running(intent("1"))
        made.append(suspension("1"))
        return made
    return running(end(state))


def planned(records: list[RunRecord]) -> list[PlannedEntry]:
    made = []
    for entry, artifact in records:
        assert artifact is not None
        made.append(PlannedEntry(entry.body_bytes(), artifact.to_bytes()))
    return made


def renamed(documents: list[tuple[dict[str, Any], dict[str, Any]]], run_id: str) -> list[PlannedEntry]:
    """These entries and artifacts, linked again as those of another run."""
    made, digest = [], "0" * 64
    for entry, artifact in documents:
        written = canonical_bytes({**artifact, "run_id": run_id})
        body = {
            **entry,
            "run_id": run_id,
            "prev_entry_digest": digest,
            "artifact_digest": digest_of_bytes(written),
        }
        made.append(PlannedEntry(canonical_bytes(body), written))
        digest = digest_of_bytes(made[-1].entry)
    return made


async def commit_all(ledger: PostgresLedger, plans: list[Plan]) -> list[str | None]:
    """The code of each plan's refusal, or None."""
    codes: list[str | None] = []
    for first in range(0, len(plans), BATCH_PLANS_MAX):
        errors = await ledger.commit_batch(plans[first : first + BATCH_PLANS_MAX])
        codes += [None if error is None else error.code for error in errors]
    return codes


async def test_the_append_function_admits_each_triple_of_the_table_and_no_other(
    ledger: PostgresLedger, admin: Admin
) -> None:
    """Every state, artifact and verdict (those of the table, one that is none, and no verdict), to every state; at
    birth, too. What the rows say is compared with the table of the code, triple by triple."""
    births: list[Plan] = []
    tried: list[tuple[Plan, bool]] = []
    for number, (state, artifact) in enumerate(itertools.product(["", *RUN.states], _documents())):
        run_id = f"r-{number}"
        before = [] if state == "" else planned(journal_in(state).records)
        raw = [(json.loads(p.entry), json.loads(p.artifact)) for p in before]
        entries = renamed(raw, run_id)
        if entries:
            births.append(Plan(f"run:{run_id}", EXECUTOR, None, entries))
        rule = next(rule for rule in RUN.artifacts if rule.schema_id == artifact["schema_id"])
        verdict = "" if rule.verdict_field is None else str(artifact.get(rule.verdict_field, ""))
        from_state = state or RUN.birth_state
        leads_to = RUN.next_state.get((from_state, rule.artifact_type, verdict, state == ""))
        # Refused ones first: they leave the stream as it is.
        for to_state in sorted(RUN.states, key=lambda to_state: to_state == leads_to):
            entry = {
                "schema_id": RUN.entry_schema_id,
                "schema_version": "1.0",
                "sequence_number": len(entries) + 1,
                "executor_id": EXECUTOR,
                "recorded_at": time_at(number),
                "from_state": from_state,
                "to_state": to_state,
                "artifact_type": rule.artifact_type,
            }
            last = renamed([*raw, (entry, artifact)], run_id)[-1]
            tried.append((Plan(f"run:{run_id}", EXECUTOR, None, [last]), to_state == leads_to))
    assert set(await commit_all(ledger, births)) == {None}
    found: list[str | None] = []
    for places in range(len(RUN.states)):  # a stream stands once in a batch
        found += await commit_all(ledger, [plan for plan, _ in tried[places :: len(RUN.states)]])
    expected = [admitted for places in range(len(RUN.states)) for _, admitted in tried[places :: len(RUN.states)]]
    assert found == [None if admitted else InvalidTransition.code for admitted in expected]
    assert expected.count(True) == len(RUN.transitions)
    assert await admin.fetchval("SELECT bool_and(verbatim = '') FROM tga.links"), "all were stored as fields"


def _documents() -> list[dict[str, Any]]:
    made = [json.loads(artifact.to_bytes()) for artifact in ARTIFACTS.values()]
    for rule in RUN.artifacts:
        if rule.verdict_field is not None:
            sample = next(document for document in made if document["schema_id"] == rule.schema_id)
            made.append({**sample, rule.verdict_field: "ELSE"})
            made.append({name: value for name, value in sample.items() if name != rule.verdict_field})
    return made


class StoredRun:
    """A run that is folded here and appended there, each artifact by a plan of its own."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self._ledger = ledger
        self.journal: Journal | None = None
        self._head = Head.unborn(RUN)

    async def append(self, *artifacts: RunDocument, executor: str = EXECUTOR, owner_after: str | None = None) -> str:
        for artifact in artifacts:
            if self.journal is None:
                self.journal = Journal(artifact)  # type: ignore[arg-type]
            else:
                self.journal.append(artifact)
            run = self.journal.run
            head = self._head
            entry, self._head, is_admitted = RUN_DOCUMENTS.plan(
                head, artifact, identity=run.run_id, executor_id=executor, recorded_at=time_at(head.sequence_number)
            )
            assert is_admitted
            run.head = self._head
            waiting = waiting_for(run)
            await self._ledger.commit(Plan(f"run:{run.run_id}", executor, owner_after, [entry], waiting_after=waiting))
        return self._head.artifact_digest or ""


async def test_a_run_is_appended_listed_by_its_procedure_and_stands_where_it_waits(
    ledger: PostgresLedger, admin: Admin, sessions: Sessions
) -> None:
    run = StoredRun(ledger)

    async def stands() -> tuple[Any, ...]:
        row = await admin.fetchrow(
            "SELECT h.state, h.waiting, w.kind, r.state AS rests, r.waiting AS for_whom FROM tga.heads h"
            " LEFT JOIN tga.in_work w USING (stream_no) LEFT JOIN tga.at_rest r USING (stream_no)"
            " WHERE h.stream = 'run:r'"
        )
        assert row is not None
        return tuple(row)

    await run.append(Journal().records[0].artifact)  # type: ignore[arg-type]
    assert await stands() == ("SCHEDULED", "worker", None, "SCHEDULED", "worker")
    await run.append(attempt(1), owner_after=TOKEN)
    assert await stands() == ("RUNNING", None, "run", None, None)
    with pytest.raises(ConcurrentExecution):  # the fence: the lease is the owner
        await ledger.commit(Plan("run:r", EXECUTOR, None))
    ask = await run.append(checkpoint("1"), intent("2", "ask", "pay"), executor=TOKEN, owner_after=TOKEN)
    await run.append(suspension("2"), executor=TOKEN)
    assert await stands() == ("WAITING", "person", None, "WAITING", "person")
    await run.append(answer("2", ask, "person", wakes="YES"))
    assert await stands() == ("SCHEDULED", "worker", None, "SCHEDULED", "worker")
    await run.append(attempt(2), owner_after=TOKEN)
    await run.append(checkpoint("3", outcome="ERROR", attempt=2), end("FAILED", attempt=2, positions=3), executor=TOKEN)
    assert await stands() == ("FAILED", "operator", None, "FAILED", "operator")
    assert run.journal is not None
    await run.append(resumption(run.journal.run, reopens=["3"]))
    await run.append(attempt(3), owner_after=TOKEN)
    await run.append(checkpoint("3", attempt=3, try_number=2), end(attempt=3, positions=3), executor=TOKEN)
    assert await stands() == ("COMPLETED", None, "run", None, None), "in_work is swept by who looks for work next"

    rows = await admin.fetch("SELECT entry, artifact, entry_digest FROM tga.records ORDER BY sequence_number")
    records = [
        RUN_DOCUMENTS.read(row["entry"], row["artifact"], entry_digest=row["entry_digest"].hex()) for row in rows
    ]
    folded = fold(records)
    assert folded is not None
    assert (folded.head.state, folded.attempt, folded.frontier.positions) == ("COMPLETED", 3, 3)
    queries, scope = PostgresQueries(sessions), Visibility("default", None)
    for filters, many in (({"subject": "onboard"}, 1), ({"subject": "offboard"}, 0), ({"name": "1.2.0"}, 1)):
        assert len((await queries.streams(RUN, scope, **filters)).items) == many  # type: ignore[arg-type]


async def test_no_executor_takes_or_recovers_a_run_and_what_has_ended_is_swept(
    ledger: PostgresLedger, admin: Admin, sessions: Sessions
) -> None:
    run = StoredRun(ledger)
    await run.append(Journal().records[0].artifact)  # type: ignore[arg-type]
    await run.append(attempt(1), owner_after=TOKEN)
    assert await admin.fetchval("SELECT lease_until FROM tga.heads") is None, "nothing runs out by itself"
    with pytest.raises(ConcurrentExecution):
        await acquire_stream(sessions, "run:r", EXECUTOR)  # no session holds the token's lock, and none needs to
    assert await _recoverable(sessions, "run", EXECUTOR) == []
    assert await _recoverable(sessions, "run", TOKEN) == []
    async with admin.transaction():
        await admin.fetch("SELECT tga.recoverable('run', $1::uuid, NULL, 10)", EXECUTOR)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await admin.fetchval(held) == 0, "no lock is asked for a run"
    assert await admin.fetchval("SELECT count(*) FROM tga.in_work") == 1
    await run.append(end("CANCELLED"), executor=TOKEN)
    assert await admin.fetchval("SELECT waiting IS NULL AND state = 'CANCELLED' FROM tga.at_rest"), "an unusual end"
    assert await _recoverable(sessions, "trace", EXECUTOR) == []
    assert await admin.fetchval("SELECT count(*) FROM tga.in_work") == 0, "who recovers traces sweeps ended runs too"


async def _recoverable(sessions: Sessions, kind: str, asking: str) -> list[str]:
    rows = await sessions.commit("SELECT s FROM tga.recoverable($1, $2::uuid, NULL, 10) AS s", kind, asking)
    return [row["s"] for row in rows]


@pytest.mark.parametrize(
    ("kinds", "whom"),
    [
        (["sleep"], "time"),
        (["tool", "sleep"], "tool"),
        (["sleep", "child"], "child"),
        (["tool", "signal"], "signal"),
        (["sleep", "ask", "tool"], "person"),
    ],
)
def test_a_run_that_awaits_several_names_first_who_has_to_be_told(kinds: list[str], whom: str) -> None:
    made = running(*(intent(f"1:{n}.1", kind, f"{kind}-{n}") for n, kind in enumerate(kinds, 1)))
    assert waiting_for(made.run) is None
    made.append(suspension(*(f"1:{n}.1" for n in range(1, len(kinds) + 1)), wake="ALL"))
    assert waiting_for(made.run) == whom
    made.run.awaits = ["7"]
    with pytest.raises(RecoveryFailed):
        waiting_for(made.run)
