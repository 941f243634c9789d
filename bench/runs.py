"""Runs: `python -m bench.runs [--quick]`.

1. Checkpoints a second at 1, 8, 32 and 128 runs at once, as ratios to pgbench inserting the same bytes, one row a
   transaction, unbatched. In process: fold, plan, commit; the HTTP around it is measured by bench.http.
2. What a put costs at entry 100, 1,000 and 20,000 of a run: round trips, commits, buffers.
3. A whole run of one step: a worker waits, start and lease, put and end. Workers keep their ids, as processes do: one
   that is new must first be noted, and its run be leased by itself.
4. Reading a journal of 20,000 checkpoints back, in pages: time; and, in another pass, how much memory it takes more.
5. What a checkpoint leaves in the database and in the write-ahead log.
6. What 100,000 waiting runs cost: buffers of the one query that looks for what is due.
7. With `--dbos PYTHON`, an interpreter whose environment has DBOS: the same run of one step there, in turns with ours.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from app.core.limits import RUN_PAGE_RECORDS_MAX
from app.domain.ledger.plans import Ledger, Plan
from app.domain.runs.engine.messages import LeasedRun
from bench.baseline import Baseline, Step
from bench.cost import buffers_of_append, cost_of, measuring_session
from bench.measure import (
    AT_ONCE,
    BASELINE_CLIENTS,
    WARMUP_STEPS,
    Rounds,
    Server,
    Timing,
    arguments_of,
    closed_loop,
    measure_sync,
    run_bench,
    throughput_table,
)
from tests.runs.engines import Engine, open_engine, step
from tga_sdk.journal import Journal

VALUE: Final = {"text": "x" * 188}  # 200 bytes as JSON
BASELINE: Final = """
CREATE SCHEMA baseline;
CREATE TABLE baseline.checkpoints (
    stream text NOT NULL, place bigint NOT NULL, artifact bytea NOT NULL, PRIMARY KEY (stream, place));
"""
PUTS_A_COST: Final = 20
WHOLE: Final = "whole run of one step"


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure."""

    rounds: int
    seconds: float
    lengths: tuple[int, ...]
    counted: int
    waiting: int

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=3, seconds=3.0, lengths=(100, 1_000, 20_000), counted=4_000, waiting=100_000)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=1, seconds=0.1, lengths=(10, 110), counted=60, waiting=2_000)


class Putter:
    """One run, and where its program stands."""

    def __init__(self, engine: Engine, run: LeasedRun) -> None:
        self.engine = engine
        self.run = run
        self.seen = run.sequence_number
        self.performed = 0

    async def put(self, count: int = 1) -> None:
        puts = [step(str(self.performed + place), VALUE) for place in range(1, count + 1)]
        answer = await self.engine.put(self.run, self.seen, *puts)
        if answer.directive != "CONTINUE":
            raise RuntimeError(f"the run is not ours: {answer}")
        self.performed += count
        self.seen = answer.sequence_number


_numbers = itertools.count(1)


async def leased(engine: Engine, count: int) -> list[Putter]:
    """So many runs, leased to one worker."""
    await asyncio.gather(*(engine.start(f"run-{next(_numbers)}") for _ in range(count)))
    runs: list[LeasedRun] = []
    while len(runs) < count:
        runs += await engine.lease(min(count - len(runs), 64))
    return [Putter(engine, run) for run in runs]


async def run_puts(server: Server, at_once: int, seconds: float) -> Timing:
    async with open_engine(server.gateway_url) as engine:
        putters = await leased(engine, at_once)
        queues: list[Iterator[Putter]] = [itertools.repeat(putter) for putter in putters]
        return await closed_loop(server, lambda putter: putter.put(), queues, seconds)


async def whole_run(engine: Engine, worker: str) -> None:
    """A worker waits, a run starts, the worker gets it, performs one step and ends it."""
    waiting = asyncio.create_task(engine.lease(1, worker=worker, wait_ms=10_000))
    await asyncio.sleep(0)
    await engine.start(f"whole-{next(_numbers)}")
    (run,) = await waiting
    end = {"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 1}
    await engine.put(run, run.sequence_number, step("1", VALUE), then=end)


async def run_whole(server: Server, at_once: int, seconds: float) -> Timing:
    async with open_engine(server.gateway_url) as engine:
        queues: list[Iterator[str]] = [itertools.repeat(f"worker-{next(_numbers):06}") for _ in range(at_once)]
        return await closed_loop(server, lambda worker: whole_run(engine, worker), queues, seconds)


def baseline_step() -> Step:
    """The bytes of a checkpoint's artifact, a row a transaction."""
    return Step(
        schema=BASELINE,
        statements=("INSERT INTO baseline.checkpoints (stream, place, artifact) VALUES (:stream, :place, :artifact)",),
        values={"artifact": b"x" * 760},
        steps_per_stream=1_000_000,
    )


async def measure_throughput(
    server: Server, baseline: Baseline, scale: Scale, dbos: str | None, theirs: list[dict[int, float]]
) -> tuple[Rounds, list[float]]:
    rounds, sync_ms = Rounds(), []
    for _ in range(scale.rounds):
        sync_ms.append(measure_sync(server.embedded.data_dir))
        for at_once in AT_ONCE:
            if at_once in BASELINE_CLIENTS:
                rounds.add("baseline", at_once, await baseline.run(at_once, scale.seconds))
            rounds.add("put", at_once, await run_puts(server, at_once, scale.seconds))
            if at_once in BASELINE_CLIENTS:
                rounds.add(WHOLE, at_once, await run_whole(server, at_once, scale.seconds))
        if dbos is not None:
            theirs.append(await measure_dbos(server, dbos, scale))
    return rounds, sync_ms


class _Explained:
    """A ledger whose next plan is committed under EXPLAIN."""

    def __init__(self, ledger: Ledger, session: Any) -> None:
        self._ledger = ledger
        self._session = session
        self.buffers: list[int] | None = None

    async def commit(self, plan: Plan) -> None:
        if self.buffers is None:
            await self._ledger.commit(plan)
        else:
            self.buffers.append(await buffers_of_append(self._session, plan))

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[Any]:
        return list(await self._ledger.commit_all(plans, needs))


async def measure_flatness(server: Server, scale: Scale) -> Table:
    table = Table(title="Flatness: one put to a run, by the length of its journal")
    for heading in ("at entry", "round trips", "commits", "buffers (least, median, most)", "client CPU µs"):
        table.add_column(heading, justify="right")
    for length in scale.lengths:
        putter, buffers, cpu_us = await _buffers_at(server, length)

        async def puts(url: str, count: int, putter: Putter = putter) -> None:
            async with open_engine(url) as engine:
                putter.engine = engine
                for _ in range(count + 1):  # the first one reads the run
                    await putter.put()

        async with measuring_session(server.observer_url) as observer:
            commits, trips = await cost_of(server.gateway_url, observer, puts, PUTS_A_COST)
        shown = f"{buffers[0]}, {statistics.median(buffers):.0f}, {buffers[-1]}"
        per_put = (f"{trips / PUTS_A_COST:.2f}", f"{commits / PUTS_A_COST:.2f}")
        table.add_row(f"{length:,}", *per_put, shown, f"{cpu_us:.0f}")
    return table


async def _buffers_at(server: Server, length: int) -> tuple[Putter, list[int], float]:
    """A run with so many entries; the buffers that puts to it touch, and the processor time that they take here."""
    made: list[_Explained] = []
    async with measuring_session(server.admin_url) as session:

        def wrap(ledger: Ledger) -> Ledger:
            made.append(_Explained(ledger, session))
            return made[0]

        async with open_engine(server.gateway_url, wrap=wrap) as engine:
            (putter,) = await leased(engine, 1)
            while putter.seen < length - 1:
                await putter.put(min(64, length - 1 - putter.seen))
            found: list[int] = []
            made[0].buffers = found
            for _ in range(2 * PUTS_A_COST):  # in the first half statements are planned, and catalogues read
                await putter.put()
            made[0].buffers = None
            found = found[PUTS_A_COST:]
            cpu, puts = time.process_time(), 5 * PUTS_A_COST
            for _ in range(puts):
                await putter.put()
            return putter, sorted(found), (time.process_time() - cpu) * 1e6 / puts


async def measure_bytes(server: Server, scale: Scale) -> tuple[float, float]:
    """Of one checkpoint with a value of 200 bytes: in the database, and in the log."""
    sizes = "SELECT pg_database_size(current_database()), pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
    async with open_engine(server.gateway_url) as engine:
        putters = await leased(engine, 10)
        for putter in putters:
            await putter.put(10)
        async with measuring_session(server.admin_url) as session:
            await session.execute("CHECKPOINT")
            before = await session.fetchrow(sizes)
            for _ in range(scale.counted // 10):
                await asyncio.gather(*(putter.put() for putter in putters))
            after = await session.fetchrow(sizes)
    if before is None or after is None:
        raise RuntimeError("the sizes cannot be read")
    count = scale.counted // 10 * 10
    return (after[0] - before[0]) / count, float(after[1] - before[1]) / count


async def measure_replay(server: Server, scale: Scale) -> tuple[int, float, float]:
    """Checkpoints, seconds to read them back into a worker's journal, and MiB that it takes at most."""
    async with open_engine(server.gateway_url) as engine:
        (putter,) = await leased(engine, 1)
        while putter.performed < scale.lengths[-1]:
            await putter.put(64)
        started = time.perf_counter()
        await read_back(engine, putter.run.run_id)
        taken = time.perf_counter() - started
        tracemalloc.start()  # in a pass of its own: to follow every allocation takes longer than all else
        await read_back(engine, putter.run.run_id)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        return putter.performed, taken, peak


async def read_back(engine: Engine, run_id: str) -> Journal:
    """The journal of a run as its worker has it, in pages."""
    runs, journal, after = engine.engine.ports.runs, Journal(), 0
    while page := await runs.load_records(run_id, after=after, limit=RUN_PAGE_RECORDS_MAX):
        for record in page:
            said = {} if record.artifact is None else record.artifact.to_json()
            after = record.entry.sequence_number
            journal.add({**said, "artifact_type": record.entry.artifact_type, "sequence_number": after})
    return journal


async def measure_waiting(server: Server, scale: Scale) -> tuple[int, int, int]:
    """How many runs wait, and how many buffers a look for what is due touches, with few of them and with all."""
    look = "EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT json) SELECT * FROM tga.hold_due_runs(200, 5000, 30000)"
    waiting = """
    INSERT INTO tga.runs (stream_no, tenant, procedure, program, state, attempt, due_at, failures, created_at)
    SELECT -i, 'default', 'onboard', '1', 'WAITING', 1, clock_timestamp() + (1 + i) * interval '1 hour', 0,
           clock_timestamp() FROM generate_series($1::bigint, $2::bigint) AS i"""

    async def buffers(session: Any) -> int:
        for _ in range(WARMUP_STEPS):
            rows = await session.fetch(look)
        top = json.loads(rows[0][0])[0]["Plan"]
        return int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])

    async with measuring_session(server.admin_url) as session:
        await session.execute(waiting.replace("$1::bigint", "1").replace("$2::bigint", "10"))
        await session.execute("VACUUM ANALYZE tga.runs")
        few = await buffers(session)
        await session.execute(waiting.replace("$1::bigint", "11").replace("$2::bigint", str(scale.waiting)))
        await session.execute("VACUUM ANALYZE tga.runs")
        return scale.waiting, few, await buffers(session)


async def measure_dbos(server: Server, python: str, scale: Scale) -> dict[int, float]:
    """Workflows of one step a second, by how many at once."""
    script = Path(__file__).parent / "peers" / "dbos_run.py"
    at_once = ",".join(map(str, BASELINE_CLIENTS))
    command = [python, str(script), server.observer_url, str(scale.seconds), at_once]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"DBOS did not run: {ran.stderr[-2000:]}")
    return {int(number): float(rate) for number, rate in map(str.split, ran.stdout.splitlines())}


def peers_table(rounds: Rounds, theirs: list[dict[int, float]]) -> Table:
    table = Table(title="A run of one step, from its start to its end: ours to DBOS, medians of rounds in turns")
    for heading in ("at once", "ours a second", "DBOS a second", "ratio"):
        table.add_column(heading, justify="right")
    for cell in rounds.cells():
        if cell.name == WHOLE:
            rate = statistics.median(found[cell.at_once] for found in theirs)
            ours = cell.median.per_second
            table.add_row(str(cell.at_once), f"{ours:,.0f}", f"{rate:,.0f}", f"{ours / rate:.2f}")
    return table


async def bench(server: Server, machine: str, console: Console, scale: Scale, dbos: str | None) -> None:
    baseline = Baseline(server, baseline_step())
    await baseline.prepare()
    console.print(f"{machine}; values of 200 bytes; {scale.rounds} rounds of {scale.seconds:g} s, medians")
    theirs: list[dict[int, float]] = []
    rounds, sync_ms = await measure_throughput(server, baseline, scale, dbos, theirs)
    title = f"Runs, in process. Baseline: {baseline.name}, one insert of the same bytes a transaction, unbatched"
    console.print(throughput_table(title, rounds.cells()))
    console.print(f"The disk alone, a write and fdatasync in each round: {', '.join(f'{ms:.2f}' for ms in sync_ms)} ms")
    console.print(await measure_flatness(server, scale))
    database, log = await measure_bytes(server, scale)
    console.print(f"A checkpoint leaves {database:,.0f} bytes in the database and {log:,.0f} of write-ahead log.")
    count, seconds, peak = await measure_replay(server, scale)
    waiting, few, many = await measure_waiting(server, scale)
    console.print(f"A look for what is due touches {few} buffers with 10 waiting runs, {many} with {waiting:,}.")
    if theirs:
        console.print(peers_table(rounds, theirs))
    console.print(f"{count:,} checkpoints are read back in {seconds:.2f} s, with {peak:.1f} MiB at most.")


def main() -> None:
    parser = arguments_of("runs", __doc__)
    parser.add_argument("--dbos", metavar="PYTHON", help="an interpreter that has DBOS, to compare with")
    given = parser.parse_args()
    scale = Scale.quick() if given.quick else Scale.full()
    run_bench(lambda server, machine, console: bench(server, machine, console, scale, given.dbos))


if __name__ == "__main__":
    main()
