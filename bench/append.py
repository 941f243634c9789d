"""What an append costs, against the same inserts without any check: `python -m bench.append [--quick]`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.table import Table

from app.core.limits import BATCH_PLANS_MAX, WRITER_SESSIONS_MAX
from app.domain.ledger.plans import Plan
from app.domain.tga.documents import ArtifactDocument
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import advance, fold
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.writer import Writer
from bench.baseline import Baseline, Step
from bench.cost import buffers_of_append, commits_of, measuring_session
from bench.measure import (
    AT_ONCE,
    BASELINE_CLIENTS,
    WARMUP_STEPS,
    CountingLedger,
    Rounds,
    Server,
    Timing,
    arguments_of,
    closed_loop,
    measure_sync,
    run_bench,
    throughput_table,
)
from bench.streams import GrowingStream, TraceTemplate, register_kind
from tests.traces import EXECUTOR, completed_trace, time_at

LENGTHS: Final = (10, 1_000, 10_000)
OTHER_STREAMS: Final = 10_000
FLATNESS_APPENDS: Final = 9

# The same columns and indexes as the ledger's tables, without checks, triggers, locks or hashing.
BASELINE: Final = """
CREATE SCHEMA baseline;
CREATE TABLE baseline.links (LIKE tga.links INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.payloads (LIKE tga.payloads INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.heads (LIKE tga.heads INCLUDING DEFAULTS INCLUDING INDEXES) WITH (fillfactor = 80);
CREATE FUNCTION baseline.append(s text, n bigint, d bytea, a bytea, st text, o uuid) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    number bigint;
BEGIN
    INSERT INTO baseline.heads AS h
           (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting, is_open)
    VALUES (s, n, d, st, d, o, NULL, n < 4)
        ON CONFLICT (stream) DO UPDATE
       SET sequence_number = excluded.sequence_number, entry_digest = excluded.entry_digest, state = excluded.state,
           artifact_digest = excluded.artifact_digest, owner = excluded.owner, waiting = excluded.waiting,
           is_open = excluded.is_open, updated_at = clock_timestamp()
    RETURNING stream_no INTO number;
    INSERT INTO baseline.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                                artifact_digest, recorded_at, artifact_type, from_state, to_state)
    VALUES (number, n, 1, 1, o, d, d, d, '2026-01-01T00:00:00.000Z', 'supervisor_decision', st, st);
    INSERT INTO baseline.payloads (stream_no, sequence_number, artifacts) VALUES (number, n, ARRAY[a]);
END
$$;
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure."""

    rounds: int
    seconds: float
    lengths: tuple[int, ...]
    other_streams: int
    built_traces: int

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=3, seconds=3.0, lengths=LENGTHS, other_streams=OTHER_STREAMS, built_traces=500)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=1, seconds=0.1, lengths=(10, 100), other_streams=64, built_traces=5)


@dataclass
class Workload:
    """Traces that nobody has appended yet; each run takes its own."""

    template: TraceTemplate = field(default_factory=TraceTemplate)
    used: int = 0

    def take(self, workers: int, appends: int) -> list[Iterator[Plan]]:
        """For each worker its plans, built now, so that building is not measured."""
        each = -(-appends // (4 * workers))
        queues = []
        for _ in range(workers):
            numbers = range(self.used + 1, self.used + 1 + each)
            self.used += each
            queues.append(iter([plan for n in numbers for plan in self.template.plans(n)]))
        return queues


async def run_unbatched(server: Server, workload: Workload, workers: int, seconds: float) -> Timing:
    queues = workload.take(workers, int(4_000 * seconds) + 4 * WARMUP_STEPS * workers)
    async with await Sessions.open(server.gateway_url, sessions_max=workers) as sessions:
        return await closed_loop(server, PostgresLedger(sessions).commit, queues, seconds)


async def run_batched(server: Server, workload: Workload, workers: int, seconds: float) -> tuple[Timing, float]:
    """The timing, and how many appends stood in a batch."""
    queues = workload.take(workers, int(12_000 * seconds) + 4 * WARMUP_STEPS * workers)
    async with await Sessions.open(server.gateway_url, sessions_max=WRITER_SESSIONS_MAX) as sessions:
        ledger = CountingLedger(sessions)
        writer = Writer(ledger)
        timing = await closed_loop(server, writer.commit, queues, seconds)
        await writer.close()
        return timing, ledger.plans / ledger.batches


def step_of(template: TraceTemplate) -> Step:
    """Four appends to a stream, then the next stream, as in a trace."""
    return Step(
        schema=BASELINE,
        statements=("SELECT baseline.append(:stream, :place, :digest, :artifact, 'AUTHORIZED', :owner)",),
        values={
            "artifact": bytes(template.artifact_bytes),
            "digest": bytes(32),
            "owner": EXECUTOR,
        },
        steps_per_stream=4,
    )


async def measure_throughput(server: Server, baseline: Baseline, scale: Scale) -> tuple[Rounds, list[float]]:
    """The lines of the table, and how long the disk took in each round, in ms."""
    workload = Workload()
    rounds = Rounds()
    sync_ms = []
    for _ in range(scale.rounds):
        sync_ms.append(measure_sync(server.embedded.data_dir))
        for at_once in AT_ONCE:
            if at_once in BASELINE_CLIENTS:
                rounds.add("baseline", at_once, await baseline.run(at_once, scale.seconds))
                rounds.add("commit", at_once, await run_unbatched(server, workload, at_once, scale.seconds))
            timing, batch_size = await run_batched(server, workload, at_once, scale.seconds)
            rounds.add("writer", at_once, timing, batch_size=batch_size)
    steps = baseline.steps
    await baseline.verify_stored({"links": steps, "payloads": steps})
    return rounds, sync_ms


def measure_building(traces: int) -> float:
    """CPU µs to make one entry: the record from state and artifact, and the bytes of both documents."""
    inputs: list[tuple[ExecutionState | None, ArtifactDocument]] = []
    for n in range(traces):
        state: ExecutionState | None = None
        for record in completed_trace(n):
            assert record.artifact is not None
            inputs.append((state, record.artifact))
            state = fold([record], start=state)
    started = time.process_time()
    for state, artifact in inputs:
        record, _ = advance(state, artifact, executor_id=EXECUTOR, recorded_at=time_at(0))
        record.entry.body_bytes()
        artifact.to_bytes()
    return (time.process_time() - started) * 1e6 / len(inputs)


@dataclass(frozen=True, slots=True)
class Flatness:
    """What the appends after entry `length` cost; buffers are least, median and most of several."""

    length: int
    other_streams: int
    commits_per_append: float
    round_trips_per_append: float
    buffers: tuple[int, int, int]


async def measure_flatness(server: Server, scale: Scale) -> list[Flatness]:
    async with measuring_session(server.admin_url) as admin:
        await register_kind(admin)
    found = await _measure_lengths(server, scale, other_streams=0)
    async with await Sessions.open(server.gateway_url, sessions_max=2) as sessions:
        ledger = PostgresLedger(sessions)
        births = [GrowingStream(f"other-{n}").next_plan() for n in range(scale.other_streams)]
        for start in range(0, len(births), BATCH_PLANS_MAX):
            errors = await ledger.commit_batch(births[start : start + BATCH_PLANS_MAX])
            for error in errors:
                if error is not None:
                    raise error
    return found + await _measure_lengths(server, scale, other_streams=scale.other_streams)


async def _measure_lengths(server: Server, scale: Scale, *, other_streams: int) -> list[Flatness]:
    stream = GrowingStream(f"beside-{other_streams}")
    found = []
    async with measuring_session(server.observer_url) as observer:
        for length in scale.lengths:
            async with await Sessions.open(server.gateway_url, sessions_max=1) as sessions:
                ledger = PostgresLedger(sessions)
                for plan in stream.plans_until(length):
                    await ledger.commit(plan)
            async with measuring_session(server.admin_url) as session:
                warm = GrowingStream(f"warm-{other_streams}-{length}")
                for _ in range(WARMUP_STEPS):
                    await buffers_of_append(session, warm.next_plan())
                buffers = sorted(
                    [await buffers_of_append(session, stream.next_plan()) for _ in range(FLATNESS_APPENDS)]
                )
            plans = [stream.next_plan() for _ in range(FLATNESS_APPENDS)]
            commits, trips = await commits_of(server.gateway_url, observer, plans)
            found.append(
                Flatness(
                    length,
                    other_streams,
                    commits / len(plans),
                    trips / len(plans),
                    (buffers[0], buffers[len(buffers) // 2], buffers[-1]),
                )
            )
    return found


def flatness_table(rows: list[Flatness]) -> Table:
    table = Table(title="Flatness: an append to one stream, by its length and by how many others there are")
    for heading in ("at entry", "other streams", "round trips", "commits", "buffers (least, median, most)"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.length:,}",
            f"{row.other_streams:,}",
            f"{row.round_trips_per_append:.2f}",
            f"{row.commits_per_append:.2f}",
            ", ".join(str(count) for count in row.buffers),
        )
    return table


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    template = TraceTemplate()
    baseline = Baseline(server, step_of(template))
    await baseline.prepare()
    console.print(
        f"{machine}; entries of {template.entry_bytes} bytes, artifacts of {template.artifact_bytes}; "
        f"{scale.rounds} rounds of {scale.seconds:g} s, medians"
    )
    rounds, sync_ms = await measure_throughput(server, baseline, scale)
    title = f"Appends: one entry, one artifact, one head. Baseline: {baseline.name}, no checks, unbatched"
    console.print(throughput_table(title, rounds.cells()))
    # A slow disk hides the processor's work at 1 at once, and a fast one shows it.
    console.print(f"The disk alone, a write and fdatasync in each round: {', '.join(f'{ms:.2f}' for ms in sync_ms)} ms")
    console.print(
        f"Building the documents of an entry, not measured above: {measure_building(scale.built_traces):.0f} µs CPU"
    )
    console.print(flatness_table(await measure_flatness(server, scale)))


def main() -> None:
    scale = Scale.quick() if arguments_of("append", __doc__).parse_args().quick else Scale.full()
    run_bench(lambda server, machine, console: bench(server, machine, console, scale))


if __name__ == "__main__":
    main()
