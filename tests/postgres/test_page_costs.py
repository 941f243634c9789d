"""What a page of the console or of a list costs the store does not grow with what is stored: by buffers and rows that
it reads, never by the clock. CONSOLE.md, acceptance 13: `TGA_SOAK=1` compares 1,000 with 1,000,000, and a run of 200
entries with one of 20,000."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import asyncpg
import pytest

from app.postgres import acts, api_keys, finding, log_verifications, policy_sets, queries, reader, tree_heads
from app.postgres.call_facts import fold_all
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.invariants.plans import plan_of
from tests.postgres.test_listing import append, plan_and_buffers, scanned_whole
from tests.runs.engines import step
from tests.runs.routes import Runs, open_runs
from tests.traces import completed_trace

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
IS_WHOLE: Final = bool(os.environ.get("TGA_SOAK"))
SIZES: Final = (1_000, 1_000_000) if IS_WHOLE else (1_000, 20_000)
ENTRIES: Final = (200, 20_000) if IS_WHOLE else (200, 2_000)
FAULT: Final = {"type": "E", "message": "m", "retryable": False}
SMALL: Final = 8  # buffers: an index has a level more
EMPTY: Final = {"log_verifications", "payloads"}  # in these tests: read whole, they cost nothing

_FILLED: Final = (
    "INSERT INTO tga.tree_heads (size, root, note) SELECT 1000000 + n, sha256(n::text::bytea), 'note ' || n"
    " FROM generate_series($1::integer, $2::integer) AS n",
    "INSERT INTO tga.api_keys (key_id, secret_sha256, name, principal_id, tenant, roles, created_by)"
    " SELECT to_char(n, 'FM0000000000000000'), sha256(n::text::bytea), 'k' || n, 'p' || n, 'default', '{agent}', 'me'"
    " FROM generate_series($1::integer, $2::integer) AS n",
    "INSERT INTO tga.heads (stream, sequence_number, entry_digest, artifact_digest, state, is_open, tenant,"
    "       principal_id, subject, name, idempotency_key)"
    " SELECT substr(h.stream, 1, 19) || to_char(n, 'FM0000000000000000'), h.sequence_number, h.entry_digest,"
    "        h.artifact_digest, h.state, h.is_open, 'default', 'agent-1', 'crm', 't' || n % 20, 'k' || n"
    "   FROM generate_series($1::integer, $2::integer) AS n"
    "   JOIN tga.heads h ON h.idempotency_key = 'key-1'",
    "INSERT INTO tga.call_facts (stream_no, sequence_number, tenant, idempotency_key, state, attempts)"
    " SELECT stream_no, sequence_number, tenant, idempotency_key, state, 1 FROM tga.heads"
    "  WHERE tenant = 'default' AND $1::integer + $2::integer > 0 ON CONFLICT DO NOTHING",
    "INSERT INTO tga.digest_leaves (prefix, leaf_index)"
    " SELECT tga.digest_prefix(sha256(n::text::bytea)), 1000000 + n"
    "   FROM generate_series($1::integer, $2::integer) AS n",
    "INSERT INTO tga.acts (stream_no, sequence_number, tenant, leaf_index, act, actor)"
    " SELECT h.stream_no, 1, 'default', n, 'approved', 'ada' FROM generate_series($1::integer, $2::integer) AS n"
    "   JOIN tga.heads h ON h.idempotency_key = 'k' || n",
    # A system stream of many entries, every thirtieth of which puts a policy in force. A page looks at so many of them
    # and no more, so there are more than that from the beginning.
    "INSERT INTO tga.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,"
    "       artifact_digest, recorded_at, artifact_type, from_state, to_state, xid)"
    " SELECT (SELECT stream_no FROM tga.heads WHERE stream = 'system:costs'),"
    "        n + CASE WHEN $1 > 2 THEN 6000 ELSE 0 END, 1, 1, gen_random_uuid(), '', '',"
    "        sha256('policy'), '2026-01-01T00:00:00.000Z', CASE WHEN n % 30 = 0 THEN 'policy_set' ELSE 'pin' END,"
    "        'OPEN', 'OPEN', pg_current_xact_id()"
    "   FROM generate_series($1::integer, CASE WHEN $1 > 2 THEN $2 ELSE $2 + 6000 END) AS n",
    "UPDATE tga.heads SET sequence_number = (SELECT max(l.sequence_number) FROM tga.links l"
    "        WHERE l.stream_no = heads.stream_no) WHERE stream = 'system:costs' AND $1::integer + $2::integer > 0",
)
_TABLES: Final = ("tree_heads", "api_keys", "heads", "call_facts", "digest_leaves", "links", "payloads", "acts")


async def _fill(admin: Admin, first: int, last: int) -> None:
    """In bulk, past the triggers: what is read here needs no chain."""
    async with admin.transaction():
        for table in _TABLES:
            await admin.execute(f"ALTER TABLE tga.{table} DISABLE TRIGGER ALL")
        for statement in _FILLED:
            await admin.execute(statement, first, last)
    for table in _TABLES:
        await admin.execute(f"VACUUM ANALYZE tga.{table}")


async def test_find_keys_heads_and_policy_sets_cost_the_same_however_many_there_are(
    ledger: PostgresLedger, sessions: Sessions, admin: Admin
) -> None:
    await append(ledger, [plan_of(completed_trace(1))])
    await sessions.commit("SELECT * FROM tga.integrate(100000)")
    await fold_all(sessions)
    await admin.execute(
        "INSERT INTO tga.heads (stream_no, stream, sequence_number, entry_digest, state, is_open)"
        " VALUES (nextval('tga.stream_numbers'), 'system:costs', 0, '', 'OPEN', true)"
    )
    (digest,) = await admin.fetchrow("SELECT entry_digest FROM tga.links LIMIT 1") or (b"",)
    (stream,) = await admin.fetchrow("SELECT stream FROM tga.heads WHERE stream LIKE 'trace:%' LIMIT 1") or ("",)
    asked: dict[str, tuple[str, tuple[Any, ...]]] = {
        "find by id": (finding._BY_NAME, ("default", f"{{{stream},run:none}}", None)),
        "find by key": (finding._BY_KEY, ("default", "k777", None, "{crm,crm}", "{t1,t17}", 20)),
        "find nothing by key": (finding._BY_KEY, ("default", "no such", None, "{crm}", "{t1}", 20)),
        "find by digest": (finding._BY_DIGEST, ("default", f"\\x{digest.hex()}", None, 20)),
        "find nothing by digest": (finding._BY_DIGEST, ("default", f"\\x{bytes(32).hex()}", None, 20)),
        "what people did": (acts._PAGE, ("default", 2**62, 51)),
        "what they did before": (acts._PAGE, ("default", 500, 51)),
        "keys": (api_keys._PAGE, ("default", "1970-01-01", "", 51)),
        "newest heads": (tree_heads._HEADS, (2**62, 13)),
        "older heads": (tree_heads._HEADS, (1_000_500, 13)),
        "policy sets": (policy_sets._SETS, ("system:costs", 2**62, 21)),
        "whether it may be seen": (queries._VISIBLE, ("default", stream, None)),
        "systems of one name": (reader._REPEATED_SYSTEMS, ()),
        "last verification": (log_verifications._LAST_CONCLUSIVE, (30_000,)),
    }
    found: dict[int, dict[str, int]] = {}
    made = 2
    for size in SIZES:
        await _fill(admin, made, size)
        made = size + 1
        found[size] = {}
        for what, (statement, arguments) in asked.items():
            plan, found[size][what] = await plan_and_buffers(admin, statement, *arguments)
            assert size == SIZES[0] or scanned_whole(plan) <= EMPTY, what
    print(found)
    small, large = (found[size] for size in SIZES)
    for what, buffers in large.items():
        assert buffers <= 2 * small[what] + SMALL, (what, small[what], buffers)


class RowsRead:
    """Counts the rows that statements of this process get from PostgreSQL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        connections: Any = asyncpg.Connection
        executes = connections._execute

        async def counted(connection: Any, *arguments: Any, **options: Any) -> Any:
            found = await executes(connection, *arguments, **options)
            self.rows += len(found) if isinstance(found, list) else 1
            return found

        monkeypatch.setattr(connections, "_execute", counted)


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path) as opened:
        yield opened


async def test_a_page_of_a_long_run_reads_no_more_rows_than_one_of_a_short_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of its journal, and its state at any place. The run itself is folded from its last execution checkpoint,
    which are written as seldom as the journal grows by their size (ADR 45): that is at most half of the journal."""
    for entries in ENTRIES:
        await runs.start(f"run-{entries}")
        (leased,) = await runs.lease()
        after, made = 2, 0
        while made < entries:
            puts = [step(str(made + n + 1), made + n) for n in range(50)]
            after = (await runs.put(leased, *puts, after=after))["sequence_number"]
            made += 50
        await runs.put(leased, after=after, then={"type": "fail", "error": FAULT})
    counted = RowsRead(monkeypatch)
    found: dict[int, dict[str, int]] = {}
    for entries in ENTRIES:
        found[entries], last = {}, (await runs.front.page(f"/v1/runs/run-{entries}"))["sequence_number"]
        middle = last // 2
        for path in (
            "?steps=0",
            "?steps=24",
            "/checkpoints?limit=200",
            f"/checkpoints?limit=200&after_seq={max(0, last - 100)}",
            f"/state?at={last}",
            f"/state?at={middle}",
        ):
            before = counted.rows
            await runs.front.page(f"/v1/runs/run-{entries}{path}")
            found[entries][path.partition("=")[0] + str(len(found[entries]))] = counted.rows - before
    print(found)
    short, long = (list(found[entries].items()) for entries in ENTRIES)
    for (what, few), (_, many) in zip(short, long, strict=True):
        assert many <= 2 * few + SMALL, (what, few, many)
