"""Calls and runs in bulk, as copies of real ones: what pages of the console and of lists are measured beside.

The database copies rows of streams that a real gateway has made: other names, keys, times and entry digests, the same
documents. The sequencer and the fold take them up as they take up any other, so trees, facts, counts and digests are
their own work. A copied call's documents name the call that it was copied from: lists do not read those, and its own
page would show the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from tests.attacker import disarm, rearm

COPIES_A_STATEMENT: Final = 20_000
CALL_OF_FOUR: Final = "completed-4"  # which seed has so many leaves
LEAVES_OF_CALL: Final = 4
DAYS: Final = 7
DENSE: Final = 1_000  # the newest of any size have every state, so that a page of few and one of many show the same
NEWEST: Final = 500  # as many lie in the last half hour, however many there are
TAIL: Final = 200  # leaves beyond the last 256 that a proof hashes again: as many in both trees, to a call
SELDOM: Final = 100  # as many are of an agent or tool that seldom comes, and half as many failures: spread over all
# Which of ten calls is copied, among the newest and among the others (0 to 5: completed ones).
_SEED: Final = """
CASE WHEN {n} > {last} - {dense} THEN (ARRAY['pending', 'held', 'failed', 'denied'])[{n} % 10 + 1]
     WHEN {n} % 100 = 0 THEN 'pending' WHEN {n} % 200 = 1 THEN 'held'
     WHEN {n} % 50 = 2 THEN 'failed' WHEN {n} % 50 = 3 THEN 'denied' END
"""
_CHUNK: Final = """
INSERT INTO bench_copies
SELECT nextval('tga.stream_numbers'), s.stream_no, c.n, c.ms, substr(s.stream, 1, strpos(s.stream, ':')) || {name},
       CASE c.n % (2 * {every}) WHEN 2 THEN 'failure' WHEN 5 THEN 'tool' WHEN {every} + 5 THEN 'tool'
                                WHEN 9 THEN 'agent' WHEN {every} + 9 THEN 'agent' END
  FROM (SELECT n, {began} AS ms, coalesce({kind}, 'completed-' || n % {completed}) AS kind
          FROM generate_series({first}, {last}) AS n) AS c
  JOIN bench_seeds s ON s.kind = c.kind
 ORDER BY c.n
"""
_ID: Final = """
substr(lpad(to_hex(c.ms), 12, '0'), 1, 8) || '-' || substr(lpad(to_hex(c.ms), 12, '0'), 9) || '-7000-8000-'
|| lpad(to_hex(c.n), 12, '0')
"""
_MOMENT: Final = "to_timestamp(c.ms / 1000.0)"
_SAID: Final = f"""to_char({_MOMENT} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')"""
# By table: what of a copy differs from what it was copied from.
_DIFFERS: Final[dict[str, dict[str, str]]] = {
    "heads": {
        "stream": "c.stream",
        "idempotency_key": "CASE WHEN s.idempotency_key IS NOT NULL THEN 'made-' || c.n END",
        "expires_at": "s.expires_at + c.n * interval '1 second'",
        "updated_at": _MOMENT,
        # Of agent-7 is one call of ten. What seldom comes is a failure of a tool and an agent that else succeed, ...
        "principal_id": """CASE WHEN c.seldom = 'agent' THEN 'seldom'
                                WHEN c.seldom = 'failure' OR c.n % 10 = 7 THEN 'agent-7' ELSE s.principal_id END""",
        # ... a call of a tool, or of an agent.
        "name": """CASE c.seldom WHEN 'tool' THEN 'seldom' WHEN 'failure' THEN 'charge' ELSE s.name END""",
    },
    "links": {
        "entry_digest": "sha256((c.n || ' ' || s.sequence_number)::bytea)",
        "prev_entry_digest": "sha256((c.n || ' ' || s.sequence_number - 1)::bytea)",
        "artifact_digest": "sha256((c.n || ' artifact ' || s.sequence_number)::bytea)",
        "recorded_at": _SAID,
        "xid": "pg_current_xact_id()",
    },
    "payloads": {},
    "at_rest": {"stream": "c.stream", "expires_at": "s.expires_at + c.n * interval '1 second'"},
    "runs": {"created_at": _MOMENT},
    "run_requests": {"expires_at": "s.expires_at + c.n * interval '1 second'", "asked_at": _MOMENT},
}


async def mark_seeds(session: Any, seeds: dict[str, str]) -> None:
    """`seeds`: streams by what they are copied as."""
    await session.execute(
        "CREATE TABLE IF NOT EXISTS bench_seeds (kind text PRIMARY KEY, stream_no bigint, stream text)"
    )
    for kind, stream in seeds.items():
        await session.execute(
            "INSERT INTO bench_seeds SELECT $1, h.stream_no, h.stream FROM tga.heads h WHERE h.stream = $2",
            kind,
            stream,
        )


async def add_calls(session: Any, count: int, say: Callable[[str], None], *, is_newest: bool) -> None:
    """`count` calls in all: the older ones evenly over the last days until an hour ago, the more the denser; or the
    newest, up to a minute ago."""
    older, hour = count - NEWEST, 3_600_000
    if is_newest:
        began = f"{_now_ms() - hour // 2} + (n - {older}) * {hour // 2 - 60_000}::bigint / {NEWEST}"
    else:
        began = f"{_now_ms() - DAYS * 24 * hour} + n * {(DAYS * 24 - 1) * hour}::bigint / {older}"
    kind = _SEED.format(n="n", last=count, dense=DENSE)
    first, last = (older + 1, count) if is_newest else (1, older)
    await _add(session, first, last, say, kind=kind, began=began, name=_ID, every=count // SELDOM)


async def even_out(session: Any, count: int, say: Callable[[str], None]) -> None:
    """A few calls more, so that proofs hash as many leaves again in each tree, whatever its size."""
    leaves = await session.fetchval("SELECT first_index + leaves FROM tga.leaf_spans ORDER BY first_index DESC LIMIT 1")
    calls = (TAIL - leaves) % 256 // LEAVES_OF_CALL
    began = f"{_now_ms() - 60_000} + n"
    kind = f"'{CALL_OF_FOUR}'"
    await _add(session, count + 1, count + calls, say, kind=kind, began=began, name=_ID, every=count // SELDOM)


async def add_runs(session: Any, count: int, say: Callable[[str], None]) -> None:
    began = f"{_now_ms() - DAYS * 86_400_000} + n * {DAYS * 86_400_000 - 60_000}::bigint / {count}"
    kind = "'run-' || (ARRAY['asking', 'failed', 'completed', 'completed'])[n % 4 + 1]"
    every = count // SELDOM
    name = f"CASE c.n % {every} WHEN 0 THEN 'seldom-' ELSE 'often-' END || to_char(c.n, 'FM00000000')"
    await _add(session, 1, count, say, kind=kind, began=began, name=name, every=every)


async def _add(
    session: Any, first: int, last: int, say: Callable[[str], None], *, kind: str, began: str, name: str, every: int
) -> None:
    completed = await session.fetchval("SELECT count(*) FROM bench_seeds WHERE kind LIKE 'completed-%'")
    await session.execute(
        "CREATE UNLOGGED TABLE IF NOT EXISTS bench_copies"
        " (stream_no bigint, seed_no bigint, n bigint, ms bigint, stream text, seldom text)"
    )
    statements = [await _copying(session, table, differs) for table, differs in _DIFFERS.items()]
    await disarm(session)
    try:
        for start in range(first, last + 1, COPIES_A_STATEMENT):
            end = min(start + COPIES_A_STATEMENT - 1, last)
            async with session.transaction():
                await session.execute("TRUNCATE bench_copies")
                # `first` of the chunk, but the time and the kind by the whole.
                chunk = _CHUNK.format(
                    kind=kind, began=began, name=name, every=every, first=start, last=end, completed=completed
                )
                await session.execute(chunk, timeout=3600)
                await session.execute("ANALYZE bench_copies")
                for statement in statements:
                    await session.execute(statement, timeout=3600)
            say(f"  {end:,} of {last:,}")
    finally:
        await rearm(session)


async def _copying(session: Any, table: str, differs: dict[str, str]) -> str:
    columns = await session.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = ('tga.' || $1)::regclass AND attnum > 0 AND NOT attisdropped"
        "   AND attgenerated = '' ORDER BY attnum",
        table,
    )
    names = [row["attname"] for row in columns]
    taken = ["c.stream_no" if name == "stream_no" else differs.get(name, f"s.{name}") for name in names]
    return (
        f"INSERT INTO tga.{table} ({', '.join(names)}) SELECT {', '.join(taken)}"
        f"  FROM bench_copies c JOIN tga.{table} s ON s.stream_no = c.seed_no ORDER BY c.n"
    )


async def take_up(session: Any, say: Callable[[str], None]) -> None:
    """Let the sequencer's and the fold's functions take up all that was added."""
    while (await session.fetchrow("SELECT * FROM tga.integrate(20000)", timeout=3600))["leaves_added"]:
        pass
    say("  the tree has it all")
    looked_at = 1
    while looked_at:
        looked_at, leaf = await session.fetchrow("SELECT * FROM tga.fold_calls(5000)", timeout=3600)
        if leaf % 100_000 < 20_000:
            say(f"  folded up to leaf {leaf:,}")
    while await session.fetchval("SELECT tga.fold_acts(5000)", timeout=3600):
        pass


def _now_ms() -> int:
    return int(time.time() * 1000)


async def of_places(session: Any) -> dict[str, Any]:
    """Places that pages of both sides begin at: 50 before the last call and the last that waits, and the middles."""
    last = "OFFSET 50 LIMIT 1"
    return {
        "call": await session.fetchval(
            "SELECT substr(stream, 7) FROM tga.heads WHERE stream > 'trace:' AND stream < 'trace;'"
            f" ORDER BY stream {last}"
        ),
        "waits": await session.fetchval(
            f"SELECT expires_at FROM tga.at_rest WHERE waiting = 'supervisor' ORDER BY expires_at DESC {last}"
        ),
        "waits_middle": await session.fetchval(
            "SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY expires_at) FROM tga.at_rest"
            " WHERE waiting = 'supervisor'"
        ),
    }
