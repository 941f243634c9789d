"""What an append costs, against the same inserts without any check: `python -m bench.append [--quick]`.

Machines are noisy, so the claim is the ratios within one run; absolute numbers stand beside them. Each round runs the
baseline and ours next to each other, and each cell shows its median round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import asyncpg
from rich.console import Console
from rich.table import Table

from app.core.limits import BATCH_BYTES_MAX, BATCH_PLANS_MAX
from app.domain.ledger import Plan
from app.domain.tga.models import ArtifactDocument, ExecutionState
from app.domain.tga.replay import fold, next_record
from app.postgres.embedded import EmbeddedPostgres, find_binaries
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from bench.cost import buffers_of_append, commits_of, measuring_session
from bench.streams import GrowingStream, TraceTemplate, register_kind
from tests.traces import EXECUTOR, completed_trace, time_at

DATABASE: Final = "bench"
BASELINE_CLIENTS: Final = (1, 8, 32)
BATCHED_CALLERS: Final = (1, 8, 32, 128)
FLUSHERS_MAX: Final = 2
WARMUP_APPENDS: Final = 8  # on each session: PostgreSQL settles on a generic plan after five
LENGTHS: Final = (10, 1_000, 10_000)
OTHER_STREAMS: Final = 10_000
FLATNESS_APPENDS: Final = 9

T = TypeVar("T")

# The same columns and indexes as the ledger's tables, without checks, triggers, locks or hashing.
BASELINE: Final = """
CREATE SCHEMA baseline;
CREATE TABLE baseline.entries (LIKE tga.entries INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.artifacts (LIKE tga.artifacts INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE baseline.heads (LIKE tga.heads INCLUDING DEFAULTS INCLUDING INDEXES) WITH (fillfactor = 70);
CREATE FUNCTION baseline.append(s text, n bigint, e bytea, d bytea, a bytea, st text, o uuid) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO baseline.entries (stream, sequence_number, entry, entry_digest) VALUES (s, n, e, d);
    INSERT INTO baseline.artifacts (stream, sequence_number, artifact) VALUES (s, n, a);
    INSERT INTO baseline.heads AS h
           (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting, is_open)
    VALUES (s, n, d, st, d, o, NULL, n < 4)
        ON CONFLICT (stream) DO UPDATE
       SET sequence_number = excluded.sequence_number, entry_digest = excluded.entry_digest, state = excluded.state,
           artifact_digest = excluded.artifact_digest, owner = excluded.owner, waiting = excluded.waiting,
           is_open = excluded.is_open, updated_at = clock_timestamp();
END
$$;
"""
# Four appends to a stream, then the next stream, as in a trace; names as long as a trace's.
PGBENCH_SCRIPT: Final = r"""
\set n :n + 1
\set trace :n / 4
\set entry_number :n % 4 + 1
SELECT baseline.append('trace:{run}' || lpad(:client_id::text, 4, '0') || lpad(:trace::text, 28, '0'),
                       :entry_number, :entry, :digest, :artifact, 'AUTHORIZED', :owner);
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured stretch of appends."""

    appends: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    latencies_s: Sequence[float]

    @property
    def per_second(self) -> float:
        return self.appends / self.seconds

    @property
    def client_us(self) -> float:
        return self.client_cpu_s * 1e6 / self.appends

    @property
    def server_us(self) -> float:
        return self.server_cpu_s * 1e6 / self.appends

    def percentile_ms(self, percent: int) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3


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
        return cls(rounds=1, seconds=0.25, lengths=(10, 1_000), other_streams=512, built_traces=50)


class Server:
    """The server under test and what its processes have consumed."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self.embedded = embedded
        self.admin_url = embedded.url("postgres", DATABASE)
        self.gateway_url = embedded.url(GATEWAY_ROLE, DATABASE)
        self.observer_url = embedded.url("postgres", "postgres")

    def cpu_s(self) -> float:
        """Of the postmaster, its children, and those that ended and were waited for."""
        postmaster = self.embedded.postmaster_pid()
        ticks = 0
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                facts = Path("/proc", name, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if int(name) == postmaster:
                    ticks += sum(int(field) for field in facts[11:15])
                elif int(facts[1]) == postmaster:
                    ticks += int(facts[11]) + int(facts[12])
        return ticks / os.sysconf("SC_CLK_TCK")


class GroupCommit:
    """What arrives while a commit is in flight goes together in the next one. A lone append waits for nobody."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self._ledger = ledger
        self._waiting: deque[tuple[Plan, asyncio.Future[None]]] = deque()
        self._flushers: set[asyncio.Task[None]] = set()
        self.batches = 0

    async def commit(self, plan: Plan) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((plan, done))
        if len(self._flushers) < FLUSHERS_MAX:
            flusher = asyncio.create_task(self._flush())
            self._flushers.add(flusher)
            flusher.add_done_callback(self._flushers.discard)
        await done

    async def _flush(self) -> None:
        while self._waiting:
            batch = self._next_batch()
            self.batches += 1
            errors = await self._ledger.commit_batch([plan for plan, _ in batch])
            for (_, done), error in zip(batch, errors, strict=True):
                if error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)
            await asyncio.sleep(0)  # those who were answered ask again before the next batch leaves

    def _next_batch(self) -> list[tuple[Plan, asyncio.Future[None]]]:
        batch = [self._waiting.popleft()]
        size_bytes = batch[0][0].size_bytes()
        while self._waiting and len(batch) < BATCH_PLANS_MAX:
            size_bytes += self._waiting[0][0].size_bytes()
            if size_bytes > BATCH_BYTES_MAX:
                break
            batch.append(self._waiting.popleft())
        return batch


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


async def drive(
    server: Server, commit: Callable[[Plan], Coroutine[Any, Any, None]], queues: list[Iterator[Plan]], seconds: float
) -> Timing:
    """Every queue has one append in flight, until the time or the plans are used up."""
    latencies: list[float] = []

    async def work(plans: Iterator[Plan], until: float, kept: list[float]) -> None:
        for plan in plans:
            started = time.perf_counter()
            if started >= until:
                return
            await commit(plan)
            kept.append(time.perf_counter() - started)

    warmup = [[next(queue) for _ in range(WARMUP_APPENDS)] for queue in queues]
    await asyncio.gather(*(work(iter(plans), float("inf"), []) for plans in warmup))

    server_before, client_before, started = server.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(work(queue, started + seconds, latencies) for queue in queues))
    elapsed = time.perf_counter() - started
    client_cpu_s = time.process_time() - client_before
    return Timing(len(latencies), elapsed, client_cpu_s, server.cpu_s() - server_before, latencies)


async def run_unbatched(server: Server, workload: Workload, workers: int, seconds: float) -> Timing:
    queues = workload.take(workers, int(4_000 * seconds) + 4 * WARMUP_APPENDS * workers)
    async with await Sessions.open(server.gateway_url, sessions_max=workers) as sessions:
        return await drive(server, PostgresLedger(sessions).commit, queues, seconds)


async def run_batched(server: Server, workload: Workload, workers: int, seconds: float) -> tuple[Timing, float]:
    """The timing, and how many appends stood in a batch."""
    queues = workload.take(workers, int(12_000 * seconds) + 4 * WARMUP_APPENDS * workers)
    async with await Sessions.open(server.gateway_url, sessions_max=FLUSHERS_MAX) as sessions:
        group = GroupCommit(PostgresLedger(sessions))
        timing = await drive(server, group.commit, queues, seconds)
        return timing, (timing.appends + WARMUP_APPENDS * workers) / group.batches


class Baseline:
    """The naive limit: one plpgsql call per commit, by pgbench or, where there is none, by asyncpg."""

    def __init__(self, server: Server, template: TraceTemplate) -> None:
        self._server = server
        self._entry = bytes(template.entry_bytes)
        self._artifact = bytes(template.artifact_bytes)
        self._digest = bytes(32)
        self._runs = 0
        self.pgbench = find_pgbench()

    @property
    def name(self) -> str:
        return "pgbench" if self.pgbench else "asyncpg (no pgbench here)"

    async def run(self, clients: int, seconds: float) -> Timing:
        self._runs += 1
        if self.pgbench is None:
            return await self._run_asyncpg(clients, seconds)
        return await asyncio.to_thread(self._run_pgbench, self.pgbench, clients, seconds)

    def _run_pgbench(self, pgbench: Path, clients: int, seconds: float) -> Timing:
        defined = {
            "n": "-1",
            "entry": f"\\x{self._entry.hex()}",
            "artifact": f"\\x{self._artifact.hex()}",
            "digest": f"\\x{self._digest.hex()}",
            "owner": EXECUTOR,
        }
        with tempfile.TemporaryDirectory(prefix="tga-bench-") as place:
            script = Path(place, "append.sql")
            script.write_text(PGBENCH_SCRIPT.format(run=f"{self._runs:04}"), "utf-8")
            command: list[str | Path] = [pgbench, "-n", "-M", "prepared", "-f", script, "-c", str(clients)]
            command += ["-j", str(min(clients, os.cpu_count() or 1)), "-T", str(max(1, round(seconds)))]
            command += ["--log", f"--log-prefix={Path(place, 'latency')}"]
            command += [part for name, value in defined.items() for part in ("-D", f"{name}={value}")]
            command += ["-h", self._server.embedded.socket_dir, "-p", "5432", "-U", "postgres", DATABASE]
            server_before, client_before = self._server.cpu_s(), _children_cpu_s()
            environment = {"LC_ALL": "C", "PATH": os.environ.get("PATH", "")}
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if ran.returncode != 0:
                raise RuntimeError(f"pgbench failed: {ran.stderr}")
            server_cpu_s, client_cpu_s = self._server.cpu_s() - server_before, _children_cpu_s() - client_before
            lines = [line for log in Path(place).glob("latency*") for line in log.read_text("ascii").splitlines()]
        per_second = next(float(line.split()[2]) for line in ran.stdout.splitlines() if line.startswith("tps = "))
        latencies = [int(line.split()[2]) / 1e6 for line in lines]
        return Timing(len(latencies), len(latencies) / per_second, client_cpu_s, server_cpu_s, latencies)

    async def _run_asyncpg(self, clients: int, seconds: float) -> Timing:
        latencies: list[float] = []

        async def work(session: asyncpg.Connection[asyncpg.Record], client: int, until: float) -> None:
            for n in range(2**31):
                started = time.perf_counter()
                if started >= until:
                    return
                stream = f"trace:{self._runs:04}{client:04}{n // 4:028}"
                await session.fetchval(
                    "SELECT baseline.append($1, $2, $3, $4, $5, 'AUTHORIZED', $6)",
                    *(stream, n % 4 + 1, self._entry, self._digest, self._artifact, EXECUTOR),
                )
                latencies.append(time.perf_counter() - started)

        async with contextlib.AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(measuring_session(self._server.admin_url)) for _ in range(clients)
            ]
            server_before, client_before, started = self._server.cpu_s(), time.process_time(), time.perf_counter()
            await asyncio.gather(*(work(session, i, started + seconds) for i, session in enumerate(sessions)))
            elapsed, client_cpu_s = time.perf_counter() - started, time.process_time() - client_before
            return Timing(len(latencies), elapsed, client_cpu_s, self._server.cpu_s() - server_before, latencies)


def find_pgbench() -> Path | None:
    beside = find_binaries() / "pgbench"
    others = sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"), reverse=True)
    on_path = shutil.which("pgbench")
    for candidate in (beside, *([Path(on_path)] if on_path else []), *others):
        if candidate.is_file():
            return candidate
    return None


def measure_sync(directory: Path, *, times: int = 50) -> float:
    """Median milliseconds until 8 kB are on the disk: what a lone commit waits for, whatever it does besides."""
    taken = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(times):
            file.write(bytes(8192))
            file.flush()
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table: its rounds, and the rounds of the baseline that it stands beside."""

    name: str
    at_once: int
    rounds: list[Timing]
    baseline: list[Timing]
    note: str = ""

    @property
    def median(self) -> Timing:
        return sorted(self.rounds, key=lambda timing: timing.per_second)[len(self.rounds) // 2]

    @property
    def ratios(self) -> list[float]:
        return sorted(ours.per_second / base.per_second for ours, base in zip(self.rounds, self.baseline, strict=True))


async def measure_throughput(server: Server, scale: Scale) -> tuple[list[Cell], Baseline, list[float]]:
    """The lines of the table, who the baseline was, and how long the disk took in each round, in ms."""
    workload = Workload()
    baseline = Baseline(server, workload.template)
    rounds: dict[tuple[str, int], list[Timing]] = {}
    batch_sizes: dict[int, list[float]] = {}
    sync_ms = []
    for _ in range(scale.rounds):
        sync_ms.append(measure_sync(server.embedded.data_dir))
        for at_once in BATCHED_CALLERS:
            if at_once in BASELINE_CLIENTS:
                rounds.setdefault(("baseline", at_once), []).append(await baseline.run(at_once, scale.seconds))
                unbatched = await run_unbatched(server, workload, at_once, scale.seconds)
                rounds.setdefault(("unbatched", at_once), []).append(unbatched)
            timing, batch_size = await run_batched(server, workload, at_once, scale.seconds)
            rounds.setdefault(("batched", at_once), []).append(timing)
            batch_sizes.setdefault(at_once, []).append(batch_size)
    cells = []
    for (name, at_once), measured in sorted(
        rounds.items(), key=lambda item: (("baseline", "unbatched", "batched").index(item[0][0]), item[0][1])
    ):
        beside = min(at_once, BASELINE_CLIENTS[-1])
        note = f"{statistics.median(batch_sizes[at_once]):.1f} a commit" if name == "batched" else ""
        cells.append(Cell(name, at_once, measured, rounds["baseline", beside], note))
    await _verify_baseline(server, sum(timing.appends for cell in cells[:3] for timing in cell.rounds))
    return cells, baseline, sync_ms


async def _verify_baseline(server: Server, appends: int) -> None:
    """It stored what it was timed for."""
    async with measuring_session(server.admin_url) as session:
        counts = [await session.fetchval(f"SELECT count(*) FROM baseline.{name}") for name in ("entries", "artifacts")]
    if counts != [appends, appends]:
        raise RuntimeError(f"the baseline was timed for {appends} appends and stored {counts}")


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
        record = next_record(state, artifact, executor_id=EXECUTOR, recorded_at=time_at(0))
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
                for _ in range(WARMUP_APPENDS):
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


def throughput_table(cells: list[Cell], baseline: Baseline) -> Table:
    table = Table(title=f"Appends: one entry, one artifact, one head. Baseline: {baseline.name}, no checks, unbatched")
    for heading in (
        "",
        "at once",
        "ratio",
        "of rounds",
        "per second",
        "client CPU µs",
        "server CPU µs",
        "p50 ms",
        "p99 ms",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_column("")
    names = {"baseline": "baseline", "unbatched": "commit", "batched": "group commit"}
    previous = ""
    for cell in cells:
        if previous and cell.name != previous:
            table.add_section()
        previous = cell.name
        timing, ratios = cell.median, cell.ratios
        note = cell.note + (f", to baseline at {BASELINE_CLIENTS[-1]}" if cell.at_once > BASELINE_CLIENTS[-1] else "")
        table.add_row(
            names[cell.name],
            str(cell.at_once),
            f"{ratios[len(ratios) // 2]:.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else "",
            f"{timing.per_second:,.0f}",
            f"{timing.client_us:.0f}",
            f"{timing.server_us:.0f}",
            f"{timing.percentile_ms(50):.2f}",
            f"{timing.percentile_ms(99):.2f}",
            note,
        )
    return table


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


async def bench(embedded: EmbeddedPostgres, scale: Scale, console: Console) -> None:
    server = Server(embedded)
    async with measuring_session(server.observer_url) as root:
        await root.execute(f"CREATE DATABASE {DATABASE}")
        version = await root.fetchval("SHOW server_version")
    await migrate(server.admin_url)
    async with measuring_session(server.admin_url) as admin:
        await admin.execute(BASELINE)
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    template = TraceTemplate()
    console.print(
        f"PostgreSQL {version}, {os.cpu_count()} CPUs, {loop}; entries of {template.entry_bytes} bytes, "
        f"artifacts of {template.artifact_bytes}; {scale.rounds} rounds of {scale.seconds:g} s, medians"
    )
    cells, baseline, sync_ms = await measure_throughput(server, scale)
    console.print(throughput_table(cells, baseline))
    # A slow disk hides the processor's work at 1 at once, and a fast one shows it.
    console.print(f"The disk alone, a write and fdatasync in each round: {', '.join(f'{ms:.2f}' for ms in sync_ms)} ms")
    console.print(
        f"Building the documents of an entry, not measured above: {measure_building(scale.built_traces):.0f} µs CPU"
    )
    console.print(flatness_table(await measure_flatness(server, scale)))


def run_on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.append", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    scale = Scale.quick() if parser.parse_args().quick else Scale.full()
    console = Console(width=None if Console().is_terminal else 150)
    with tempfile.TemporaryDirectory(prefix="tga-bench-") as home:
        Path(home).chmod(0o711)  # root runs the server as another account, which must get there
        with EmbeddedPostgres(Path(home)) as embedded:
            run_on_fast_loop(bench(embedded, scale, console))


if __name__ == "__main__":
    main()
