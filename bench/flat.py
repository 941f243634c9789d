"""What a call costs beside few entries and beside many: `python -m bench.flat [--quick] [--entries 10000000]`.

Two databases of one server, each with finished traces that the database has made itself from the rows of a real one:
10,000 entries in one, as many as `--entries` says in the other. Calls in process take turns between the two. Buffers do
not depend on the machine's noise, processor time and latency do. The sequencer is not at work: what it costs beside
many leaves bench.sequencer says.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.cost import measuring_session
from bench.measure import DATABASE, Server, Timing, arguments_of, run_bench
from bench.tool_call import run_calls, step_of_real_call
from tests.attacker import disarm, rearm

FEW: Final = 10_000
WITHIN: Final = 1.15
ENTRIES_A_TRACE: Final = 4
TRACES_A_STATEMENT: Final = 50_000
LARGE_DATABASE: Final = "bench_large"
STATISTICS_S: Final = 1.5
# The rows of the one real trace, again and again under other names and keys.
_COPIES: Final = """
WITH real AS (SELECT * FROM tga.heads WHERE stream LIKE 'trace:%' ORDER BY stream_no LIMIT 1),
made AS (
    INSERT INTO tga.heads (stream, tenant, principal_id, subject, name, idempotency_key, payload_digest, effect_digest,
                           sequence_number, entry_digest, artifact_digest, state, is_open)
    SELECT format('trace:%s-%s-7000-8000-%s', lpad(to_hex(n / 65536), 8, '0'), lpad(to_hex(n % 65536), 4, '0'),
                  lpad(to_hex(n), 12, '0')),
           r.tenant, r.principal_id, r.subject, r.name, 'made-' || n, r.payload_digest, r.effect_digest,
           r.sequence_number, r.entry_digest, r.artifact_digest, r.state, r.is_open
      FROM real r, generate_series({first}, {last}) AS n
    RETURNING stream_no
), linked AS (
    INSERT INTO tga.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                           artifact_digest, recorded_at, artifact_type, from_state, to_state)
    SELECT m.stream_no, l.sequence_number, l.place, l.places, l.executor_id, l.entry_digest, l.prev_entry_digest,
           l.artifact_digest, l.recorded_at, l.artifact_type, l.from_state, l.to_state
      FROM made m, tga.links l WHERE l.stream_no = (SELECT stream_no FROM real)
)
INSERT INTO tga.payloads (stream_no, sequence_number, artifacts)
SELECT m.stream_no, p.sequence_number, p.artifacts
  FROM made m, tga.payloads p WHERE p.stream_no = (SELECT stream_no FROM real)
"""


@dataclass(frozen=True, slots=True)
class Scale:
    entries: int
    rounds: int
    seconds: float
    at_once: tuple[int, ...] = (1, 8)


@dataclass
class Side:
    """One of the two databases, and what was found there."""

    server: Server
    database: str
    entries: int
    timings: dict[int, list[Timing]] = field(default_factory=dict)
    buffers: dict[int, list[float]] = field(default_factory=dict)

    async def run(self, name: str, at_once: int, seconds: float) -> None:
        before = await self._buffers()
        timing, _ = await run_calls(self.server, f"{name}-{self.database}", at_once, seconds)
        steps = timing.steps + 8 * at_once  # the warm-up's too
        self.timings.setdefault(at_once, []).append(timing)
        self.buffers.setdefault(at_once, []).append((await self._buffers() - before) / steps)

    async def _buffers(self) -> float:
        """All that sessions of this database have touched; they tell so when they end."""
        async with measuring_session(self.server.observer_url) as session:
            await session.execute(f"SELECT pg_sleep({STATISTICS_S})")
            found = await session.fetchval(
                "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = $1", self.database
            )
            return float(found)

    def figures(self, at_once: int) -> dict[str, float]:
        timings = self.timings[at_once]
        return {
            "buffers": statistics.median(self.buffers[at_once]),
            "server CPU us": statistics.median(timing.server_us for timing in timings),
            "gateway CPU us": statistics.median(timing.client_us for timing in timings),
            "p50 ms": statistics.median(timing.percentile_ms(50) for timing in timings),
        }


async def fill(session: Any, entries: int, say: Any) -> None:
    """Until there are so many entries."""
    traces = entries // ENTRIES_A_TRACE
    await disarm(session)
    try:
        for first in range(1, traces, TRACES_A_STATEMENT):
            last = min(first + TRACES_A_STATEMENT - 1, traces - 1)  # the real one is there
            await session.execute(_COPIES.format(first=first, last=last), timeout=3600)
            say(f"  {(last + 1) * ENTRIES_A_TRACE:,} of {entries:,} entries")
    finally:
        await rearm(session)
    await session.execute("VACUUM (ANALYZE)", timeout=7200)
    await session.execute("CHECKPOINT", timeout=3600)


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    await step_of_real_call(server)  # the trace of which the others are copies
    async with measuring_session(server.observer_url) as session:
        await session.execute(f"CREATE DATABASE {LARGE_DATABASE} TEMPLATE {DATABASE}")
    large = Server(server.embedded)
    large.admin_url = server.embedded.url("postgres", LARGE_DATABASE)
    large.gateway_url = server.gateway_url.replace(f"/{DATABASE}?", f"/{LARGE_DATABASE}?")
    sides = [Side(server, DATABASE, min(FEW, scale.entries)), Side(large, LARGE_DATABASE, scale.entries)]
    console.print(f"{machine}; {scale.rounds} rounds of {scale.seconds:g} s, medians")
    for side in sides:
        async with measuring_session(side.server.admin_url) as session:
            await fill(session, side.entries, console.print)
    for number in range(scale.rounds):
        for at_once in scale.at_once:
            for side in sides if number % 2 == 0 else reversed(sides):
                await side.run(f"flat-{number}", at_once, scale.seconds)
    console.print(_table(sides, scale))


def _table(sides: list[Side], scale: Scale) -> Table:
    few, many = sides
    table = Table(title=f"A call in process; aim: at most {WITHIN:.2f} times as much")
    for heading in ("at once", "", f"beside {few.entries:,}", f"beside {many.entries:,}", "ratio", ""):
        table.add_column(heading, justify="right")
    for at_once in scale.at_once:
        ours, theirs = few.figures(at_once), many.figures(at_once)
        for name, small in ours.items():
            ratio = theirs[name] / small if small else 1.0
            verdict = "met" if ratio <= WITHIN else "NOT met"
            table.add_row(str(at_once), name, f"{small:,.2f}", f"{theirs[name]:,.2f}", f"{ratio:.2f}", verdict)
    return table


def main() -> None:
    parser = arguments_of("flat", __doc__)
    parser.add_argument("--entries", type=int, help="of the larger database (default 10,000,000; with --quick 40,000)")
    parser.add_argument("--rounds", type=int, help="in which the two take turns (default 5)")
    given = parser.parse_args()
    if given.quick:
        scale = Scale(given.entries or 40_000, given.rounds or 1, 0.2)
    else:
        scale = Scale(given.entries or 10_000_000, given.rounds or 5, 3.0)
    run_bench(lambda server, machine, console: bench(server, machine, console, scale))


if __name__ == "__main__":
    main()
